"""Flight recorder dumps: the published incidents, and jobs with a known fault."""

from __future__ import annotations

import json
import pickle
import re
import shutil
from pathlib import Path

import pytest

from importers.frgen import SECOND, T0, Job, one_group
from importers.reading import Result, written_at
from nccluprobe.importers.fr_dump import parse_dump
from nccluprobe.importers.fr_groups import status_by_name
from nccluprobe.importers.fr_job import rank_in_name
from nccluprobe.importers.fr_names import datatype, operation

_DATA = Path(__file__).parents[3] / "shared" / "data" / "fr_nvrx"


def incidents() -> list[Path]:
    return sorted(p.parent for p in _DATA.glob("*/fault_injection.log"))


@pytest.mark.skipif(not incidents(), reason=f"no incidents in {_DATA.name} beside the project")
@pytest.mark.parametrize("incident", incidents(), ids=lambda p: p.name)
class TestIncidents:
    def culprits(self, incident: Path) -> set[int]:
        text = (incident / "fault_injection.log").read_text()
        return {int(r) for r in re.findall(r"^Rank (\d+),", text, re.MULTILINE)}

    def test_exactly_the_culprits(self, incident: Path) -> None:
        assert Result(incident).blamed == self.culprits(incident)

    def test_the_same_from_json(self, incident: Path, tmp_path: Path) -> None:
        for path in incident.glob("_dump_*"):
            (tmp_path / path.name).write_text(json.dumps(pickle.loads(path.read_bytes())))
        assert Result(tmp_path).blamed == self.culprits(incident)

    def test_without_the_status_of_groups(self, incident: Path, tmp_path: Path) -> None:
        for path in incident.glob("_dump_*"):
            dump = pickle.loads(path.read_bytes())
            del dump["pg_status"]
            (tmp_path / path.name).write_bytes(pickle.dumps(dump))
        assert Result(tmp_path).blamed == self.culprits(incident)

    def test_a_dump_of_an_innocent_rank_is_missing(self, incident: Path, tmp_path: Path) -> None:
        shutil.copytree(incident, tmp_path, dirs_exist_ok=True)
        (tmp_path / "_dump_3").unlink()
        assert Result(tmp_path).blamed == self.culprits(incident)

    def test_the_culprits_left_no_dump(self, incident: Path, tmp_path: Path) -> None:
        shutil.copytree(incident, tmp_path, dirs_exist_ok=True)
        for rank in self.culprits(incident):
            (tmp_path / f"_dump_{rank}").unlink()
        assert Result(tmp_path).blamed == self.culprits(incident)

    @pytest.mark.parametrize("left", [0, 700])
    def test_a_culprit_left_a_dump_that_is_cut_short(
        self, incident: Path, tmp_path: Path, left: int
    ) -> None:
        for path in incident.glob("_dump_*"):
            (tmp_path / path.name).write_bytes(path.read_bytes())
        path = tmp_path / f"_dump_{min(self.culprits(incident))}"
        path.write_bytes(path.read_bytes()[:left])
        assert Result(tmp_path).blamed == self.culprits(incident)

    @pytest.mark.parametrize("rank", [0, 8, 13, 15])
    def test_a_foreign_file_is_named_as_the_dump_of_an_innocent_rank(
        self, incident: Path, tmp_path: Path, rank: int
    ) -> None:
        shutil.copytree(incident, tmp_path, dirs_exist_ok=True)
        path = tmp_path / f"_dump_{rank}"
        path.chmod(0o644)
        path.write_bytes(pickle.dumps({"weights": [1, 2, 3]}))
        result = Result(tmp_path)
        assert result.blamed == self.culprits(incident)
        assert any("_dump_" in p for p in result.imported.told.problems)

    def test_an_innocent_dump_is_cut_where_others_of_its_kind_lack_nobody(
        self, incident: Path, tmp_path: Path
    ) -> None:
        shutil.copytree(incident, tmp_path, dirs_exist_ok=True)
        path = tmp_path / "_dump_0"
        path.chmod(0o644)
        path.write_bytes(path.read_bytes()[:700])
        assert Result(tmp_path).blamed == self.culprits(incident)


