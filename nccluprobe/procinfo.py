"""What a process is, and what it does at the moment, from /proc.

Of the environment only the allow-listed variables below are looked at, and of
those only numbers and the job's id are kept: the rest may be secret.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from nccluprobe.syscalls import syscall_name

_TICK_NS = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
_MAX_ENVIRON = 8 << 20
_MAX_RANKS = 10_000_000
#: Slurm's step ids from here on are not srun's: batch script, extern, interactive.
_SLURM_SPECIAL = 0xFFFFFF00

_READ = frozenset(
    {
        "RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID",
        "SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID",
        "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_STEPID",
        "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
        "PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "MPI_LOCALRANKID",
        "PMIX_RANK", "PMIX_SIZE", "PMIX_LOCAL_RANK", "PMIX_NAMESPACE",
    }
)  # fmt: skip


@dataclass(frozen=True)
class RankInfo:
    """What the launcher told the process; ``source`` as in the trace's rank_source."""

    rank: int | None = None
    world_size: int | None = None
    local_rank: int | None = None
    source: str = "unknown"
    job: str | None = None


@dataclass(frozen=True)
class ProcInfo:
    """A process.  ``start_ns`` is since boot; (pid, start_ns) is unique on the host.

    ``environ_read`` is false when the environment may not be read, or is empty
    as in the middle of an exec: then a missing rank says nothing.
    """

    pid: int
    start_ns: int
    start_ticks: int
    exe: str | None
    ns_pid: int | None
    uid: int
    gid: int
    host: str
    boot_id: str
    ranks: RankInfo
    environ_read: bool


@dataclass(frozen=True)
class ProcState:
    """What a process does now.

    ``main`` is one of the trace's coverage.main values, of the main thread.  A
    thread that waits for the GPU by polling in user space is "running".
    ``cpu_ns`` is the process's user and system time; 0 when it is gone.
    """

    alive: bool
    main: str
    syscall: str | None
    cpu_ns: int
    start_ticks: int


_GONE = ProcState(False, "dead", None, 0, 0)


def read(pid: int) -> ProcInfo:
    """Describe a process.  ProcessLookupError when there is none."""
    words = _stat_words(pid)
    if words is None:
        raise ProcessLookupError(f"no process {pid}")
    status = _status(pid)
    ticks = int(words[19])
    environ = _environ(pid)
    ns_pids = status.get("NSpid", "").split()
    return ProcInfo(
        pid=pid,
        start_ns=ticks * _TICK_NS,
        start_ticks=ticks,
        exe=_exe(pid),
        ns_pid=int(ns_pids[-1]) if ns_pids else None,
        uid=int((status.get("Uid") or "0").split()[0]),
        gid=int((status.get("Gid") or "0").split()[0]),
        host=platform.node(),
        boot_id=boot_id(),
        ranks=ranks_of(environ or {}),
        environ_read=environ is not None,
    )


def read_state(pid: int) -> ProcState:
    """What the process does now, in some 30 us.  Reads two small files."""
    words = _stat_words(pid)
    if words is None:
        return _GONE
    ticks, cpu = int(words[19]), (int(words[11]) + int(words[12])) * _TICK_NS
    letter = words[0]
    if letter in (b"Z", b"X", b"x"):
        # A main thread that ended while others go on is shown as a zombie too.
        return ProcState(int(words[17]) > 1, "dead", None, cpu, ticks)
    if letter in (b"T", b"t"):
        return ProcState(True, "stopped", None, cpu, ticks)
    if letter == b"R":
        return ProcState(True, "running", None, cpu, ticks)
    main = {b"D": "uninterruptible", b"S": "syscall", b"I": "syscall"}.get(letter, "unknown")
    name = None
    number = _head(f"/proc/{pid}/syscall").split(b" ", 1)[0].strip()
    if number == b"running":
        # It woke up between the two reads.
        main = "running"
    elif number.isdigit():
        name = syscall_name(int(number))
    elif number == b"-1" and main == "syscall":
        main = "unknown"  # blocked, but not in a system call (a page fault)
    return ProcState(True, main, name, cpu, ticks)


