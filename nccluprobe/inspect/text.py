"""``inspect`` lines and groups for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from nccluprobe.inspect.groups import Group, Member
from nccluprobe.nccl.enums import RESULTS, SEQ_NAMES
from nccluprobe.plural import counted, plural, verb

Line = dict[str, Any]
_MOST = 8


def escape(text: object) -> str:
    """Text of a traced process: nothing that a terminal would act on."""
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in str(text))


def process(line: Line) -> Iterable[str]:
    """A process: who it is, what it does, its communicators."""
    rank = "rank unknown" if line["rank"] is None else f"rank {line['rank']}"
    who = f"pid {line['pid']} on {escape(line['host'])} ({escape(line['exe'] or '?')}, {rank})"
    yield f"{who}: {_main(line)}"
    for lib in line["libs"]:
        layout = "no layout"
        if lib["layout"]:
            layout = f"layout from {lib['layout']}, {lib['confidence']}"
        version = lib["nccl_version"] or "of unknown version"
        yield f"  NCCL {version}, {escape(lib['path'])}: {layout}"
    for thread in line["threads"]:
        if "api" in thread:
            where = f" ({thread['syscall']})" if "syscall" in thread else ""
            yield (
                f"  thread {thread['tid']} {escape(thread['name'])}: likely inside "
                f"{thread['api']}, {thread['state']}{where}"
            )
    for comm in line["comms"]:
        yield f"  {_comm(comm)}"
    if line["libs"] and not line["comms"]:
        yield "  no communicator found"
    for note in line["notes"]:
        yield f"  note: {escape(note)}"
    if line["searched"]:
        yield f"  searched {line['searched'] / 1e6:.0f} MB in {line['took'] / 1e9:.2f} s"


def _main(line: Line) -> str:
    if not line["alive"]:
        return "ended"
    kernel = line.get("syscall", "the kernel")
    doing = {
        "syscall": f"main thread waits in {line.get('syscall', 'a system call')}",
        "running": "main thread runs",
        "stopped": "stopped",
        "uninterruptible": f"main thread waits uninterruptibly in {kernel}",
        "dead": "main thread has ended",
    }
    return doing.get(line["main"], "state unknown")


def _comm(comm: Line) -> str:
    name = f' "{escape(comm["name"])}"' if comm["name"] else ""
    parts = [
        f"communicator {comm['hash'] or '(no hash)'}{name}: rank {comm['comm_rank']} of "
        f"{comm['nranks']}, device {comm['dev']}"
    ]
    if comm["seqs"] is None:
        parts.append("counters not known")
    else:
        parts.append(_counts(comm["seqs"]) + (" (moving)" if comm["moving"] else ""))
    if comm["async_error"]:
        parts.append(f"async error {result(comm['async_error'])}")
    if comm.get("init_state"):
        parts.append(f"state {result(comm['init_state'])}")
    parts += [word for word in ("finalized", "destroyed") if comm.get(word)]
    return "; ".join(parts)


def result(code: int) -> str:
    """A ncclResult_t by name."""
    return RESULTS.get(code, str(code))


def _counts(seqs: Sequence[int]) -> str:
    counts = [f"{n} {name}" for name, n in zip(SEQ_NAMES, seqs, strict=True) if n]
    return ", ".join(counts) if counts else "no collective yet"


def _where(member: Member) -> str:
    rank = member.process.get("rank")
    job = "" if rank is None or rank == member.rank else f", job rank {rank}"
    return f"rank {member.rank} (pid {member.pid} on {escape(member.host)}{job})"


def group(found: Group) -> Iterable[str]:
    """A communicator over all processes: who is behind."""
    name = f' "{escape(found.name)}"' if found.name else ""
    seen = len({m.rank for m in found.members})
    head = f"communicator {found.hash}{name}, {counted(found.nranks, 'rank')}, {seen} looked at"
    if found.doubled:
        have = verb(len(found.doubled), "has")
        yield (
            f"{head}: {_named(found.doubled)} {have} several communicators with this hash; "
            "which belong together cannot be told"
        )
        return
    lags = found.lags()
    if not found.counted:
        yield f"{head}: counters not known"
    elif len(found.counted) == 1:
        yield f"{head}: one rank only, nothing to compare"
    elif not lags:
        n = len(found.counted)
        who = "all equal" if n == found.nranks else f"the {n} that could be read are equal"
        yield f"{head}: {who} ({_counts(found.most())})"
    else:
        moving = "; its counters move, so small differences are normal" if found.moving else ""
        yield f"{head}: {_behind(len({lag.member.rank for lag in lags}))}{moving}"
        for lag in lags[:_MOST]:
            most = lag.calls + lag.by
            yield (
                f"  {_where(lag.member)} is {lag.by} {lag.api} behind: {lag.calls} of {most}; "
                f"{_main(lag.member.process)}"
            )
        if len(lags) > _MOST:
            yield f"  and {len(lags) - _MOST} more"
    unread = sorted({m.rank for m in found.members} - {m.rank for m in found.counted})
    if unread and found.counted:
        yield f"  counters not known: {_named(unread)}"
    gone = sorted({m.rank for m in found.members if not m.process["alive"]})
    if gone:
        it = "its process has" if len(gone) == 1 else "their processes have"
        yield f"  {_named(gone)}: {it} ended since"
    if missing := found.missing:
        its = "its process has" if len(missing) == 1 else "their processes have"
        was = verb(len(missing), "was")
        yield (
            f"  not looked at: {_named(missing)}; {its} ended, or {was} not among those looked at"
        )


def _behind(count: int) -> str:
    return f"{counted(count, 'rank', 'is')} behind"


def _named(ranks: Sequence[int]) -> str:
    return f"{plural(len(ranks), 'rank')} {_ranks(ranks)}"


def _ranks(ranks: Sequence[int]) -> str:
    """0-3, 7, 9-11"""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    texts = [str(a) if a == b else f"{a}-{b}" for a, b in runs]
    return ", ".join(texts[:_MOST]) + (", ..." if len(texts) > _MOST else "")
