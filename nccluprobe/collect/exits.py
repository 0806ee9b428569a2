"""How traced processes end, although the tracer is not their parent.

That a process ended is told by a pidfd, which never means another process with
the same number.  How it ended is asked of, in this order:

1. the pidfd itself (PIDFD_GET_INFO, kernels from 6.15, once the process is reaped);
2. /proc/PID/stat, while it is an unreaped zombie;
3. the proc connector's exit events.  A first thread may end long before the
   others, with status 0 (pthread_exit, or another thread's exec); then the others
   tell, as a status that is not 0 is the whole process's.  When events were lost,
   a status of 0 proves nothing.

When none answers within a moment, it is "gone": the code is unknown, and nobody
may call it a crash.
"""

from __future__ import annotations

import errno
import fcntl
import os
import select
import struct
import time
from dataclasses import dataclass

from nccluprobe.collect.proc_events import ProcConnector

#: _IOWR(0xFF, 11, struct pidfd_info): its first published size is 64 bytes.
_PIDFD_INFO_SIZE = 64
_PIDFD_GET_INFO = 3 << 30 | _PIDFD_INFO_SIZE << 16 | 0xFF << 8 | 11
_PIDFD_INFO_EXIT = 1 << 3
_AT_EXIT_CODE = 60

_GRACE_NS = 500_000_000  # how long a code is waited for after the end
_SLACK_NS = 50_000_000  # by which exit events and ends may be apart
_MAX_EXECS = 4096
_EXIT_BATCH = 1024


@dataclass(frozen=True)
class Exit:
    """The end of a process.

    ``how``: "exited" (``code`` is set), "signaled" (``signal`` is set), or "gone"
    (nobody could tell).  ``t_ns`` is CLOCK_MONOTONIC: of the end where the
    kernel said it, else of when it was noticed.  ``start`` is the start time in
    ticks, as given to or found by ``watch``.
    """

    pid: int
    how: str
    code: int | None
    signal: int | None
    t_ns: int
    start: int
    core_dumped: bool = False


@dataclass(frozen=True)
class Exec:
    """A watched process began another program."""

    pid: int
    t_ns: int


@dataclass
class _Watched:
    pid: int
    start: int
    fd: int | None
    event: tuple[int, int] | None = None  # wait status, time
    lost: bool = False  # events that may have been of this process were lost
    ended_ns: int = 0  # when the end was noticed
    alive_ns: int = 0  # when it had not ended yet


class ExitWatcher:
    """Watches processes; poll it a few times a second.

    ``connector`` says whether codes of processes that their parents reap at once
    can be had on kernels before 6.15; ``fallback`` says why not.
    """

    def __init__(self, connector: bool = True) -> None:
        self._watched: dict[int, _Watched] = {}
        self._by_fd: dict[int, _Watched] = {}
        self._ended: list[_Watched] = []
        self._poll = select.epoll()
        self._execs: list[Exec] = []
        self.fallback: str | None = None if connector else "switched off"
        self._polled_ns = time.monotonic_ns()
        self._connector: ProcConnector | None = None
        if connector:
            try:
                self._connector = ProcConnector()
            except OSError as err:
                self.fallback = err.strerror or str(err)

    @property
    def connector(self) -> bool:
        """Whether the proc connector is in use."""
        return self._connector is not None

    def watch(self, pid: int, start: int | None = None) -> bool:
        """Begin to watch; False when there is no such process (any more).

        ``start`` (ticks since boot) guards against a pid that was used again
        since the caller saw the process.
        """
        known = self._watched.get(pid)
        if known is not None:
            if known.ended_ns == 0 and start in (None, known.start) and not _has_ended(known):
                return True
            # The pid has, or will have, another owner; this one's end is still reported.
            del self._watched[pid]
            if known.ended_ns == 0:
                self._end(known, time.monotonic_ns())
        fd: int | None = None
        try:
            fd = os.pidfd_open(pid)
        except OSError as err:
            if err.errno == errno.ESRCH:
                return False
            # ENOSYS, or out of descriptors: then /proc is asked in each poll
        found = _stat(pid)
        if found is None or (start is not None and found[1] != start):
            if fd is not None:
                os.close(fd)
            return False
        entry = _Watched(pid, found[1], fd)
        self._watched[pid] = entry
        if fd is not None:
            self._by_fd[fd] = entry
            self._poll.register(fd, select.EPOLLIN)
        return True

    def unwatch(self, pid: int) -> None:
        """Stop watching; its end will not be reported."""
        entry = self._watched.pop(pid, None)
        if entry is not None:
            self._ended = [e for e in self._ended if e is not entry]
            self._drop(entry)

    def poll(self, now_ns: int | None = None) -> list[Exit]:
        """Processes that ended, each once.  Never blocks.

        An end is held back for up to half a second when its code may yet come.
        """
        now = time.monotonic_ns() if now_ns is None else now_ns
        for fd, _ in self._poll.poll(0, _EXIT_BATCH):
            entry = self._by_fd.get(fd)
            if entry is not None and _has_ended(entry):
                self._end(entry, now)
        for entry in [e for e in self._watched.values() if e.fd is None and e.ended_ns == 0]:
            if _has_ended(entry):
                self._end(entry, now)
        self._take_events()
        self._polled_ns = now
        done: list[Exit] = []
        waiting: list[_Watched] = []
        for entry in self._ended:
            age = now - entry.ended_ns if self._connector is not None else _GRACE_NS
            result = _resolve(entry, age)
            if result is None:
                waiting.append(entry)
                continue
            done.append(result)
            if self._watched.get(entry.pid) is entry:
                del self._watched[entry.pid]
            self._drop(entry)
        self._ended = waiting
        return done

    def take_execs(self) -> list[Exec]:
        """Execs of watched processes since the last call (with the connector only)."""
        found = self._execs
        self._execs = []
        return found

    def close(self) -> None:
        for entry in [*self._watched.values(), *self._ended]:
            self._drop(entry)
        self._watched.clear()
        self._ended.clear()
        self._poll.close()
        if self._connector is not None:
            self._connector.close()
            self._connector = None

    def _end(self, entry: _Watched, now: int) -> None:
        entry.ended_ns = now
        entry.alive_ns = self._polled_ns
        self._ended.append(entry)
        if entry.fd is not None:
            self._poll.unregister(entry.fd)
            del self._by_fd[entry.fd]

    def _drop(self, entry: _Watched) -> None:
        """Close what is held for an entry."""
        if entry.fd is None:
            return
        if self._by_fd.pop(entry.fd, None) is not None:
            self._poll.unregister(entry.fd)
        os.close(entry.fd)
        entry.fd = None

    def _take_events(self) -> None:
        if self._connector is None:
            return
        try:
            events = self._connector.drain()
        except OSError as err:
            self.fallback = f"proc connector: {err.strerror}"
            self._connector.close()
            self._connector = None
            return
        if events.lost:
            for entry in [*self._watched.values(), *self._ended]:
                entry.lost = True
        # Those that ended and wait for their status come last: a pid may have a new owner.
        by_pid = {**self._watched, **{entry.pid: entry for entry in self._ended}}
        for pid, status, t_ns in events.exits:
            found = by_pid.get(pid)
            if found is not None and (found.event is None or status or not found.event[0]):
                found.event = (status, t_ns)
        for pid, t_ns in events.execs:
            watched = self._watched.get(pid)
            if watched is None or watched.ended_ns or _has_ended(watched):
                continue  # also: by the next owner of the pid
            if watched.event is not None and watched.event[1] <= t_ns:
                watched.event = None  # of a first thread that made way for another's exec
            self._execs.append(Exec(pid, t_ns))
        del self._execs[:-_MAX_EXECS]


