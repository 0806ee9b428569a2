"""Following a job: what is read when, and how it ends."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.analysis import cover, steps
from support.tracegen import Job, S

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
    for took in (0.0, 3.0):
        began = time.time_ns() - round(took * S)
        due = session._due(began)
        assert due is not None
        assert due.sources == sources
        assert due.at - time.time_ns() > (max(took, 0.25) - 0.1) * S


def test_near_a_limit_only_what_it_depends_on_is_read(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[object] = []
    monkeypatch.setattr(session, "read", lambda only=None: bool(read.append(only)))
    soon = Due(time.time_ns() + S // 20, frozenset({3}))
    session._catch_up(soon)  # how long a whole read takes is not known
    session._takes = 1.0
    session._catch_up(soon)
    assert time.time_ns() >= soon.at
    session._catch_up(Due(time.time_ns() + 100 * S, frozenset({3})))
    session._takes, session._whole = 1.0, time.monotonic() - 60
    session._catch_up(soon)  # all has not been read for long
    assert read == [None, {3}, None, None]


def test_a_read_of_some_sources(session: Session) -> None:
    session.reader.discover(force=True)
    wanted = [s for s, _ in session.reader.names()][1:3]
    assert {c.source for c in session.reader.poll(only=wanted)} == set(wanted)
    assert {c.source for c in session.reader.poll()} == set(range(RANKS)) - set(wanted)
