"""Other faults of other programs that may leave the calls that a run has left.

Each fault of ``faults`` is undone at every rank and place where that can make
the ranks' calls agree again: that is the program without the fault.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from model.device import Comm
from model.faults import ABSENT, DIFFERS, INVERTED, MESSAGES, ORDER, SHIFTED, STUCK
from model.ops import Await, Call, Group, Host, Init, Instruction, Leave, Op, Sync
from model.stem import LAST, Base, Stem, operations
from model.tails import lacking

#: How many calls before the end of a rank's code a missing one is looked for.
PLACES = 40
#: Of these the ones that are tried.
NEAR = 12
#: Slots of each communicator that may hang on the device.
SLOTS = 24
AWAY = {("syscall", "futex"), ("syscall", "read"), ("syscall", "poll"), ("running", None),
        ("uninterruptible", None)}  # fmt: skip


#: What says which fault, as in ``faults``.
TYPES = {
    "device_hang": STUCK,
    "stall": ABSENT,
    "killed": ABSENT,
    "conflict": frozenset({"comm_init_rank_conflict"}),
    "skipped": ABSENT | DIFFERS | SHIFTED | ORDER,
    "extra": ABSENT | DIFFERS | SHIFTED | ORDER,
    "swapped": INVERTED,
    "inverted": frozenset({"p2p_order_inversion"}),
    "argument": DIFFERS,
    "zero": DIFFERS | SHIFTED | ABSENT,
    "missing_send": MESSAGES | ABSENT,
    "missing_recv": MESSAGES | ABSENT,
    "p2p_size": frozenset({"p2p_mismatch"}),
}


@dataclass
class Rival:
    """A program ``healthy``, and the same with a fault, ``broken``; both without their ends."""

    kind: str
    culprits: frozenset[int]
    words: str
    healthy: Stem
    broken: Stem
    #: A collective that does not end on the device.
    hang: tuple[int, int] | None = None
    unnamed: bool = False
    also: list[frozenset[int]] = field(default_factory=list)
    #: Who has to make what, before anything else, after its calls so far.
    first: tuple[int, Op] | None = None

    @property
    def types(self) -> frozenset[str]:
        """Kinds of findings that say it."""
        return TYPES.get(self.kind, frozenset())

    @property
    def right(self) -> set[frozenset[int]]:
        """Whom it is right to blame: any of these sets."""
        return {self.culprits, *self.also} | ({frozenset[int]()} if self.unnamed else set())


def rivals(base: Base, stem: Stem, ranks: set[int]) -> Iterator[Rival]:
    """Faults of one of these ranks, and of none."""
    yield Rival("none", frozenset(), "nothing is broken", stem, stem)
    yield from _hangs(base, stem)
    for r in sorted(ranks):
        yield from _stalls(base, stem, r)
    for r in sorted(ranks):
        yield from faults_of(base, stem, r, away=False)


def faults_of(base: Base, stem: Stem, r: int, away: bool = True) -> Iterator[Rival]:
    """Faults of this rank.  ``away``: also that it is."""
    undone = (_kills, _conflicts, _left_out, _too_many, _exchanged, _different, _messages)
    for undo in (_stalls, *undone) if away else undone:
        for rival in undo(base, stem, r):
            rival.words += stem.note
            yield rival


def _hangs(base: Base, stem: Stem) -> Iterator[Rival]:
    slots: dict[Comm, dict[int, list[Op]]] = defaultdict(lambda: defaultdict(list))
    for r in range(len(stem.code)):
        for _, op, comm in stem.calls(base, r):
            if op.peer is None and op.count and comm.nranks > 1:
                slots[comm][r].append(op)
    for comm, made in slots.items():
        n = min(len(made.get(r, ())) for r in comm.members)
        for k in range(n - 1, max(-1, n - 1 - SLOTS), -1):
            op = made[comm.members[0]][k]
            words = f"collective {k} of {comm.hash:016x} ({op.api}) does not end on the device"
            yield Rival("device_hang", frozenset(), words, stem, stem, (comm.hash, k))


def _stalls(base: Base, stem: Stem, r: int) -> Iterator[Rival]:
    proc = base.run.procs[r]
    if proc.ended is not None or not proc.threads:
        return
    _, main, syscall = proc.states[-1]
    for t, code in enumerate(stem.code[r][: len(proc.threads)]):
        if proc.threads[t].inside is not None:
            continue
        how = Host(None, main, syscall) if t == 0 else Host(None)
        if t == 0 and base.program.host_state and (main, syscall) not in AWAY:
            continue
        healthy = stem
        if code and isinstance(code[-1][1], Sync):
            healthy = stem.copy(r)  # it seems to wait for its device, and is away
            healthy.code[r][t].pop()
        last = [code[-1]] if code and isinstance(code[-1][1], Await) else []
        broken = healthy.copy(r)
        if last:
            broken.code[r][t].pop()
        broken.code[r][t] += [(LAST, how), *last]
        words = f"rank {r} stays outside NCCL ({main}) after {_after(code)}"
        yield Rival("stall", frozenset({r}), words, healthy, broken)


def _kills(base: Base, stem: Stem, r: int) -> Iterator[Rival]:
    code = stem.code[r][0]
    if not code or code[-1][1] != Leave(0):
        return
    healthy = stem.copy(r)
    healthy.code[r][0].pop()
    words = f"rank {r} exits too early, after {_after(code[:-1])}"
    yield Rival("killed", frozenset({r}), words, healthy, stem, unnamed=True)


def _after(code: list[tuple[float, Instruction]]) -> str:
    ops = [(what, op) for _, what in code for op in operations(what)]
    if not ops:
        return "its start"
    what, op = ops[-1]
    group = ", in a group" if isinstance(what, Group) else ""
    return f"its {say(op)}{group} (call {len(ops) - 1} of the thread)"


def say(op: Op) -> str:
    to = f" {'to' if op.api == 'ncclSend' else 'from'} {op.peer}" if op.p2p else ""
    return f"{op.api}{to} of {op.count} {op.dtype} on {op.comm}"


def _conflicts(base: Base, stem: Stem, r: int) -> Iterator[Rival]:
    for t, code in enumerate(stem.code[r]):
        if not code or not isinstance(mine := code[-1][1], Init):
            continue
        uid = mine.uid or mine.comm
        claims = [
            (x, w.rank)
            for x, threads in enumerate(stem.code)
            for thread in threads
            for _, w in thread
            if isinstance(w, Init) and (w.uid or w.comm) == uid
        ]
        twins = [x for x, rank in claims if rank == mine.rank and x != r]
        for free in set(range(mine.nranks)) - {rank for _, rank in claims}:
            if len(twins) == 1:
                healthy = stem.copy(r)
                healthy.code[r][t][-1] = (code[-1][0], replace(mine, rank=free))
                words = f"rank {r} claims rank {mine.rank} of {mine.comm}, and is rank {free}"
                both = frozenset({r, twins[0]})
                one = [frozenset({r})]
                yield Rival("conflict", both, words, healthy, stem, None, True, one)


def _places(code: list[tuple[float, Instruction]]) -> Iterator[tuple[int, float]]:
    """Where in a thread a call may have been, from its end on: (index, when)."""
    end = code[-1][0] if code and isinstance(code[-1][1], (Sync, Await)) else LAST
    yield (len(code) - (end < LAST), end)
    found = [i for i, (_, what) in enumerate(code) if operations(what)]
    for i in found[: -PLACES - 1 : -1]:
        yield i, code[i][0] - 1e-9


def _near(code: list[tuple[float, Instruction]], t: float) -> list[tuple[int, float]]:
    """The places next to a time."""
    return sorted(_places(code), key=lambda x: abs(min(x[1], 1e9) - t))[:NEAR]


def _put(stem: Stem, r: int, t: int, i: int, *what: tuple[float, Instruction]) -> Stem:
    made = stem.copy(r)
    made.code[r][t][i:i] = what
    return made


def _rows(base: Base, stem: Stem) -> dict[Comm, dict[int, list[Op]]]:
    """Communicator -> rank -> the collectives that it made."""
    rows: dict[Comm, dict[int, list[Op]]] = defaultdict(lambda: defaultdict(list))
    for r in range(len(stem.code)):
        for _, op, comm in stem.calls(base, r):
            if op.peer is None:
                rows[comm][r].append(op)
    return rows


def _agree(one: list[Op], two: list[Op]) -> bool:
    return all(x is y or x.signature == y.signature for x, y in zip(one, two, strict=False))


def _left_out(base: Base, stem: Stem, r: int) -> Iterator[Rival]:
    """The rank has left out a collective."""
    for comm, rows in _rows(base, stem).items():
        if r not in comm.members:
            continue
        longest = max((ops for x, ops in rows.items() if x != r), key=len, default=[])
        mine = [(at, op) for at, op, c in stem.calls(base, r) if c is comm and op.peer is None]
        ops = [op for _, op in mine]
        if len(ops) >= len(longest) and _agree(ops, longest):
            continue
        due = _when(base, stem, comm, r, len(ops))
        for t, code in enumerate(stem.code[r]):
            for i, at in _near(code, due):
                k = sum(1 for s, _ in mine if s < at)
                if k >= len(longest) or not longest[k].count:
                    continue
                op = longest[k]
                if _agree([*ops[:k], op, *ops[k:]], longest):
                    healthy = _put(stem, r, t, i, (at, Call(op)))
                    words = f"rank {r} leaves out {say(op)} (collective {k} there)"
                    words += f" after {_after(code[:i])}"
                    two = comm.nranks == 2
                    yield Rival("skipped", frozenset({r}), words, healthy, stem, unnamed=two)


def _when(base: Base, stem: Stem, comm: Comm, r: int, k: int) -> float:
    """When the first of the others made its collective of this number, or its last one."""
    found = LAST
    for x in comm.members:
        made = [at for at, op, c in stem.calls(base, x) if c is comm and op.peer is None]
        if x != r and made:
            found = min(found, made[min(k, len(made) - 1)])
    return found


def _too_many(base: Base, stem: Stem, r: int) -> Iterator[Rival]:
    """The rank makes a collective before the like of it, which it makes or was to make."""
    rows = _rows(base, stem)
    for t, code in enumerate(stem.code[r]):
        for i in [i for i, (_, w) in enumerate(code) if isinstance(w, Call)][-PLACES:]:
            what = code[i][1]
            assert isinstance(what, Call)
            comm = base.comms.get((r, what.op.comm))
            if comm is None or what.op.p2p or not what.op.count or comm.nranks < 2:
                continue
            ops = rows[comm][r]
            others = [rows[comm].get(x, []) for x in comm.members if x != r]
            longest = max(others, key=len)
            if _agree(ops, longest) and len(ops) <= min(map(len, others)):
                continue
            follows, first = code[i + 1][1] if i + 1 < len(code) else None, None
            if follows is None and len(longest) >= len(ops):
                follows, first = Call(longest[len(ops) - 1]), (r, longest[len(ops) - 1])
            if not isinstance(follows, Call) or not _like(what.op, follows.op):
                continue
            healthy = stem.copy(r)
            del healthy.code[r][t][i]
            left = [o for _, o, c in healthy.calls(base, r) if c is comm and o.peer is None]
            if _agree(left, longest):
                words = f"rank {r} makes {say(what.op)} once too often"
                words += f" after {_after(code[:i])}"
                one = frozenset({r})
                two = comm.nranks == 2
                yield Rival("extra", one, words, healthy, stem, unnamed=two, first=first)


def _like(more: Op, op: Op) -> bool:
    """Whether it can be the call too many before this one."""
    return more == op or (more.count in (3, 11, 5000) and more == replace(op, count=more.count))


def _exchanged(base: Base, stem: Stem, r: int) -> Iterator[Rival]:
    """The rank makes two calls next to each other in the wrong order."""
    for t, code in enumerate(stem.code[r]):
        for i in range(len(code) - 2, max(-1, len(code) - 2 - PLACES), -1):
            (s, x), (u, y) = code[i], code[i + 1]
            if not (isinstance(x, Call) and isinstance(y, Call)):
                continue
            streams = x.op.comm != y.op.comm and x.op.stream == y.op.stream
            swapped = not x.op.p2p and not y.op.p2p and streams and x.op.count and y.op.count
            same = x.op.peer == y.op.peer and x.op.comm == y.op.comm
            inverted = same and x.op.api == "ncclSend" and y.op.api == "ncclRecv"
            shared = [set(base.comms[r, w.op.comm].members) for w in (x, y)]
            if not (swapped and len(shared[0] & shared[1]) > 1) and not inverted:
                continue
            healthy = stem.copy(r)
            healthy.code[r][t][i : i + 2] = [(s, y), (u, x)]
            kind = "swapped" if swapped else "inverted"
            words = f"rank {r} makes {say(x.op)} and {say(y.op)} in the wrong order"
            yield Rival(kind, frozenset({r}), words, healthy, stem, unnamed=True)


def _different(base: Base, stem: Stem, r: int) -> Iterator[Rival]:
    """The rank makes one collective with other arguments than all others."""
    if lacking(base, stem) is not None:
        return
    rows: dict[Comm, list[list[Op]]] = {}
    for x in range(len(stem.code)):
        for _, op, comm in stem.calls(base, x):
            if op.peer is None and x != r:
                rows.setdefault(comm, [[] for _ in stem.code])[x].append(op)
    for t, code in enumerate(stem.code[r]):
        made: dict[Comm, int] = defaultdict(int)
        for i, (at, what) in enumerate(code):
            for op in operations(what):
                if op.p2p or (r, op.comm) not in base.comms:
                    continue
                comm = base.comms[r, op.comm]
                k = made[comm]
                made[comm] += 1
                others = [ops[k] for ops in rows.get(comm, []) if len(ops) > k]
                if not others or others[0].signature == op.signature or isinstance(what, Group):
                    continue
                healthy = stem.copy(r)
                healthy.code[r][t][i] = (at, Call(others[0]))
                kind = _argument(op, others[0], comm.nranks)
                if kind is not None and lacking(base, healthy) is not None:
                    words = f"rank {r} makes {say(op)} where {say(others[0])} is due"
                    two = comm.nranks == 2
                    yield Rival(kind, frozenset({r}), words, healthy, stem, unnamed=two)


def _argument(op: Op, due: Op, n: int) -> str | None:
    """Which fault makes the one of the other, of those that change one argument."""
    if not due.count:
        return None
    if op == replace(due, count=0):
        return "zero"
    changed = [
        op == replace(due, count=op.count) and op.count in (due.count + 1, due.count * 2),
        op == replace(due, dtype=op.dtype) and op.dtype in ("int8", "float16", "float64"),
        op == replace(due, op=op.op) and op.op in ("min", "max"),
        due.root is not None and op == replace(due, root=(due.root + 1) % n),
        op == replace(due, api=op.api, op=op.op, root=op.root)
        and op.root in (None, 0)
        and op.op in (None, "sum"),
    ]
    return "argument" if any(changed) else None


def _messages(base: Base, stem: Stem, r: int) -> Iterator[Rival]:
    """The rank has left out a send or receive, or made it with another size."""
    left = lacking(base, stem)
    first: dict[tuple[str, str, int | None], tuple[float, Op]] = {}
    for when, op in left[r] if left is not None else []:
        if op.p2p:
            first.setdefault((op.api, op.comm, op.peer), (when, op))
    for when, op in first.values():
        kind = "missing_send" if op.api == "ncclSend" else "missing_recv"
        for t, code in enumerate(stem.code[r]):
            # Near the time at which the other half was made.
            for i, at in _near(code, when):
                words = f"rank {r} leaves out {say(op)} after {_after(code[:i])}"
                yield Rival(
                    kind,
                    frozenset({r}),
                    words,
                    _put(stem, r, t, i, (at, Call(op))),
                    stem,
                    unnamed=True,
                )
                if i < len(code) and isinstance(group := code[i][1], Group):
                    healthy = stem.copy(r)
                    healthy.code[r][t][i] = (code[i][0], Group((*group.ops, op)))
                    words = f"rank {r} leaves out {say(op)} of the group after {_after(code[:i])}"
                    yield Rival(kind, frozenset({r}), words, healthy, stem, unnamed=True)
    if left is None:
        yield from _sizes(base, stem, r)


def _sizes(base: Base, stem: Stem, r: int) -> Iterator[Rival]:
    for t, code in enumerate(stem.code[r]):
        for i, (at, what) in enumerate(code):
            for k, op in enumerate(operations(what)):
                if not op.p2p or not op.count % 2:
                    continue
                other = replace(op, count=(op.count - 1) // 2)
                ops = list(operations(what))
                ops[k] = other
                healthy = stem.copy(r)
                made: Instruction = Call(other) if isinstance(what, Call) else Group(tuple(ops))
                healthy.code[r][t][i] = (at, made)
                if lacking(base, healthy) is not None:
                    words = f"rank {r} makes {say(op)} where {other.count} are due"
                    yield Rival("p2p_size", frozenset({r}), words, healthy, stem, unnamed=True)