def _stat(pid: int) -> tuple[bytes, int, int, int] | None:
    """(state, start ticks, threads, wait status) of a process, None when there is none."""
    try:
        fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        words = os.read(fd, 4096).rpartition(b") ")[2].split()
    except OSError:
        return None
    finally:
        os.close(fd)
    if len(words) < 50:
        return None
    return words[0], int(words[19]), int(words[17]), int(words[49])


def _has_ended(entry: _Watched) -> bool:
    """Whether the process is over: gone, or a zombie as a whole."""
    found = _stat(entry.pid)
    if found is None or found[1] != entry.start:
        return True
    return found[0] in (b"Z", b"X", b"x") and found[2] <= 1


def _resolve(entry: _Watched, age_ns: int) -> Exit | None:
    """How it ended, that many ns after its end was noticed; None: ask again later."""
    wait = age_ns < _GRACE_NS
    status = _pidfd_status(entry.fd) if entry.fd is not None else None
    if status is None:
        status = _zombie_status(entry)
    t_ns = entry.ended_ns
    if entry.event is not None:
        from_event, at = entry.event
        if status is None and (from_event or not entry.lost):
            if from_event == 0 and age_ns < _SLACK_NS:
                return None  # the event of another thread, not 0, may be on its way
            status = from_event
        if at >= entry.alive_ns - _SLACK_NS:
            t_ns = at
    elif wait:
        return None  # also for the true time of the end
    if status is None:
        return None if wait else Exit(entry.pid, "gone", None, None, t_ns, entry.start)
    signal = status & 0x7F
    if signal:
        return Exit(entry.pid, "signaled", None, signal, t_ns, entry.start, bool(status & 0x80))
    return Exit(entry.pid, "exited", status >> 8 & 0xFF, None, t_ns, entry.start)


def _pidfd_status(fd: int) -> int | None:
    """Wait status of a reaped process by its pidfd, where the kernel keeps it."""
    info = bytearray(_PIDFD_INFO_SIZE)
    struct.pack_into("=Q", info, 0, _PIDFD_INFO_EXIT)
    try:
        fcntl.ioctl(fd, _PIDFD_GET_INFO, info)
    except OSError:
        return None
    (mask,) = struct.unpack_from("=Q", info)
    if not mask & _PIDFD_INFO_EXIT:
        return None
    (status,) = struct.unpack_from("=i", info, _AT_EXIT_CODE)
    return int(status)


def _zombie_status(entry: _Watched) -> int | None:
    """Wait status of an unreaped process.

    The kernel shows 0 to those who may not look: 0 counts only when another
    file with the same condition can be read.
    """
    found = _stat(entry.pid)
    if found is None or found[1] != entry.start or found[0] != b"Z":
        return None
    if found[3] != 0:
        return found[3]
    try:
        with open(f"/proc/{entry.pid}/io", "rb") as file:  # noqa: PTH123
            return 0 if file.read(1) else None
    except OSError:
        return None
