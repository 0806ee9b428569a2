"""What this kernel and this process's privileges mean for tracing.

Plain facts in small dataclasses: ``attach`` warns with them, ``doctor`` shows them.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

#: uretprobes became a system call in 6.11; seccomp lets it pass since 6.14.
_URETPROBE_SYSCALL = (6, 11)
_SECCOMP_FIX = (6, 14)
_SECCOMP_FILTER = 2

_CAPABILITIES = {
    1: "dac_override",
    2: "dac_read_search",
    12: "net_admin",
    19: "sys_ptrace",
    21: "sys_admin",
    38: "perfmon",
    39: "bpf",
    40: "checkpoint_restore",
}

#: The one purpose without which nothing works.
LOADING = "loading the BPF program"

#: What is needed for what: any one of the sets will do.
_NEEDS: tuple[tuple[str, tuple[frozenset[str], ...]], ...] = (
    (
        LOADING,
        (frozenset({"bpf", "perfmon"}), frozenset({"sys_admin"})),
    ),
    (
        "uprobe_multi links",
        (frozenset({"bpf", "perfmon"}), frozenset({"sys_admin"})),
    ),
    ("probes through perf_event_open", (frozenset({"sys_admin"}),)),
    (
        "reading maps and states of other users' processes",
        (frozenset({"sys_ptrace"}),),
    ),
    (
        "reading their environment (ranks)",
        (frozenset({"sys_ptrace", "dac_read_search"}), frozenset({"sys_ptrace", "dac_override"})),
    ),
    (
        "opening mapped files that were deleted or lie in other mount namespaces",
        (
            frozenset({"sys_ptrace", "dac_read_search", "checkpoint_restore"}),
            frozenset({"sys_ptrace", "dac_read_search", "sys_admin"}),
            frozenset({"sys_ptrace", "dac_override", "checkpoint_restore"}),
            frozenset({"sys_ptrace", "dac_override", "sys_admin"}),
        ),
    ),
    ("the kernel's mapping events", (frozenset({"perfmon"}), frozenset({"sys_admin"}))),
    ("exit codes by the proc connector", (frozenset({"net_admin"}),)),
)


@dataclass(frozen=True)
class Kernel:
    """The running kernel; ``version`` is (0, 0) when its name makes no sense."""

    release: str
    version: tuple[int, int]
    machine: str


@dataclass(frozen=True)
class SeccompRisk:
    """Whether probing returns may kill processes that have a seccomp filter.

    ``pids`` are the traced processes that have one.  ``warning`` is one line for
    the user, None when there is nothing to warn of.
    """

    kernel_at_risk: bool
    pids: tuple[int, ...]
    warning: str | None


@dataclass(frozen=True)
class Tracefs:
    """Where tracefs is mounted, if it is; only the fallback way of probing needs it."""

    path: str | None
    writable: bool


@dataclass(frozen=True)
class Lack:
    """Something this process may not do.

    ``ways``: the capabilities that each way to it lacks, the way of least privilege first.
    """

    purpose: str
    ways: tuple[tuple[str, ...], ...]

    @property
    def missing(self) -> tuple[str, ...]:
        """What the nearest way lacks."""
        return min(self.ways, key=len)

    def __str__(self) -> str:
        """``CAP_BPF and CAP_PERFMON, or CAP_SYS_ADMIN``."""
        named = [" and ".join(f"CAP_{name.upper()}" for name in way) for way in self.ways]
        return ", or ".join(named[:2])


@dataclass(frozen=True)
class Capabilities:
    """Effective capabilities, of those that matter here, and what is out of reach."""

    effective: frozenset[str]
    initial_user_ns: bool
    lacks: tuple[Lack, ...] = field(default=())


def kernel() -> Kernel:
    """The running kernel."""
    release = platform.release()
    return Kernel(release, parse_release(release), platform.machine())


def parse_release(release: str) -> tuple[int, int]:
    """(6, 18) of "6.18.44-generic"."""
    found = re.match(r"(\d+)\.(\d+)", release)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def seccomp_risk(pids: Iterable[int], running: Kernel | None = None) -> SeccompRisk:
    """Look whether traced processes are in danger from return probes.

    Kernels from 6.11 up to 6.13 end a return probe with a system call of its own
    (335) that a seccomp filter may answer by killing the process.  Some of them
    carry the fix as a backport, which cannot be seen from outside; so this is a
    warning and no refusal.
    """
    running = running or kernel()
    at_risk = running.machine == "x86_64" and _URETPROBE_SYSCALL <= running.version < _SECCOMP_FIX
    if not at_risk:
        return SeccompRisk(False, (), None)
    filtered = tuple(pid for pid in pids if seccomp_mode(pid) == _SECCOMP_FILTER)
    if not filtered:
        return SeccompRisk(True, (), None)
    shown = ", ".join(map(str, filtered[:5])) + (", ..." if len(filtered) > 5 else "")
    return SeccompRisk(
        True,
        filtered,
        f"kernel {running.release} may lack the fix that lets return probes pass seccomp filters: "
        f"processes with a filter ({shown}) may be killed; use --no-exit, or a kernel from 6.14",
    )


def seccomp_mode(pid: int) -> int | None:
    """0 none, 1 strict, 2 filter; None when it cannot be read."""
    try:
        text = Path(f"/proc/{pid}/status").read_text(errors="replace")
    except OSError:
        return None
    found = re.search(r"^Seccomp:\s*(\d+)", text, re.M)
    return int(found[1]) if found else None


def tracefs() -> Tracefs:
    """Look for tracefs in the mount table."""
    try:
        lines = Path("/proc/self/mounts").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        words = line.split(" ")
        if len(words) > 2 and words[2] == "tracefs":
            path = words[1].replace("\\040", " ")
            return Tracefs(path, os.access(f"{path}/uprobe_events", os.W_OK))
    return Tracefs(None, False)


def uprobe_pmu() -> bool:
    """Whether the kernel makes uprobes through perf_event_open (4.17 and later)."""
    return Path("/sys/bus/event_source/devices/uprobe/type").exists()


def capabilities() -> Capabilities:
    """Effective capabilities of this process, and what they do not allow."""
    mask = 0
    try:
        text = Path("/proc/self/status").read_text()
        found = re.search(r"^CapEff:\s*([0-9a-f]+)", text, re.M)
        mask = int(found[1], 16) if found else 0
    except OSError:
        pass
    return judge_capabilities(mask, _initial_user_ns())


def judge_capabilities(mask: int, initial_user_ns: bool = True) -> Capabilities:
    """What a CapEff mask allows.  In a user namespace of its own it allows none of this."""
    have = frozenset(name for bit, name in _CAPABILITIES.items() if mask >> bit & 1)
    usable = have if initial_user_ns else frozenset()
    lacks = []
    for purpose, ways in _NEEDS:
        missing = tuple(tuple(sorted(way - usable)) for way in ways)
        if all(missing):
            lacks.append(Lack(purpose, missing))
    return Capabilities(have, initial_user_ns, tuple(lacks))


def _initial_user_ns() -> bool:
    """The initial user namespace maps every id onto itself."""
    try:
        words = Path("/proc/self/uid_map").read_text().split()
    except OSError:
        return True
    return words == ["0", "0", "4294967295"]
