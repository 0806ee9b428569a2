"""Guesses beside a cause that is known."""

from __future__ import annotations

from typing import Any

import pytest
from support.analysis import analyze_job, blamed, cover, steps
from support.tracegen import Job

from nccluprobe.match.finding import Finding
from nccluprobe.match.model import ProcessKey
from nccluprobe.match.temper import temper


def finding(hang_type: str, reason: str, confidence: str, who: int, **more: Any) -> Finding:
    return Finding(
        key=(hang_type, who),
        hang_type=hang_type,
        run_id="run",
        comm_uid_hash=None,
        comm_seq=None,
        detected_at=1,
        details={"reason": reason, "confidence": confidence},
        severity="error",
        role="root_cause",
        culprits=(who,),
        **{"job": "a", **more},
    )


@pytest.mark.parametrize("confidence", ["inferred", "reduced"])
def test_a_guess_is_not_blamed_beside_a_known_cause(confidence: str) -> None:
    cause = finding("collective_missing_enter", "rank_alive_but_not_entered", "observed", 3)
    guess = finding("p2p_unmatched", "wrong_peer", confidence, 5)
    temper([guess, cause])
    assert (cause.role, cause.culprits) == ("root_cause", (3,))
    assert (guess.role, guess.culprits) == ("unknown", ())
    assert cause.id in guess.details["note"]


@pytest.mark.parametrize(
    "other",
    [
        finding("collective_missing_enter", "rank_alive_but_not_entered", "observed", 3, job="b"),
        finding("p2p_unmatched", "call_extra", "inferred", 3),
        finding("collective_missing_enter", "rank_alive_but_not_entered", "observed", 5),
    ],
    ids=["of another job", "another guess", "the same rank"],
)
def test_a_guess_stays_where_no_other_cause_is_known(other: Finding) -> None:
    guess = finding("p2p_unmatched", "wrong_peer", "inferred", 5)
    temper([guess, other])
    assert (guess.role, guess.culprits) == ("root_cause", (5,))


def test_what_was_seen_directly_is_no_guess() -> None:
    cause = finding("collective_missing_enter", "rank_alive_but_not_entered", "observed", 3)
    seen = finding("p2p_unmatched", "partner_gone_past", "observed", 5)
    temper([seen, cause])
    assert seen.role == "root_cause"


def absence(*who: tuple[int, str, str | None], at: int = 1, comm: str = "a") -> Finding:
    """Ranks that did not come: (pid, reason, main thread)."""
    f = finding("collective_missing_enter", who[0][1], "observed", 0, since=at)
    f.key = ("absence", comm, *who)
    f.culprits = tuple(ProcessKey("boot", pid, 1) for pid, _, _ in who)
    f.details["missing_rank_status"] = [
        {"comm_rank": n, "pid": pid, "host": "node0", "reason": reason, "main_thread": main}
        for n, (pid, reason, main) in enumerate(who)
    ]
    return f


def pids(f: Finding) -> list[int]:
    return [who.pid for who in f.culprits if isinstance(who, ProcessKey)]


ALIVE, GONE = "rank_alive_but_not_entered", "rank_exit_or_crash_suspected"


@pytest.mark.parametrize("sure", [(3, GONE, None), (3, ALIVE, "stopped")], ids=["gone", "stopped"])
def test_who_may_wait_for_the_device_is_not_blamed_beside_who_is_gone(
    sure: tuple[int, str, str | None],
) -> None:
    alive, both = absence((5, ALIVE, "running")), absence(sure, (6, ALIVE, "running"), comm="b")
    temper([alive, both])
    assert (alive.role, pids(alive)) == ("unknown", [])
    assert (both.role, pids(both)) == ("root_cause", [3])


def test_of_several_only_those_are_named_whom_others_miss_too() -> None:
    several = absence(*((pid, ALIVE, "running") for pid in (3, 4, 5)))
    one = absence((4, ALIVE, "running"), comm="b", at=2)
    temper([several, one])
    assert (several.role, several.downstream_of) == ("downstream", one.id)
    assert (one.role, pids(one)) == ("root_cause", [4])


