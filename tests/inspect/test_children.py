"""Communicators seen from their making, whose fields only the live struct tells."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from support.e2e import Stage
from support.traces import validate
from support.waiting import wait_for

pytestmark = [pytest.mark.root, pytest.mark.timeout(120)]

PROGRAM = Path(__file__).with_name("children.py")


def test_children_get_rank_and_size(stage: Stage) -> None:
    process = stage.popen(
        [sys.executable, PROGRAM, stage.lib], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin is not None and process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    daemon = stage.attach("--pid", str(process.pid), "--lib", stage.lib)
    daemon.ready()
    process.stdin.write("go\n")
    process.stdin.flush()
    truth = json.loads(process.stdout.readline())
    total = sum(c["calls"] for c in truth)
    wait_for(
        lambda: sum(len(t.of("call", api="ncclAllReduce")) for t in daemon.traces()) == total,
        "all calls in the trace",
        context=lambda: daemon.stderr.text,
    )
    daemon.stop()
    (trace,) = daemon.traces()
    validate([trace])
    calls = Counter(c["comm"] for c in trace.of("call", api="ncclAllReduce"))
    found = Counter(
        (c["learnt"], c["comm_rank"], c["nranks"], calls[c["id"]]) for c in trace.comms.values()
    )
    assert found == Counter((c["how"], c["rank"], c["nranks"], c["calls"]) for c in truth)
    assert all(c["hash"] is not None for c in trace.comms.values())
    # Seen from their making: no base; the counter at every call.
    assert not any("seqs" in c for c in trace.comms.values())
    worlds = [c for c, n in calls.items() if n == 200]
    assert len(worlds) == 2
    for comm in worlds:
        seqs = {c["idx"]: c.get("seq") for c in trace.of("call", comm=comm, api="ncclAllReduce")}
        assert seqs == {idx: idx for idx in range(200)}
