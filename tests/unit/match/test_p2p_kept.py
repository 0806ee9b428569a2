"""Which sends and receives are kept, and for how long: memory holds only what is open."""

from __future__ import annotations

from functools import partial

from support import messages
from support.analysis import Run, cover
from support.messages import BIG, RECV, SEND
from support.tracegen import Job

#: All in one stream.
post = partial(messages.post, stream=0)
exchange = partial(messages.exchange, stream=0)


def test_groups_of_sends_behind_a_lost_one_are_kept() -> None:
    """However many there are: a hole is known for a loss only by the coverage."""
    job = Job()
    a, b = job.world(2)
    for i in range(100):
        lost = {"lost": True} if i == 0 else {}
        a.proc.group([(a, SEND, {"peer": 1, "count": BIG, **lost})], 1 + i * 0.1)
        post(b, RECV, 0, 1 + i * 0.1)
    a.proc.cover(0.5, 0.9)
    a.proc.cover(12, 400, lost_kernel=1)
    b.proc.cover(0.5, 400)
    run = Run(job)
    for t in (5.0, 11.0):
        run.until(t)
        run.scan()
    run.all()
    run.scan()
    assert run.analysis.matcher.book.all() == []


def test_sends_to_a_rank_that_does_not_exist_are_not_kept() -> None:
    job = Job()
    comms = job.world(2)
    for i in range(50):
        post(comms[0], SEND, 7, 1 + i)
    cover(job.procs, 400)
    run = Run(job)
    run.all()
    run.scan()
    (side,) = run.analysis.matcher.p2p.sides.values()
    assert side.queue(True, 7).n == 0 and side.queue(True, 7).end == 50


def test_sends_to_a_rank_that_is_not_traced_are_not_kept_once_all_is_read() -> None:
    """Before that a trace of it may turn up."""
    job = Job()
    comms = job.world(2, nranks=3)
    for i in range(200):
        post(comms[0], SEND, 2, 1 + 0.1 * i)
    cover(job.procs, 100)
    run = Run(job)
    run.feed(0)
    run.analysis.matcher.settle()
    (side,) = run.analysis.matcher.p2p.sides.values()
    assert side.queue(True, 2).n == 200
    run.feed(1)
    run.analysis.matcher.settle()
    assert side.queue(True, 2).n < 100


def test_a_send_that_stays_open_keeps_no_whole_batch_alive() -> None:
    job = Job()
    comms = job.world(2)
    post(comms[0], SEND, 1, exchange(comms, 300))
    cover(job.procs, 400)
    run = Run(job)
    run.all()
    run.scan()
    sides = run.analysis.matcher.p2p.sides.values()
    (queue,) = (q for s in sides for q in s.queues.values() if q.n)
    assert queue.n == 1
    assert all(part.base is None for part in queue.parts)


def test_what_was_open_is_forgotten_with_its_communicator() -> None:
    job = Job()
    comms = job.world(2)
    t = exchange(comms, 10)
    post(comms[0], SEND, 1, t, 64)
    for c in comms:
        c.proc.comm_end(c, t + 1, "abort")
    cover(job.procs, t + 20)
    run = Run(job)
    run.all()
    run.scan()
    p2p = run.analysis.matcher.p2p
    assert not p2p.sides and not p2p.pairs.open


def test_few_sends_are_kept_where_nobody_can_be_compared() -> None:
    job = Job()
    comm = job.proc(0).comm(None, None, None)
    for i in range(5000):
        post(comm, SEND, 1, 1 + i * 0.001)
    cover(job.procs, 10)
    run = Run(job)
    run.all()
    run.scan()
    (side,) = run.analysis.matcher.p2p.sides.values()
    assert side.queue(True, 1).n <= 4096 and side.queue(True, 1).end == 5000
