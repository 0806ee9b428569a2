"""Attaching the programs to functions of a library.

Two ways, tried in this order: one uprobe_multi link for all functions of a
file (Linux 6.6), or one perf event per function (Linux 5.15).  Neither needs
tracefs, both carry a cookie, and both hold for all processes, present and
future, that map the file.

Return probes come first and go last: an entry without its exit never leaves a
call open.
"""

from __future__ import annotations

import errno
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from nccluprobe.capture import sysbpf
from nccluprobe.capture.bpf import BpfProgram
from nccluprobe.errors import ExitCode, NccluprobeError

_PMU = Path("/sys/bus/event_source/devices/uprobe")
_CLOSERS = 32

Offsets = Sequence[tuple[int, int]]


@dataclass
class Attached:
    """The links of one library."""

    path: str
    enters: list[int] = field(default_factory=list)
    returns: list[int] = field(default_factory=list)

    @property
    def count(self) -> int:
        """How many links there are."""
        return len(self.enters) + len(self.returns)


class Links(ABC):
    """Links of the entry and return programs."""

    #: "multi" or "perf"
    kind: str

    def __init__(self, enter_fd: int, exit_fd: int | None) -> None:
        self._enter_fd = enter_fd
        self._exit_fd = exit_fd

    @abstractmethod
    def _open(
        self, prog_fd: int, path: str, offsets: Offsets, returns: bool, fds: list[int]
    ) -> None:
        """Append file descriptors whose closing detaches, the probe before its program."""

    def attach(self, fd_or_path: int | str, offsets: Offsets, exits: bool) -> Attached:
        """Probe functions of a file, given as (file offset, cookie).

        ``fd_or_path`` may be an open file, or a path such as
        /proc/PID/map_files/RANGE; the kernel keeps the file, not the name.
        Raises NccluprobeError, with nothing left attached.
        """
        path = f"/proc/self/fd/{fd_or_path}" if isinstance(fd_or_path, int) else fd_or_path
        links = Attached(path)
        try:
            if exits and self._exit_fd is not None:
                self._open(self._exit_fd, path, offsets, True, links.returns)
            self._open(self._enter_fd, path, offsets, False, links.enters)
        except OSError as e:
            self.detach(links)
            raise _refused(self.kind, path, e) from e
        return links

    def detach(self, links: Attached) -> float:
        """Remove the probes, entries first; the seconds that it took."""
        start = time.monotonic()
        for fds in (links.enters, links.returns):
            _close_all(fds)
            fds.clear()
        return time.monotonic() - start


def _close_all(fds: Sequence[int]) -> None:
    """Close from several threads: the kernel waits for a grace period in each."""
    if len(fds) < 2:
        for fd in fds:
            os.close(fd)
        return
    with ThreadPoolExecutor(min(len(fds), _CLOSERS)) as pool:
        list(pool.map(os.close, fds))


class MultiLinks(Links):
    """One uprobe_multi link per library and end."""

    kind = "multi"

    def _open(
        self, prog_fd: int, path: str, offsets: Offsets, returns: bool, fds: list[int]
    ) -> None:
        fds.append(sysbpf.link_uprobe_multi(prog_fd, path, list(offsets), returns))


class PerfLinks(Links):
    """One perf event of the uprobe PMU per function and end."""

    kind = "perf"

    def __init__(self, enter_fd: int, exit_fd: int | None) -> None:
        super().__init__(enter_fd, exit_fd)
        self._pmu = int((_PMU / "type").read_text())
        text = (_PMU / "format" / "retprobe").read_text().strip()
        self._return_bit = int(text.rpartition(":")[2])

    def _open(
        self, prog_fd: int, path: str, offsets: Offsets, returns: bool, fds: list[int]
    ) -> None:
        bit = self._return_bit if returns else None
        for offset, cookie in offsets:
            event = sysbpf.open_uprobe_event(self._pmu, bit, path, offset)
            try:
                fds.append(sysbpf.link_perf_event(prog_fd, event, cookie))
            finally:
                os.close(event)  # the link holds it


def _refused(kind: str, path: str, e: OSError) -> NccluprobeError:
    if e.errno in (errno.EPERM, errno.EACCES):
        needs = "CAP_BPF and CAP_PERFMON" if kind == "multi" else "CAP_BPF and CAP_SYS_ADMIN"
        return NccluprobeError(
            f"not permitted to probe {path} by {kind} links ({e.strerror}):"
            f" run as root, or with {needs}",
            ExitCode.NOT_PERMITTED,
        )
    return NccluprobeError(
        f"the kernel refused to probe {path} by {kind} links: {e.strerror}", ExitCode.BPF_REFUSED
    )


def _multi_works(enter_fd: int) -> bool:
    """Whether the kernel knows uprobe_multi: a folder is refused for what it is."""
    try:
        os.close(sysbpf.link_uprobe_multi(enter_fd, "/", [(1, 0)], False))
    except OSError as e:
        return e.errno == errno.EBADF
    return True


def open_links(program: BpfProgram, force: str | None = None) -> Links:
    """The best kind of link that this kernel and these privileges allow.

    ``force``: "multi" or "perf" only.
    """
    if force not in (None, "multi", "perf"):
        raise NccluprobeError(f"--link is multi or perf, not {force}", ExitCode.USAGE)
    if force != "perf":
        try:
            enter, leave = program.load_probes(multi=True)
            if _multi_works(enter):
                return MultiLinks(enter, leave)
        except (OSError, NccluprobeError):
            if force == "multi":
                raise
        if force == "multi":
            raise NccluprobeError(
                "this kernel has no uprobe_multi links (Linux 6.6): use --link perf",
                ExitCode.BPF_REFUSED,
            )
    enter, leave = program.load_probes(multi=False)
    try:
        return PerfLinks(enter, leave)
    except (OSError, ValueError) as e:
        why = e.strerror if isinstance(e, OSError) else "not a number"
        raise NccluprobeError(
            f"this kernel has no uprobe PMU ({_PMU}: {why}): it needs CONFIG_UPROBE_EVENTS",
            ExitCode.BPF_REFUSED,
        ) from e
