"""What the threads of a process do, and which NCCL call they are likely inside.

Without stopping a thread its registers are known only while it is in a system
call.  Then the words on its stack are looked at: one that points behind a call
instruction inside an NCCL function says that the thread is in that function,
or was a moment ago, as left-overs lie on stacks too.  So it is "likely".
"""

from __future__ import annotations

import contextlib
import os
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nccluprobe.capture.elf import Function
from nccluprobe.capture.maps import Mapping, open_mapping
from nccluprobe.inspect.libraries import Copy
from nccluprobe.syscalls import syscall_name

_MOST_THREADS = 4096
_STACK = 64 << 10
_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "uninterruptible",
    "T": "stopped",
    "t": "traced",
    "Z": "ended",
    "I": "idle",
}


@dataclass(frozen=True)
class ThreadState:
    """A thread.  ``api`` is the NCCL call that it is likely inside, if any."""

    tid: int
    name: str
    state: str
    syscall: str | None
    wchan: str | None
    api: str | None


@dataclass(frozen=True)
class _Code:
    """A mapping of a copy of NCCL, its functions by place in the file."""

    start: int
    end: int
    offset: int
    entries: list[int]
    ends: list[int]
    names: list[str]
    fd: int


class NcclStacks:
    """Finds NCCL's functions on stacks of one process."""

    def __init__(
        self, pid: int, copies: Sequence[Copy], read: Callable[[int, int], bytes | None]
    ) -> None:
        self._read = read
        self._codes: list[_Code] = []
        for copy in copies:
            functions = sorted(copy.image.functions.values(), key=lambda f: f.entry)
            for mapping in copy.mappings:
                with contextlib.suppress(OSError):
                    self._add(pid, mapping, functions)

    def _add(self, pid: int, mapping: Mapping, functions: Sequence[Function]) -> None:
        start, end = (int(part, 16) for part in mapping.range.split("-"))
        entries = [f.entry for f in functions]
        ends = [f.entry + f.size for f in functions]
        names = [f.name for f in functions]
        fd = open_mapping(pid, mapping).fd
        self._codes.append(_Code(start, end, mapping.offset, entries, ends, names, fd))

    def close(self) -> None:
        """Close the libraries."""
        for code in self._codes:
            os.close(code.fd)

    def api_at(self, sp: int) -> str | None:
        """The innermost NCCL function that the stack shows."""
        raw = None
        size = _STACK
        while raw is None and size >= 256:
            raw = self._read(sp & ~7, size)
            size //= 2
        if raw is None:
            return None
        words = np.frombuffer(raw[: len(raw) // 8 * 8], "<u8")
        for code in self._codes:
            inside = (words >= code.start) & (words < code.end)
            for word in words[inside].tolist():
                name = self._function(code, word)
                if name is not None:
                    return name
        return None

    def _function(self, code: _Code, address: int) -> str | None:
        place = address - code.start + code.offset
        at = bisect_right(code.entries, place) - 1
        if at < 0 or not code.entries[at] < place < code.ends[at]:
            return None
        before = os.pread(code.fd, 7, place - 7)
        return code.names[at] if _is_call(before) else None


def _is_call(before: bytes) -> bool:
    """Whether these seven bytes may end in a call instruction (x86-64)."""
    if len(before) < 7:
        return False
    if before[2] == 0xE8:
        return True
    # ff /2 with a register, or with memory and a displacement of 0, 1 or 4 bytes.
    return any(before[7 - n] == 0xFF and before[8 - n] & 0x38 == 0x10 for n in (2, 3, 4, 6, 7))


def threads(pid: int, stacks: NcclStacks | None) -> list[ThreadState]:
    """All threads of a process, the first one first."""
    found = []
    try:
        tids = sorted(int(name) for name in os.listdir(f"/proc/{pid}/task"))  # noqa: PTH208
    except OSError:
        return []
    for tid in tids[:_MOST_THREADS]:
        state = _thread(f"/proc/{pid}/task/{tid}", tid, stacks)
        if state is not None:
            found.append(state)
    return found


def _thread(folder: str, tid: int, stacks: NcclStacks | None) -> ThreadState | None:
    head, _, tail = _text(f"{folder}/stat").rpartition(") ")
    if not tail:
        return None
    words = _text(f"{folder}/syscall").split()
    syscall = api = None
    if words and words[0].isdigit():
        syscall = syscall_name(int(words[0]))
    if stacks is not None and len(words) >= 3:
        # "number six arguments sp pc", or "-1 sp pc" outside a system call.
        with contextlib.suppress(ValueError):
            api = stacks.api_at(int(words[-2], 16))
    wchan = _text(f"{folder}/wchan")
    return ThreadState(
        tid=tid,
        name=head.partition(" (")[2],
        state=_STATES.get(tail[0], tail[0]),
        syscall=syscall,
        wchan=wchan if wchan not in ("", "0") else None,
        api=api,
    )


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
