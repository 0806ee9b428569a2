"""Hosts whose clocks differ by minutes, read afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.analysis import Run, cover, steps
from support.tracegen import Host, Job
from typer.testing import CliRunner

from nccluprobe.cli.main import build
from nccluprobe.errors import ExitCode
from nccluprobe.match.options import SECOND
from nccluprobe.match.skew import LEAST

A, B = "00000000000000aa", "00000000000000bb"
N0 = Host("node0")


def job(other: Host, waited: float = 100, seen: float | None = None, **more: str) -> Job:
    """Ranks 0 and 1 on one host, 2 and 3 on the other; rank 3 does not come in the end.

    ``seen``: until when the other host's collector goes on.
    """
    made = Job()
    comms = [made.proc(r, (N0, other)[r // 2]).comm(A, r, 4, **more) for r in range(4)]
    t = steps(comms, 42)
    steps(comms[:3], 1, start=t)
    cover(made.procs[:2], t + waited)
    cover(made.procs[2:], t + (waited if seen is None else seen))
    return made


def skews(of: Job) -> dict[str, float]:
    run = Run(of)
    run.all()
    other = run.analysis.corrected()
    return {} if other is None else {boot: ahead / SECOND for boot, ahead in other.skews.items()}


@pytest.mark.parametrize("skew", [-300, 300, 7200])
@pytest.mark.parametrize("synced", [True, False])
def test_a_clock_that_is_wrong_by_minutes_makes_nobody_silent(
    tmp_path: Path, skew: float, synced: bool
) -> None:
    job(Host("node1", skew=skew, synced=synced)).write(tmp_path)
    words = ["analyze", str(tmp_path)]
    done = CliRunner().invoke(build(words), words)
    text = " ".join(done.stdout.split())
    assert done.exit_code == ExitCode.NOTICES
    assert "Rank 3 (pid 1003 on node1) did not enter" in text
    assert "ranks 0-2 wait in it for 100.0 s" in text and "silent" not in text
    assert f"the clock of node0 is {abs(skew):.0f} s" in text


def test_a_collector_that_ended_is_silent() -> None:
    """The communicator was made at one time on both hosts: it is not the clock."""
    assert skews(job(Host("node1"), waited=400, seen=100)) == {}
    assert skews(job(Host("node1", skew=-300), waited=500, seen=200)) == {}


def test_who_was_attached_later_tells_nothing_of_the_clock() -> None:
    assert skews(job(Host("node1", skew=-300), learnt="struct")) == {}


def test_small_differences_are_left_alone() -> None:
    assert skews(job(Host("node1", skew=0.9 * LEAST / SECOND))) == {}


def test_hosts_that_share_a_communicator_only_with_another_one() -> None:
    """node0 and node1 share one, node1 and node2 another; most processes are on node1."""
    made = Job()
    hosts = [N0, Host("node1", skew=600), Host("node2", skew=-90)]
    a = [made.proc(0, hosts[0]).comm(A, 0, 2), made.proc(1, hosts[1]).comm(A, 1, 2)]
    b = [made.proc(2, hosts[1]).comm(B, 0, 2), made.proc(3, hosts[2]).comm(B, 1, 2)]
    b.append(a[1].proc.comm("00000000000000cc", 0, 2))
    made.procs[2].comm("00000000000000cc", 1, 2)
    steps([*a, *b], 5)
    cover(made.procs, 50)
    assert skews(made) == {"boot-node0": -600, "boot-node2": -690}