def stalled(n: int = 4, start: int = 0) -> Job:
    job = one_group(n, start)
    for i in range(20):
        job.all("0", i * 0.1)
    job.all("0", 2.0, 2, done=False)
    return job


def test_a_rank_that_did_not_come(tmp_path: Path) -> None:
    result = Result(stalled().write(tmp_path))
    assert result.blamed == {2}
    assert result.errors == ["collective_missing_enter"]
    finding = result.findings[0]
    assert finding.comm_seq == 21
    assert finding.details["comm_name"] == "default_pg"


def test_a_rank_that_left_no_dump(tmp_path: Path) -> None:
    folder = stalled().write(tmp_path)
    (folder / "nccl_trace_rank_2").unlink()
    result = Result(folder)
    assert result.blamed == {2}
    (finding,) = result.findings
    assert finding.details["reason"] == "rank_left_no_dump"
    assert finding.details["confidence"] == "reduced"


def test_a_dump_that_nobody_copied(tmp_path: Path) -> None:
    """Another rank explains the wait: the one without a dump is not named."""
    folder = stalled().write(tmp_path)
    (folder / "nccl_trace_rank_1").unlink()
    assert Result(folder).blamed == {2}


def test_rings_that_begin_at_different_calls(tmp_path: Path) -> None:
    job = stalled(start=5000)
    for rank, r in job.ranks.items():
        ring = 5 + 3 * rank
        (tmp_path / f"rank{rank}.json").write_text(json.dumps(r.dump(ring=ring)))
    result = Result(tmp_path)
    assert result.blamed == {2}
    assert not any(f.details["trace_event_loss_possible"] for f in result.findings)


def test_active_entries_only(tmp_path: Path) -> None:
    """The rank that did not come shows no entry at all: its group's status places it."""
    result = Result(stalled(start=700).write(tmp_path, active_only=True))
    assert result.blamed == {2}
    assert result.findings[0].comm_seq == 721


def test_a_status_is_told_by_its_neighbours(tmp_path: Path) -> None:
    """Groups and communicators are numbered apart, in one order; some groups have no number."""
    entry = {"collective_seq_id": 7, "state": "scheduled", "profiling_name": "nccl:all_reduce"}
    entry |= {"pg_id": 4, "process_group": ("30", "data"), "time_created_ns": 1, "record_id": 0}
    groups = ("0", "5", "12", "30", "31", "40")
    dump = parse_dump(
        pickle.dumps(
            {
                "pg_config": {g: {"name": g, "desc": "", "ranks": "[0, 1]"} for g in groups},
                "pg_status": {
                    str(i): {"last_enqueued_collective": i, "last_completed_collective": 0}
                    for i in (0, 3, 4, 6, 8)
                },
                "entries": [entry],
            }
        )
    )
    # One number stands between those of groups 0 and 30, and two groups do: it is told of none.
    assert status_by_name(dump) == {"0": (0, 0), "30": (4, 0), "31": (6, 0), "40": (8, 0)}


def test_all_is_complete(tmp_path: Path) -> None:
    job = one_group()
    for i in range(20):
        job.all("0", i * 0.1)
    assert Result(job.write(tmp_path)).findings == []


def test_a_dump_of_a_job_that_goes_on(tmp_path: Path) -> None:
    """Made by hand a second after the newest call: nobody has waited for long."""
    folder = stalled().write(tmp_path)
    written_at(folder, (T0 + 3 * SECOND) / 1e9)
    assert Result(folder).findings == []


def test_a_dump_that_is_as_old_as_its_waits(tmp_path: Path) -> None:
    folder = stalled().write(tmp_path)
    written_at(folder, T0 / 1e9 + 400)
    result = Result(folder)
    assert result.blamed == {2}
    assert 397 < result.findings[0].details["waited_s"] < 399


def test_sizes_that_differ(tmp_path: Path) -> None:
    job = one_group()
    for i in range(10):
        job.all("0", i * 0.1)
    job.all("0", 1.0, 3, done=False)
    job.ranks[3].call("0", 1.0, done=False, input_sizes=[[64]], output_sizes=[[64]])
    result = Result(job.write(tmp_path))
    assert "collective_mismatch" in result.types
    assert result.blamed == {3}


