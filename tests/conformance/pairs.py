"""Sends and receives: one program per kind of fault, and the correct twins.

The base is a chain, as in a pipeline: each rank receives from the one before,
sends to the one after, and all meet in an AllReduce.  The fault is between
``ends(n)``: at the sender for ncclSend, at the receiver for ncclRecv.

A pair has no majority: "the sender left one out" and "the receiver made one
more" look alike.  Only what the two and others did in the rounds before can tell
them apart, so that where there is such a history either the culprit is named or
nobody; without it, nobody.  The finding has to be there all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from conformance.program import (
    OTHER,
    STOPPED,
    Call,
    Exit,
    Group,
    Program,
    Step,
    Stop,
    Sync,
    call,
    group,
    recv,
    send,
    synced,
)
from conformance.truth import (
    CROSSED,
    MISSING,
    NOBODY,
    P2P_INVERTED,
    P2P_MISMATCH,
    P2P_UNMATCHED,
    Case,
    Truth,
)
from nccluprobe.nccl.api import API_TABLE, Api, Kind

P2P = tuple(a for a in API_TABLE if a.kind is Kind.P2P)
ROUNDS, BROKEN = 8, 3
#: Elements of float32: far above and below what NCCL buffers.
BIG, SMALL = 1 << 26, 1 << 10
ANY = (P2P_UNMATCHED, P2P_MISMATCH, P2P_INVERTED)

Edit = Callable[[list[Step]], list[Step]]


def ends(n: int, direction: str | None = "send") -> tuple[int, int]:
    """Sender and receiver of the pair that has the fault: in the middle, or at an end."""
    sender = {2: 0, 4: 1, 8: 4} if direction == "send" else {2: 0, 4: 0, 8: 6}
    return sender[n], sender[n] + 1


def chain(n: int, rank: int, count: int) -> list[Step]:
    """One round of one rank."""
    steps: list[Step] = []
    if rank > 0:
        steps.append(recv(rank - 1, count=count))
    if rank < n - 1:
        steps.append(send(rank + 1, count=count))
    return [*steps, call("ncclAllReduce")]


def ring(n: int, rank: int, count: int) -> list[Step]:
    """One round in which all send and receive at once."""
    both = group(send((rank + 1) % n, count=count), recv((rank - 1) % n, count=count))
    return [both, call("ncclAllReduce")]


def all_to_all(n: int, rank: int, count: int) -> list[Step]:
    """Uneven: each pair has its own size, and one pair has nothing and makes no calls."""
    calls: list[Call] = []
    for other in range(n):
        for src, dst in ((rank, other), (other, rank)):
            if src != dst and (n == 2 or (src, dst) != (0, n - 1)):
                size = count + 16 * src + dst
                calls.append(
                    send(dst, count=size) if src == rank else recv(src, count=size)
                )  # fmt: skip
    return [group(*calls), call("ncclAllReduce")]


Shape = Callable[[int, int, int], list[Step]]


def program(
    n: int,
    sync: bool,
    broken: dict[int, Edit],
    shape: Shape = chain,
    count: int = BIG,
    step: int = 1,
    last: Step | None = None,
    at: int = BROKEN,
) -> Program:
    """``ROUNDS`` rounds; edits apply to round ``at``; sizes grow by ``step``."""
    ranks: list[list[Step]] = []
    for rank in range(n):
        steps: list[Step] = [call("ncclAllReduce", OTHER)]
        for i in range(ROUNDS):
            own = shape(n, rank, count + step * i)
            steps += broken[rank](own) if i == at and rank in broken else own
        steps = synced(steps) if sync else [*steps, Sync()]
        stops = next((i for i, s in enumerate(steps) if isinstance(s, Stop | Exit)), len(steps))
        ranks.append([*steps[: stops + 1], *([last] if last else [])])
    return Program(ranks)


def _find(s: list[Step], direction: str) -> int:
    return next(i for i, x in enumerate(s) if isinstance(x, Call) and x.api.direction == direction)


class _Pair:
    """The edits of one side of the pair."""

    def __init__(self, api: Api, n: int) -> None:
        assert api.direction is not None
        self.n, self.direction = n, api.direction
        self.sender, self.receiver = ends(n, api.direction)
        self.at, self.other = (
            (self.sender, self.receiver)
            if api.direction == "send"
            else (self.receiver, self.sender)
        )

    def edit(self, make: Callable[[Call], list[Step]]) -> dict[int, Edit]:
        """Replaces the call of this side."""

        def do(s: list[Step]) -> list[Step]:
            i = _find(s, self.direction)
            at = s[i]
            assert isinstance(at, Call)
            return [*s[:i], *make(at), *s[i + 1 :]]

        return {self.at: do}

    def in_group(self, make: Callable[[Call], list[Call]]) -> dict[int, Edit]:
        """Replaces the call of this side in its group."""

        def do(s: list[Step]) -> list[Step]:
            at = s[0]
            assert isinstance(at, Group)
            calls: list[Call] = []
            for c in at.calls:
                mine = c.api.direction == self.direction and c.args["peer"] == self.other
                calls += make(c) if mine else [c]
            return [Group(tuple(calls)), *s[1:]]

        return {self.at: do}

    def elsewhere(self, c: Call) -> Call:
        """With another peer."""
        peer = self.receiver + 1 if self.direction == "send" else self.sender - 1
        return c.but(peer=peer % self.n)


def cases(api: Api, n: int) -> Iterator[Case]:
    """All faulty programs of a send or receive with ``n`` ranks."""
    pair = _Pair(api, n)
    who = frozenset({pair.at})
    gone = Truth(who, (P2P_UNMATCHED, MISSING), why="it never comes; all others wait for it")
    alone = gone
    if n == 2 and api.direction == "send":
        why = "who receives may wait for an idle sender for hours: the cause may be left open"
        alone = replace(gone, or_blamed=(NOBODY,), severity="any", why=why)
    tie = Truth(
        who, ANY, or_blamed=(NOBODY,), why="one side less or the other more: only habit tells"
    )
    differs = replace(tie, kinds=(P2P_MISMATCH,), why="of two sides only habit tells the wrong one")

    def case(
        fault: str, variant: str, truth: Truth, broken: dict[int, Edit], **more: object
    ) -> Case:
        sync, passes = variant.endswith("sync"), variant.endswith("pass")

        def build() -> Program:
            return program(n, sync, broken, **more)  # type: ignore[arg-type]

        return Case(api.name, fault, variant, n, build, truth, passes)

    def drop(c: Call) -> list[Call]:
        return []

    for how in ("sync", "ahead"):
        left_out = alone if how == "sync" else gone
        yield case("missing call", f"stop {how}", left_out, pair.edit(lambda c: [Sync(), Stop()]))
        yield case("missing call", f"stop, small {how}", left_out,
                   pair.edit(lambda c: [Sync(), Stop()]), count=SMALL)  # fmt: skip
        # A sender may wait for work in a futex, or poll for it; not in the rest.
        for name, inside, truth in (
            ("computes", None, left_out),
            ("reads", "read", gone),
            ("is stopped", STOPPED, gone),
        ):
            held = pair.edit(lambda c, i=inside: [Sync(), Stop(i)])  # type: ignore[misc]
            yield case("missing call", f"stop, {name} {how}", truth, held)
        for name, exit_ in (("code 1", Exit(1)), ("signal 9", Exit(None, 9)), ("code 0", Exit(0))):
            left = pair.edit(lambda c, e=exit_: [Sync(), e])  # type: ignore[misc]
            yield case("early exit", f"{name} {how}", gone, left)
        yield case("missing call", f"skip {how}", tie, pair.edit(lambda c: []))
        yield case("extra call", how, tie, pair.edit(lambda c: [c.but(count=BIG + 77), c]))
        yield case("wrong communicator", how, replace(tie, causes=2),
                   pair.edit(lambda c: [replace(c, comm=OTHER)]))  # fmt: skip
        yield _swapped(api, pair, how)
        yield from _crossed(api, pair, how)
        yield _head_to_head(api, pair, how)
        for shape in (ring, all_to_all):
            name = shape.__name__.replace("_", " ")
            edit = pair.in_group(drop)
            yield case("asymmetric pair", f"{name} {how}", tie, edit, shape=shape)
            # A first send or receive waits in GroupEnd: nothing of that group has begun.
            first = f"{name}, the first {how}"
            yield case("asymmetric pair", first, tie, edit, shape=shape, at=0)
        if n > 2:
            # The call to the wrong peer and the missing one have this rank in common;
            # but the wrong peer may have left out its own part, too.
            wrong = pair.edit(lambda c: [pair.elsewhere(c)])
            yield case("asymmetric pair", f"wrong peer {how}", replace(tie, causes=2), wrong)
    yield case(
        "missing call", "skip in a uniform stream ahead", tie, pair.edit(lambda c: []), step=0
    )
    for how in ("sync", "ahead", "pass"):
        for name, value in (("count", 999), ("datatype", "float64")):
            wrong = pair.edit(lambda c, a={name: value}: [c.but(**a)])  # type: ignore[misc]
            yield case(f"wrong {name}", how, differs, wrong)
        smaller = pair.in_group(lambda c: [c.but(count=999)])
        yield case("wrong count", f"all to all {how}", differs, smaller, shape=all_to_all)
    # A small send that nobody takes harms nobody; once both have left it is a fact.
    leftover = replace(tie, severity="any", why=f"{tie.why}; nothing hangs")
    lost = (lambda c: []) if api.direction == "recv" else (lambda c: [c, c])
    fault = "missing call" if api.direction == "recv" else "extra call"
    yield case(fault, "small, left over at the end", leftover, pair.edit(lost),
               count=SMALL, step=0, last=Exit(0))  # fmt: skip
    yield Case(api.name, "missing call", "stop at the first", n, lambda: _first(pair), alone)


def _first(pair: _Pair) -> Program:
    ranks: list[list[Step]] = [synced(chain(pair.n, rank, BIG)) for rank in range(pair.n)]
    i = _find(ranks[pair.at], pair.direction)
    ranks[pair.at] = [*ranks[pair.at][:i], Stop()]
    return Program(ranks)


def _between(pair: _Pair, how: str, at: list[Step], other: list[Step]) -> Program:
    """A healthy program, then these steps of the two ranks, then all meet."""
    made = program(pair.n, True, {})
    for rank, steps in enumerate(made.ranks):
        own = {pair.at: at, pair.other: other}.get(rank, [])
        more = [*own, call("ncclAllReduce", OTHER)]
        steps += synced(more) if how == "sync" else [*more, Sync()]
    return made


def _swapped(api: Api, pair: _Pair, how: str) -> Case:
    """Two messages of different sizes, in the other order on one side; never seen before."""

    def build() -> Program:
        mine, peers = (send, recv) if pair.direction == "send" else (recv, send)
        at = [mine(pair.other, count=BIG + i) for i in (60, 50)]
        other = [peers(pair.at, count=BIG + i) for i in (50, 60)]
        return _between(pair, how, [*at], [*other])

    truth = Truth(NOBODY, (P2P_MISMATCH,), why="as many calls on both sides, in two orders")
    return Case(api.name, "swapped order", how, pair.n, build, truth)


def _crossed(api: Api, pair: _Pair, how: str) -> Iterator[Case]:
    """One side goes to a collective first, the other first to the pair.

    That all others are in the collective is no evidence: they have no part in the pair.
    """

    def build(waits: bool) -> Program:
        mine, peers = (send, recv) if pair.direction == "send" else (recv, send)
        made = _between(pair, how, [], [peers(pair.at, count=BIG + 50)])
        last: list[Step] = [mine(pair.other, count=BIG + 50), Sync()]
        own = made.ranks[pair.at]
        made.ranks[pair.at] = own + last if waits else own[:-1] + last
        return made

    truth = Truth(
        NOBODY,
        (P2P_INVERTED, CROSSED, P2P_UNMATCHED),
        causes=2,
        why="either of the two may have the wrong order",
    )
    fault = "deadlock across communicators"
    if how == "sync":
        yield Case(api.name, fault, how, pair.n, lambda: build(True), truth)
        return
    one = replace(truth, why=f"{truth.why}: one waits for the device, the other runs ahead")
    yield Case(api.name, fault, "one ahead", pair.n, lambda: build(True), one)
    both = replace(truth, required=False, why="all calls are there; only their order is wrong")
    yield Case(api.name, fault, how, pair.n, lambda: build(False), both)


def _head_to_head(api: Api, pair: _Pair, how: str) -> Case:
    """Both send (receive) first, and then receive (send)."""

    def build() -> Program:
        calls = [send, recv] if pair.direction == "send" else [recv, send]
        at, other = (
            [c(peer, count=BIG + 50) for c in calls] for peer in (pair.other, pair.at)
        )  # fmt: skip
        warm = group(send(pair.other), recv(pair.other))
        warm_other = group(send(pair.at), recv(pair.at))
        return _between(pair, how, [warm, Sync(), *at], [warm_other, Sync(), *other])

    truth = Truth(
        NOBODY,
        (P2P_INVERTED, P2P_UNMATCHED),
        causes=2,
        why="both do the same; where hosts are not seen in a CUDA wait it may stay two waits",
    )
    if how == "ahead":
        truth = replace(truth, required=False, why="all calls are there; only their order is wrong")
    return Case(api.name, "swapped order", f"head to head {how}", pair.n, build, truth)
