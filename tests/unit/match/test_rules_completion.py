"""Rules of what completion tells (flight recorder dumps) that no other test would miss."""

from __future__ import annotations

from pathlib import Path

import pytest
from importers.frgen import Job as Dumps
from importers.reading import Result
from support.analysis import Run, cover, steps
from support.tracegen import Job, unix

from nccluprobe.match.absence import Context
from nccluprobe.match.completion import not_complete
from nccluprobe.match.options import Options
from nccluprobe.match.waits import Wait


def two_groups() -> Dumps:
    """All ranks, and all but the last one, after some calls that are complete."""
    job = Dumps({"0": ("all", [0, 1, 2, 3]), "1": ("three", [0, 1, 2])})
    for i in range(5):
        job.all("0", i * 0.1)
        job.all("1", i * 0.1 + 0.05)
    return job


@pytest.mark.parametrize("order", ["here_first", "there_first"])
def test_who_does_not_follow_its_peers_is_held_by_nothing(tmp_path: Path, order: str) -> None:
    """Ranks 0 and 1 went on from the call that rank 2 sits in: it does not keep it from coming.

    Had they made the two calls in the other order, it might.
    """
    job = two_groups()
    here, there = (2.0, 3.0) if order == "here_first" else (3.0, 2.0)
    job.all("0", here, 3, done=False)
    job.all("1", there, 2, done=False)
    assert Result(job.write(tmp_path)).blamed == ({2, 3} if order == "here_first" else {3})


def test_a_transfer_that_both_have_posted_and_that_does_not_end_holds_both(tmp_path: Path) -> None:
    job = two_groups()
    job.ranks[0].transfer("1", 2.0, True, 1, done=False)
    job.ranks[1].transfer("1", 2.0, False, 0, done=False)
    job.all("0", 3.0, 0, 1, done=False)
    result = Result(job.write(tmp_path))
    assert result.blamed == set()
    assert "collective_all_ranks_stuck" in result.types


@pytest.mark.parametrize("traced", [4, 3])
def test_that_nobody_is_missing_is_said_only_where_all_are_observed(traced: int) -> None:
    job = Job()
    comms = job.world(traced, nranks=4)
    end = steps(comms, 6)
    cover(job.procs, end + 100)
    run = Run(job)
    run.all()
    run.scan()
    (comm,) = run.analysis.matcher.comms.values()
    assert comm.last_sig is not None
    for e in comm.members():
        e.completed, e.oldest = 5, (5, e.last_t, comm.last_sig)
    w = Wait(comm, "call #5", 0, tuple(comm.members()), (), seq=5)
    ctx = Context(Options(), run.analysis.matcher.table, unix(end + 100), "run", None)
    f = not_complete(w, ctx)
    assert f is not None
    text = f.details["summary"]
    assert ("nobody is missing" in text) == (traced == 4)
    assert ("1 of 4 ranks is not observed, and may not have come" in text) == (traced == 3)


def test_a_call_after_which_nothing_is_seen_may_lack_its_other_rank(tmp_path: Path) -> None:
    """Those who run its program in another pair may come to it as well: rank 0 is not ahead."""
    job = Dumps({"0": ("all", [0, 1, 2, 3]), "1": ("pair", [0, 1]), "2": ("pair", [2, 3])})
    for i in range(5):
        for group in ("0", "1", "2"):
            job.all(group, i * 0.1)
    job.all("1", 2.0, 1, done=False)
    assert Result(job.write(tmp_path)).blamed == {1}


@pytest.mark.parametrize(("before", "role"), [(0, "downstream"), (1, "downstream"), (2, None)])
def test_what_does_not_complete_where_its_members_differed_is_no_cause(
    tmp_path: Path, before: int, role: str | None
) -> None:
    """The call that differs may be complete, as some moved less, and the next one is not."""
    job = two_groups()
    for i in range(before + 1):
        for rank in range(4):
            sizes = [[64 if i == 0 and rank < 2 else 32]]
            more = {"input_sizes": sizes, "output_sizes": sizes}
            job.ranks[rank].call("0", 2.0 + i, done=i < before, **more)
    found = [f for f in Result(job.write(tmp_path)).findings if f.state == "open"]
    stuck = [f for f in found if f.hang_type == "collective_all_ranks_stuck"]
    differs = [f for f in found if f.hang_type == "collective_mismatch"]
    assert len(stuck) == len(differs) == 1
    assert stuck[0].role == (role or "root_cause")
    assert (stuck[0].downstream_of == differs[0].id) == (role is not None)


def test_a_call_in_which_only_some_stand_is_not_said_of_all(tmp_path: Path) -> None:
    """Rank 0 made it first on its stream, rank 1 behind another one: a circle."""
    job = Dumps({"0": ("all", [0, 1]), "1": ("both", [0, 1])})
    for i in range(5):
        job.all("0", i * 0.1)
        job.all("1", i * 0.1 + 0.05)
    job.ranks[0].call("0", 2.0, done=False)
    job.ranks[0].call("1", 2.1, done=False)
    job.ranks[1].call("1", 2.0, done=False)
    job.ranks[1].call("0", 2.1, done=False)
    assert "collective_all_ranks_stuck" not in Result(job.write(tmp_path)).types