def test_all_to_all_may_differ_in_size(tmp_path: Path) -> None:
    job = one_group()
    for i in range(10):
        for rank, r in job.ranks.items():
            r.call("0", i * 0.1, "all_to_all", input_sizes=[[64 + rank, 8]])
    assert Result(job.write(tmp_path)).findings == []


def test_gathered_tensors_may_differ_in_size(tmp_path: Path) -> None:
    job = one_group(2)
    for rank, r in job.ranks.items():
        r.call("0", 1.0, "all_gather", input_sizes=[[2 + rank]], output_sizes=[[2], [3]])
    assert Result(job.write(tmp_path)).findings == []


def test_calls_put_together_are_one(tmp_path: Path) -> None:
    """Three all-gathers and the entry that ends them share a number; only the end has a state."""
    job = one_group()
    for i in range(6):
        for r in job.ranks.values():
            r.seq["0"] = r.seq.get("0", 0) + 1
            for _ in range(3):
                r.part("0", i * 0.1, "all_gather_into_tensor_coalesced")
            r.part("0", i * 0.1, "coalesced", state="completed", retired=True, input_sizes=[])
    job.all("0", 1.0, 1, done=False)
    result = Result(job.write(tmp_path))
    assert result.blamed == {1}
    assert result.findings[0].comm_seq == 7


def pipeline(tmp_path: Path, come: bool) -> Result:
    """Two stages of two ranks; rank 3 stops before its tensor-parallel call, or all go on."""
    job = Job(
        {
            "0": ("default_pg", [0, 1, 2, 3]),
            "1": ("TP", [0, 1]),
            "2": ("TP", [2, 3]),
            "3": ("PP", [0, 2]),
            "4": ("PP", [1, 3]),
        }
    )
    for i in range(10):
        t = i * 0.1
        last = i == 9 and not come
        for a, b, pp in ((0, 2, "3"), (1, 3, "4")):
            job.ranks[a].transfer(pp, t, True, 1)
            job.ranks[b].transfer(pp, t + 0.001, False, 0)
        job.all("1", t + 0.002)
        job.all("2", t + 0.003, *([3] if last else []), done=not last)
        job.ranks[2].transfer("3", t + 0.004, True, 0, done=not last)
        job.ranks[0].transfer("3", t + 0.005, False, 1, done=not last)
        if not last:
            job.ranks[3].transfer("4", t + 0.004, True, 0)
        job.ranks[1].transfer("4", t + 0.005, False, 1, done=not last)
    return Result(job.write(tmp_path, active_only=True))


def test_a_rank_behind_a_pipeline(tmp_path: Path) -> None:
    """Rank 1 waits for a send of rank 3; ranks 0 and 2 wait on the device: rank 3 is the cause."""
    assert pipeline(tmp_path, come=False).blamed == {3}


def test_a_pipeline_that_goes_on(tmp_path: Path) -> None:
    assert pipeline(tmp_path, come=True).findings == []


def test_a_device_that_does_not_finish(tmp_path: Path) -> None:
    """Others have completed later calls with it: it took part, and does not see its own end."""
    job = one_group()
    for i in range(10):
        for rank, r in job.ranks.items():
            r.call("0", i * 0.1, done=rank != 1 or i < 5)
    result = Result(job.write(tmp_path))
    assert result.types == {"collective_missing_exit"}
    assert result.blamed == {1}


def test_a_device_that_fails_in_a_call_that_all_others_complete(tmp_path: Path) -> None:
    job = Job({"0": ("default_pg", [0, 1, 2, 3]), "1": ("TP", [0, 1])})
    for i in range(10):
        job.all("0", i * 0.1)
    for rank, r in job.ranks.items():
        r.call("0", 1.0, done=rank != 1)
    job.all("1", 1.1, done=False)
    job.all("0", 1.2, done=False)
    assert Result(job.write(tmp_path)).blamed == {1}


