"""The collector: the beginning of a process's file, calls that are inside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.collecting import (
    MS,
    T0,
    Bench,
    Exit,
    Info,
    Ranks,
    State,
    init,
    inside,
    name_record,
    rec,
)

from nccluprobe.capture.source import Losses


@pytest.mark.parametrize(
    "records",
    [
        [],
        [rec("ncclMemAlloc")],
        [rec("ncclGroupStart"), rec("ncclGroupEnd", group_depth=1)],
        [rec("ncclGetUniqueId")],
    ],
)
def test_no_file_before_the_first_init_or_data_call(tmp_path: Path, records: list[Any]) -> None:
    bench = Bench(tmp_path)
    bench.step(*records)
    bench.steps(2)
    assert not (tmp_path / "tracing").exists()


def test_first_lines(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.step(init(1))
    kinds = [line["kind"] for line in bench.lines()]
    assert kinds[:2] == ["process", "clock"]
    assert "coverage" in kinds and kinds[-1] == "call"
    assert bench.watcher.watched == [100]


def test_the_group_that_an_init_stands_in_is_kept(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.step(
        rec("ncclGroupStart", group_id=1),
        rec("ncclGroupEnd", group_id=1, group_depth=1),
        rec("ncclGroupStart", group_id=2, t_enter=T0 + 1),
    )
    bench.step(name_record(1, "tp"), init(1, group_id=2, group_depth=1))
    calls = bench.of_kind("call")
    assert [(c["api"], c["group"]) for c in calls] == [
        ("ncclGroupStart", 2),
        ("ncclCommInitRank", 2),
    ]
    assert bench.of_kind("comm")[-1]["name"] == "tp"


def test_a_group_end_inside_before_the_file(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    start = rec("ncclGroupStart", group_id=1)
    bench.step(start)
    inside(bench, api="ncclGroupEnd", comm_gen=0, group_id=1, group_depth=1)
    bench.steps(1)
    assert not (tmp_path / "tracing").exists()
    bench.step(init(1, tid=101))
    bench.steps(1)
    assert [c["api"] for c in bench.of_kind("call")] == ["ncclGroupStart", "ncclCommInitRank"]
    assert [c["api"] for c in bench.of_kind("enter")] == ["ncclGroupEnd"]


def test_unwanted_processes_are_denied_once(tmp_path: Path) -> None:
    asked = []

    def wanted(pid: int) -> bool:
        asked.append(pid)
        return pid == 100

    bench = Bench(tmp_path, wanted)
    bench.step(init(1), *(rec(pid=200, tid=t, comm_gen=9) for t in (200, 201, 200, 201)))
    bench.step(rec(pid=200, tid=200, comm_gen=9))
    assert bench.source.denied == [(200, 1)]
    assert asked == [100, 200]
    assert len(bench.files()) == 1
    bench.procs.states[200] = State(alive=False)
    bench.steps(2)
    assert (200, 1) in bench.source.forgotten


def test_a_process_nobody_could_look_at(tmp_path: Path) -> None:
    answers = iter([None, None, True])
    bench = Bench(tmp_path, lambda pid: next(answers))
    bench.step(init(1))
    bench.step(rec(comm_gen=1))
    assert bench.collector.stats.undecided == 2 and bench.source.denied == []
    bench.step(rec(comm_gen=1))
    assert bench.of_kind("coverage")[-1]["lost_queue"] == 2


def test_a_process_that_is_gone_when_its_file_begins(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.procs.infos[100] = None
    bench.step(init(1))
    line = bench.of_kind("process")[0]
    assert (line["start"], line["exe"]) == (0, None)


def test_an_introduced_process_is_known_after_its_end(tmp_path: Path) -> None:
    """All of it is over before its first record is read."""
    bench = Bench(tmp_path, lambda pid: None)
    bench.procs.infos[100] = Info(ranks=Ranks(2, 4, 2, "torchrun", "job"))
    assert bench.collector.introduce(100)
    bench.procs.infos[100] = None
    assert not bench.collector.introduce(100)
    bench.watcher.exits.append(Exit(100, "exited", 3, None, T0 + 20 * MS))
    bench.step(ms=50)
    bench.step(init(1), rec(comm_gen=1))
    bench.steps(1)
    lines = bench.lines()
    assert (lines[0]["rank"], lines[0]["exe"]) == (2, "python3")
    assert (lines[-1]["how"], lines[-1]["code"], lines[-1]["t"]) == ("exited", 3, T0 + 20 * MS)
    bench.steps(20, ms=100)
    assert bench.collector._introductions.get(100) is None


def test_an_introduction_is_not_for_the_next_owner_of_the_pid(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.procs.infos[100] = Info(ranks=Ranks(2, 4, 2, "torchrun", "job"))
    bench.collector.introduce(100)
    bench.procs.infos[100] = None
    bench.watcher.exits.append(Exit(100, "exited", 3, None, T0 + 5))
    bench.step()
    bench.step(init(1, rank=0, nranks=1, t_enter=T0 + 6))
    assert bench.lines()[0]["rank"] is None
    assert not bench.of_kind("process_end")


def test_the_code_may_come_after_the_record(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.collector.introduce(100)
    bench.procs.infos[100] = None
    bench.step(init(1))
    bench.watcher.exits.append(Exit(100, "signaled", None, 6, T0 + 5000))
    bench.steps(1)
    assert bench.lines()[-1]["signal"] == 6


def test_two_jobs_two_folders(tmp_path: Path) -> None:
    bench = Bench(tmp_path, run_id=None)
    bench.procs.infos[1] = Info(ranks=Ranks(0, 2, 0, "torchrun", "../../etc/a b"))
    bench.procs.infos[2] = Info(ranks=Ranks(0, 2, 0, "torchrun", "other"))
    bench.step(*(init(g, pid=g, tid=g) for g in (1, 2, 3)))
    runs = sorted(p.name for p in (tmp_path / "tracing").iterdir())
    assert "other" in runs and "_.._etc_a_b" in runs and len(runs) == 3


def test_messages(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.step(init(1))
    bench.close()
    assert [kind for kind, _ in bench.messages] == ["process", "library", "communicator", "end"]


def test_enter_only_when_two_looks_agree(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.step(init(1))
    stuck = inside(bench)
    bench.steps(0.3)
    assert bench.of_kind("enter") == []
    bench.steps(0.3)
    (line,) = bench.of_kind("enter")
    assert (line["t"], line["thread"], line["comm"]) == (stuck.t_enter, 100, 0)
    bench.steps(5)
    assert len(bench.of_kind("enter")) == 1
    assert bench.of_kind("coverage")[-1]["main"] == "nccl"
    assert bench.of_kind("coverage")[-1]["in_flight"] == 1
    bench.source.inside = []
    bench.step(stuck._replace(t_exit=bench.clock.now, rc=0))
    bench.steps(2)
    call = bench.of_kind("call")[-1]
    assert (call["t"], call["thread"], call["rc"]) == (stuck.t_enter, 100, 0)
    assert bench.of_kind("coverage")[-1]["in_flight"] == 0
    assert bench.of_kind("coverage")[-1]["main"] == "running"


def test_torn_entries_are_not_believed(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.step(init(1))
    for i in range(100):
        bench.source.inside = [rec(comm_gen=1, t_enter=T0 + 7 + i // 25, t_exit=0, call_idx=i)]
        bench.step(ms=25)
    assert bench.of_kind("enter") == []


def test_no_enter_for_a_call_whose_record_came_with_the_look(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.step(init(1))
    stuck = inside(bench)
    bench.steps(0.245, ms=5)
    # Still in the table, though its record is in the ring: the front removes it last.
    for _ in range(100):
        bench.step(ms=5)
        if bench.of_kind("enter"):
            break
        if bench.clock.now - stuck.t_enter >= 495 * MS:
            bench.source.ring.append(stuck._replace(t_exit=bench.clock.now))
            break
    bench.source.inside = []
    bench.steps(2)
    calls = [c for c in bench.of_kind("call", "enter") if c["t"] == stuck.t_enter]
    assert [c["kind"] for c in calls][-1] == "call" and len(calls) <= 2


def test_first_init_that_never_returns_makes_the_file(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    inside(bench, api="ncclCommInitRank", peer=1, nranks=2, uid_hash=0xAB, comm_gen=0)
    bench.steps(1)
    (line,) = bench.of_kind("enter")
    assert (line["api"], line["rank"], line["nranks"]) == ("ncclCommInitRank", 1, 2)
    assert line["uid_hash"] == "00000000000000ab"


def test_comm_end_at_the_entry_of_a_destroy_that_blocks(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.step(init(1))
    stuck = inside(bench, api="ncclCommDestroy")
    bench.steps(1)
    (end,) = bench.of_kind("comm_end")
    assert end["t"] == stuck.t_enter and end["how"] == "destroy"
    bench.source.inside = []
    bench.step(stuck._replace(t_exit=bench.clock.now))
    assert len(bench.of_kind("comm_end")) == 1
    assert bench.of_kind("call")[-1]["api"] == "ncclCommDestroy"


def test_exit_record_lost(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.step(init(1))
    stuck = inside(bench)
    bench.steps(1)
    bench.source.inside = []
    bench.source.lost = Losses(by_process={(100, 1): 1})
    bench.steps(2)
    line = bench.of_kind("call")[-1]
    assert (line["t"], line["end"], line["rc"], line["dur"]) == (stuck.t_enter, "lost", None, None)
    assert bench.of_kind("coverage")[-1]["lost_kernel"] == 1
