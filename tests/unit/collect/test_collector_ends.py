"""The collector: coverage, and the ends of processes."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from support.collecting import (
    MS,
    T0,
    Bench,
    Exec,
    Exit,
    Info,
    S,
    State,
    init,
    inside,
    read,
    rec,
)

from nccluprobe.capture.source import Losses
from nccluprobe.record import FLAG_NO_RETURN


def test_coverage_every_second_also_without_calls(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.step(init(1))
    bench.steps(30, ms=7)
    times = [line["t"] for line in bench.of_kind("coverage")]
    assert max(b - a for a, b in itertools.pairwise(times)) <= S
    through = [line["through"] for line in bench.of_kind("coverage")]
    assert through == sorted(through)
    assert bench.clock.now - through[-1] < 2 * S
    clocks = [line["mono"] for line in bench.of_kind("clock")]
    assert len(clocks) == 3 and bench.of_kind("clock")[0]["err"] == 1500


def test_coverage_counts(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.step(init(1), *(rec(comm_gen=1, t_enter=T0 + i) for i in range(50)))
    bench.source.lost = Losses(
        by_process={(100, 1): 3, (7, 1): 9},
        blind={(100, 1): 4},
        overwritten={(100, 1): 5},
        unattributed=2,
    )
    bench.procs.states[100] = State(main="syscall", syscall="futex", cpu_ns=12)
    bench.steps(2)
    last = bench.of_kind("coverage")[-1]
    assert last["captured"] == 51
    assert (last["lost_kernel"], last["lost_unattributed"]) == (5, 2)
    assert (last["blind"], last["overwritten"], last["skipped_disk"]) == (4, 5, 0)
    assert (last["main"], last["syscall"], last["cpu"], last["alive"]) == (
        "syscall", "futex", 12, True,
    )  # fmt: skip
    assert 1 * S < last["last_call_age"] < 3 * S


@pytest.mark.parametrize(
    ("how", "code", "signal"), [("exited", 3, None), ("signaled", None, 9), ("gone", None, None)]
)
def test_process_end(tmp_path: Path, how: str, code: int | None, signal: int | None) -> None:
    bench = Bench(tmp_path)
    bench.step(init(1), rec(comm_gen=1))
    at = bench.clock.now
    bench.watcher.exits.append(Exit(100, how, code, signal, at))
    bench.step(rec(comm_gen=1, t_enter=at - 5))
    bench.steps(1)
    last = bench.lines()[-1]
    assert last == {
        "kind": "process_end", "t": at, "how": how, "code": code, "signal": signal, "in_flight": 0,
    }  # fmt: skip
    coverage = bench.of_kind("coverage")[-1]
    assert coverage["main"] == "dead" and coverage["alive"] is False
    assert coverage["through"] >= at and coverage["captured"] == 3
    assert bench.source.forgotten == [(100, 1)]
    assert bench.collector.processes == []


def test_death_inside_a_call(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.step(init(1))
    long = inside(bench, tid=101)
    bench.steps(1)
    short = inside(bench, tid=102)
    at = bench.clock.now + 5
    gone = rec(comm_gen=1, tid=103, t_enter=at - 50, t_exit=at, flags=FLAG_NO_RETURN)
    bench.watcher.exits.append(Exit(100, "signaled", None, 11, at))
    bench.step(gone)
    bench.steps(1)
    calls = {c["thread"]: c for c in bench.of_kind("call") if "end" in c}
    assert set(calls) == {101, 102, 103}
    assert all(c["end"] == "no_return" and c["rc"] is None for c in calls.values())
    assert calls[101]["dur"] == at - long.t_enter and calls[102]["dur"] == at - short.t_enter
    assert bench.lines()[-1]["in_flight"] == 3


def test_found_dead_without_a_watcher(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.step(init(1))
    bench.procs.states[100] = State(alive=False, main="dead")
    bench.steps(3)
    assert bench.lines()[-1]["how"] == "gone"


def test_pid_used_by_another_process(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.step(init(1))
    bench.procs.states[100] = State(start_ticks=999)
    bench.steps(3)
    assert bench.lines()[-1]["how"] == "gone"


def test_exec_and_a_new_file(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.step(init(1))
    bench.watcher.execs.append(Exec(100, bench.clock.now))
    bench.steps(1)
    bench.step(init(2, epoch=2, t_enter=bench.clock.now))
    bench.steps(1)
    first, second = sorted(bench.files(), key=lambda f: len(f.name))
    assert second.name == "rank_unknown_pid_100_node1_5000000000.jsonl"
    kinds = [(x["kind"], x.get("how"), x.get("state")) for x in read(first)]
    assert kinds[-1] == ("process_end", "exec", None)
    assert ("state", None, "exec") in kinds
    assert [x["id"] for x in read(second) if x["kind"] == "comm"] == [0]
    assert bench.source.forgotten == [(100, 1)]


def test_exec_and_the_end_in_one_poll(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.step(init(1))
    at = bench.clock.now
    bench.watcher.exits.append(Exit(100, "exited", 0, None, at + 2))
    bench.watcher.execs.append(Exec(100, at))
    bench.steps(1)
    assert bench.lines()[-1]["how"] == "exec"
    assert bench.of_kind("coverage")[-1]["alive"] is True


def test_exec_of_the_next_owner_of_the_pid(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.step(init(1))
    at = bench.clock.now
    bench.watcher.exits.append(Exit(100, "exited", 0, None, at))
    bench.watcher.execs.append(Exec(100, at + 2))
    bench.steps(1)
    assert bench.lines()[-1]["how"] == "exited"


def test_a_zombie_is_judged_by_what_it_was(tmp_path: Path) -> None:
    bench = Bench(tmp_path, lambda pid: False)
    for pid in (100, 101):
        bench.collector.introduce(pid)
    bench.procs.states[100] = State(alive=False, main="dead")
    bench.step(init(1), init(2, pid=101, tid=101))
    assert [f.name for f in bench.files()] == ["rank_unknown_pid_100.jsonl"]


def test_exec_with_the_same_epoch(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.step(init(1))
    at = bench.clock.now
    bench.watcher.execs.append(Exec(100, at))
    bench.step(rec(comm_gen=1, t_enter=at - 1), init(2, t_enter=at + 1))
    bench.steps(1)
    assert [x["kind"] for x in read(bench.files()[0])][-1] == "process_end"
    assert len(bench.files()) == 2
    assert bench.source.forgotten == []


def test_same_pid_other_epoch_is_another_process(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.step(init(1))
    bench.procs.infos[100] = Info(start_ns=9 * S, start_ticks=900)
    bench.procs.states[100] = State(start_ticks=900)
    bench.step(init(1, epoch=2, t_enter=bench.clock.now))
    bench.watcher.exits.append(Exit(100, "exited", 0, None, bench.clock.now - 15 * MS))
    bench.steps(1)
    first, second = sorted(bench.files(), key=lambda f: len(f.name))
    assert read(first)[-1]["how"] == "exited"
    assert read(second)[-1]["kind"] == "coverage"
    assert second.name.endswith("_node1_9000000000.jsonl")


def test_records_after_the_end_are_late(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.step(init(1))
    at = bench.clock.now
    bench.watcher.exits.append(Exit(100, "exited", 0, None, at))
    bench.steps(1)
    bench.step(rec(comm_gen=1, t_enter=at - 1))
    assert bench.collector.stats.late == 1
    assert len(bench.files()) == 1


def test_detach(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.step(init(1))
    inside(bench)
    bench.steps(0.4)
    bench.source.ring.append(rec(comm_gen=1, tid=101))
    bench.close()
    assert bench.lines()[-1]["how"] == "detached" and bench.lines()[-1]["in_flight"] == 1
    assert len(bench.of_kind("enter")) == 1  # seen twice by then
    assert [c["thread"] for c in bench.of_kind("call")] == [100, 101]
    assert bench.of_kind("coverage")[-1]["alive"] is True


def test_dead_processes_leave_nothing(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    for pid in range(1000, 1200):
        bench.step(init(pid, pid=pid, tid=pid), rec("ncclGroupStart", pid=pid, tid=pid))
        bench.watcher.exits.append(Exit(pid, "exited", 0, None, bench.clock.now))
    bench.steps(1)
    collector = bench.collector
    assert collector.processes == []
    assert not collector._router.threads and not collector._router.watch
    assert not collector._inflight.inside and not collector._inflight.written
    assert len(bench.source.forgotten) == 200


def test_churn_of_communicators_is_bounded(tmp_path: Path) -> None:
    """1e5 communicators, each made, used and destroyed."""
    bench = Bench(tmp_path)
    gen = 0
    for _ in range(500):
        batch = []
        for _ in range(200):
            gen += 1
            t = bench.clock.now + 1
            batch += [
                init(gen, uid_hash=gen, t_enter=t),
                rec(comm_gen=gen, stream=gen, t_enter=t),
                rec("ncclCommDestroy", comm_gen=gen, t_enter=t),
            ]
        bench.step(*batch, ms=500)
    (process,) = bench.collector.processes
    ids = process.ids
    assert len(ids.live) <= 24 * 200 and len(ids._instances) <= 16384
    assert len(ids._streams) <= 65536
    (thread,) = process._threads.values()
    assert len(thread.templates) <= 2048
    bench.close()
    comms = [x for x in bench.lines(check=False) if x["kind"] == "comm"]
    assert len({c["id"] for c in comms}) == 100_000
