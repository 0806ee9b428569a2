"""How a rank ended, and what the others' wait is put down to.

One daemon watches eight jobs of two ranks.  In each, rank 1 ends in another
way, in or out of an NCCL call, while rank 0 waits for it in a collective.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from support.daemon import Daemon, met, until
from support.e2e import Analyze, Report, Stage
from support.puppets import Ranks
from support.traces import Line, Trace, validate

pytestmark = [pytest.mark.root, pytest.mark.timeout(150)]


@dataclass
class Ending:
    """A way to end: what to tell the puppet, and what the trace must say."""

    name: str
    inside: bool
    how: str
    code: int | None
    signal: int | None
    reasons: tuple[str, ...]
    finish: Callable[[Ranks], None]


def exits(code: int) -> Callable[[Ranks], None]:
    def finish(ranks: Ranks) -> None:
        ranks[1].end(code)

    return finish


def killed(ranks: Ranks) -> None:
    ranks[1].process.send_signal(signal.SIGKILL)
    assert ranks[1].process.wait(30) == -signal.SIGKILL


def aborts(ranks: Ranks) -> None:
    ranks[1].send("kill", signal=int(signal.SIGABRT))
    assert ranks[1].process.wait(30) == -signal.SIGABRT


CRASH = ("rank_exit_or_crash_suspected",)
EXITED = ("rank_exited",)
ENDINGS = [
    Ending(f"{name}_{'inside' if inside else 'outside'}", inside, how, code, number, why, finish)
    for inside in (False, True)
    for name, how, code, number, why, finish in (
        ("exit0", "exited", 0, None, EXITED, exits(0)),
        ("exit1", "exited", 1, None, CRASH, exits(1)),
        ("sigkill", "signaled", None, 9, CRASH, killed),
        ("sigabrt", "signaled", None, 6, CRASH, aborts),
    )
]


@pytest.fixture
def ended(stage: Stage, analyze: Analyze) -> tuple[dict[str, list[Trace]], Report, Daemon]:
    """All eight jobs, played; their traces by job and one report over all."""
    daemon = stage.attach_glob()
    jobs: dict[str, Ranks] = {}
    for ending in ENDINGS:
        ranks = stage.ranks(2, job=ending.name)
        ranks.init("a").init("b").collective(comm="a", n=3)
        jobs[ending.name] = ranks
        if ending.inside:  # the first collective of a communicator blocks in the call
            cmds: list[dict[str, Any]] = [{"op": "call", "fn": "ncclAllReduce", "comm": "b"}]
            ranks[1].ask("thread", name="stuck", cmds=cmds)

    def inside_seen(traces: dict[int, Trace]) -> bool:
        pids = [jobs[e.name][1].pid for e in ENDINGS if e.inside]
        return all(pid in traces and traces[pid].of("enter") for pid in pids)

    until(daemon, inside_seen, "the calls inside")
    met(daemon, [pid for ranks in jobs.values() for pid in ranks.pids])
    for ending in ENDINGS:
        ending.finish(jobs[ending.name])
        jobs[ending.name][0].send("call", fn="ncclAllGather", comm="a", sync=True)

    def settled(traces: dict[int, Trace]) -> bool:
        for ranks in jobs.values():
            waits = traces[ranks[0].pid].of("call", api="ncclAllGather")
            if not waits or not traces[ranks[1].pid].end:
                return False
            if traces[ranks[0].pid].coverage["through"] < waits[0]["t"] + 3.5e9:
                return False
        return True

    until(daemon, settled, "the waits", timeout=60)
    report = analyze(daemon.out)
    daemon.stop()
    traces: dict[str, list[Trace]] = {}
    for trace in sorted(daemon.traces(), key=lambda t: t.rank or 0):
        traces.setdefault(trace.process["run_id"], []).append(trace)
    return traces, report, daemon


def test_every_ending_has_its_line_and_its_reason(
    ended: tuple[dict[str, list[Trace]], Report, Daemon],
) -> None:
    traces, report, _ = ended
    wrong: list[str] = []
    for ending in ENDINGS:
        waiting, dead = traces[ending.name]
        validate([waiting, dead])
        end = dead.end
        assert end is not None
        got: Any = (end["how"], end["code"], end["signal"], end["in_flight"])
        want: Any = (ending.how, ending.code, ending.signal, int(ending.inside))
        if got != want:
            wrong.append(f"{ending.name}: process_end {got}, not {want}")
        open_ended = [c for c in dead.of("call") if c.get("end") == "no_return"]
        if [c["api"] for c in open_ended] != ["ncclAllReduce"] * ending.inside:
            wrong.append(f"{ending.name}: never returned: {open_ended}")
        if any(c["rc"] is not None for c in open_ended):
            wrong.append(f"{ending.name}: a return code without a return")
        if dead.inside():
            wrong.append(f"{ending.name}: left open: {dead.inside()}")
        found = findings_on(report, waiting, "ncclAllGather")
        if len(found) != 1:
            wrong.append(f"{ending.name}: {len(found)} findings: {found}")
            continue
        details = found[0]["details"]
        if details["missing_comm_ranks"] != [1] or details["reason"] not in ending.reasons:
            wrong.append(f"{ending.name}: {details}")
        if found[0]["severity"] != "error":  # an exit is a proof
            wrong.append(f"{ending.name}: severity {found[0]['severity']}")
    assert not wrong, "\n".join([*wrong, report.text])


def findings_on(report: Report, waiting: Trace, api: str) -> list[Line]:
    """Open findings about a collective that this rank waits in."""
    comm = waiting.of("call", api=api)[0]["comm"]
    found = [f for f in report.open if f["comm_uid_hash"] == waiting.comms[comm]["hash"]]
    return [f for f in found if f["details"].get("missing_comm_ranks")]


@pytest.mark.parametrize("destroy", [False, True])
def test_orderly_end_is_no_fault(stage: Stage, analyze: Analyze, destroy: bool) -> None:
    """Ranks that leave one by one when the work is done, with and without destroy."""
    daemon = stage.attach_glob()
    ranks = stage.ranks(3).init().collective(n=10)
    if destroy:
        ranks.destroy()
    met(daemon, ranks.pids)
    ranks[1].end()
    until(daemon, lambda t: t[ranks[1].pid].end, "the first end")
    start = max(t.coverage["through"] for t in daemon.traces())
    until(
        daemon,
        lambda t: t[ranks[0].pid].coverage["through"] > start + 3.5e9,
        "time after the first end",
    )
    assert analyze(daemon.out).findings == []
    for rank in (0, 2):
        ranks[rank].end()
    until(daemon, lambda t: all(x.end for x in t.values()), "all ends")
    daemon.stop()
    validate(daemon.traces())
    assert analyze(daemon.out).findings == []
    for trace in daemon.traces():
        assert bool(trace.of("comm_end")) is destroy


def test_thread_ends_inside_while_the_process_lives(stage: Stage) -> None:
    """exec inside a call on another thread: the call never returned, the process goes on."""
    daemon = stage.attach_glob()
    ranks = stage.ranks(2).init()
    ranks[0].ask("thread", name="stuck", cmds=[{"op": "call", "fn": "ncclAllReduce"}])
    until(daemon, lambda t: ranks[0].pid in t and t[ranks[0].pid].of("enter"), "the enter")
    ranks[0].send("exec", argv=["/bin/sleep", "1000"])

    def closed(traces: dict[int, Trace]) -> bool:
        return any(c.get("end") == "no_return" for c in traces[ranks[0].pid].of("call"))

    traces = until(daemon, closed, "the call closed")
    trace = traces[ranks[0].pid]
    assert trace.end and trace.end["how"] == "exec"
    daemon.stop()
    validate(daemon.traces())
