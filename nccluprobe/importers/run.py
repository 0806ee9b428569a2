"""Everything that was found, read and fed to an analysis."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from nccluprobe.errors import ExitCode, NccluprobeError
from nccluprobe.importers import ras
from nccluprobe.importers.common import Numbers, Told, open_file
from nccluprobe.importers.files import FR, INSPECTOR, KINDS, NCCL_LOG, RAS, Found
from nccluprobe.importers.fr import FlightRecorder
from nccluprobe.importers.fr_default import describe_default
from nccluprobe.importers.fr_dump import EMPTY, Dump, is_foreign, read_dump
from nccluprobe.importers.fr_job import jobs_of
from nccluprobe.importers.guard import read_guarded
from nccluprobe.importers.inspector import Inspector
from nccluprobe.importers.nccl_log import NcclLog
from nccluprobe.importers.ras_model import Report
from nccluprobe.importers.ras_reports import together
from nccluprobe.match.model import ProcessKey
from nccluprobe.match.pipeline import Analysis
from nccluprobe.plural import counted, verb

_NAMES = {
    FR: "flight recorder dump",
    RAS: "RAS report",
    INSPECTOR: "Inspector file",
    NCCL_LOG: "NCCL log",
}


@dataclass
class Imported:
    """What was imported, for the report."""

    told: Told = field(default_factory=Told)
    files: dict[str, int] = field(default_factory=dict)
    #: Files of which something was read.
    good: int = 0
    #: Notes for the report's coverage.
    notes: list[str] = field(default_factory=list)

    def note(self, line: str) -> None:
        """Say something once, be it of several jobs."""
        if line not in self.notes:
            self.notes.append(line)

    def all_notes(self) -> list[str]:
        """Notes and problems as lines for people."""
        lines = [f"{counted(n, _NAMES[k])} read" for k, n in self.files.items()]
        problems = self.told.problems
        lines += self.notes + problems[:20]
        if len(problems) > 20:
            lines.append(f"{counted(len(problems) - 20, 'more file')} with problems")
        return lines


def one_kind(kinds: list[str] | None) -> str | None:
    """What all files are; None: nobody says.  Refuses a kind that nobody reads, and several."""
    for kind in kinds or ():
        if kind not in KINDS:
            raise NccluprobeError(f"--from {kind}: give one of {', '.join(KINDS)}", ExitCode.USAGE)
    if len(set(kinds or ())) > 1:
        raise NccluprobeError(
            f"--from {' --from '.join(kinds or ())}: give one kind, which all files then are, or "
            "none: files are told by their contents",
            ExitCode.USAGE,
        )
    return kinds[0] if kinds else None


def import_files(found: Found, analysis: Analysis) -> Imported:
    """Read all files of ``found`` into an analysis, after the traces."""
    done = Imported()
    done.told.problems += found.problems
    numbers = Numbers(known=_known(analysis))
    if files := found.files.get(FR):
        _flight_recorder(files, analysis, numbers, done)
    if files := found.files.get(RAS):
        _ras(files, analysis, numbers, done)
    if files := found.files.get(INSPECTOR):
        inspector = Inspector(analysis.table, numbers, done.told)
        for path in _readable(files, INSPECTOR, done):
            _read(inspector.read, path, done)
        for items in inspector.items():
            analysis.take(items)
        done.good += len(inspector.processes)
    if files := found.files.get(NCCL_LOG):
        log = NcclLog(analysis.table, numbers, done.told)
        for path in _readable(files, NCCL_LOG, done):
            _read(log.read, path, done)
        for items in log.items(analysis.matcher.options.missing_after):
            analysis.take(items)
        done.good += len(log.processes)
        when = (
            "for how long its last calls have been open" if log.clocked else "when calls were made"
        )
        done.notes.append(
            f"a log does not say {when}: what is open at its end is judged as if that had "
            f"lasted {analysis.matcher.options.missing_after / 1e9:g} s"
        )
    analysis.count_calls(done.told.calls)
    return done


def _known(analysis: Analysis) -> dict[tuple[str, int], ProcessKey]:
    found = {}
    for p in analysis.matcher.processes.values():
        if p.info is not None:
            found[p.info.host, p.info.pid] = p.info.key
    return found


def _readable(files: list[tuple[str, int]], kind: str, done: Imported) -> Iterator[str]:
    for path, _ in files:
        try:
            open_file(path).close()
        except OSError as error:
            done.told.problem(f"{path}: {error.strerror}")
            continue
        except ValueError as error:
            done.told.problem(f"{path}: {error}")
            continue
        done.files[kind] = done.files.get(kind, 0) + 1
        yield path


def _read(read: Callable[[str], None], path: str, done: Imported) -> None:
    try:
        read(path)
    except OSError as error:
        done.told.problem(f"{path}: not read to its end: {error.strerror}")
    except ValueError as error:  # it was replaced since
        done.told.problem(f"{path}: {error}")


def _flight_recorder(
    files: list[tuple[str, int]], analysis: Analysis, numbers: Numbers, done: Imported
) -> None:
    reads: list[tuple[str, Dump | None]] = []
    errors: list[tuple[str, str]] = []
    for read in read_guarded(read_dump, files):
        if read.error is not None:
            errors.append((read.path, read.error))
            if is_foreign(read.error):
                continue
        reads.append((read.path, read.value))
    if len(errors) == len(files) > 1 and {why for _, why in errors} == {EMPTY}:
        folders = sorted({str(Path(path).parent) for path, _ in files})
        more = "" if len(folders) < 3 else f" and {counted(len(folders) - 2, 'more folder')}"
        done.told.problem(f"{', '.join(folders[:2])}{more}: the {len(files)} dumps are empty files")
        return
    for path, why in errors:
        done.told.problem(f"{path}: {why}")
    good = sum(dump is not None for _, dump in reads)
    if not good:
        return
    done.good += good
    done.files[FR] = good
    jobs, problems = jobs_of(reads)
    for problem in problems:
        done.told.problem(problem)
    for job in jobs:
        where = job.label.rstrip("/")
        dumps = [x.dump for x in job.members.values() if x.dump is not None]
        if not any(map(len, dumps)):
            if dumps:
                n = len(dumps)
                they = "it holds" if n == 1 else "they hold"
                done.told.problem(f"{where}: its {counted(n, 'dump', 'is')} empty: {they} no call")
            continue
        if describe_default(job):
            done.note(
                "the dumps do not describe their groups: the default group is taken to have "
                f"the {counted(len(dumps), 'rank')} that left one"
            )
        recorder = FlightRecorder(job, numbers.take(len(job.members)), analysis.table)
        recorder.read()
        if recorder.unplaced:
            done.told.problem(
                f"{where}: {counted(recorder.unplaced, 'call')} of groups that the dumps do not "
                f"describe (pg_config) {verb(recorder.unplaced, 'is')} not compared"
            )
        if not recorder.compares:
            continue
        done.note("calls have PyTorch's numbers (collective_seq_id): the first is #1")
        analysis.lower_limits(recorder.waited)
        for items in recorder.items():
            analysis.take(items)
        done.told.calls += recorder.calls
        if recorder.assumed:
            done.note(
                "a dump does not say when it was made: the ranks are taken to have waited "
                f"for the timeout of {recorder.waited / 1e9:g} s after the newest call"
            )
        if recorder.restarted:
            done.note(
                "the job was restarted inside its processes: calls of before, which are still "
                "in the dumps, are left out"
            )


def _ras(
    files: list[tuple[str, int]], analysis: Analysis, numbers: Numbers, done: Imported
) -> None:
    read: list[Report] = []
    for found in read_guarded(ras.read_report, files):
        if found.value is None:
            done.told.problem(f"{found.path}: {found.error}")
        else:
            read.append(found.value)
    reports, problems = together(read)
    for text in problems:
        done.told.problem(text)
    for report in reports:
        for items in ras.items(report, numbers):
            analysis.take(items)
    if reports:
        done.files[RAS] = len(reports)
        if any(r.is_text for r in reports):
            done.note("a RAS text does not tell of communicators whose ranks are level")
        done.good += len(reports)
