"""Pointers come back: every call belongs to the right life of its communicator."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from support.daemon import met, until
from support.e2e import Stage
from support.traces import Line, Trace, by_pid, check_order, validate
from support.waiting import wait_for

pytestmark = [pytest.mark.root, pytest.mark.timeout(120)]

LOOPS = 1500
#: One heap for all threads: what one frees, the other gets.
ONE_HEAP = {"MALLOC_ARENA_MAX": "1"}
CALLS = 3  # nccl_load --churn makes as many per life


def lives_are_apart(trace: Trace, lives: int, calls: int) -> None:
    """Each comm line has exactly its own calls, all on one thread, one life after another."""
    assert len(trace.comms) == lives
    ended = Counter(e["comm"] for e in trace.of("comm_end", how="destroy"))
    by_comm: dict[int, list[Line]] = {c: [] for c in trace.comms}
    inits: dict[int, Line] = {}
    for line in trace.of("call"):
        if line["api"] == "ncclCommInitRank":
            assert line["new_comm"] not in inits
            inits[line["new_comm"]] = line
        else:
            by_comm[line["comm"]].append(line)
    assert set(inits) == set(trace.comms)
    threads: dict[int, list[tuple[int, int]]] = {}
    for comm, made in by_comm.items():
        made.sort(key=lambda c: c["idx"])
        assert [c["api"] for c in made] == ["ncclAllReduce"] * calls + ["ncclCommDestroy"]
        assert [c["idx"] for c in made] == list(range(calls + 1))
        assert ended[comm] == 1
        life = [inits[comm], *made]
        assert len({c["thread"] for c in life}) == 1
        times = [(c["t"], c["dur"]) for c in life]
        assert all(a[0] + a[1] <= b[0] for a, b in pairwise(times))
        threads.setdefault(life[0]["thread"], []).append((times[0][0], sum(times[-1])))
    for spans in threads.values():
        spans.sort()
        assert all(a[1] <= b[0] for a, b in pairwise(spans))
    hashes = {c["hash"] for c in trace.comms.values()}
    assert len(hashes) == lives and None not in hashes


def test_two_threads_churn(stage: Stage, nccl_load: Path) -> None:
    daemon = stage.attach_glob()
    load = stage.load(
        nccl_load, 1, "--churn", "--threads", "2", "--calls", str(LOOPS), env=ONE_HEAP
    ).go()
    truth = load.truth()
    load.end(daemon)
    (pid,) = load.pids
    until(daemon, lambda t: pid in t and t[pid].end, "the end")
    daemon.stop()
    trace = by_pid(daemon.traces())[pid]
    validate([trace])
    made = Counter(truth[pid]["calls"])
    del made["ncclGetUniqueId"]  # probed as a helper, never written
    assert trace.counts() == made
    lives_are_apart(trace, 2 * LOOPS, CALLS)
    check_order(trace)
    assert trace.coverage["blind"] == 0


def test_pointers_do_come_back(stage: Stage) -> None:
    """The same with the pointers known: they were reused, also by the other thread."""
    daemon = stage.attach_glob()
    puppet = stage.puppet(ONE_HEAP)
    puppet.load(stage.lib)
    lives = 300
    for name, count in (("a", 11), ("b", 22)):
        cmds = [{"op": "churn", "n": lives, "calls": 5, "count": count}]
        puppet.ask("thread", name=name, cmds=cmds)
    pointers: dict[str, list[int]] = {}
    for name in ("a", "b"):
        (reply,) = puppet.ask("join", name=name)["replies"]
        assert reply["rc"] == 0
        pointers[name] = reply["pointers"]
    assert len(set(pointers["a"]) | set(pointers["b"])) < lives / 10
    assert set(pointers["a"]) & set(pointers["b"]), "the threads never shared a pointer"
    met(daemon, [puppet.pid])
    puppet.end()
    until(daemon, lambda t: puppet.pid in t and t[puppet.pid].end, "the end")
    daemon.stop()
    trace = by_pid(daemon.traces())[puppet.pid]
    validate([trace])
    lives_are_apart(trace, 2 * lives, 5)
    # No communicator has calls of both threads: the counts differ by thread.
    per_comm: dict[int, set[int]] = {}
    for call in trace.of("call", api="ncclAllReduce"):
        per_comm.setdefault(call["comm"], set()).add(call["count"])
    assert Counter(tuple(v) for v in per_comm.values()) == {(11,): lives, (22,): lives}


def test_many_threads_on_communicators_of_their_own(stage: Stage, nccl_load: Path) -> None:
    daemon = stage.attach_glob()
    load = stage.load(
        nccl_load, 1, "--threads", "16", "--calls", "400", "--op", "all", "--no-destroy"
    ).go()
    truth = load.truth()
    load.end(daemon)
    (pid,) = load.pids

    def ended() -> bool:
        return any(t.pid == pid and t.end for t in daemon.traces())

    wait_for(ended, "the end", context=lambda: daemon.stderr.text)
    daemon.stop()
    trace = by_pid(daemon.traces())[pid]
    validate([trace])
    made = Counter(truth[pid]["calls"])
    del made["ncclGetUniqueId"]
    assert trace.counts() == made
    check_order(trace)
    assert len(trace.comms) == 16
    for comm in trace.comms:
        calls = trace.of("call", comm=comm)
        assert len({c["thread"] for c in calls}) == 1
        assert len(calls) == truth[pid]["comms"][0]["data_calls"]
    # A group is one thread's; its positions are 0, 1, 2, ... without a hole.
    groups: dict[int, list[tuple[int, int]]] = {}
    for line in trace.of("call"):
        if "gpos" in line and line["api"] != "ncclGroupStart":
            groups.setdefault(line["group"], []).append((line["thread"], line["gpos"]))
    assert groups
    for members in groups.values():
        assert len({thread for thread, _ in members}) == 1
        assert sorted(pos for _, pos in members) == list(range(len(members)))
