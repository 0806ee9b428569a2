"""Processes: who they are at a glance, and whether the user wants them traced."""

from __future__ import annotations

import fnmatch
import os
import re
from dataclasses import dataclass, field
from typing import NamedTuple

_PF_KTHREAD = 0x00200000
_INTERPRETERS = re.compile(r"^(pypy|python|bash|dash|sh|zsh|perl|node|ruby)[0-9.]*[a-z]?$")
_WILDCARDS = re.compile(r"[*?\[]")

#: Options that take the next word as their value, by family of interpreter.
_WITH_VALUE = {
    "python": ("-W", "-X", "--check-hash-based-pycs"),
    "pypy": ("-W", "-X"),
    "bash": ("-o", "-O", "+o", "+O", "--rcfile", "--init-file"),
    "node": ("-r", "--require", "--import", "--loader"),
    "ruby": ("-r", "-I", "-E"),
    "perl": (),
}
#: Options after which there is no script: the program is in the command line.
_NO_SCRIPT = {
    "python": ("-c",),
    "pypy": ("-c",),
    "node": ("-e", "-p", "--eval", "--print"),
    "ruby": ("-e",),
    "perl": ("-e", "-E"),
}


class ProcessKey(NamedTuple):
    """A process for good: pids are used again, start times are not.

    ``start`` is in clock ticks since boot (field 22 of /proc/PID/stat).
    """

    pid: int
    start: int


class Glance(NamedTuple):
    """What one read of /proc/PID/stat tells.

    ``image`` changes with exec (the addresses of code, stack and arguments are
    drawn anew); it is equal in a process and its forks.
    """

    key: ProcessKey
    comm: str
    state: str
    kernel: bool
    image: tuple[bytes, ...]


def glance(pid: int) -> Glance | None:
    """Look at a process; None when there is none."""
    return parse_stat(_head(f"/proc/{pid}/stat"))


def parse_stat(line: bytes) -> Glance | None:
    """The text of /proc/PID/stat; None when it makes no sense."""
    # The name may hold anything, brackets and blanks too: it ends at the last ")".
    head, _, tail = line.rpartition(b") ")
    pid, _, comm = head.partition(b" (")
    words = tail.split()
    if len(words) < 46:
        return None
    return Glance(
        ProcessKey(int(pid), int(words[19])),
        comm.decode("utf-8", "replace"),
        words[0].decode("ascii", "replace"),
        bool(int(words[6]) & _PF_KTHREAD),
        (words[23], words[24], words[25], words[45]),
    )


def is_running(seen: Glance | None) -> bool:
    """Exists and has not ended.

    A first thread that ended while others go on shows as a zombie, too.
    """
    if seen is None or seen.state in "Xx":
        return False
    if seen.state != "Z":
        return True
    try:
        threads = os.listdir(f"/proc/{seen.key.pid}/task")  # noqa: PTH208
    except OSError:
        return False
    return len(threads) > 1 and any(_alive(seen.key.pid, tid) for tid in threads)


def _alive(pid: int, tid: str) -> bool:
    state = _head(f"/proc/{pid}/task/{tid}/stat").rpartition(b") ")[2][:1]
    return state not in (b"", b"Z", b"X", b"x")


def exec_pages(pid: int) -> bytes:
    """VmExe and VmLib of a process: they change when executable mappings come or go."""
    status = _head(f"/proc/{pid}/status")
    at = status.find(b"VmExe:")
    return status[at : status.find(b"VmPTE", at)] if at >= 0 else b""


def _head(path: str) -> bytes:
    """The first 4 KB of a /proc file, b"" when it cannot be read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.read(fd, 4096)
    except OSError:  # ended in between
        return b""
    finally:
        os.close(fd)


@dataclass
class ProcessMatcher:
    """Which processes the user wants.

    A pattern is compared with the process's name (comm), the base name of its
    executable, and, for interpreters, that of the script; a word without
    wildcards matches names that begin with it.  A process in ``pids`` always
    matches.  With neither, nothing does.  The tracer itself and kernel threads
    never do.
    """

    globs: list[str] = field(default_factory=list)
    pids: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._self = os.getpid()
        self._pids = frozenset(self.pids)
        self._patterns = [g if _WILDCARDS.search(g) else g + "*" for g in self.globs if g]

    def matches(self, seen: Glance) -> bool:
        """Whether this process is wanted.  Reads /proc, keeps nothing of it."""
        pid = seen.key.pid
        if pid == self._self or seen.kernel:
            return False
        if pid in self._pids:
            return True
        if not self._patterns:
            return False
        if self._fits(seen.comm):
            return True
        exe = exe_name(pid)
        if exe is None:
            return False
        return self._fits(exe) or self._fits(script_name(exe, _arguments(pid)))

    def _fits(self, name: str | None) -> bool:
        return name is not None and any(fnmatch.fnmatchcase(name, p) for p in self._patterns)


def exe_name(pid: int) -> str | None:
    """Base name of the executable; None for kernel threads and when not permitted."""
    try:
        path = os.readlink(f"/proc/{pid}/exe")  # noqa: PTH115
    except OSError:
        return None
    return path.removesuffix(" (deleted)").rpartition("/")[2]


def _arguments(pid: int) -> list[str]:
    """The first arguments.  They may hold secrets: used, then dropped."""
    return [os.fsdecode(a) for a in _head(f"/proc/{pid}/cmdline").split(b"\0")[:32]]


def script_name(exe: str, arguments: list[str]) -> str | None:
    """Base name of the script that an interpreter runs; None when it is none or has none.

    ``python -m module`` gives the module's name.
    """
    known = _INTERPRETERS.match(exe)
    if known is None:
        return None
    takes = _WITH_VALUE.get(known[1], _WITH_VALUE["bash"])
    words = iter(arguments[1:])
    for word in words:
        if known[1] in ("python", "pypy"):
            if word == "-m":
                return next(words, None) or None
            if word.startswith("-m") and len(word) > 2:
                return word[2:]
        if word in _NO_SCRIPT.get(known[1], ("-c",)) or word in ("-", "--"):
            following = next(words, "") if word == "--" else ""
            return following.rpartition("/")[2] or None
        if word in takes:
            next(words, None)
        elif not word.startswith(("-", "+")):
            return word.rpartition("/")[2] or None
    return None
