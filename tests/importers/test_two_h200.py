"""What PyTorch 2.11 and NCCL 2.28.9 wrote of faults on two H200 (tools/gpu/sources.py).

Two ranks that differ are equals, so of those faults nobody is named; whoever is must be rank 1.
"""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from importers.reading import Result
from nccluprobe.match.options import SECOND, Options

ABSENT, DIFFERS, OTHER, STUCK, LEFT = (
    "collective_missing_enter",
    "collective_mismatch",
    "skipped_or_extra_call",
    "collective_all_ranks_stuck",
    "p2p_unmatched",
)
CROSSED = "cross_comm_order_inversion"
#: Fault -> ranks that are blamed, and the kinds of the root causes.
DUMPS = {
    "stall": ({1}, {ABSENT}),
    "kill": ({1}, {ABSENT}),
    "exit": ({1}, {ABSENT}),
    "stop": ({1}, {ABSENT}),
    "gpu": (set(), {STUCK}),
    "api": (set(), {OTHER}),
    "size": (set(), {DIFFERS}),
    "dtype": (set(), {DIFFERS}),
    "order": (set(), set()),
    "skip": (set(), {CROSSED}),
    "no_send": (set(), {"p2p_order_inversion"}),
    "stall.timed": ({1}, {ABSENT}),
    "gpu.timed": ({1}, {ABSENT}),
    "size.timed": (set(), {DIFFERS}),
    "no_send.timed": (set(), {"p2p_order_inversion"}),
    "stall.active": ({1}, {ABSENT}),
    "kill.active": ({1}, {ABSENT}),
    "gpu.active": (set(), {STUCK}),
    "size.active": (set(), {DIFFERS}),
    "api.active": (set(), {OTHER}),
    "skip.active": (set(), {CROSSED}),
    "no_send.active": (set(), {"p2p_order_inversion"}),
    "stall.plain": ({1}, {ABSENT}),
    "gpu.plain": (set(), {STUCK}),
    "no_send.plain": (set(), {"p2p_order_inversion"}),
    "stall.coalesced": ({1}, {ABSENT}),
    "gpu.coalesced": (set(), {STUCK}),
    "size.coalesced": ({1}, {DIFFERS}),
    "skip.coalesced": ({1}, {OTHER}),
}
LOGS = {
    "healthy": (set(), set()),
    "healthy.plain": (set(), set()),
    "healthy.coalesced": (set(), set()),
    "stall": ({1}, {ABSENT}),
    "kill": ({1}, {ABSENT}),
    "exit": ({1}, {ABSENT}),
    "stop": ({1}, {ABSENT}),
    "gpu": (set(), set()),
    "api": (set(), {OTHER}),
    "size": (set(), {DIFFERS}),
    "dtype": (set(), {DIFFERS}),
    "order": (set(), {CROSSED}),
    "skip": (set(), {CROSSED}),
    "no_send": ({1}, {LEFT}),
    "no_receive": ({1}, {LEFT}),
    "no_send.plain": ({1}, {LEFT}),
    "no_receive.plain": ({1}, {LEFT}),
    "stall.coalesced": ({1}, {ABSENT}),
    "skip.coalesced": ({1}, {OTHER}),
}
#: Counts of launches know nothing of sends, sizes, and of processes that do not answer.
REPORTS = {
    "healthy": (set(), set()),
    "stall": ({1}, {ABSENT}),
    "skip": ({1}, {ABSENT}),
    "skip.coalesced": ({1}, {ABSENT}),
    "kill": (set(), set()),
    "exit": (set(), set()),
    "stop": (set(), set()),
    "gpu": (set(), set()),
    "api": (set(), set()),
    "order": (set(), set()),
    "size": (set(), set()),
    "no_send": (set(), set()),
}
Verdict = tuple[set[int], set[str]]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two_h200")
    with tarfile.open(Path(__file__).with_name("two_h200.tar.xz")) as kept:
        # Before Python 3.11.4 there is no filter.
        kept.extraction_filter = getattr(tarfile, "data_filter", lambda member, _: member)
        kept.extractall(folder)
    return folder


def verdict(kind: str, *paths: Path) -> Verdict:
    options = Options(
        missing_after=2 * SECOND, late_after=SECOND, error_after=4 * SECOND, decide_after=SECOND
    )
    result = Result(*paths, kind=kind, options=options)
    causes = [f for f in result.findings if f.role == "root_cause" and f.state == "open"]
    return result.blamed, {f.hang_type for f in causes}


@pytest.mark.parametrize("fault", DUMPS)
def test_flight_recorder(recorded: Path, fault: str) -> None:
    assert verdict("fr", recorded / fault / "fr") == DUMPS[fault]


@pytest.mark.parametrize("fault", LOGS)
def test_nccl_log(recorded: Path, fault: str) -> None:
    assert verdict("nccl-log", recorded / fault / "log") == LOGS[fault]


@pytest.mark.parametrize("form", ["txt", "json"])
@pytest.mark.parametrize("fault", REPORTS)
def test_ras(recorded: Path, fault: str, form: str) -> None:
    paths = [recorded / fault / "ras" / f"{look}.{form}" for look in (0, 1)]
    assert verdict("ras", *(p for p in paths if p.exists())) == REPORTS[fault]


def test_numbers_that_ras_reads_from_freed_memory_are_no_ranks(recorded: Path) -> None:
    """NCCL 2.28 adds a communicator of 257 ranks, all without a process, for one that died."""
    text = recorded / "kill" / "ras" / "1.txt"
    assert "Rank -" in text.read_text()
    assert Result(text).findings == []
