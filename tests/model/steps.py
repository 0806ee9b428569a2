"""Steps of a random program: what all its ranks do together.

Whatever a step waits for is in it or before it, in the order in which all its
ranks make their calls, so a program without a fault runs to its end.
"""

from __future__ import annotations

from collections.abc import Callable

from model.builder import Builder, Set
from model.ops import (
    Await,
    Call,
    Group,
    Host,
    Instruction,
    Kernel,
    Op,
    Post,
    StreamWait,
    Sync,
)

Step = Callable[[Builder], None]


def collective(b: Builder) -> None:
    chosen = b.pick(1)
    if chosen is None:
        return
    times = b.rng.choice([1, 1, 1, 2, 4, 8])
    ops = b.each(chosen)
    for part, op in ops:
        for r in part:
            if b.rng.random() < 0.3:
                b.main[r].append(Kernel(chosen.stream, b.rng.expovariate(200)))
            b.main[r] += [Call(op)] * times


def group(b: Builder) -> None:
    chosen = b.pick()
    if chosen is None:
        return
    for part in chosen.parts:
        k = b.rng.choice([2, 2, 3, 5])
        like = [b.op(chosen.name, len(part), chosen.stream) for _ in range(k)]
        for r in part:
            b.main[r].append(Group(tuple(like)))


def group_of_two(b: Builder) -> None:
    """A group over two communicators that all of its ranks have."""
    one, two = b.pick(), b.pick()
    if one is None or two is None or one is two:
        return
    # The second one's members must all be in the group, so take it whole.
    mine: list[list[Op]] = [[] for _ in range(b.n)]
    for chosen in (one, two):
        for part, op in b.each(chosen):
            for r in part:
                mine[r].append(op)
    for r in range(b.n):
        if mine[r]:
            b.main[r].append(Group(tuple(mine[r])))


def message(b: Builder, chosen: Set, api: str, peer: int, count: int) -> Op:
    return Op(api, chosen.name, count, "uint8", None, None, peer, chosen.stream)


def warm(b: Builder, chosen: Set, part: list[int], pairs: list[tuple[int, int]]) -> None:
    """First messages of pairs (ranks in the communicator), in one group per rank."""
    new = [p for p in pairs if (chosen.name, part[p[0]], part[p[1]]) not in b.pairs]
    ops: dict[int, list[Op]] = {}
    for src, dst in new:
        b.pairs.add((chosen.name, part[src], part[dst]))
        ops.setdefault(src, []).append(message(b, chosen, "ncclSend", dst, 64))
        ops.setdefault(dst, []).append(message(b, chosen, "ncclRecv", src, 64))
    for i, mine in ops.items():
        b.main[part[i]].append(Group(tuple(mine)))


def ring(b: Builder) -> None:
    chosen = b.pick()
    if chosen is None:
        return
    count = b.rng.choice([64, 4096, 1 << 20])
    for part in chosen.parts:
        k = len(part)
        for i, r in enumerate(part):
            send = message(b, chosen, "ncclSend", (i + 1) % k, count)
            recv = message(b, chosen, "ncclRecv", (i - 1) % k, count)
            pair = (send, recv) if b.rng.random() < 0.7 else (recv, send)
            b.main[r].append(Group(pair))
            b.pairs.add((chosen.name, r, part[(i + 1) % k]))


def pipeline(b: Builder) -> None:
    chosen = b.pick()
    if chosen is None:
        return
    count = b.rng.choice([1024, 1 << 18])
    batches = b.rng.choice([1, 2, 4])
    for part in chosen.parts:
        for _ in range(batches):
            for i, r in enumerate(part):
                if i > 0:
                    b.main[r].append(Call(message(b, chosen, "ncclRecv", i - 1, count)))
                b.main[r].append(Kernel(chosen.stream, 0.002))
                if i + 1 < len(part):
                    b.main[r].append(Call(message(b, chosen, "ncclSend", i + 1, count)))
                    b.pairs.add((chosen.name, r, part[i + 1]))


def uneven(b: Builder) -> None:
    """All-to-all by sends of different sizes; empty pairs are left out by both."""
    chosen = b.pick()
    if chosen is None:
        return
    for part in chosen.parts:
        k = len(part)
        dense = min(1.0, 6 / k)
        sizes = {
            (s, d): b.rng.choice([16, 5000, 300_000])
            for s in range(k)
            for d in range(k)
            if b.rng.random() < dense
        }
        for i, r in enumerate(part):
            ops: list[Op] = []
            for j in range(k):
                if (i, j) in sizes:
                    ops.append(message(b, chosen, "ncclSend", j, sizes[i, j]))
                if (j, i) in sizes:
                    ops.append(message(b, chosen, "ncclRecv", j, sizes[j, i]))
            if ops:
                b.main[r].append(Group(tuple(ops)))
            b.pairs |= {(chosen.name, r, part[d]) for s, d in sizes if s == i}


