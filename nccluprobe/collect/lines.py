"""Records and facts to lines of the trace.

Two ways to the same line.  ``call`` and ``enter`` build a dictionary by the
schema and let orjson write it: for every api and every odd case.  ``template``
turns such a dictionary, once per combination of constant fields, into a ``%``
template for the hot path; so both ways cannot drift apart.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import orjson

from nccluprobe.capture.source import Losses
from nccluprobe.collect.ports import ProcState
from nccluprobe.nccl.api import BY_ID, Api, Kind
from nccluprobe.nccl.enums import datatype_name, op_name
from nccluprobe.record import (
    FLAG_BLIND,
    FLAG_ENTER_ONLY,
    FLAG_NO_RETURN,
    FLAG_NONBLOCKING,
    FLAG_UNWOUND,
    UNKNOWN_SEQ,
    Record,
)
from nccluprobe.trace.schema import ARGUMENT_FIELDS, numbers_of

Line = dict[str, Any]


def dump(line: Line) -> str:
    """One line, with its newline.

    Text from the target may hold lone surrogates, which orjson refuses: they
    are replaced.
    """
    try:
        return orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE).decode()
    except (TypeError, orjson.JSONEncodeError):
        return orjson.dumps(_clean(line), option=orjson.OPT_APPEND_NEWLINE).decode()


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, dict):
        return {key: _clean(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_clean(item) for item in value]
    return value


def hex_hash(value: int) -> str:
    """A hash as the trace writes it."""
    return f"{value:016x}"


_ARGUMENTS: dict[str, Callable[[Record], Any]] = {
    "count": lambda r: r.count,
    "datatype": lambda r: datatype_name(r.datatype),
    "op": lambda r: op_name(r.op),
    "root": lambda r: r.peer,
    "peer": lambda r: r.peer,
    "nranks": lambda r: r.nranks,
    "rank": lambda r: r.peer,
    "color": lambda r: r.color,
    "key": lambda r: r.peer,
}


class _Plan(NamedTuple):
    """What a call line of one api holds."""

    numbered: bool
    ordered: bool
    arguments: tuple[tuple[str, Callable[[Record], Any]], ...]
    stream: bool
    new_comm: bool


def _plan(api: Api) -> _Plan:
    names = [f.name for role in api.args for f in ARGUMENT_FIELDS.get(role, ())]
    numbers = [f.name for f in numbers_of(api)]
    return _Plan(
        numbered="comm" in numbers,
        ordered="ord" in numbers,
        arguments=tuple((n, _ARGUMENTS[n]) for n in names if n in _ARGUMENTS),
        stream="stream" in names,
        new_comm="new_comm" in names,
    )


_PLANS: dict[int, _Plan] = {i: _plan(a) for i, a in BY_ID.items() if a.kind is not Kind.HELPER}


class Ids(NamedTuple):
    """What the record's addresses are called in the file."""

    comm: int | None
    stream: int | None
    new_comm: int | None = None


def end_of(rec: Record) -> str | None:
    """Why the record has no return code, or None when it has one."""
    if rec.flags & FLAG_NO_RETURN:
        return "no_return"
    if rec.flags & FLAG_UNWOUND:
        return "unwound"
    if rec.flags & FLAG_ENTER_ONLY or not rec.t_exit:
        return "enter_only"
    return None


def _body(line: Line, rec: Record, ids: Ids) -> Line:
    plan = _PLANS[rec.api]
    if plan.numbered:
        known = ids.comm is not None and not rec.flags & FLAG_BLIND
        line["comm"] = ids.comm
        line["idx"] = rec.call_idx if known else None
        if plan.ordered:
            line["ord"] = rec.order_idx if known else None
    for name, get in plan.arguments:
        line[name] = get(rec)
    if plan.stream:
        line["stream"] = ids.stream
    if rec.group_id:
        line["group"] = rec.group_id
        if rec.group_depth:  # a GroupStart that opens the group stands not in it
            line["gpos"] = rec.group_pos
        if rec.group_depth > 1:
            line["gdepth"] = rec.group_depth
    if rec.nccl_seq != UNKNOWN_SEQ:
        line["seq"] = rec.nccl_seq
    if rec.callsite_id:
        line["site"] = hex_hash(rec.callsite_id)
    if rec.uid_hash:
        line["uid_hash"] = hex_hash(rec.uid_hash)
    if rec.flags & FLAG_BLIND:
        line["blind"] = True
    if rec.flags & FLAG_NONBLOCKING:
        line["nonblocking"] = True
    return line


def call(rec: Record, ids: Ids, end: str | None = None) -> Line:
    """A ``call`` line.  ``end`` overrides why there is no return code."""
    end = end or end_of(rec)
    line: Line = {
        "kind": "call",
        "api": BY_ID[rec.api].name,
        "t": rec.t_enter,
        "thread": rec.tid,
        "dur": max(0, rec.t_exit - rec.t_enter) if rec.t_exit else None,
        "rc": None if end else rec.rc,
    }
    if end:
        line["end"] = end
    if _PLANS[rec.api].new_comm:
        line["new_comm"] = ids.new_comm
    return _body(line, rec, ids)


