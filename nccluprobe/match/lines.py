"""The rare kinds of lines: one converter each, types checked."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from nccluprobe.match import model as m
from nccluprobe.match.signature import SignatureTable
from nccluprobe.nccl.api import BY_NAME, Kind
from nccluprobe.nccl.enums import SEQ_NAMES

Line = dict[str, Any]

#: A host's clock may be set while it is traced: a smaller step is jitter.
_STEP = 1_000_000


class BadLine(Exception):
    """A line that cannot be what it says."""


#: What a line with wrong contents may raise when it is converted.
BAD = (BadLine, TypeError, KeyError, ValueError, OverflowError, AttributeError, IndexError)


@dataclass
class SourceState:
    """What the decoder remembers of one source."""

    source: int
    path: str
    boot_id: str = ""
    offset: int = 0
    through: int = 0
    inside: set[tuple[int, int]] = field(default_factory=set)
    #: Calls that ended in the chunk now decoded, when it has enter lines.
    watch_returns: bool = False
    returned: set[tuple[int, int]] = field(default_factory=set)
    #: group -> (thread, newest entry) of groups whose end is not seen yet
    open_groups: dict[int, tuple[int, int]] = field(default_factory=dict)
    #: When it began to abort communicators last, unix ns.
    aborts: deque[int] = field(default_factory=lambda: deque(maxlen=64))


@dataclass
class Boots:
    """Clocks of hosts by their boot id: unix less monotonic time, ns."""

    offsets: dict[str, int] = field(default_factory=dict)
    #: Those that are known to be wrong, and were corrected: how exactly, nobody knows.
    corrected: frozenset[str] = frozenset()


def integer(value: Any) -> int:
    """An integer, or TypeError."""
    if type(value) is not int:
        raise TypeError(f"{value!r} is not an integer"[:100])
    return value


def _opt_int(row: Line, name: str) -> int | None:
    value = row.get(name)
    return None if value is None else integer(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a text"[:100])
    return value


def _opt_text(row: Line, name: str) -> str | None:
    value = row.get(name)
    return None if value is None else _text(value)


def _time(row: Line, name: str, state: SourceState) -> int:
    t = integer(row[name])
    if not 0 <= t < 2**62:
        raise ValueError(f"{name} is out of range")
    return t + state.offset


def _process(row: Line, state: SourceState, boots: Boots, _: SignatureTable) -> m.Item:
    boot_id = _text(row["boot_id"])
    state.boot_id = boot_id
    state.offset = boots.offsets.get(boot_id, state.offset)
    libs = row.get("libs") or []
    versions = {str(lib["nccl_version"]) for lib in libs if lib.get("nccl_version")}
    return m.ProcessInfo(
        source=state.source,
        key=m.ProcessKey(boot_id, integer(row["pid"]), integer(row["start"])),
        run_id=_text(row["run_id"]),
        host=_text(row["host"]),
        exe=_opt_text(row, "exe"),
        rank=_opt_int(row, "rank"),
        world_size=_opt_int(row, "world_size"),
        front=str(row.get("front", "")),
        exits=bool(row.get("exits", True)),
        nccl_versions=tuple(sorted(versions)),
        cannot_see=tuple(_text(w) for w in row.get("cannot_see") or ()),
        job=_opt_text(row, "job"),
        ns_pid=_opt_int(row, "ns_pid"),
    )


def _clock(row: Line, state: SourceState, boots: Boots, _: SignatureTable) -> m.Item:
    offset = integer(row["unix"]) - integer(row["mono"])
    if abs(offset) >= 2**62:
        raise ValueError("unix is out of range")
    first = boots.offsets.setdefault(state.boot_id, offset)
    state.offset = first
    if state.boot_id in boots.corrected:
        return m.ClockState(state.source, None)
    err = _opt_int(row, "err")
    bound = None if err is None or row.get("synced") is False else err
    if bound is not None and abs(offset - first) > _STEP:
        bound += abs(offset - first)
    return m.ClockState(state.source, bound)


def _comm(row: Line, state: SourceState, _: Boots, __: SignatureTable) -> m.Item:
    return m.CommInfo(
        source=state.source,
        id=integer(row["id"]),
        t=_time(row, "t", state),
        hash=_opt_text(row, "hash"),
        instance=integer(row["instance"]),
        comm_rank=_opt_int(row, "comm_rank"),
        nranks=_opt_int(row, "nranks"),
        learnt=_text(row["learnt"]),
        parent=_opt_int(row, "parent"),
        name=_opt_text(row, "name"),
        base=_opt_int(row, "base"),
        child=_opt_int(row, "child"),
        seqs=_seqs(row),
    )


def _seqs(row: Line) -> tuple[int, ...] | None:
    values = row.get("seqs")
    if values is None:
        return None
    if len(values) != len(SEQ_NAMES):
        raise ValueError("seqs has the wrong length")
    return tuple(integer(v) for v in values)


def _comm_end(row: Line, state: SourceState, _: Boots, __: SignatureTable) -> m.Item:
    return m.CommEnd(state.source, integer(row["comm"]), _time(row, "t", state), _text(row["how"]))


def _coverage(row: Line, state: SourceState, _: Boots, __: SignatureTable) -> m.Item:
    losses = ("lost_kernel", "lost_queue", "overwritten", "skipped_disk", "blind")
    alive = row["alive"]
    if not (alive is None or isinstance(alive, bool)):
        raise TypeError("alive is not a boolean")
    return m.Coverage(
        source=state.source,
        t=_time(row, "t", state),
        through=_time(row, "through", state),
        lost=sum(integer(row[name]) for name in losses),
        blind=integer(row["blind"]),
        in_flight=integer(row["in_flight"]),
        alive=alive,
        main=_text(row["main"]),
        syscall=_opt_text(row, "syscall"),
        last_call_age=_opt_int(row, "last_call_age"),
        dropped=_opt_int(row, "dropped") or 0,
    )


def _process_end(row: Line, state: SourceState, _: Boots, __: SignatureTable) -> m.Item:
    return m.ProcessEnd(
        source=state.source,
        t=_time(row, "t", state),
        how=_text(row["how"]),
        code=_opt_int(row, "code"),
        signal=_opt_int(row, "signal"),
        in_flight=integer(row["in_flight"]),
    )


def _state(row: Line, state: SourceState, _: Boots, __: SignatureTable) -> m.Item | None:
    if row["state"] == "phase":
        since = _time(row, "since", state)
        return m.Phase(
            source=state.source,
            t=_time(row, "t", state),
            name=_opt_text(row, "phase"),
            since=since,
            beat=_time(row, "beat", state) if "beat" in row else since,
            every=_opt_int(row, "every"),
            limit=_opt_int(row, "limit"),
            step=_opt_int(row, "step"),
        )
    # Anything else that the tracing says of itself is for people.  It is checked all the
    # same: a broken line is counted as one.
    _time(row, "t", state)
    _text(row["state"])
    _opt_text(row, "detail")
    return None


def _enter(row: Line, state: SourceState, _: Boots, table: SignatureTable) -> m.Item:
    name = _text(row["api"])
    api = BY_NAME.get(name)
    order = _opt_int(row, "ord")
    matched = api is not None and api.kind in (Kind.COLLECTIVE, Kind.P2P)
    direction = api.direction if api is not None else None
    sig = None
    if matched and order is not None:
        sig = table.intern_call(
            name, row.get("count"), row.get("datatype"), row.get("op"), row.get("root")
        )
    return m.Enter(
        source=state.source,
        api=name,
        t=_time(row, "t", state),
        thread=integer(row["thread"]),
        comm=_opt_int(row, "comm"),
        idx=_opt_int(row, "idx"),
        ord=order,
        sig=sig,
        peer=None if direction is None else integer(row["peer"]),
        send=None if direction is None else direction == "send",
        seq=m.NO_SEQ if row.get("group") else integer(row.get("seq", m.NO_SEQ)),
        site=table.sites.id_of(row.get("site")),
        group=_group(row),
        stream=_opt_int(row, "stream"),
        uid_hash=_opt_text(row, "uid_hash"),
        nranks=_opt_int(row, "nranks"),
        rank=_opt_int(row, "rank"),
        color=_opt_int(row, "color"),
        key=_opt_int(row, "key"),
        nonblocking=bool(row.get("nonblocking", False)),
    )


def _group(row: Line) -> int:
    """The open group; an inner GroupEnd (depth > 1) ends none."""
    group = _opt_int(row, "group") or 0
    inner = row["api"] == "ncclGroupEnd" and (_opt_int(row, "gdepth") or 1) > 1
    return 0 if inner else group


def _looked(row: Line, state: SourceState, _: Boots, __: SignatureTable) -> m.Item:
    t = integer(row["unix"])
    if not 0 <= t < 2**62:
        raise ValueError("unix is out of range")
    alive = row["alive"]
    if not isinstance(alive, bool):
        raise TypeError("alive is not a boolean")
    return m.Looked(
        source=state.source,
        key=m.ProcessKey(_text(row["boot_id"]), integer(row["pid"]), integer(row["start"])),
        t=t,
        host=_text(row["host"]),
        rank=_opt_int(row, "rank"),
        alive=alive,
        main=_text(row["main"]),
        syscall=_opt_text(row, "syscall"),
        inside=tuple(_text(x["api"]) for x in row["threads"] if x.get("api")),
        comms=tuple(_looked_comm(c) for c in row["comms"] if c.get("hash") is not None),
    )


def _looked_comm(row: Line) -> m.LookedComm:
    rank, nranks = integer(row["comm_rank"]), integer(row["nranks"])
    if not 0 <= rank < nranks <= m.MAX_NRANKS:
        raise ValueError("comm_rank is out of range")
    return m.LookedComm(
        hash=_text(row["hash"]),
        comm_rank=rank,
        nranks=nranks,
        name=_opt_text(row, "name"),
        seqs=_seqs(row),
        moving=bool(row.get("moving")),
    )


Converter = Callable[[Line, SourceState, Boots, SignatureTable], "m.Item | None"]
CONVERTERS: dict[str, Converter] = {
    "process": _process,
    "clock": _clock,
    "comm": _comm,
    "comm_end": _comm_end,
    "coverage": _coverage,
    "process_end": _process_end,
    "state": _state,
    "enter": _enter,
    "inspect": _looked,
}
#: Items that come before the calls of their chunk; all others come after.
FIRST = (m.ProcessInfo, m.ClockState, m.CommInfo)


def lifecycle_call(row: Line, state: SourceState, t: int, t_exit: int, rc: int) -> m.Call:
    """A finished lifecycle call."""
    return m.Call(
        source=state.source,
        api=_text(row["api"]),
        t=t,
        t_exit=t_exit,
        rc=rc,
        thread=integer(row["thread"]),
        comm=_opt_int(row, "comm"),
        idx=_opt_int(row, "idx"),
        ord=_opt_int(row, "ord"),
        group=_opt_int(row, "group") or 0,
        uid_hash=_opt_text(row, "uid_hash"),
        nranks=_opt_int(row, "nranks"),
        rank=_opt_int(row, "rank"),
        color=_opt_int(row, "color"),
        key=_opt_int(row, "key"),
        nonblocking=bool(row.get("nonblocking", False)),
    )


#: A finished call with a return code that is an error.
failed_call = lifecycle_call
