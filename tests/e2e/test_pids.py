"""A process is (host, pid, start time): pids come back, processes fork and exec."""

from __future__ import annotations

import re
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.daemon import met, until
from support.e2e import Stage
from support.puppets import Puppet, Ranks
from support.traces import Trace, by_pid, validate
from support.waiting import wait_for

pytestmark = [pytest.mark.root, pytest.mark.timeout(120)]

LAST_PID = Path("/proc/sys/kernel/ns_last_pid")


def start_with_pid(stage: Stage, pid: int) -> Puppet:
    """A puppet that has this pid, which is free; others may fork in between, so: again."""
    for _ in range(200):
        LAST_PID.write_text(str(pid - 1))
        puppet = stage.puppet()
        if puppet.pid == pid:
            return puppet
        puppet.end()
    raise AssertionError(f"pid {pid} was never given out")


def lone(stage: Stage, puppet: Puppet, calls: int) -> None:
    """A communicator of one, with some calls on it."""
    puppet.load(stage.lib)
    Ranks([puppet], stage.lib).init().collective(n=calls)


def test_pid_reuse_gives_two_processes_and_two_files(stage: Stage) -> None:
    daemon = stage.attach_glob()
    first = stage.puppet()
    lone(stage, first, 3)
    met(daemon, [first.pid])
    first.end()  # without destroy
    second = start_with_pid(stage, first.pid)
    lone(stage, second, 5)
    wait_for(lambda: len(daemon.traces()) == 2, "the second file")
    second.end()

    def both() -> list[Trace] | None:
        found = daemon.traces()
        return found if len(found) == 2 and all(t.end for t in found) else None

    traces = wait_for(both, "two files", context=lambda: f"{daemon.stderr.text}{daemon.traces()}")
    daemon.stop()
    validate(daemon.traces())
    assert traces is not None
    traces.sort(key=lambda t: t.process["start"])
    assert [t.pid for t in traces] == [first.pid] * 2
    assert traces[0].process["start"] < traces[1].process["start"]
    for trace, calls in zip(traces, (3, 5), strict=True):
        assert trace.counts() == {"ncclCommInitRank": 1, "ncclAllReduce": calls}
        (comm,) = trace.comms.values()
        idx = [c["idx"] for c in trace.of("call", comm=comm["id"])]
        assert len(set(idx)) == len(idx) and max(idx) == len(idx) - 1
        assert trace.end and trace.end["code"] == 0


@pytest.fixture
def pid_namespace() -> Iterator[tuple[str, ...]]:
    yield ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child", "--")


def test_same_pid_in_two_containers(stage: Stage, pid_namespace: tuple[str, ...]) -> None:
    """Both are pid 1 inside; here they are two."""
    daemon = stage.attach_glob()
    puppets = [stage.puppet(prefix=pid_namespace) for _ in range(2)]
    assert [p.ns_pid for p in puppets] == [1, 1]
    ranks = Ranks(puppets, stage.lib).load().init().collective(n=4)
    wait_for(lambda: len(daemon.traces()) == 2, "both met", context=lambda: daemon.stderr.text)
    ranks.destroy().end()

    def both() -> bool:
        found = daemon.traces()
        return len(found) == 2 and all(t.end for t in found)

    wait_for(both, "two files", context=lambda: daemon.stderr.text)
    daemon.stop()
    traces = daemon.traces()
    validate(traces)
    assert len({t.pid for t in traces}) == 2
    for trace in traces:
        assert trace.process["ns_pid"] == 1 != trace.pid
        assert trace.counts()["ncclAllReduce"] == 4


def test_fork_of_a_process_with_communicators(stage: Stage) -> None:
    """A child has the memory of its parent, not its communicators: it is a process of its own."""
    daemon = stage.attach_glob()
    ranks = stage.ranks(2).init().collective(n=6)
    go = stage.tmp / "go"
    hold = {"op": "hold", "path": str(go)}
    silent = ranks[0].ask("fork", cmds=[hold])["pid"]
    # A child with a communicator of its own, beside the one that it inherited.
    uid = ranks[0].ask("uid")["uid"]
    cmds: list[dict[str, Any]] = [
        {"op": "call", "fn": "ncclGroupStart"},
        {"op": "call", "fn": "ncclGroupEnd"},
        {"op": "init", "comm": "own", "nranks": 1, "uid": uid, "rank": 0},
        {"op": "call", "fn": "ncclAllReduce", "comm": "own", "n": 4},
        hold,
    ]
    busy = ranks[0].ask("fork", cmds=cmds)["pid"]
    met(daemon, [*ranks.pids, busy])
    go.touch()
    for pid in (silent, busy):
        assert ranks[0].ask("wait", pid=pid)["status"] == 0
    ranks.collective(n=6).destroy().end()

    def done(traces: dict[int, Trace]) -> bool:
        return all(p in traces and traces[p].end for p in [*ranks.pids, busy])

    traces = until(daemon, done, "the ends")
    daemon.stop()
    validate(traces.values())
    assert silent not in traces  # no file for a child that made no call
    for pid in ranks.pids:
        assert traces[pid].counts()["ncclAllReduce"] == 12
    child = traces[busy]
    assert child.counts()["ncclAllReduce"] == 4
    own = {c["comm"] for c in child.of("call", api="ncclAllReduce")}
    assert len(own) == 1
    assert child.comms[own.pop()]["nranks"] == 1
    assert child.process["start"] > traces[ranks[0].pid].process["start"]


