"""Following a job: what is read when, and how it ends."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.analysis import cover, steps
from support.tracegen import UNIX, Job, S

from nccluprobe.cli.judging import Session
from nccluprobe.importers.files import find
from nccluprobe.match.matcher import Due
from nccluprobe.match.options import Options
from nccluprobe.report.writer import FindingWriter

RANKS = 4


@pytest.fixture
def signals() -> Iterator[None]:
    """Follow takes these over."""
    kept = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


@pytest.fixture
def session(tmp_path: Path, signals: None) -> Session:
    job = Job()
    comms = job.world(RANKS)
    t = steps(comms, 5)
    steps(comms[:3], 1, start=t)
    cover(job.procs, t + 100)
    job.write(tmp_path)
    return Session(find([tmp_path], None), Options(), None, as_json=True)


def test_who_is_stopped_while_it_reads_still_judges(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scans = []
    monkeypatch.setattr(session.analysis, "scan", lambda now: scans.append(now) or [])
    monkeypatch.setattr(session, "_import", lambda: signal.raise_signal(signal.SIGTERM))
    with FindingWriter(tmp_path) as writer:
        session.follow(writer, None, None)
    assert len(scans) == 1


def test_asked_twice_it_ends_at_once(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def twice() -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(session, "_import", twice)
    with FindingWriter(tmp_path) as writer, pytest.raises(KeyboardInterrupt):
        session.follow(writer, None, None)


def test_limits_that_pass_one_after_another_leave_time_between_scans(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = frozenset({1})
    monkeypatch.setattr(session.analysis, "due", lambda began: Due(began + 1, sources))
    for took, pause in ((0.5, 0.0), (3.0, 1.5), (1.0, 2.5)):
        began = time.time_ns() - round(took * S)
        due = session._due(began, limit=True)
        assert due is not None
        assert due.sources == sources
        assert max(0, due.at - time.time_ns()) / S == pytest.approx(pause, abs=0.2)
    due = session._due(began, limit=False)  # it was not that of a limit
    assert due is not None
    assert due.at < time.time_ns()


def test_what_scans_of_limits_took_is_paid_back_by_the_time_between(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session.analysis, "due", lambda began: Due(began + 1, frozenset({1})))
    session._judged = time.monotonic() - 13  # 10 s lie between
    session._credit = -9.0
    due = session._due(time.time_ns() - 3 * S, limit=True)
    assert due is not None
    assert (due.at - time.time_ns()) / S == pytest.approx(2, abs=0.2)


def test_when_a_limit_is_over_what_it_depends_on_is_read_first(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a read of all ends there, unless that was not done for long."""
    read: list[object] = []

    def slowly(only: object = None, until: int | None = None) -> bool:
        read.append(only if until is None else until)
        while until is not None and until == soon.at and time.time_ns() < until:
            time.sleep(0.01)
        return False

    monkeypatch.setattr(session, "read", slowly)
    soon = Due(time.time_ns() + S // 20, frozenset({3}))
    later = Due(time.time_ns() + 100 * S, frozenset({3}))
    session._catch_up(soon)  # nothing was read so far
    session._catch_up(later)
    session._catch_up(soon)  # is over while all is read
    session._catch_up(soon)
    session._whole = time.monotonic() - 60
    session._catch_up(soon)
    assert read == [None, later.at, soon.at, {3}, {3}, None]


def test_a_read_ends_at_a_limit_and_goes_on_where_it_was(session: Session) -> None:
    lines = session.analysis.decoder.counts
    assert session.read(until=time.time_ns())
    one = lines.lines
    assert session.read(until=time.time_ns() + 100 * S)
    assert 0 < one < lines.lines
    whole = lines.lines
    assert not session.read()
    assert lines.lines == whole


def test_no_scan_begins_just_before_a_limit(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would take longer than what is left: the scan of the limit waited for it."""
    scans: list[int] = []

    def scan(now: int) -> list[object]:
        scans.append(now)
        time.sleep(0.4)
        return []

    limit = time.time_ns() + round(1.3 * S)
    monkeypatch.setattr(session.analysis, "scan", scan)
    monkeypatch.setattr(
        session, "_due", lambda began, **_: Due(limit, frozenset({3})) if began < limit else None
    )
    with FindingWriter(tmp_path) as writer:
        session.follow(writer, 1.5, None)
    first, at_limit, *_ = scans
    assert first < limit - S
    assert limit <= at_limit < limit + S // 5


def test_a_read_of_some_sources(session: Session) -> None:
    session.reader.discover(force=True)
    wanted = [s for s, _ in session.reader.names()][1:3]
    assert {c.source for c in session.reader.poll(only=wanted)} == set(wanted)
    assert {c.source for c in session.reader.poll()} == set(range(RANKS)) - set(wanted)


def test_a_job_is_judged_by_its_hosts_clock(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the analyzer's clock is 1000 s behind."""
    clock = UNIX - 900 * S
    monkeypatch.setattr(time, "time_ns", lambda: clock)
    with FindingWriter(tmp_path) as writer:
        session.follow(writer, 0.0, None)
    (found,) = session.analysis.matcher.book.open.values()
    assert [who["rank"] for who in found.named] == [3]
    assert "s ahead of this machine's" in session.text(colour=False)


def test_it_says_at_the_start_what_it_watches(
    session: Session, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with FindingWriter(tmp_path) as writer:
        session.follow(writer, 0.0, None)
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f"watching in {tmp_path}: 4 traces so far" in said and "after 60 s" in said


def test_it_says_that_it_waits_for_a_first_trace(
    tmp_path: Path, signals: None, capsys: pytest.CaptureFixture[str]
) -> None:
    session = Session(find([tmp_path], None), Options(), None, as_json=False)
    with FindingWriter(tmp_path) as writer:
        session.follow(writer, 0.0, None)
    assert "no trace yet, waiting for one" in capsys.readouterr().err
