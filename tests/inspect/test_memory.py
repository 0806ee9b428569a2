"""``inspect`` on NVIDIA's own library: finds all communicators and changes nothing."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import nccl_cache

from nccluprobe.inspect.process import Inspector, look_at
from nccluprobe.inspect.search import Budget

pytestmark = [pytest.mark.root, pytest.mark.nccl]

VERSIONS = [
    version
    for version in nccl_cache.VERSIONS[2:]  # before 2.21 there is no magic to find them by
    if version in nccl_cache.DEFAULT_VERSIONS or nccl_cache.library(version) is not None
]
NEWEST = nccl_cache.DEFAULT_VERSIONS[-1]
FindNccl = Callable[[str], Path]


def ids(comms: list[dict[str, Any]]) -> set[tuple[Any, ...]]:
    return {
        (
            c["hash"],
            c.get("rank", c.get("comm_rank")),
            c["nranks"],
            None if c["seqs"] is None else tuple(c["seqs"]),
        )
        for c in comms
    }


@pytest.mark.parametrize("version", VERSIONS)
def test_every_version(version: str, real_nccl: FindNccl, hold: Any, cli: Any) -> None:
    held = hold(real_nccl(version), version)
    done = cli("inspect", held.pid, "--json")
    assert done.returncode == 0, done.stderr
    (line,) = map(json.loads, done.stdout.splitlines())
    assert ids(line["comms"]) == ids(held.now["comms"])
    assert line["complete"] and line["pid"] == held.pid and line["alive"]
    assert [c["dev"] for c in line["comms"]] == [2, 2]
    assert line["libs"][0]["nccl_version"] == version


def settled(held: Any) -> dict[str, str]:
    """Its memory once answering takes no more pages of its own (measured: one, 1 run in 4)."""
    told: list[dict[str, str]] = []
    while len(told) < 20 or any(x != told[-1] for x in told[-20:]):
        assert len(told) < 1000, told[-20:]
        told.append(held.do("status")["memory"])
    return told[-1]


@pytest.mark.slow
def test_two_gigabytes_of_noise(real_nccl: FindNccl, hold: Any) -> None:
    held = hold(real_nccl(NEWEST), NEWEST, "--noise", "2048")
    assert held.first["fault_fd"] >= 0, "this kernel has no userfaultfd: not tested"
    before = settled(held)
    took = []  # seconds of processor: others may use the machine, too
    for _ in range(4):
        began = time.process_time()
        (looked,) = look_at([held.pid])
        took.append(time.process_time() - began)
        line = looked.line()
        assert line["complete"], line["notes"]
        assert ids(line["comms"]) == ids(held.now["comms"])
        assert line["searched"] > 2 << 30
        assert looked.found.skipped >= 1  # that under userfaultfd
    assert held.do("status")["memory"] == before
    # Beside a peer in the same run, as machines differ: the bytes only counted, in memory.
    noise = np.random.default_rng(1).integers(0, 256, 64 << 20, np.uint8).tobytes()
    began = time.process_time()
    for _ in range(32):
        noise.count(b"\0")
    peer = time.process_time() - began
    assert 2 * min(took) < peer, (took, peer)


@pytest.mark.slow
def test_bounds_are_kept(real_nccl: FindNccl, hold: Any) -> None:
    held = hold(real_nccl(NEWEST), NEWEST, "--noise", "2048")
    (looked,) = look_at([held.pid], Budget(bytes=64 << 20))
    assert not looked.found.complete and looked.found.searched <= 80 << 20
    assert any("bound" in note for note in looked.notes)
    # What is likely was looked at before the bound.
    assert {"000000000000a1a1"} <= {c["hash"] for c in looked.line()["comms"]}
    began = time.monotonic()
    (looked,) = look_at([held.pid], Budget(seconds=0.1))
    assert not looked.found.complete and time.monotonic() - began < 3
    assert any("time is up" in note for note in looked.notes)


def test_a_moving_counter_is_said_to_move(real_nccl: FindNccl, hold: Any) -> None:
    held = hold(real_nccl(NEWEST), NEWEST, "--late")
    inspector = Inspector()
    looked = inspector.look(held.pid)
    held.do("step 3")
    inspector.finish()
    moving = {c["hash"]: c["moving"] for c in looked.line()["comms"]}
    assert moving["000000000000a1a1"] and moving["000000000000b2b2"]
    # The last two are not ready, or lie in shared memory.
    assert ids(held.now["comms"][:2]) <= ids(looked.line()["comms"])


def test_a_process_that_is_gone(hold: Any, real_nccl: FindNccl, cli: Any) -> None:
    held = hold(real_nccl(NEWEST), NEWEST)
    held.close()
    done = cli("inspect", held.pid)
    assert done.returncode == 6 and "no process" in done.stderr


def test_starts_of_pages_come_first_where_there_is_much(
    real_nccl: FindNccl, hold: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nccluprobe.inspect.search._MUCH", 0)
    monkeypatch.setattr("nccluprobe.inspect.search._MODERATE", 0)
    held = hold(real_nccl(NEWEST), NEWEST)
    (looked,) = look_at([held.pid])
    assert ids(looked.line()["comms"]) == ids(held.now["comms"])
    (looked,) = look_at([held.pid], Budget(bytes=0))
    assert not looked.found.complete