@pytest.mark.parametrize(("later", "blamed"), [(10, []), (600, [4])])
def test_who_may_wait_is_not_blamed_beside_calls_that_cannot_be_one(
    later: int, blamed: list[int]
) -> None:
    """Unless they are long past, and the job went on."""
    second = 1_000_000_000
    difference = finding("collective_mismatch", "arguments_differ", "observed", 1, since=second)
    difference.comm_uid_hash = "00000000000000aa"
    alive = absence((4, ALIVE, "running"), at=(1 + later) * second)
    temper([difference, alive])
    assert difference.role == "root_cause"
    assert pids(alive) == blamed


@pytest.mark.parametrize(("confidence", "blamed"), [("observed", []), ("inferred", [4])])
def test_who_may_wait_is_blamed_beside_two_that_may_only_seem_to_wait_for_each_other(
    confidence: str, blamed: list[int]
) -> None:
    """Behind who does not come, sends may stand half made and look so."""
    inversion = finding("p2p_order_inversion", "orders_exclude", confidence, 1)
    inversion.culprits, inversion.comm_uid_hash = (), "00000000000000aa"
    alive = absence((4, ALIVE, "running"))
    temper([inversion, alive])
    assert pids(alive) == blamed
    assert inversion.role == ("unknown" if blamed else "root_cause")


def test_a_call_that_does_not_return_is_no_cause_beside_calls_that_cannot_be_one() -> None:
    """It may be held up by a full stream."""
    held = finding("collective_missing_exit", "call_not_returned", "inferred", 4)
    temper([held])
    assert held.culprits == (4,)
    difference = finding("collective_mismatch", "arguments_differ", "observed", 1)
    difference.comm_uid_hash = "00000000000000aa"
    temper([difference, held])
    assert (difference.role, held.role, held.culprits) == ("root_cause", "unknown", ())
    failed = finding("collective_missing_exit", "not_complete_here", "inferred", 4)
    temper([difference, failed])
    assert failed.culprits == (4,)


@pytest.mark.parametrize(
    ("later", "confidence", "blamed"),
    [(10, "inferred", ()), (600, "inferred", (4,)), (10, "observed", (4,))],
)
def test_a_circle_of_waits_names_nobody_beside_calls_that_were_seen_to_differ(
    later: int, confidence: str, blamed: tuple[int, ...]
) -> None:
    second = 1_000_000_000
    difference = finding("collective_mismatch", "arguments_differ", "observed", 1, since=second)
    at = (1 + later) * second
    circle = finding("skipped_or_extra_call", "call_extra", confidence, 4, since=at)
    circle.details["cycle"] = []
    temper([circle, difference])
    assert (difference.role, circle.culprits) == ("root_cause", blamed)
    less = finding("collective_mismatch", "arguments_differ", "inferred", 1, since=at)
    circle = finding("skipped_or_extra_call", "call_extra", "inferred", 4, since=at)
    circle.details["cycle"] = []
    temper([circle, less])
    assert circle.culprits == (4,)


def test_who_is_gone_is_blamed_beside_calls_that_cannot_be_one() -> None:
    difference = finding("collective_mismatch", "arguments_differ", "observed", 1)
    gone = absence((4, GONE, None))
    temper([difference, gone])
    assert (gone.role, pids(gone)) == ("root_cause", [4])


def test_what_only_stands_still_is_no_cause_beside_one_that_names_somebody() -> None:
    stuck = finding("collective_all_ranks_stuck", "all_inside", "inferred", 1)
    stuck.culprits = ()
    temper([stuck])
    assert stuck.role == "root_cause"
    temper([stuck, finding("collective_missing_exit", "not_complete_here", "inferred", 2)])
    assert stuck.role == "unknown"


def test_a_rank_missing_before_a_difference_on_its_own_communicator_is_named() -> None:
    difference = finding("collective_mismatch", "arguments_differ", "observed", 1)
    alive = absence((4, ALIVE, "running"))
    difference.comm_uid_hash = alive.comm_uid_hash = "00000000000000aa"
    temper([difference, alive])
    assert pids(alive) == [4]


