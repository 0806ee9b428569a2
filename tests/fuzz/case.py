"""One case: mutated files through reader, importers, matcher and report."""

from __future__ import annotations

import json
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from fuzz.corpus import Files, corpus
from fuzz.mutate import mixed, mutated, odd_things, write
from nccluprobe.cli.judging import Session
from nccluprobe.errors import NccluprobeError
from nccluprobe.importers.files import find
from nccluprobe.match.options import SECOND, Options
from nccluprobe.report.writer import finding_line

#: A case that takes longer has found a way to make the analyzer slow.
LIMIT_S = 60


class Slow(Exception):
    """A case took too long."""


class Uncounted(Exception):
    """Something that was read is in no count."""


@contextmanager
def _limited(seconds: int) -> Iterator[None]:
    def late(signum: int, frame: FrameType | None) -> None:
        raise Slow(f"more than {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _check_counts(session: Session) -> None:
    counts = session.analysis.decoder.counts
    unknown = sum(counts.unknown_kinds.values())
    if counts.calls + counts.bad_lines + unknown > counts.lines + session_imported(session):
        raise Uncounted(f"more than there is: {counts}")
    if counts.bad_lines and not counts.examples:
        raise Uncounted("bad lines without an example")


def session_imported(session: Session) -> int:
    """Calls that came from elsewhere than traces."""
    return 0 if session.imported is None else session.imported.told.calls


def _judge(session: Session, now: int | None) -> None:
    for finding in session.analysis.scan(now):
        json.loads(finding_line(finding))


class Fuzzer:
    """Runs cases by their seed."""

    def __init__(self) -> None:
        with tempfile.TemporaryDirectory() as scratch:
            self.corpus = corpus(Path(scratch))

    def run(self, seed: int) -> None:
        """Raises what the analyzer raises, Slow or Uncounted; nothing when all is well."""
        rng = random.Random(seed)
        # Dumps are read in processes of their own, which takes its time.
        kinds = [rng.choice(["trace"] * 12 + [k for k in self.corpus if k != "trace"])]
        if rng.random() < 0.1:
            kinds.append(rng.choice(list(self.corpus)))
        files: Files = {}
        for kind in kinds:
            tree = kind.startswith("fr_") or (kind == "ras" and rng.random() < 0.7)
            for name, data in self.corpus[kind].items():
                changed = mutated(rng, data, not tree) if rng.random() < 0.7 else data
                files[name] = changed
        folder = Path(tempfile.mkdtemp())
        try:
            with _limited(LIMIT_S):
                self._analyze(rng, folder, files)
        finally:
            shutil.rmtree(folder)
        if seed % 4 == 0:
            self._counted(random.Random(-seed - 1))

    def _counted(self, rng: random.Random) -> None:
        """Whole lines that come again or too late, links and pipes: each is in its count."""
        files: Files = {}
        twice = late = 0
        for name, data in self.corpus["trace"].items():
            files[name], again, back = mixed(rng, data)
            twice, late = twice + again, late + back
        with tempfile.TemporaryDirectory() as scratch, _limited(LIMIT_S):
            folder = Path(scratch)
            write(rng, folder, files, odd=0.0)
            left = odd_things(rng, folder / "run")
            session = Session(find([folder], None), Options(), None, as_json=True)
            session.load()
            _judge(session, None)
            counts, passed = session.analysis.decoder.counts, session.reader.counts.passed_over
            told = " ".join(session.text(False).split())
        if (counts.repeated, counts.out_of_order, set(passed)) != (twice, late, left):
            raise Uncounted(f"{twice} lines twice, {late} late, {left}: {counts}, {passed}")
        for n, what in ((twice, "count once"), (late, "put in order"), (len(left), "not read")):
            if n and what not in told:
                raise Uncounted(f"not told: {what}: {told}")

    def _analyze(self, rng: random.Random, folder: Path, files: Files) -> None:
        live = rng.random() < 0.3
        halves = {n: d[: rng.randrange(len(d) + 1)] for n, d in files.items()} if live else files
        write(rng, folder, halves)
        options = Options(lint=rng.random() < 0.2, missing_after=rng.choice([0, 5, 60]) * SECOND)
        try:
            session = Session(find([folder], None), options, None, as_json=True)
            session.load()
            _judge(session, time.time_ns() if live else None)
            if live:
                for name, data in files.items():
                    with (folder / name).open("ab") as f:
                        f.write(data[len(halves[name]) :])
                session.reader.discover(force=True)
                session.read()
                _judge(session, rng.choice([0, time.time_ns(), 2**62]))
            _judge(session, None)
        except NccluprobeError:
            return  # one clear line
        _check_counts(session)
        session.text(False)