def test_exec_ends_a_process_and_begins_another(stage: Stage) -> None:
    """The pid and its start time stay; the communicators do not."""
    daemon = stage.attach_glob()
    puppet = stage.puppet()
    lone(stage, puppet, 3)
    met(daemon, [puppet.pid])
    puppet.send("exec", argv=[sys.executable, "-u", str(stage.script)])
    assert puppet.reply()["pid"] == puppet.pid
    lone(stage, puppet, 5)
    wait_for(
        lambda: sum((t.counts() for t in daemon.traces()), Counter())["ncclAllReduce"] == 8,
        "the calls after it",
        context=lambda: daemon.stderr.text,
    )
    puppet.end()

    def done() -> bool:
        ends = [e for t in daemon.traces() for e in t.of("process_end")]
        return any(e["how"] == "exited" for e in ends)

    wait_for(done, "the end", context=lambda: daemon.stderr.text)
    daemon.stop()
    traces = daemon.traces()
    validate(traces)
    assert any(e["how"] == "exec" for t in traces for e in t.of("process_end")) or any(
        s["state"] == "exec" for t in traces for s in t.of("state")
    )
    # Two communicators, each with its own calls from 0.
    per_comm: Counter[int] = Counter()
    for trace in traces:
        for comm in trace.comms:
            idx = sorted(c["idx"] for c in trace.of("call", comm=comm, api="ncclAllReduce"))
            per_comm[len(idx)] += 1
            assert idx == list(range(idx[0], idx[0] + len(idx)))
    assert per_comm == {3: 1, 5: 1}
    assert sum((t.counts() for t in traces), Counter())["ncclAllReduce"] == 8


def descriptors(pid: int) -> int:
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("met_first", [True, False])
def test_a_hundred_short_lives(stage: Stage, met_first: bool) -> None:
    """100 matching processes of a moment each: a file each, nothing kept after them.

    Those that end within milliseconds of their first call may be over before anyone
    could see whether they match: then their records are counted, not left out in silence.
    """
    shorts = stage.tmp / f"{stage.token}_short.py"
    shutil.copy(stage.script, shorts)
    daemon = stage.attach_glob()
    before = descriptors(daemon.pid)
    pids: list[int] = []
    for _ in range(10):
        batch = [stage.puppet(script=shorts) for _ in range(10)]
        for puppet in batch:
            puppet.load(stage.lib)
            Ranks([puppet], stage.lib).init()
        for n, puppet in enumerate(batch):
            assert puppet.call("ncclAllReduce", n=n + 1) == 0
        if met_first:
            met(daemon, [p.pid for p in batch])
        for puppet in batch:
            puppet.end()
        pids += [p.pid for p in batch]

    def done(traces: dict[int, Trace]) -> bool:
        left = [p for p in pids if p not in traces] if met_first else []
        return not left and all(t.end for t in traces.values())

    until(daemon, done, "the ends", timeout=60)
    # Those whose end is written are let go of in the daemon's next rounds.
    deadline = time.monotonic() + 20
    while (after := descriptors(daemon.pid)) > before + 5 and time.monotonic() < deadline:
        time.sleep(0.2)
    daemon.stop()
    traces = by_pid(daemon.traces())
    validate(traces.values())
    missing = 0
    for n, pid in enumerate(pids):
        made = {"ncclCommInitRank": 1, "ncclAllReduce": n % 10 + 1}
        if pid not in traces:
            missing += sum(made.values())
            continue
        trace = traces[pid]
        if met_first or not trace.coverage["lost_queue"]:
            assert trace.counts() == made
        assert trace.end
        if met_first:
            assert (trace.end["how"], trace.end["code"]) == ("exited", 0)
    counted = re.search(r"([\d,]+) records? (?:is|are) in no file", daemon.stderr.text)
    print(f"\n{missing} calls of processes without a file, said: {counted and counted[1]}")
    assert (int(counted[1].replace(",", "")) if counted else 0) >= missing
    assert not (met_first and missing)
    assert after <= before + 5, "descriptors of dead processes are kept"
