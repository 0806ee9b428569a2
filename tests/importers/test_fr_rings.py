"""Rings that have gone past the calls in question, and ranks that dump when others have gone on."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

from importers.fr_incidents import FORMS
from importers.frgen import Job, one_group
from importers.reading import Result
from importers.test_cli import analyze
from importers.test_fr import stalled
from importers.test_fr_incidents import blamed, made
from nccluprobe.importers.fr_calls import Calls, Collectives, Transfers
from nccluprobe.importers.fr_dump import parse_dump
from nccluprobe.importers.fr_entries import COMPLETED
from nccluprobe.importers.fr_groups import Group, Part, forget_unplaced
from nccluprobe.importers.fr_rings import open_below
from nccluprobe.match.model import SIG_LOST
from nccluprobe.match.signature import SignatureTable


@pytest.mark.parametrize("seed", [8, 13, 29, 48])
def test_who_waits_for_ranks_that_dump_late_is_not_to_blame(seed: int, tmp_path: Path) -> None:
    """Their rings hold what came later, and only the end of what the others wait in."""
    incident = made("late-any", seed)
    assert blamed(incident, "ring", tmp_path) <= incident.culprits


def test_the_end_of_a_batch_that_came_after_the_cut_is_that_of_all_its_parts(
    tmp_path: Path,
) -> None:
    incident = made("late-any", 48)
    data = incident.write(tmp_path, FORMS["ring"]()) / "node0_nccl_trace_rank_1.json"
    dump = parse_dump(data.read_bytes())
    calls = Calls(dump, SignatureTable())
    seq = dump.seq == 55625
    assert (calls.state[seq] == COMPLETED).all()
    calls.cut(int(dump.ended[seq].max()) - 1)
    assert not (calls.state[seq] == COMPLETED).any()


def group_of(*parts: tuple[int | None, int | None, bool]) -> Group:
    """Of each rank: number of the one open call that it shows, its position, and ``whole``."""
    group = Group(("0", tuple(range(len(parts)))))
    one, no = np.ones(1, np.int64), np.zeros(1, np.bool_)
    for rank, (base, position, whole) in enumerate(parts):
        part = group.parts[rank] = Part(rank, 0, position=position, whole=whole)
        if base is not None:
            sig = one.astype(np.int32)
            part.collectives = Collectives(base, sig, one, one, base, no, no)
    return group


def test_what_a_ring_does_not_hold_may_be_open() -> None:
    """One shows that 5 is open, the ring of another begins with 7, a third has made 6 calls."""
    group = group_of((5, None, True), (7, None, False), (None, 6, False))
    assert group.complete == 5
    open_below([group], dict.fromkeys(range(3), (100, 9)))
    bases = [(c.base, c.pending, c.end) for p in group.parts.values() if (c := p.collectives)]
    assert bases == [(5, 5, 6), (5, 5, 8), (5, 5, 6)]
    second = group.parts[1].collectives
    assert second is not None
    assert second.sig.tolist() == [SIG_LOST, SIG_LOST, 1]


def test_what_others_have_completed_stays_complete() -> None:
    group = group_of((9, None, True), (7, None, False))
    assert group.complete == 9
    open_below([group], dict.fromkeys(range(2), (100, 9)))
    assert [p.collectives.base for p in group.parts.values() if p.collectives] == [9, 7]


def written(job: Job, rings: dict[int, int], folder: Path) -> Path:
    """Dumps with so many of the newest entries; of the others all."""
    folder.mkdir()
    for rank, r in job.ranks.items():
        dump = r.dump(ring=rings.get(rank))
        (folder / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(dump, 2))
    return folder


@pytest.mark.parametrize("others", [0, 3])
def test_a_ring_that_begins_with_what_is_open_shows_no_end_of_what_is_older(
    others: int, tmp_path: Path
) -> None:
    """No ring of the two shows an end; nor are they failed devices beside one that shows some."""
    groups = {"0": ("tp", [0, 1]), "1": ("tp", [2, 3])}
    job = Job(dict(list(groups.items())[: 1 + bool(others)]))
    for i in range(25):
        for group in job.groups:
            job.all(group, i / 10, done=i < 5 or (group == "1" and i < 23))
    result = Result(written(job, {0: 12, 1: 6}, tmp_path / "d"))
    assert result.blamed == set()
    assert "collective_all_ranks_stuck" in result.types


def lane(send: bool, n: int, done: int) -> Transfers:
    """Sends to the other one of two, or receives, of which the first ones are complete."""
    one = np.ones(n, np.int64)
    return Transfers(
        send=np.full(n, send),
        peer=np.full(n, int(send), np.int32),
        sig=one.astype(np.int32),
        t=one,
        record=np.arange(n),
        done=np.arange(n) < done,
        begun=np.zeros(n, np.bool_),
        batch=0 * one,
        from_first=False,
    )


@pytest.mark.parametrize(("sent", "done", "left"), [(3, 2, 1), (3, 3, 5), (5, 0, 5)])
def test_receives_that_a_failed_device_may_only_show_as_open(
    sent: int, done: int, left: int
) -> None:
    """The ring begins with them: older ones may have met what the sender, which waits, has open."""
    group = Group(("1", (0, 1)))
    group.parts[0] = Part(0, 0, transfers=lane(True, sent, done))
    group.parts[1] = Part(1, 0, transfers=lane(False, 5, 0))
    forget_unplaced([group], {1})
    received = group.parts[1].transfers
    assert received is not None
    assert len(received.sig) == left


def test_who_does_not_send_is_named_beside_a_ring_that_begins_with_what_is_open(
    tmp_path: Path,
) -> None:
    """It waits for nothing itself."""
    job = Job({"0": ("world", [0, 1]), "1": ("pp", [0, 1])})
    for i in range(10):
        job.ranks[0].transfer("1", i / 10, True, 1)
        job.ranks[1].transfer("1", i / 10, False, 0)
    for _ in range(3):
        job.ranks[1].transfer("1", 1.0, False, 0, done=False)
        job.ranks[1].call("0", 1.0, done=False)
    assert Result(written(job, {1: 4}, tmp_path / "d")).blamed == {0}


@pytest.mark.parametrize(
    ("kind", "seed"), [("gpu-stage", 10), ("healthy", 5019), ("extra-one", 5019)]
)
def test_short_rings_of_jobs_name_nobody_innocent(kind: str, seed: int, tmp_path: Path) -> None:
    incident = made(kind, seed)
    assert blamed(incident, "ring", tmp_path) <= incident.culprits


def test_a_rank_of_a_dump_has_a_next_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    out = " ".join(analyze(stalled().write(tmp_path / "dumps"))[1].split())
    assert "next: look at the stack of the process of rank 2 of the job" in out
    assert "the first is #1" in out


def test_a_rank_without_a_dump_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    job = one_group()
    job.all("0", 1.0)
    folder = job.write(tmp_path / "dumps")
    (folder / "nccl_trace_rank_0").unlink()
    out = " ".join(analyze(folder)[1].split())
    assert "rank 0, no dump" in out
    assert out.count("rank 0") == 1


def test_two_ranks_that_are_stuck_apart_are_two_causes(tmp_path: Path) -> None:
    """Both have completed all that their dumps show: no device of theirs holds them."""
    job = Job({"0": ("world", [0, 1, 2, 3]), "1": ("a", [0, 1]), "2": ("b", [2, 3])})
    for n in range(5):
        job.all("0", n / 10)
        job.all("1", n / 10 + 0.03)
        job.all("2", n / 10 + 0.06)
    job.ranks[0].call("1", 1.0, done=False)
    job.ranks[2].call("2", 1.0, done=False)
    assert Result(job.write(tmp_path / "dumps")).blamed == {1, 3}


def test_nothing_has_left_a_ring_that_holds_record_0(tmp_path: Path) -> None:
    """What is open at its beginning is what its rank waits in, and has its place."""
    pipe, tensor = "PIPELINE_MODEL_PARALLEL_GROUP", "TENSOR_MODEL_PARALLEL_GROUP"
    job = Job(
        {
            "0": ("default_pg", [0, 1, 2, 3, 4]),
            "1": (tensor, [0, 1]),
            "2": (pipe, [0, 2]),
            "3": (tensor, [3, 4]),
        }
    )
    job.ranks[0].call("1", 0.0, done=False)
    job.ranks[0].transfer("2", 0.1, True, 1, done=False)
    job.ranks[2].transfer("2", 0.0, False, 0, done=False)
    job.all("3", 0.0)
    job.all("0", 1.0, 0, 1, 2, done=False)
    assert Result(job.write(tmp_path)).blamed == {1}