@cache
def boot_id() -> str:
    """The boot id of this host; "unknown" when /proc does not tell."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"


def ranks_of(environ: Mapping[str, str]) -> RankInfo:
    """Rank and job from a launcher's variables; values that make no sense are ignored.

    The launcher nearest to the process wins: torchrun inside srun or mpirun,
    mpirun inside srun (whose variables its daemons inherit) before Slurm.
    """
    job = _job(environ)
    elastic = "TORCHELASTIC_RUN_ID" in environ
    step = _number(environ.get("SLURM_STEP_ID") or environ.get("SLURM_STEPID"), 1 << 32)
    in_step = step is not None and step < _SLURM_SPECIAL
    candidates = [
        (
            "torchrun" if elastic else "environment",
            ("RANK",),
            ("WORLD_SIZE",),
            ("LOCAL_RANK",),
        ),
        (
            "openmpi",
            ("OMPI_COMM_WORLD_RANK",),
            ("OMPI_COMM_WORLD_SIZE",),
            ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ),
        (
            "pmi",
            ("PMI_RANK", "PMIX_RANK"),
            ("PMI_SIZE", "PMIX_SIZE"),
            ("PMI_LOCAL_RANK", "MPI_LOCALRANKID", "PMIX_LOCAL_RANK"),
        ),
    ]
    if in_step:
        candidates.append(
            (
                "slurm",
                ("SLURM_PROCID",),
                ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
                ("SLURM_LOCALID",),
            )
        )
    fallback: RankInfo | None = None
    for source, ranks, sizes, locals_ in candidates:
        rank, size = _first(environ, ranks), _first(environ, sizes)
        if rank is None or (size is not None and rank >= size):
            continue
        local = _first(environ, locals_)
        if local is not None and size is not None and local >= size:
            local = None
        found = RankInfo(rank, size, local, source, job)
        if size is not None:
            return found
        fallback = fallback or found
    return fallback or RankInfo(job=job)


def _job(environ: Mapping[str, str]) -> str | None:
    for name in ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "PMIX_NAMESPACE"):
        value = environ.get(name, "")
        if value and value != "none" and len(value) <= 200 and value.isprintable():
            return value
    return None


def _first(environ: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    for name in names:
        value = _number(environ.get(name), _MAX_RANKS)
        if value is not None:
            return value
    return None


def _number(text: str | None, limit: int) -> int | None:
    if text is None or not (text.isascii() and text.isdigit()) or len(text) > 10:
        return None
    value = int(text)
    return value if value < limit else None


def _environ(pid: int) -> dict[str, str] | None:
    """The allow-listed variables, None when the environment cannot be read."""
    try:
        with Path(f"/proc/{pid}/environ").open("rb") as file:
            raw = file.read(_MAX_ENVIRON)
    except OSError:
        return None
    if not raw:
        return None
    found: dict[str, str] = {}
    for entry in raw.split(b"\0"):
        name, _, value = entry.partition(b"=")
        text = name.decode("ascii", "replace")
        if text in _READ:
            found.setdefault(text, value[:256].decode("utf-8", "replace"))
    return found


def _exe(pid: int) -> str | None:
    try:
        path = os.readlink(f"/proc/{pid}/exe")  # noqa: PTH115
    except OSError:
        return None
    return path.removesuffix(" (deleted)").rpartition("/")[2] or None


def _status(pid: int) -> dict[str, str]:
    lines = _head(f"/proc/{pid}/status", 16384).decode("utf-8", "replace").splitlines()
    pairs = (line.partition(":") for line in lines)
    return {name: value.strip() for name, _, value in pairs}


def _stat_words(pid: int) -> list[bytes] | None:
    """Fields of /proc/PID/stat from the third (state) on; None when there is no process."""
    words = _head(f"/proc/{pid}/stat").rpartition(b") ")[2].split()
    return words if len(words) >= 20 else None


def _head(path: str, size: int = 4096) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.read(fd, size)
    except OSError:  # not permitted, or ended in between
        return b""
    finally:
        os.close(fd)