def enter(rec: Record, ids: Ids) -> Line:
    """An ``enter`` line: the call is still inside."""
    line: Line = {
        "kind": "enter",
        "api": BY_ID[rec.api].name,
        "t": rec.t_enter,
        "thread": rec.tid,
    }
    return _body(line, rec, ids)


#: Values of a template, in this order; the last three only when the line has them.
TEMPLATE_ARGUMENTS = ("t", "dur", "idx", "ord", "count")
_PLACEHOLDER = re.compile(r'"((?:%[^"@]+@)+)"')


def template(rec: Record, ids: Ids) -> str:
    """A ``%`` template for calls that are like ``rec`` in all but a few numbers.

    It takes t, dur, idx, ord, count, then the peer or root if the api has one,
    then group and gpos if ``rec`` is in a group, then seq if ``rec`` knows it.
    Arguments that the line lacks are swallowed.
    """
    line = call(rec, ids)
    names = [*TEMPLATE_ARGUMENTS]
    names += [n for n in ("root", "peer") if n in line]
    names += ["group", "gpos"] if rec.group_id else []
    names += ["seq"] if rec.nccl_seq != UNKNOWN_SEQ else []
    previous = "t"
    for name in names:
        if line.get(name) is not None:
            line[name] = "%d@"
            previous = name
        else:
            line[previous] += "%.0s@"
    text = _PLACEHOLDER.sub(lambda m: m.group(1).replace("@", ""), dump(line))
    # orjson keeps the order of the dictionary, and that of the arguments must agree with it.
    order = [n for n in line if isinstance(line[n], str) and "@" in line[n]]
    assert order == [n for n in names if n in order], order
    return text


def has_root_or_peer(api: int) -> bool:
    """Whether a template of this api takes the peer or root."""
    return any(name in ("root", "peer") for name, _ in _PLANS[api].arguments)


def has_stream(api: int) -> bool:
    """Whether a line of this api names a stream."""
    return _PLANS[api].stream


_MAINS = frozenset({"nccl", "syscall", "running", "stopped", "uninterruptible", "dead"})


def coverage(t: int, through: int) -> Line:
    """A ``coverage`` line, to be filled; counters of the file are set when it is written."""
    return {"kind": "coverage", "t": t, "through": through, "captured": 0, "skipped_disk": 0}


def losses(counts: Losses, key: tuple[int, int], queue: int) -> Line:
    """The part of a ``coverage`` line that says what is missing."""
    line: Line = {
        "lost_kernel": counts.by_process.get(key, 0) + counts.unattributed,
        "lost_queue": queue,
        "overwritten": counts.overwritten.get(key, 0),
        "blind": counts.blind.get(key, 0),
    }
    if counts.unattributed:
        line["lost_unattributed"] = counts.unattributed
    return line


def state_of(state: ProcState | None, main_inside: bool) -> Line:
    """The part of a ``coverage`` line that says how the process is."""
    if state is None:
        return {"alive": None, "main": "nccl" if main_inside else "unknown"}
    main = state.main if state.main in _MAINS else "unknown"
    line: Line = {"alive": state.alive, "main": "nccl" if main_inside else main}
    if state.syscall is not None:
        line["syscall"] = state.syscall
    line["cpu"] = state.cpu_ns
    return line


def comm_end(comm: int, t: int, how: str) -> str:
    """A ``comm_end`` line."""
    return dump({"kind": "comm_end", "comm": comm, "t": t, "how": how})


def clock(mono: int, unix: int, synced: bool | None, err: int | None) -> str:
    """A ``clock`` line."""
    return dump({"kind": "clock", "mono": mono, "unix": unix, "synced": synced, "err": err})


def state(t: int, name: str, detail: str | None = None) -> str:
    """A ``state`` line."""
    line: Line = {"kind": "state", "t": t, "state": name}
    if detail is not None:
        line["detail"] = detail
    return dump(line)


def phase(t: int, name: str | None, since: int, **more: int | str | None) -> str:
    """A ``state`` line of a declared phase; ``name`` None: it ended at ``since``."""
    line: Line = {"kind": "state", "t": t, "state": "phase", "phase": name, "since": since}
    line.update((key, value) for key, value in more.items() if value is not None)
    return dump(line)


def process_end(t: int, how: str, code: int | None, signal: int | None, in_flight: int) -> str:
    """A ``process_end`` line."""
    return dump(
        {
            "kind": "process_end",
            "t": t,
            "how": how,
            "code": code,
            "signal": signal,
            "in_flight": in_flight,
        }
    )


def again(line: str) -> str:
    """A line of an earlier part, marked as repeated."""
    return f'{line[:-2]},"again":true}}\n'