def gone_past(who: int, waiter: int, **more: Any) -> Finding:
    f = finding("p2p_unmatched", "partner_gone_past", "inferred", who, waiters=(waiter,), **more)
    f.details["missing_rank_status"] = [
        {"reason": "partner_gone_past", "host": "a", "pid": who},
        {"reason": "rank_alive_but_not_entered", "host": "a", "pid": 99},
    ]
    return f


def test_one_that_several_have_gone_past_is_out_of_step_itself() -> None:
    found = [gone_past(1, waiter=0), gone_past(2, waiter=0)]
    temper(found)
    assert [f.culprits for f in found] == [(0,), (0,)]


@pytest.mark.parametrize(
    "other", [gone_past(2, waiter=5), gone_past(2, waiter=0, job="b"), gone_past(1, waiter=0)]
)
def test_of_different_waits_each_has_its_own_cause(other: Finding) -> None:
    f = gone_past(1, waiter=0)
    was = other.culprits
    temper([f, other])
    assert (f.culprits, other.culprits) == ((1,), was)


@pytest.mark.parametrize(("slot", "role"), [(5, "root_cause"), (20, "unknown")])
def test_a_call_does_not_return_on_a_stream_behind_one_left_out(slot: int, role: str) -> None:
    """Of one communicator: after the difference it is a consequence, before it is not."""
    skip = finding("skipped_or_extra_call", "call_skipped", "observed", 3)
    held = finding("collective_missing_exit", "call_not_returned", "inferred", 5)
    for f, seq in ((skip, 9), (held, slot)):
        f.comm_uid_hash, f.comm_seq = "aa", seq
    temper([skip, held])
    assert (skip.role, held.role) == ("root_cause", role)


@pytest.mark.parametrize(
    ("api_call", "comm", "role"),
    [(False, "bb", "unknown"), (False, "aa", "root_cause"), (True, "bb", "root_cause")],
)
def test_who_is_held_is_not_blamed_beside_one_before_a_full_queue(
    api_call: bool, comm: str, role: str
) -> None:
    """``api_call``: what does not return is no collective, and stands in no queue."""
    full = finding("nccl_missing_exit", "call_not_returned", "inferred", 3)
    held = finding("collective_missing_exit", "call_not_returned", "inferred", 5)
    full.culprits = ()
    full.comm_uid_hash, full.comm_seq = "aa", 9
    held.comm_uid_hash, held.comm_seq = comm, None if api_call else 9
    temper([full, held])
    assert (held.role, held.culprits) == (role, () if role == "unknown" else (5,))


def test_who_is_free_to_come_stays_named_beside_another() -> None:
    """Others lack the one alone; what keeps its peers does not keep the other."""
    reason = "rank_alive_but_not_entered"
    both = finding("collective_missing_enter", reason, "observed", 3, free=frozenset({4}))
    both.culprits = (3, 4, 5)
    one = finding("collective_missing_enter", reason, "observed", 3, since=1)
    temper([both, one])
    assert (both.role, both.culprits) == ("root_cause", (4,))
    assert (one.role, one.culprits) == ("root_cause", (3,))


@pytest.mark.parametrize(("confidence", "named"), [("inferred", ()), ("observed", (5,))])
def test_who_a_circle_singles_out_is_not_named_beside_calls_that_differ(
    confidence: str, named: tuple[int, ...]
) -> None:
    """An absence is inferred where the absent one waits itself for those who wait for it."""
    differs = finding("collective_mismatch", "arguments_differ", "observed", 3)
    absent = finding("collective_missing_enter", "rank_alive_but_not_entered", confidence, 5)
    temper([absent, differs])
    assert (differs.culprits, absent.culprits) == ((3,), named)


@pytest.mark.parametrize(
    ("pairs", "named"),
    [
        ([(1, 2), (3, 1)], (1,)),
        ([(1, 2)], ()),
        ([(1, 2), (2, 1)], ()),
        ([(1, 2), (3, 4)], ()),
        ([(1, 2), (3, 1), (2, 3)], ()),
    ],
)
def test_who_is_at_odds_with_several_is_the_one_that_is_wrong(
    pairs: list[tuple[int, int]], named: tuple[int, ...]
) -> None:
    """In each pair one of the two has made a call too many, or left one out."""
    found = []
    for n, pair in enumerate(pairs):
        f = finding("p2p_unmatched", "call_skipped", "inferred", n, waiters=pair)
        f.culprits = ()
        found.append(f)
    temper(found)
    assert [f.culprits for f in found] == [named] * len(pairs)


