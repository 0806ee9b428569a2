"""One case: a program, what is broken in it, and how its run went."""

from __future__ import annotations

import copy
import random
from collections.abc import Hashable
from dataclasses import dataclass

from model.breaker import Breaker, NoPlace, Truth
from model.device import Comm, Endpoint
from model.emit import JobTrace, emit
from model.engine import Engine
from model.faults import ABSENT, FAULTS
from model.loss import lose
from model.ops import Host, Op, Program
from model.program import generate

#: How long a broken job is watched after nothing moves any more, in seconds.
HANG_S = 400.0
#: A rank that was away for longer may be called late.
NOTICED_S = 20.0


class Invalid(AssertionError):
    """A program without a fault did not end: an error of the model."""


@dataclass
class Case:
    """``truth`` None: nothing is broken.  ``visible``: something is open at the API."""

    seed: int
    engine: Engine
    horizon: float
    truth: Truth | None
    visible: bool = True
    #: Ranks that are away for long, and come back: they may be called late.
    slow: frozenset[int] = frozenset()
    #: Hosts without a tracer.
    untraced: frozenset[str] = frozenset()

    def lost(self, rate: float) -> dict[int, set[int]]:
        """Rank -> indices of the records that a tracer lost."""
        rng = random.Random(f"loss {self.seed} {rate}")
        burst = rng.choice([1, 1, 4, 16])
        return {p.rank: lose(p, rate, rng, burst) for p in self.engine.procs}

    def hidden(self, rate: float) -> bool:
        """Whether the call that differs, or all that it differs from, was lost.

        Of a collective that is what the other members called in its slot, of a
        send or receive its other half.
        """
        call = None if self.truth is None else self.truth.call
        if call is None:
            return False
        lost = self.lost(rate)
        kept: dict[tuple[Hashable, ...], set[bool]] = {}
        slots = set()
        for p in self.engine.procs:
            for i, r in enumerate(p.records):
                if r.op is None or r.op.p2p != call.p2p:
                    continue
                at = _meeting(p.endpoints[r.fields["comm"]], r.op, r.fields["ord"])
                if r.op is call:
                    slots.add(at)
                if i not in lost[p.rank]:
                    kept.setdefault(at, set()).add(r.op is call)
        return bool(slots) and all(len(kept.get(at, ())) < 2 for at in slots)

    def traces(self, rate: float = 0.0) -> JobTrace:
        """What a tracer wrote that lost this part of all records."""
        job = emit(self.engine, self.horizon, self.lost(rate))
        job.procs = [t for t in job.procs if t.host not in self.untraced]
        return job


def _meeting(e: Endpoint, op: Op, order: int) -> tuple[Hashable, ...]:
    """Which operations belong together: a slot, or the n-th from one rank to another."""
    if op.peer is None:
        return (e.comm.hash, order)
    ends = (e.rank, op.peer) if op.api == "ncclSend" else (op.peer, e.rank)
    return (e.comm.hash, *ends, order)


def slow_ranks(program: Program) -> frozenset[int]:
    """Ranks with a phase outside NCCL that is long enough to be noticed."""
    return frozenset(
        r
        for r, threads in enumerate(program.code)
        for code in threads
        if any(isinstance(i, Host) and (i.dt or 0.0) > NOTICED_S for i in code)
    )


def healthy(seed: int, small: bool = False) -> Case:
    """A program without a fault; some are looked at in the middle of their run."""
    program = generate(seed, small)
    engine = Engine(program, seed)
    end = engine.run()
    stuck = [p.rank for p in engine.procs if not p.finished]
    if stuck:
        raise Invalid(f"seed {seed}: ranks {stuck} hang without a fault")
    rng = random.Random(f"horizon {seed}")
    horizon = rng.uniform(1.0, end) if rng.random() < 0.3 else end + rng.choice([0.1, 5.0, 30.0])
    nodes = -(-program.nranks // program.per_host)
    untraced = frozenset[str]()
    if nodes > 1 and rng.random() < 0.3:
        untraced = frozenset(f"node{i}" for i in rng.sample(range(nodes), rng.randrange(1, nodes)))
    return Case(seed, engine, horizon, None, slow=slow_ranks(program), untraced=untraced)


def broken(seed: int, kind: str, small: bool = False, tries: int = 40) -> Case:
    """A program with a fault of this kind that takes effect; NoPlace: none found."""
    program = generate(seed, small)
    engine = Engine(program, seed)
    engine.run()
    members = {(p.rank, name): e.comm.members for p in engine.procs for name, e in p.known.items()}
    comms = {e.comm for p in engine.procs for e in p.known.values()}
    slots = sorted((c.hash, n, c.nranks) for c in comms for n in c.slots)
    rng = random.Random(f"fault {seed} {kind}")
    for attempt in range(tries):
        changed = copy.copy(program)
        changed.code = [[list(t) for t in threads] for threads in program.code]
        changed.device_hangs, changed.never_started = set(), set()
        truth = FAULTS[kind](Breaker(changed, rng, members, slots))
        run = Engine(changed, seed)
        try:
            end = run.run()
        except KeyError:
            continue  # uses a communicator that it does not have any more
        waiting = [p.rank for p in run.procs if not p.finished and p.rank not in truth.culprits]
        waiting = [r for r in waiting if r not in changed.never_started]
        if truth.blocks and not waiting:
            continue
        if kind == "device_hang" and attempt < tries // 2 and not visible(run):
            continue
        if kind == "device_hang" and len(alone := idle(run)) == 1:
            truth.also.append(frozenset(alone))
            truth.types |= ABSENT
        horizon = end + (HANG_S if any(not p.finished for p in run.procs) else 5.0)
        return Case(seed, run, horizon, truth, truth.shown or visible(run), slow_ranks(program))
    raise NoPlace


def visible(engine: Engine) -> bool:
    """Whether the API shows that something is open.

    A call that does not return; a collective that some members made and
    others did not; a send without a receive.
    """
    return any(r.end is None for p in engine.procs for r in p.records) or bool(_waiting(engine))


def _waiting(engine: Engine) -> set[int]:
    """Ranks that made a call which a partner did not make, by counting alone.

    In a collective of count 0, for which nothing runs, nobody waits, nor does who has ended.
    """
    found: set[int] = set()
    ends: dict[Comm, list[tuple[int, Endpoint]]] = {}
    run: dict[Endpoint, int] = {}
    for p in engine.procs:
        for e in p.known.values():
            ends.setdefault(e.comm, []).append((p.rank, e))
            run[e] = e.ords
        for record in p.records:
            if record.op is not None and not record.op.p2p and not record.op.count:
                e = p.endpoints[record.fields["comm"]]
                run[e] = run.get(e, 0) - 1
    for comm, mine in ends.items():
        fewest = min(run[e] for _, e in mine) if len(mine) == comm.nranks else 0
        found |= {r for r, e in mine if run[e] > fewest}
        made = {(e.rank, *key): n for _, e in mine for key, n in e.peer_ords.items()}
        for r, e in mine:
            for (api, peer), n in e.peer_ords.items():
                other = "ncclRecv" if api == "ncclSend" else "ncclSend"
                if made.get((peer, other, e.rank), 0) < n:
                    found.add(r)
    return {r for r in found if engine.procs[r].ended is None}


def idle(engine: Engine) -> list[int]:
    """Ranks outside NCCL all of whose calls have all their partners.

    A single one looks the same whether its work hangs on the device or it went away.
    """
    waiting = _waiting(engine)
    return [
        p.rank
        for p in engine.procs
        if p.ended is None
        and p.rank not in waiting
        and p.threads
        and all(t.inside is None for t in p.threads)
    ]
