"""Programs of training jobs for ``fr_sim``: 3D-parallel with experts, and fully sharded."""

from __future__ import annotations

import random
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

from importers.fr_parts import Group, Transfer
from importers.fr_sim import Host, Sim

Steps = Generator[Any, None, None]


@dataclass
class Groups:
    """All groups of a job, numbered as PyTorch does."""

    all: list[Group] = field(default_factory=list)
    #: Numbers that groups of another backend have taken.
    others: set[int] = field(default_factory=set)
    _next: int = 0

    def make(self, desc: str, *members: tuple[int, ...]) -> dict[int, Group]:
        """Groups of one kind; rank -> its group."""
        found = {}
        for ranks in members:
            g = Group(str(self._next), desc, ranks)
            self._next += 1
            self.all.append(g)
            for r in ranks:
                found[r] = g
        return found

    def skip(self, n: int) -> None:
        """Groups that are none of NCCL's."""
        self.others.update(range(self._next, self._next + n))
        self._next += n

    def of(self, rank: int) -> list[Group]:
        """The groups of a rank, in order of making."""
        return [g for g in self.all if rank in g.ranks]


class Megatron:
    """Tensor, data, pipeline and expert parallel; rank = tensor + T * (data + D * stage)."""

    def __init__(self, rng: random.Random, t: int, d: int, p: int, chunks: int = 1) -> None:
        self.t, self.d, self.p, self.chunks = t, d, p, chunks
        self.rng = rng
        n = self.n = t * d * p
        self.experts = rng.random() < 0.7
        self.batched = chunks == 1 and rng.random() < 0.4
        self.world_recv = p == 2 and not self.batched
        self.layers = rng.choice((1, 1, 2))
        self.micro = p * rng.choice((1, 2))
        self.iterations = rng.choice((2, 3))
        self.coalesce = rng.random() < 0.4
        self.slow = rng.choice((5e-4, 2e-3))
        self.barrier = rng.random() < 0.3
        self.norm_world = rng.random() < 0.5
        g = self.groups = Groups()
        every = tuple(range(n))
        stages = [every[s * t * d : (s + 1) * t * d] for s in range(p)]
        blocks = [b[i : i + t] for b in stages for i in range(0, t * d, t)]
        pipes = [tuple(range(i, n, t * d)) for i in range(t * d)]
        self.world = g.make("default_pg", every)
        data = [tuple(b[i::t]) for b in stages for i in range(t)]
        self.dp = g.make("DATA_PARALLEL_GROUP_WITH_CP", *data)
        g.skip(rng.choice((0, 4)))
        model = [tuple(r for r in every if r // t % d == i) for i in range(d)]
        self.mp = g.make("MODEL_PARALLEL_GROUP", *model)
        self.tp = g.make("TENSOR_MODEL_PARALLEL_GROUP", *blocks)
        self.pp = g.make("PIPELINE_MODEL_PARALLEL_GROUP", *pipes)
        self.emb = g.make("EMBEDDING_GROUP", *(tuple({x[0]: 0, x[-1]: 0}) for x in pipes))
        self.tdp = g.make("TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP", *stages)
        self.tcp = g.make("TENSOR_AND_CONTEXT_PARALLEL_GROUP", *blocks)
        self.ep = g.make("EXPERT_MODEL_PARALLEL_GROUP", *stages)
        self.etp = g.make("EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP", *stages)
        g.make("EXPERT_DATA_PARALLEL_GROUP", *((r,) for r in every))
        self.intra = g.make("INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP", every)

    def start(self, sim: Sim) -> None:
        """Give every host its program."""
        for h in sim.hosts.values():
            h.program = self._program(h, random.Random(self.rng.getrandbits(32) + h.rank))

    # -- one rank ----------------------------------------------------------

    def _program(self, h: Host, rng: random.Random) -> Steps:
        if self.micro:
            h.collective(self.world[h.rank], "all_reduce", [1], dtype="Int")
            yield "all"
        for i in range(self.iterations):
            yield rng.uniform(0, 1e-4)
            schedule = self._interleaved if self.chunks > 1 else self._one_f_one_b
            yield from schedule(h, rng)
            yield from self._update(h, i)

    def _update(self, h: Host, i: int) -> Steps:
        r = h.rank
        if self.d > 1:
            if self.coalesce:
                calls = [("reduce_scatter_tensor_coalesced", [4096 * self.d], [4096])] * 3
                h.coalesced(self.dp[r], calls)
            else:
                for _ in range(2):
                    h.collective(self.dp[r], "_reduce_scatter_base", [8192 * self.d], [8192])
                    yield 2e-4
        if self.p > 1 and r in self.emb and h.rank in (self.emb[r].ranks):
            h.collective(self.emb[r], "all_reduce", [2048, 5120])
            yield 1e-4
        where = self.intra if self.norm_world else self.mp
        h.collective(where[r], "all_reduce", [1], dtype="Float")
        yield "sync"
        h.compute(2e-3)
        if self.d > 1:
            h.collective(self.dp[r], "_all_gather_base", [8192], [8192 * self.d])
        yield 1e-3
        h.collective(self.mp[r], "all_reduce", [1], dtype="Float")
        yield "sync"
        if self.barrier:
            h.collective(self.world[r], "all_reduce_barrier", [1], dtype="Float")
            yield "all"

    def _stage(self, rank: int) -> int:
        return rank // (self.t * self.d)

    def _forward(self, h: Host, rng: random.Random, edge: bool) -> Steps:
        r, t = h.rank, self.t
        if edge and t > 1:
            for _ in range(2):
                h.collective(self.tp[r], "broadcast", [1, 8192], dtype="Long", root=0)
                yield 2e-4
        for _ in range(self.layers):
            yield from self._dense(h)
            if self.experts:
                if t > 1:
                    h.collective(self.tcp[r], "all_reduce", [16], dtype="Long")
                h.collective(self.etp[r], "_all_gather_base", [16], [16 * t * self.d], "Long")
                yield 5e-4
                if t > 1:
                    h.collective(self.tp[r], "_all_gather_base", [4096, 5120], [4096 * t, 5120])
                yield "sync"  # the host needs the numbers of tokens
                n = 4096 + rng.randrange(-200, 200)
                for a, b in (((4096, 5120), (n, 5120)), ((4096,), (n,)), ((n, 5120), (4096, 5120))):
                    h.collective(self.ep[r], "all_to_all", list(a), list(b), timeout_ms=600_000)
                    yield 4e-4
                h.compute(self.slow)
                if t > 1:
                    h.collective(self.tp[r], "_reduce_scatter_base", [4096 * t], [4096])
                yield 3e-4
        h.collective(self.tdp[r], "all_reduce", [120], dtype="Float")
        yield 3e-4

    def _dense(self, h: Host) -> Steps:
        r, t = h.rank, self.t
        for _ in range(2):
            if t > 1:
                h.collective(self.tp[r], "_all_gather_base", [4096, 1, 5120], [4096 * t, 1, 5120])
                yield 5e-4
            h.compute(self.slow)
            if t > 1:
                h.collective(self.tp[r], "_reduce_scatter_base", [4096 * t, 1], [4096, 1])
            yield 5e-4

    def _backward(self, h: Host, rng: random.Random) -> Steps:
        r = h.rank
        for _ in range(self.layers):
            if self.experts:
                for _ in range(3):
                    h.collective(self.ep[r], "all_to_all", [4096, 5120], timeout_ms=600_000)
                    yield 5e-4
            yield from self._dense(h)
        h.collective(self.tdp[r], "all_reduce", [180], dtype="Float")
        yield 3e-4

    # -- pipelines ---------------------------------------------------------

    def _exchange(self, h: Host, ways: dict[str, bool]) -> Steps:
        """Sends and receives of one step; the compute stream waits for all."""
        g, r = self.pp[h.rank], h.rank
        me, p = g.ranks.index(r), self.p
        after, before = (me + 1) % p, (me - 1) % p
        if self.batched:
            order = ("send_prev", "recv_prev", "send_next", "recv_next")
        elif me % 2 == 0:
            order = ("send_next", "recv_prev", "send_prev", "recv_next")
        else:
            order = ("recv_prev", "send_next", "recv_next", "send_prev")
        todo = [
            Transfer(w.startswith("send"), after if w.endswith("next") else before)
            for w in order
            if ways.get(w)
        ]
        if not todo:
            return
        if self.batched:
            h.wait(h.batch(g, todo))
            yield 3e-4
            yield "all"  # Megatron waits for the device after a batch
            return
        parts = []
        for x in todo:
            group, peer = g, x.peer
            even = me % 2 == 0
            if self.world_recv and (x.send != even):
                group, peer = self.world[r], g.ranks[x.peer]
            parts.append(h.transfer(group, Transfer(x.send, peer, x.shape)))
            yield 1e-4
        for part in parts:
            h.wait(part)

    def _one_f_one_b(self, h: Host, rng: random.Random) -> Steps:
        s, p, m = self._stage(h.rank), self.p, self.micro
        first, last = s == 0, s == p - 1
        warm = min(p - s - 1, m)
        for _ in range(warm):
            yield from self._exchange(h, {"recv_prev": not first})
            yield from self._forward(h, rng, first)
            yield from self._exchange(h, {"send_next": not last})
        if m > warm:
            yield from self._exchange(h, {"recv_prev": not first})
        for k in range(m - warm):
            yield from self._forward(h, rng, first or last)
            yield from self._exchange(h, {"send_next": not last, "recv_next": not last})
            yield from self._backward(h, rng)
            more = k < m - warm - 1
            yield from self._exchange(h, {"send_prev": not first, "recv_prev": more and not first})
        for _ in range(warm):
            yield from self._exchange(h, {"recv_next": not last})
            yield from self._backward(h, rng)
            yield from self._exchange(h, {"send_prev": not first})

    def _interleaved(self, h: Host, rng: random.Random) -> Steps:
        s, p, v = self._stage(h.rank), self.p, self.chunks
        total = self.micro * v
        warm = min((p - s - 1) * 2 + (v - 1) * p, total)
        first, last = s == 0, s == p - 1

        def chunk(k: int, forward: bool) -> int:
            c = (k % (p * v)) // p
            return c if forward else v - 1 - c

        def arrives(k: int, forward: bool) -> bool:
            """Whether the input of step k comes from another stage."""
            if k >= total:
                return False
            c = chunk(k, forward)
            return not (first and c == 0) if forward else not (last and c == v - 1)

        def leaves(k: int, forward: bool) -> bool:
            c = chunk(k, forward)
            return not (last and c == v - 1) if forward else not (first and c == 0)

        yield from self._exchange(h, {"recv_prev": arrives(0, True)})
        for k in range(warm):
            yield from self._forward(h, rng, first or last)
            ways = {"send_next": leaves(k, True), "recv_prev": arrives(k + 1, True)}
            if k == warm - 1 and warm < total:
                ways["recv_next"] = arrives(0, False)
            yield from self._exchange(h, ways)
        for k in range(total - warm):
            f = k + warm
            yield from self._forward(h, rng, first or last)
            yield from self._backward(h, rng)
            ways = {
                "send_next": leaves(f, True),
                "recv_prev": arrives(f + 1, True),
                "send_prev": leaves(k, False),
                "recv_next": arrives(k + 1, False),
            }
            yield from self._exchange(h, ways)
        for k in range(total - warm, total):
            if k == 0:
                yield from self._exchange(h, {"recv_next": arrives(0, False)})
            yield from self._backward(h, rng)
            ways = {"send_prev": leaves(k, False), "recv_next": arrives(k + 1, False)}
            yield from self._exchange(h, ways)


class Sharded:
    """Fully sharded data parallel, with or without replicas and tensor parallel."""

    def __init__(self, rng: random.Random, n: int, shard: int, t: int = 1) -> None:
        self.rng = rng
        self.n, self.t = n, t
        self.layers = rng.choice((2, 4))
        self.iterations = rng.choice((2, 3))
        self.slow = rng.choice((5e-4, 3e-3))
        self.host_gathers = rng.random() < 0.5
        g = self.groups = Groups()
        every = tuple(range(n))
        self.world = g.make("default_pg", every)
        g.skip(rng.choice((0, 1)))
        self.tp = g.make("mesh_tp", *(every[i : i + t] for i in range(0, n, t)))
        size = shard * t
        shards = [tuple(b[i::t]) for o in range(0, n, size) for b in [every[o : o + size]]
                  for i in range(t)]  # fmt: skip
        self.shard = g.make("mesh_shard", *shards)
        self.replica = g.make("mesh_replicate", *(tuple(every[i::size]) for i in range(size)))

    def start(self, sim: Sim) -> None:
        """Give every host its program."""
        for h in sim.hosts.values():
            h.program = self._program(h)

    def _program(self, h: Host) -> Steps:
        r = h.rank
        n = len(self.shard[r].ranks)
        h.collective(self.world[r], "broadcast", [4], dtype="Int", root=0)
        yield "all"
        for _ in range(self.iterations):
            ahead = h.collective(self.shard[r], "_all_gather_base", [512], [512 * n], wait=False)
            for layer in range(self.layers):
                h.wait(ahead)
                yield 4e-4
                if layer < self.layers - 1:
                    ahead = h.collective(
                        self.shard[r], "_all_gather_base", [512], [512 * n], wait=False
                    )
                yield from self._tensor(h)
                h.compute(self.slow)
            for _ in range(self.layers):
                h.wait(h.collective(self.shard[r], "_all_gather_base", [512], [512 * n]))
                yield from self._tensor(h)
                h.compute(2 * self.slow)
                h.collective(self.shard[r], "_reduce_scatter_base", [512 * n], [512], wait=False)
                if len(self.replica[r].ranks) > 1:
                    h.collective(self.replica[r], "all_reduce", [512], wait=False)
                yield 4e-4
            yield "all" if self.host_gathers else 1e-3
            h.collective(self.world[r], "all_reduce", [1], dtype="Float")
            yield "sync"

    def _tensor(self, h: Host) -> Steps:
        if self.t > 1:
            h.collective(self.tp[h.rank], "all_reduce", [64, 4096])
            yield 3e-4
