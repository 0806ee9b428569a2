"""What reports say of files that hold no times or no calls: nothing that is not in them."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from importers.reading import Result
from importers.test_ras import BEHIND, TEXT
from nccluprobe.cli.main import build
from nccluprobe.importers import run

SAMPLES = Path(__file__).parents[2] / "docs" / "samples"
_CLOCK = re.compile(r"^\[\d{4}-[^]]*\] ", re.MULTILINE)


def command(*arguments: object) -> str:
    words = [*map(str, arguments)]
    done = CliRunner().invoke(build(words), words)
    assert all(len(line) <= 80 for line in done.stdout.splitlines())
    return " ".join(done.stdout.split())


def coverage(text: str) -> str:
    return text[text.index("Coverage: ") :]


@pytest.fixture
def no_clock(tmp_path: Path) -> Path:
    log = tmp_path / "job.log"
    log.write_text(_CLOCK.sub("", (SAMPLES / "nccl-log" / "job.log").read_text()))
    return log


def test_a_log_without_a_clock_tells_no_time(no_clock: Path, tmp_path: Path) -> None:
    text = command("analyze", no_clock, "--out", tmp_path)
    assert (
        "did not enter ncclAllReduce #4 of communicator fa93daea854b060b: ranks 0-1,3 wait in "
        in (text)
    )
    assert "wait in it. - to blame" in text and "since when is not in the log" in text
    assert "a log does not say when calls were made: what is open at its end is judged as if" in (
        coverage(text)
    )
    assert not re.search(r"\d\d:\d\d:\d\d|for \d+(\.\d+)? (s|min)|since \d", text), text
    found = Result(no_clock).findings
    assert [f.details["assumed"] for f in found] == [["waited_s", "first_entered_unix_ns"]]


def test_explain_shows_no_times_of_a_log_without_a_clock(no_clock: Path, tmp_path: Path) -> None:
    (f,) = Result(no_clock).findings
    text = command("explain", no_clock, f.id)
    assert "The log has no times." in text and "no later call in the log" in text
    assert not re.search(r"\d\d:\d\d:\d\d|no call for|for \d", text), text


def test_a_log_with_a_clock_tells_since_when_and_not_for_how_long(tmp_path: Path) -> None:
    text = command("analyze", SAMPLES / "nccl-log", "--out", tmp_path)
    assert "since 2026-05-05 06:00:24 UTC, until when is not in the log" in text
    assert not re.search(r" for \d+(\.\d+)? (s|min)", text[: text.index("Coverage")]), text
    (f,) = Result(SAMPLES / "nccl-log").findings
    assert f.details["assumed"] == ["waited_s"]


def test_of_calls_that_do_not_return_the_sentence_has_no_time_either(tmp_path: Path) -> None:
    """All ranks of the sample are in the initialisation, and nobody gets out."""
    lines = (SAMPLES / "nccl-log" / "job.log").read_text().splitlines()
    log = tmp_path / "job.log"
    log.write_text(_CLOCK.sub("", "\n".join(x for x in lines if "Init START" in x) + "\n"))
    text = command("analyze", log, "--out", tmp_path)
    assert (
        "All 4 ranks are inside ncclCommInitRank of communicator fa93daea854b060b, and it does not"
        " end: nobody is missing"
    ) in text
    assert not re.search(r"for \d+(\.\d+)? s", text[: text.index("Coverage")]), text


def test_a_timeout_that_stands_for_a_time_is_called_one(tmp_path: Path) -> None:
    folder = shutil.copytree(SAMPLES / "fr", tmp_path / "fr", copy_function=shutil.copyfile)
    text = command("analyze", folder, "--out", tmp_path)
    assert "ranks 0-1,3 wait in it for 10.0 min (PyTorch timeout)." in text


def test_reports_of_ras_are_not_said_to_be_of_no_process(tmp_path: Path) -> None:
    text = coverage(command("analyze", SAMPLES / "ras", "--out", tmp_path))
    assert text.startswith(
        "Coverage: 1 job, 4 processes, 4 ranks of 1 communicator, looked at 2 times: NCCL's "
        "counters, no calls. - 2 RAS reports read"
    )
    both = coverage(command("analyze", SAMPLES / "ras", SAMPLES / "inspector", "--out", tmp_path))
    assert both.startswith("Coverage: 2 jobs, 4 processes, 1 communicator, 24 calls;")
    assert (
        "looked at from outside, 2 times (inspect, NCCL RAS): 4 processes, 4 ranks of 1 "
        "communicator"
    ) in both


@pytest.mark.parametrize(
    ("warnings", "said"),
    [
        ("", "Coverage: no rank is named in what was read. - 1 RAS report read"),
        (
            BEHIND.format(count=640),
            "Coverage: 1 job, 2 processes, 8 ranks of 1 communicator, looked at once: NCCL's",
        ),
    ],
)
def test_a_text_of_ras(tmp_path: Path, warnings: str, said: str) -> None:
    report = tmp_path / "ras.txt"
    report.write_text(TEXT.format(status="MISMATCH", warnings=warnings, errors=""))
    text = coverage(command("analyze", report, "--from", "ras", "--out", tmp_path))
    assert text.startswith(said)
    assert not re.search(r"\b0 (process|communicator|call|rank|job)", text), text


@pytest.mark.parametrize("kind", sorted(run.KINDS))
def test_no_count_of_what_was_read_is_a_false_zero(kind: str, tmp_path: Path) -> None:
    text = coverage(command("analyze", SAMPLES / kind, "--out", tmp_path))
    assert not re.search(r"\b0 (process|communicator|call|rank|job)", text), text
