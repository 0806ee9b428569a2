"""What can be broken in a program, and what is then true.

A fault changes the code of one or two ranks.  Its truth names the kinds of
findings that say it and the exact set of global ranks that are to blame.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

from model.breaker import Breaker, NoPlace, Place, Truth
from model.ops import (
    COLLECTIVES,
    Call,
    End,
    Group,
    Init,
    Instruction,
    Leave,
    Op,
    Split,
    Stop,
    Sync,
)

ABSENT = frozenset({"collective_missing_enter", "p2p_unmatched", "comm_init_missing_enter",
                    "comm_ended_under_waiters"})  # fmt: skip
DIFFERS = frozenset({"collective_mismatch"})
SHIFTED = frozenset({"skipped_or_extra_call"})
#: A call left out, or made in the wrong order, can look alike.
ORDER = frozenset({"cross_comm_order_inversion", "p2p_order_inversion"})
INVERTED = frozenset({"cross_comm_order_inversion", "collective_missing_enter"})
STUCK = frozenset({"collective_all_ranks_stuck", "collective_missing_exit", "nccl_missing_exit"})
MESSAGES = frozenset({"p2p_unmatched", "p2p_mismatch", "p2p_order_inversion"})


def works(rank: int, what: Instruction) -> bool:
    return isinstance(what, (Call, Group, Split, Sync))


def _stall(b: Breaker) -> Truth:
    """A rank stays outside NCCL, before a call or inside a group, and never comes."""
    place = b.place(works)
    what = b.code(place)[place[2]]
    if isinstance(what, Group) and b.rng.random() < 0.3:
        b.put(place, replace(what, stall=(b.rng.randrange(len(what.ops)), b.away())))
    else:
        b.put(place, b.away(), what)
    return Truth("stall", ABSENT, frozenset({place[0]}))


def _killed(b: Breaker) -> Truth:
    """A process is killed, or exits, with code 0 or another."""
    place = b.place(works)
    how = b.rng.choice([Leave(None, 9), Leave(None, 11), Leave(1), Leave(0)])
    b.put(place, how)
    # Who leaves in order may have been called once too often by its partner.
    return Truth("killed", ABSENT, frozenset({place[0]}), unnamed=how == Leave(0), note=str(how))


def _stopped(b: Breaker) -> Truth:
    """A process is stopped (SIGSTOP)."""
    place = b.place(works)
    b.put(place, Stop(), b.code(place)[place[2]])
    # It may stop inside a call that could return.
    types = ABSENT | {"nccl_missing_exit"}
    return Truth("stopped", types, frozenset({place[0]}))


def _skipped(b: Breaker) -> Truth:
    """A rank leaves out one collective."""
    place, _, members = b.collective()
    b.put(place)
    types = ABSENT | DIFFERS | SHIFTED | ORDER
    return Truth("skipped", types, frozenset({place[0]}), unnamed=len(members) == 2)


def _extra(b: Breaker) -> Truth:
    """A rank makes one collective more, like the next or unlike it."""
    place, op, members = b.collective()
    more = op if b.rng.random() < 0.5 else replace(op, count=b.rng.choice([3, 11, 5000]))
    b.put(place, Call(more), Call(op))
    types = ABSENT | DIFFERS | SHIFTED | ORDER
    return Truth("extra", types, frozenset({place[0]}), unnamed=len(members) == 2)


def _differs(b: Breaker, kind: str, change: Callable[[Op, int], Op]) -> Truth:
    place, op, members = b.collective()
    other = change(op, len(members))
    if other.signature == op.signature:
        raise NoPlace
    b.put(place, Call(other))
    types = DIFFERS | SHIFTED if kind == "api" else DIFFERS
    return Truth(
        kind,
        types,
        frozenset({place[0]}),
        unnamed=len(members) == 2,
        blocks=False,
        shown=True,
        note=f"{op} -> {other}",
        call=other,
    )


def _count(b: Breaker) -> Truth:
    """One rank passes another count."""
    return _differs(
        b, "count", lambda op, n: replace(op, count=b.rng.choice([op.count + 1, op.count * 2]))
    )


def _zero(b: Breaker) -> Truth:
    """One rank passes a count of zero: the library runs nothing for it."""
    truth = _differs(b, "zero", lambda op, n: replace(op, count=0))
    truth.types = DIFFERS | SHIFTED | ABSENT
    truth.blocks, truth.shown = True, False
    return truth


def _datatype(b: Breaker) -> Truth:
    """One rank passes another datatype."""
    return _differs(
        b, "datatype", lambda op, n: replace(op, dtype=b.rng.choice(["int8", "float16", "float64"]))
    )


def _op(b: Breaker) -> Truth:
    """One rank passes another reduction op."""
    return _differs(
        b, "op", lambda op, n: op if op.op is None else replace(op, op=b.rng.choice(["min", "max"]))
    )


def _root(b: Breaker) -> Truth:
    """One rank passes another root."""
    return _differs(
        b, "root", lambda op, n: op if op.root is None else replace(op, root=(op.root + 1) % n)
    )


def _api(b: Breaker) -> Truth:
    """One rank calls another collective."""

    def change(op: Op, n: int) -> Op:
        api = b.rng.choice(list(COLLECTIVES))
        has_op, has_root = COLLECTIVES[api]
        return replace(op, api=api, op="sum" if has_op else None, root=0 if has_root else None)

    return _differs(b, "api", change)


def _swapped(b: Breaker) -> Truth:
    """Two calls next to each other on two communicators and one stream change places."""
    found = []
    for r, threads in enumerate(b.program.code):
        for t, code in enumerate(threads):
            for i, (x, y) in enumerate(itertools.pairwise(code)):
                if not (isinstance(x, Call) and isinstance(y, Call)) or x.op.p2p or y.op.p2p:
                    continue
                if x.op.comm == y.op.comm or x.op.stream != y.op.stream:
                    continue
                if not x.op.count or not y.op.count:
                    continue
                both = set(b.members[r, x.op.comm]) & set(b.members[r, y.op.comm])
                if len(both) >= 2:
                    found.append((r, t, i))
    if not found:
        raise NoPlace
    r, t, i = b.rng.choice(found)
    code = b.program.code[r][t]
    code[i], code[i + 1] = code[i + 1], code[i]
    return Truth("swapped", INVERTED, frozenset({r}), unnamed=True)


def _message(b: Breaker, api: str) -> tuple[Place, int, Op]:
    """A send or receive, alone (-1) or in a group (its position)."""
    found: list[tuple[Place, int, Op]] = []
    for place in b.places(lambda r, what: isinstance(what, (Call, Group))):
        what = b.code(place)[place[2]]
        ops = [(-1, what.op)] if isinstance(what, Call) else []
        if isinstance(what, Group):
            ops = list(enumerate(what.ops))
        for k, op in ops:
            if op.api == api and b.members[place[0], op.comm][op.peer or 0] != place[0]:
                found.append((place, k, op))
    if not found:
        raise NoPlace
    return b.rng.choice(found)


def _without(b: Breaker, place: Place, k: int) -> None:
    what = b.code(place)[place[2]]
    if isinstance(what, Group):
        left = what.ops[:k] + what.ops[k + 1 :]
        b.put(place, *([Group(left)] if left else []))
    else:
        b.put(place)


def _missing_send(b: Breaker) -> Truth:
    """One send is left out, alone or in a group."""
    place, k, _ = _message(b, "ncclSend")
    _without(b, place, k)
    types = MESSAGES | ABSENT
    return Truth("missing_send", types, frozenset({place[0]}), unnamed=True)


def _missing_recv(b: Breaker) -> Truth:
    """One receive is left out, alone or in a group."""
    place, k, _ = _message(b, "ncclRecv")
    _without(b, place, k)
    types = MESSAGES | ABSENT
    return Truth("missing_recv", types, frozenset({place[0]}), unnamed=True)


def _size(b: Breaker) -> Truth:
    """A send and its receive have different sizes."""
    place, k, op = _message(b, b.rng.choice(["ncclSend", "ncclRecv"]))
    other = replace(op, count=op.count * 2 + 1)
    what = b.code(place)[place[2]]
    if isinstance(what, Group):
        b.put(place, Group((*what.ops[:k], other, *what.ops[k + 1 :])))
    else:
        b.put(place, Call(other))
    return Truth(
        "p2p_size",
        frozenset({"p2p_mismatch"}),
        frozenset({place[0]}),
        unnamed=True,
        blocks=False,
        shown=True,
        call=other,
    )


def _inverted(b: Breaker) -> Truth:
    """Both of two peers send a large message first."""
    found = []
    for r, threads in enumerate(b.program.code):
        for t, code in enumerate(threads):
            for i, (x, y) in enumerate(itertools.pairwise(code)):
                if not (isinstance(x, Call) and isinstance(y, Call)):
                    continue
                recv_first = x.op.api == "ncclRecv" and y.op.api == "ncclSend"
                if recv_first and x.op.peer == y.op.peer and x.op.comm == y.op.comm:
                    found.append((r, t, i))
    if not found:
        raise NoPlace
    r, t, i = b.rng.choice(found)
    code = b.program.code[r][t]
    code[i], code[i + 1] = code[i + 1], code[i]
    return Truth("inverted", frozenset({"p2p_order_inversion"}), frozenset({r}), unnamed=True)


def _split_subset(b: Breaker) -> Truth:
    """One rank does not enter a split: it stays away, or exits."""
    place = b.place(lambda r, what: isinstance(what, Split) and len(b.members[r, what.parent]) > 1)
    if b.rng.random() < 0.5:
        b.put(place, b.away(), b.code(place)[place[2]])
    else:
        split = b.code(place)[place[2]]
        assert isinstance(split, Split)
        del b.code(place)[place[2] :]
        kept = list(b.program.code[place[0]][0])
        b.program.code[place[0]][0][:] = [*kept, Leave(1)]
    return Truth("split_subset", ABSENT, frozenset({place[0]}))


def _init_missing(b: Breaker) -> Truth:
    """One rank does not enter the making of a communicator."""
    place = b.place(lambda r, what: isinstance(what, Init) and what.nranks > 1)
    init = b.code(place)[place[2]]
    assert isinstance(init, Init)
    if init.comm == "world":
        b.program.never_started.add(place[0])
    else:
        b.put(place, b.away(), init)
    return Truth(
        "init_missing",
        frozenset({"comm_init_missing_enter"}),
        frozenset({place[0]}),
        unnamed=True,
        missing=frozenset({init.rank}),
    )


def _conflict(b: Breaker) -> Truth:
    """Two processes claim one rank."""
    place = b.place(lambda r, what: isinstance(what, Init) and what.nranks > 1)
    init = b.code(place)[place[2]]
    assert isinstance(init, Init)
    other = b.rng.choice([r for r in range(init.nranks) if r != init.rank])
    b.put(place, replace(init, rank=other))
    twin = b.members[place[0], init.comm][other]
    return Truth(
        "conflict",
        frozenset({"comm_init_rank_conflict"}),
        frozenset({place[0], twin}),
        unnamed=True,
        also=[frozenset({place[0]})],
    )


def _ended(b: Breaker) -> Truth:
    """A member ends a communicator that the others go on to use."""
    place, op, _members = b.collective()
    code = b.code(place)
    how = b.rng.choice(["abort", "abort", "destroy"])
    gone = op.comm
    rest: list[Instruction] = []
    for what in code[place[2] :]:
        if isinstance(what, Call) and what.op.comm == gone:
            continue
        if isinstance(what, (Split, End)) and gone in (
            getattr(what, "parent", ""),
            getattr(what, "comm", ""),
        ):
            if isinstance(what, Split):
                break
            continue
        if isinstance(what, Group) and any(o.comm == gone for o in what.ops):
            break
        rest.append(what)
    if place[1] != 0 or len(b.program.code[place[0]]) > 1:
        rest = []
    if b.rng.random() < 0.4:
        rest = []
    code[place[2] :] = [End(gone, how), *rest]
    if not rest:
        code.append(b.away())
    return Truth("ended", ABSENT, frozenset({place[0]}), note=how)


def _device_hang(b: Breaker) -> Truth:
    """A collective that all entered hangs on the device: nobody is to blame."""
    slots = [(h, number) for h, number, n in b.slots if n > 1]
    if not slots:
        raise NoPlace
    b.program.device_hangs.add(b.rng.choice(slots))
    return Truth("device_hang", STUCK, frozenset())


def _late(b: Breaker) -> Truth:
    """A rank comes 75 to 240 s late; then all goes on."""
    place, _, _ = b.collective()
    dt = b.rng.uniform(75, 240)
    if b.rng.random() < 0.3:
        b.put(place, Stop(dt), b.code(place)[place[2]])
    else:
        away = replace(b.away(), dt=dt)
        b.put(place, away, b.code(place)[place[2]])
    return Truth(
        "late",
        # While it is away, sends and receives may be the first that miss it.
        frozenset({"delayed_collective_enter", "nccl_missing_exit"})
        | {"collective_missing_enter", "p2p_unmatched"},
        frozenset({place[0]}),
        blocks=False,
        shown=True,
    )


FAULTS: dict[str, Callable[[Breaker], Truth]] = {
    "stall": _stall,
    "killed": _killed,
    "stopped": _stopped,
    "skipped": _skipped,
    "extra": _extra,
    "count": _count,
    "zero": _zero,
    "datatype": _datatype,
    "op": _op,
    "root": _root,
    "api": _api,
    "swapped": _swapped,
    "missing_send": _missing_send,
    "missing_recv": _missing_recv,
    "p2p_size": _size,
    "inverted": _inverted,
    "split_subset": _split_subset,
    "init_missing": _init_missing,
    "conflict": _conflict,
    "ended": _ended,
    "device_hang": _device_hang,
    "late": _late,
}