def test_two_devices_one_call_behind(tmp_path: Path) -> None:
    """One of them is a victim of the other: nobody can tell which."""
    job = one_group()
    for i in range(10):
        job.all("0", i * 0.1)
    for rank, r in job.ranks.items():
        r.call("0", 1.0, done=rank not in (1, 2))
    assert Result(job.write(tmp_path)).blamed == set()


def test_all_came_and_nobody_completes(tmp_path: Path) -> None:
    """The device or the network: no rank is named.  What waits behind it is no finding."""
    job = Job({"0": ("default_pg", [0, 1, 2, 3]), "1": ("TP", [0, 1]), "2": ("TP", [2, 3])})
    for i in range(10):
        job.all("0", i * 0.1)
    job.all("0", 1.0, done=False)
    job.all("1", 1.1, done=False)
    job.all("2", 1.1, done=False)
    result = Result(job.write(tmp_path))
    assert result.errors == ["collective_all_ranks_stuck"]
    assert result.blamed == set()
    assert result.findings[0].comm_seq == 11


def test_a_dump_of_a_job_that_goes_on_and_is_level(tmp_path: Path) -> None:
    job = one_group()
    for i in range(10):
        job.all("0", i * 0.1, done=i < 8)
    folder = job.write(tmp_path)
    written_at(folder, T0 / 1e9 + 2)
    assert Result(folder).findings == []


def test_two_jobs_are_two(tmp_path: Path) -> None:
    stalled().write(tmp_path / "a")
    job = one_group()
    job.all("0", 1.0)
    job.write(tmp_path / "b")
    result = Result(tmp_path)
    assert result.blamed == {2}
    assert len(result.analysis.matcher.jobs.labels()) == 2


def test_an_older_version(tmp_path: Path) -> None:
    """Version 1: one number for all, ranks as a list, groups by id."""
    job = stalled()
    for rank, r in job.ranks.items():
        dump = r.dump()
        for e in dump["entries"]:
            e["seq_id"] = e.pop("collective_seq_id")
            for name in ("p2p_seq_id", "process_group", "op_id", "is_p2p"):
                del e[name]
        dump["pg_config"] = {"0": [0, 1, 2, 3]}
        del dump["pg_status"]
        (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(dump, 2))
    assert Result(tmp_path).blamed == {2}


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("_dump_12", 12),
        ("nccl_trace_rank_3", 3),
        ("host7_nccl_trace_rank_3.json", 3),
        ("rank12.pickle", 12),
        ("trace", None),
    ],
)
def test_ranks_in_names(name: str, rank: int | None) -> None:
    assert rank_in_name(name) == rank


def test_hosts_in_names(tmp_path: Path) -> None:
    job = stalled()
    for rank, r in job.ranks.items():
        path = tmp_path / f"node{rank // 2}-rank_{rank}.dump"
        path.write_bytes(pickle.dumps(r.dump()))
    assert Result(tmp_path).blamed == {2}


def test_names_and_types() -> None:
    assert operation("nccl:_reduce_scatter_base").api == "ncclReduceScatter"
    assert operation("nccl:recv 0<-3") == ("ncclRecv", False, 3)
    assert operation("nccl:something new").api == "something new"
    assert datatype("ComplexFloat") == ("float32", 2)


def test_versions_read(tmp_path: Path) -> None:
    dump = parse_dump(pickle.dumps(stalled().ranks[0].dump()))
    assert dump.version == "2.9"
    assert len(dump) == 21
    assert dump.timeout_ms == 600_000


def test_numbers_of_a_dump_are_of_all_its_groups(tmp_path: Path) -> None:
    """One that a group does not show is another group's call, and no lost one."""
    job = Job({"0": ("default_pg", [0, 1]), "1": ("tensor_parallel", [0, 1])})
    for i in range(6):
        job.all("01"[i % 2], float(i))
    job.all("0", 7.0, 1, done=False)
    result = Result(job.write(tmp_path))
    assert result.blamed == {1}
    for p in result.analysis.matcher.processes.values():
        assert all(not holes.gaps for holes in p.losses.holes.values())