def head_to_head(b: Builder) -> None:
    """Two peers send to each other, then receive; both sends fit into buffers."""
    chosen = b.pick()
    if chosen is None:
        return
    for part in chosen.parts:
        pairs = [(i, i + 1) for i in range(0, len(part) - 1, 2)]
        both = [p for i, j in pairs for p in ((i, j), (j, i))]
        warm(b, chosen, part, both)
        for i, j in pairs:
            for me, peer in ((i, j), (j, i)):
                b.main[part[me]] += [
                    Call(message(b, chosen, "ncclSend", peer, 2048)),
                    Call(message(b, chosen, "ncclRecv", peer, 2048)),
                ]


def exchange(b: Builder) -> None:
    """Two peers exchange large messages: one sends first, the other receives first."""
    chosen = b.pick()
    if chosen is None:
        return
    for part in chosen.parts:
        pairs = [(i, i + 1) for i in range(0, len(part) - 1, 2)]
        warm(b, chosen, part, [p for i, j in pairs for p in ((i, j), (j, i))])
        for i, j in pairs:
            send = Call(message(b, chosen, "ncclSend", j, 1 << 20))
            recv = Call(message(b, chosen, "ncclRecv", j, 1 << 20))
            b.main[part[i]] += [send, recv]
            send = Call(message(b, chosen, "ncclSend", i, 1 << 20))
            recv = Call(message(b, chosen, "ncclRecv", i, 1 << 20))
            b.main[part[j]] += [recv, send]


def sync(b: Builder) -> None:
    stream = b.rng.randrange(b.streams)
    some = b.rng.random() < 0.2
    for r in range(b.n):
        if not some or b.rng.random() < 0.5:
            b.main[r].append(Sync(stream))


def compute(b: Builder) -> None:
    scale = b.rng.choice([0.001, 0.02, 0.5])
    for r in range(b.n):
        b.main[r].append(b.jitter(scale))


def wait(b: Builder) -> None:
    if b.streams > 1:
        waits, on = b.rng.sample(range(b.streams), 2)
        for r in range(b.n):
            b.main[r].append(StreamWait(waits, on))


def slow(b: Builder) -> None:
    """Checkpoint or compile: one or all ranks are away for up to 50 s."""
    dt = b.rng.uniform(5, 50)
    who = range(b.n) if b.rng.random() < 0.5 else [b.rng.randrange(b.n)]
    state = b.rng.choice([("running", None), ("syscall", "write"), ("uninterruptible", None)])
    for r in who:
        b.main[r].append(Host(dt * b.rng.uniform(0.8, 1.0), *state))


def nothing(b: Builder) -> None:
    """All pass a zero count: the library runs nothing."""
    chosen = b.pick()
    if chosen is not None:
        for part in chosen.parts:
            for r in part:
                b.main[r].append(
                    Call(Op("ncclAllReduce", chosen.name, 0, "float32", "sum", None, None,
                            chosen.stream))
                )  # fmt: skip


def backward(b: Builder) -> None:
    """A second thread makes collectives of one set, the main thread those of another."""
    one, two = b.pick(), b.pick()
    if one is None or two is None or one is two or one.stream == two.stream:
        return
    b.made += 1
    start, end = f"s{b.made}", f"e{b.made}"
    threads: list[list[list[Instruction]]] = [[[] for _ in range(b.n)] for _ in range(2)]
    for code, chosen in zip(threads, (one, two), strict=True):
        for part, op in b.each(chosen):
            times = b.rng.choice([1, 3])
            for r in part:
                code[r] += [b.jitter(0.005), *[Call(op)] * times]
    for r in range(b.n):
        b.main[r] += [Post(start), *threads[0][r], Await(end)]
        b.aux[r] += [Await(start), *threads[1][r], Post(end)]


STEPS: list[tuple[float, Step]] = [
    (8, collective),
    (2, group),
    (1, group_of_two),
    (1.5, ring),
    (1.5, pipeline),
    (1.5, uneven),
    (1, head_to_head),
    (1, exchange),
    (3, sync),
    (4, compute),
    (1, wait),
    (0.15, slow),
    (0.2, nothing),
    (1.5, backward),
    (0.6, Builder.split),
    (0.15, Builder.destroy),
]
