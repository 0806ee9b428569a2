"""Late attach: ranks placed among the calls of the others, or said to be a guess."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest
from support.analysis import Run, analyze_job, cover
from support.lateattach import World, make, trace
from support.lateoracle import decidable, unknowable
from support.tracegen import Comm, Job

from nccluprobe.match import model as m
from nccluprobe.match.align import align
from nccluprobe.match.counters import Stream
from nccluprobe.match.endpoint import Endpoint
from nccluprobe.match.finding import Finding
from nccluprobe.match.place import HOLD
from nccluprobe.match.signature import UNSEEN

SURE = ("exact", "aligned")
HASH = "00000000000000aa"
AR = "ncclAllReduce"


@dataclass
class Score:
    """How many ranks were placed how."""

    worlds: int = 0
    decidable: int = 0
    right: int = 0
    undecided: list[tuple[int, int, str]] = field(default_factory=list)
    wrong: list[tuple[int, int, str]] = field(default_factory=list)
    bases: Counter[str] = field(default_factory=Counter)
    #: Off by a call that was lost, and said to have lost calls.
    lost: int = 0
    #: Worlds in which ranks hang, and those in which just these are named.
    hangs: int = 0
    named: int = 0


def truth(world: World, rank: int) -> int:
    """Slots entered in truth, up to the last call seen."""
    r = world.ranks[rank]
    return 1 + max((x.slot for i in r.seen if (x := r.made[i]).slot is not None), default=-1)


def judge(seed: int, score: Score) -> None:
    """One world through the matcher, compared with the oracle."""
    world = make(seed)
    run = Run(trace(world, until=400.0))
    run.all()
    run.scan()
    matcher = run.analysis.matcher
    (comm,) = matcher.comms.values()
    score.worlds += 1
    score.bases.update(e.base for e in comm.endpoints.values())
    sure = {
        rank: e.entered - truth(world, rank)
        for rank, e in comm.endpoints.items()
        if e.base in SURE and e.slotted
    }
    offs = Counter(sure.values())
    agreed = offs.most_common(1)[0][0] if offs else None
    for rank, off in sure.items():
        if off == agreed:
            continue
        if unknowable(world, world.ranks[rank]):
            assert comm.endpoints[rank].lost
            score.lost += 1
        else:
            score.wrong.append((seed, rank, str(comm.endpoints[rank].placement)))
    for group in decidable(world):
        for rank in group:
            score.decidable += 1
            if sure.get(rank, "no") == agreed:
                score.right += 1
            else:
                score.undecided.append((seed, rank, str(comm.endpoints[rank].placement)))
    verdicts(seed, world, matcher.book.all(), score)


def verdicts(seed: int, world: World, findings: list[Finding], score: Score) -> None:
    """Who hangs is named; nobody else is, as sure."""
    most = max(r.entered for r in world.ranks)
    behind = [r.rank for r in world.ranks if r.entered < most]
    named = False
    for f in findings:
        if f.hang_type == "nccl_error_exit":
            continue
        right = f.details["missing_comm_ranks"] == behind != []
        named = named or right
        if f.severity == "error" and not right:
            score.wrong.append((seed, -1, f.hang_type))
    score.hangs += bool(behind)
    score.named += named


def check(seeds: range) -> Score:
    score = Score()
    for seed in seeds:
        judge(seed, score)
    return score


def _assert(score: Score) -> None:
    assert not score.wrong, score.wrong
    assert score.right >= 0.99 * score.decidable, (score.right, score.decidable, score.undecided)
    assert score.named >= 0.9 * score.hangs


def test_random_late_attaches() -> None:
    _assert(check(range(200)))


@pytest.mark.slow
def test_a_thousand_random_late_attaches() -> None:
    score = check(range(1000, 2000))
    print(
        f"{score.worlds} jobs; ranks: {dict(score.bases)}; decidable {score.decidable}, "
        f"of those right {score.right}; wrong {len(score.wrong)}; off by a lost call "
        f"{score.lost}; hangs {score.hangs}, named {score.named}"
    )
    _assert(score)


def test_without_counters_the_calls_must_fit_in_one_way() -> None:
    rng = np.random.default_rng(1)
    calls = rng.integers(1, 6, 400).astype(np.int32)
    found = align(stream(calls[:300]), stream(calls[120:], t=120))
    assert (found.shift, found.base) == (120, "aligned")
    found = align(stream(calls[120:], t=120), stream(calls[:300]))
    assert (found.shift, found.base) == (-120, "aligned")


def test_lost_calls_agree_with_everything() -> None:
    rng = np.random.default_rng(2)
    calls = rng.integers(1, 6, 400).astype(np.int32)
    holes = calls.copy()
    holes[rng.random(400) < 0.2] = 0
    found = align(stream(holes[:300]), stream(calls[120:], t=120))
    assert (found.shift, found.base) == (120, "aligned")


def test_repeated_calls_are_ambiguous() -> None:
    calls = np.tile(np.array([1, 2, 2, 3], np.int32), 50)
    found = align(stream(calls), stream(calls[40:120], t=40))
    assert (found.base, found.shift) == ("ambiguous", 40)
    assert found.others > 10


def test_few_calls_are_not_enough() -> None:
    calls = np.arange(1, 200, dtype=np.int32)
    assert align(stream(calls[:100]), stream(calls[92:], t=92)).base == "ambiguous"
    assert align(stream(calls[:100]), stream(calls[100:], t=100)).base == "unknown"


def test_counters_decide_where_calls_repeat() -> None:
    calls = np.ones(100, np.int32)
    found = align(stream(calls, seq=1000), stream(calls[:50], seq=1030))
    assert (found.shift, found.base) == (30, "exact")


def test_streams_that_do_not_overlap_are_placed_by_their_counters() -> None:
    calls = np.ones(100, np.int32)
    found = align(
        stream(calls, seq=1000, before=(0, 0, 0, 0, 1000)),
        stream(calls[:5], seq=1200, before=(0, 0, 0, 0, 1200)),
    )
    assert (found.shift, found.base) == (200, "aligned")


def test_a_counter_that_stands_still_is_not_believed() -> None:
    """The tracer came in the middle of a group: the counter moves at its end."""
    calls = np.ones(60, np.int32)
    mine = stream(calls[:20], seq=1031)
    mine.seq[:3] = 1029  # two of the group were made before, three after
    found = align(stream(calls, seq=1000), mine)
    assert (found.shift, found.base) == (31, "exact")


def stream(
    calls: m.Int32, seq: int = -1, t: int = 0, before: tuple[int, ...] | None = None
) -> Stream:
    """AllReduce calls whose counter begins at ``seq``."""
    n = len(calls)
    numbers = np.arange(n, dtype=np.int64)
    return Stream(
        shape=calls,
        function=np.where(calls == 0, UNSEEN, 4).astype(np.int32),
        seq=numbers + seq if seq >= 0 else np.full(n, m.NO_SEQ, np.int64),
        t=(numbers + t) * 1_000_000,
        before=before,
    )


def late_job(n: int, stop: int, period: int, counters: bool) -> tuple[Job, list[Comm]]:
    """Rank ``r`` is attached at call 20 + 7 r; the last one stops at ``stop``."""
    job = Job()
    comms = []
    for r in range(n):
        first = 20 + 7 * r
        more = {"seqs": [0, 0, 0, 0, first]} if counters else {}
        c = job.proc(r).comm(HASH, r, n, 1 + first * 0.01, learnt="struct", **more)
        for i in range(first, stop if r == n - 1 else stop + 4):
            seq = {"seq": i} if counters else {}
            c.proc.call(c, AR, 1 + i * 0.01, count=1 + i % period, **seq)
        comms.append(c)
    return job, comms


def test_a_hang_is_found_after_late_attaches() -> None:
    job, _ = late_job(4, 200, 10, counters=True)
    cover(job.procs, 400)
    (f,) = analyze_job(job)
    assert (f.comm_seq, f.details["missing_comm_ranks"], f.severity) == (200, [3], "error")
    assert (f.role, f.details["confidence"]) == ("root_cause", "observed")
    assert f.coverage["base"] == "exact"
    assert [a["shift"] for a in f.coverage["alignment"]] == [20, 27, 34, 41]
    assert f.coverage["numbers"] == "NCCL's"


def test_a_guess_names_nobody() -> None:
    job, _ = late_job(3, 200, 10, counters=False)
    cover(job.procs, 400)
    (f,) = analyze_job(job)
    assert (f.severity, f.role, f.culprits) == ("notice", "unknown", ())
    assert f.coverage["base"] == "ambiguous"
    assert "is a guess" in f.details["note"]
    assert f.coverage["numbers"] == "from the first call seen"


def test_a_rank_that_hung_before_the_others_were_attached() -> None:
    """Its trace ends where that of the other has not begun: the counters tell."""
    job = Job()
    for r, (first, last) in enumerate(((100, 110), (112, 120))):
        c = job.proc(r).comm(HASH, r, 2, 1, learnt="struct", seqs=[0, 0, 0, 0, first])
        for i in range(first, last):
            c.proc.call(c, AR, 2 + i * 0.01, seq=i)
    cover(job.procs, 400)
    (f,) = analyze_job(job)
    assert (f.comm_seq, f.details["missing_comm_ranks"]) == (110, [0])
    assert (f.coverage["base"], f.details["confidence"]) == ("aligned", "reduced")


def test_late_ranks_are_placed_by_one_that_was_seen_from_its_init() -> None:
    job = Job()
    c = job.proc(0).comm(HASH, 0, 2)
    late = job.proc(1).comm(HASH, 1, 2, 2, learnt="struct", seqs=[10, 0, 0, 0, 90])
    for i in range(150):
        api, n = (AR, i - i // 10 - 1) if i % 10 else ("ncclBroadcast", i // 10)
        c.proc.call(c, api, 1 + i * 0.01, seq=n)
        if 100 <= i < 140:
            late.proc.call(late, api, 1 + i * 0.01, seq=n)
    cover(job.procs, 400)
    (f,) = analyze_job(job)
    assert (f.comm_seq, f.details["missing_comm_ranks"], f.severity) == (140, [1], "error")
    assert f.coverage["alignment"][0]["why"] == "counters of 2 functions agree"


def test_a_mismatch_is_found_among_late_ranks() -> None:
    job, comms = late_job(3, 100, 5, counters=True)
    t = 10.0
    for c in comms[2:]:
        for i in range(100, 104):
            c.proc.call(c, AR, 3 + i * 0.01, count=1 + i % 5, seq=i)
    for i in range(104, 130):
        for c in comms:
            n = 99 if (c is comms[1] and i == 110) else 1 + i % 5
            c.proc.call(c, AR, t + i * 0.01, count=n, seq=i)
    cover(job.procs, 30)
    (f,) = analyze_job(job)
    assert (f.hang_type, f.comm_seq) == ("collective_mismatch", 110)
    assert (f.details["minority_comm_ranks"], f.severity) == ([1], "error")


def test_a_group_that_was_open_and_failed_did_not_run() -> None:
    """The tracer came in the middle of it: two of its calls look like any other."""
    job = Job()
    for r in range(2):
        c = job.proc(r).comm(HASH, r, 2, 1, learnt="struct", seqs=[0, 0, 0, 0, 50])
        if r == 0:
            for i in range(2):
                c.proc.call(c, AR, 1.1 + i * 0.01, count=7, seq=50)
            c.proc.call(None, "ncclGroupEnd", 1.2, rc=4)
        for i in range(50, 100):
            c.proc.call(c, AR, 2 + i * 0.01, seq=i)
    cover(job.procs, 30)
    one, two = _endpoints(job)
    assert (one.entered, two.entered, one.base, two.base) == (100, 100, "exact", "exact")
    assert [f.hang_type for f in analyze_job(job)] == ["nccl_error_exit"]


def _endpoints(job: Job) -> list[Endpoint]:
    run = Run(job)
    run.all()
    run.scan()
    (comm,) = run.analysis.matcher.comms.values()
    return [e for _, e in sorted(comm.endpoints.items())]


def test_the_same_verdict_when_read_in_small_steps() -> None:
    job, _ = late_job(4, 3000, 10, counters=True)
    cover(job.procs, 400)
    run = Run(job)
    for _ in range(200):
        for i in range(4):
            run.feed(i, 40)
        run.analysis.matcher.settle()
    run.all()
    run.scan()
    (f,) = run.analysis.matcher.book.all()
    assert (f.comm_seq, f.details["missing_comm_ranks"]) == (3000, [3])
    (comm,) = run.analysis.matcher.comms.values()
    assert {e.base for e in comm.endpoints.values()} == {"exact"}


def test_memory_is_bounded_while_places_are_not_certain() -> None:
    job, _ = late_job(2, 12_000, 10, counters=False)
    run = Run(job)
    held = 0
    for _ in range(130):
        for i in range(2):
            run.feed(i, 100)
        run.analysis.matcher.settle()
        (comm,) = run.analysis.matcher.comms.values()
        held = max([held, *(len(e.rows) for e in comm.endpoints.values())])
    assert held < 2 * HOLD
