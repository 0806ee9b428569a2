"""Attach in mid-run on NVIDIA's own library: who is who, and the absolute sequence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import nccl_cache
from support.e2e import Stage
from support.traces import Trace, validate
from support.waiting import wait_for

pytestmark = [pytest.mark.root, pytest.mark.nccl]

VERSIONS = [
    version
    for version in nccl_cache.VERSIONS[2:]
    if version in nccl_cache.DEFAULT_VERSIONS or nccl_cache.library(version) is not None
]
FindNccl = Callable[[str], Path]


def by_hash(trace: Trace) -> dict[str, dict[str, Any]]:
    return {c["hash"]: c for c in trace.comms.values()}


@pytest.mark.parametrize("version", VERSIONS)
def test_identity_and_sequence(version: str, real_nccl: FindNccl, hold: Any, stage: Stage) -> None:
    held = hold(real_nccl(version), version, "--late")
    held.do("step 40")  # before anybody watches
    daemon = stage.attach("--pid", str(held.pid))
    daemon.ready()
    held.do("drop")
    before = {c["hash"]: c for c in held.now["comms"]}
    held.do("step 5")
    held.do("group 3")
    held.do("ready")
    held.do("step 4")
    wait_for(
        lambda: sum(len(t.of("call", api="ncclAllReduce")) for t in daemon.traces()) == 48,
        "all calls in the trace",
        context=lambda: daemon.stderr.text,
    )
    daemon.stop()
    (trace,) = daemon.traces()
    validate([trace])
    comms = by_hash(trace)
    assert comms.keys() == before.keys()
    for name, planted in before.items():
        comm = comms[name]
        assert comm["learnt"] == "struct"
        assert (comm["comm_rank"], comm["nranks"]) == (planted["rank"], planted["nranks"])
        assert comm["dev"] == 2
        calls = [c for c in trace.of("call", api="ncclAllReduce") if c["comm"] == comm["id"]]
        assert [c["idx"] for c in calls] == list(range(12))
        counts = planted["seqs"] is not None
        if not counts:
            assert "seqs" not in comm and not any("seq" in c for c in calls)
            continue
        # The dropped pages were not there for the probe: identity came from user
        # space, too late for the counters.  The unready one was read 8 calls later.
        if planted["at"] == held.now["comms"][2]["at"]:
            assert "seqs" not in comm and not any("seq" in c for c in calls)
            continue
        late = 8 if planted["at"] == held.now["comms"][3]["at"] else 0
        base = planted["seqs"][4] + late
        assert comm["seqs"] == [*planted["seqs"][:4], base]
        assert comm["base_seq"] == sum(comm["seqs"])
        for call in calls[late:]:
            number = planted["seqs"][4] + call["idx"]
            assert call.get("seq") == (None if "group" in call else number)
        last = next(c for c in held.now["comms"] if c["hash"] == name)
        assert last["seqs"][4] == planted["seqs"][4] + len(calls)