@pytest.mark.parametrize("confidence", ["observed", "inferred"])
def test_who_may_wait_is_not_named_beside_a_proven_circle_on_its_own_communicator(
    confidence: str,
) -> None:
    """A circle of hosts that are inside their calls is broken by itself."""
    circle = finding("p2p_order_inversion", "orders_exclude", confidence, 0)
    circle.details["cycle"], circle.culprits = [{}, {}], ()
    f = finding("p2p_unmatched", "rank_alive_but_not_entered", "observed", 5)
    f.comm_uid_hash = circle.comm_uid_hash = "00000000000000aa"
    temper([circle, f])
    assert f.culprits == (() if confidence == "observed" else (5,))


@pytest.mark.parametrize(
    ("main", "confidence", "named"),
    [("running", "inferred", True), ("stopped", "inferred", False), ("running", "reduced", False)],
)
def test_a_half_that_was_left_out_of_a_group_is_not_explained_by_who_may_wait(
    main: str, confidence: str, named: bool
) -> None:
    left = finding("p2p_unmatched", "call_skipped", confidence, 5)
    alive = absence((4, ALIVE, main))
    alive.comm_uid_hash = left.comm_uid_hash
    temper([left, alive])
    assert (left.culprits, pids(alive)) == (((5,), []) if named else ((), [4]))


def test_of_two_that_did_not_come_the_one_that_is_missed_elsewhere_too_is_named() -> None:
    """Whether the other one waits for its device is not seen in such a trace."""
    job = Job()
    comms = job.world(4)
    pair = [job.procs[r].comm("00000000000000bb", at, 2) for at, r in enumerate((0, 3))]
    t = steps(pair, 3, start=steps(comms, 5))
    steps([*comms[:2], pair[0]], 1, start=t, stream=0)
    cover(job.procs[:3], t + 400)
    cover(job.procs[3:], t + 400, main="syscall", syscall="read")
    found = analyze_job(job)
    assert blamed(found) == {3}
    assert not any(f.free for f in found)


@pytest.mark.parametrize(("comm", "named"), [("bb", ()), ("aa", (5,))])
def test_who_does_not_come_to_a_split_may_wait_behind_calls_that_differ(
    comm: str, named: tuple[int, ...]
) -> None:
    """It is outside NCCL; on the communicator of the difference the slots tell who is missing."""
    differs = finding("collective_mismatch", "arguments_differ", "observed", 3)
    differs.comm_uid_hash = "aa"
    absent = finding("comm_init_missing_enter", "rank_alive_but_not_entered", "observed", 5)
    absent.comm_uid_hash = comm
    temper([absent, differs])
    assert (differs.culprits, absent.culprits) == ((3,), named)


@pytest.mark.parametrize(("supposes", "named"), [(True, ()), (False, (5,))])
def test_who_is_named_only_if_lost_calls_were_made_is_not_beside_streams_that_hold_up_each_other(
    supposes: bool, named: tuple[int, ...]
) -> None:
    order = finding("p2p_order_inversion", "orders_exclude", "inferred", 0)
    order.culprits = ()
    f = finding("collective_missing_enter", "rank_alive_but_not_entered", "reduced", 5)
    f.supposes, f.since = supposes, 1
    temper([order, f])
    assert f.culprits == named
    assert (order.role == "root_cause") is supposes


@pytest.mark.parametrize(("confidence", "named"), [("inferred", ()), ("reduced", (6,))])
def test_who_goes_past_others_halves_may_wait_behind_one_that_was_left_out(
    confidence: str, named: tuple[int, ...]
) -> None:
    left = finding("p2p_unmatched", "call_skipped", confidence, 5)
    past = finding("p2p_unmatched", "partner_gone_past", "inferred", 6)
    temper([past, left])
    assert (left.culprits, past.culprits) == ((5,), named)
