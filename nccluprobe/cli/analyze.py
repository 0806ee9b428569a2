"""``nccluprobe analyze``: read traces, name the rank that broke a collective."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from nccluprobe.errors import ExitCode, NccluprobeError
from nccluprobe.importers.files import KINDS, Found, find
from nccluprobe.importers.run import Imported, check_kind, import_files
from nccluprobe.match.finding import Finding
from nccluprobe.match.options import SECOND, Options
from nccluprobe.match.pipeline import Analysis
from nccluprobe.match.process import Who
from nccluprobe.match.status import is_silent
from nccluprobe.report.text import Summary, report, single
from nccluprobe.report.writer import FindingWriter, finding_line
from nccluprobe.trace.reader import TraceReader

SCAN_S = 1.0
_STEP_S = 0.25
_PASSES = 4
_LONGEST_S = 100_000_000  # three years


def _ns(option: str, seconds: float) -> int:
    if not seconds < _LONGEST_S:  # also for what is not a number
        raise NccluprobeError(
            f"{option} {seconds}: give seconds, at most {_LONGEST_S}", ExitCode.USAGE
        )
    return round(seconds * SECOND)


def analyze(
    folders: Annotated[
        list[Path],
        typer.Argument(
            help="Run folders, or folders with runs below; dumps, reports and logs of other tools.",
            metavar="PATH...",
        ),
    ],
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Stay and watch a job that runs.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print findings as JSON lines instead of text.")
    ] = False,
    missing_after: Annotated[
        float, typer.Option(min=0, help="Seconds until an absence is written.")
    ] = 60.0,
    late_after: Annotated[float, typer.Option(min=0, help="Seconds that make a rank late.")] = 30.0,
    error_after: Annotated[
        float, typer.Option(min=0, help="Seconds until an absence is an error.")
    ] = 300.0,
    idle_ok: Annotated[
        list[str] | None,
        typer.Option(help="Communicator (name or hash pattern) that may wait for its root."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for findings.jsonl (default: the first DIR).")
    ] = None,
    source: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="KIND",
            help=f"What the files are: {', '.join(KINDS)} (default: by their contents).",
        ),
    ] = None,
    run_id: Annotated[str | None, typer.Option("--run-id", help="Only traces of this run.")] = None,
    duration: Annotated[
        float | None, typer.Option(min=0, help="With --follow: stop after so many seconds.")
    ] = None,
    until_quiet: Annotated[
        float | None,
        typer.Option(min=0, help="With --follow: stop when nothing was written for so long."),
    ] = None,
) -> int:
    """Read traces and name the rank that broke a collective."""
    options = Options(
        missing_after=_ns("--missing-after", missing_after),
        late_after=_ns("--late-after", late_after),
        error_after=_ns("--error-after", error_after),
        idle_ok=tuple(idle_ok or ()),
    )
    for folder in folders:
        if not folder.exists():
            raise NccluprobeError(f"{folder}: no such folder", ExitCode.NO_TRACE)
    check_kind(source)
    found = find(folders, source)
    session = _Session(found, options, run_id, as_json)
    with FindingWriter(out or _default_out(folders[0])) as writer:
        if follow:
            session.follow(writer, duration, until_quiet)
        else:
            session.afterwards(writer)
    matcher = session.analysis.matcher
    if not matcher.standing.looks and not any(p.info for p in matcher.processes.values()):
        if session.imported is not None and session.imported.told.problems:
            raise NccluprobeError(session.imported.told.problems[0], ExitCode.NO_TRACE)
        raise NccluprobeError(
            f"no readable trace in {', '.join(map(str, folders))}; "
            "give the folder that attach wrote to (--out). A job that hung before attach came "
            "makes no calls and so no trace: `nccluprobe inspect` reads where its ranks stand",
            ExitCode.NO_TRACE,
        )
    session.finish()
    return int(session.exit_code())


def _default_out(folder: Path) -> Path:
    if not folder.is_dir():
        return folder.parent
    runs = folder / "tracing" if (folder / "tracing").is_dir() else folder
    inside = [p for p in runs.iterdir() if p.is_dir() and not p.is_symlink()]
    if len(inside) == 1 and not any(runs.glob("*.jsonl")):
        return inside[0]
    return runs


class _Session:
    """Reader and matcher, driven by a clock."""

    def __init__(self, found: Found, options: Options, run_id: str | None, as_json: bool) -> None:
        self.reader = TraceReader(found.traces, run_id)
        self.found = found
        self.imported: Imported | None = None
        self.analysis = Analysis(options)
        self.as_json = as_json
        self._live = False

    def read(self) -> bool:
        """Everything there is to read now; whether there was anything."""
        self.reader.discover()
        self.analysis.open(self.reader.names())
        something = False
        for c in self.reader.poll():
            through = self.analysis.feed(c.source, c.path, c.first_line, c.lines, c.caught_up)
            self.reader.at_time(c.source, through)
            something = something or bool(c.lines)
        return something

    def afterwards(self, writer: FindingWriter) -> None:
        """Read all, judge at the end of the traces."""
        self.reader.discover(force=True)
        # Files may still grow: read on until all ends are of about the same time,
        # so that no trace is taken for silent because it was read first.
        for _ in range(_PASSES):
            began = time.monotonic()
            self.read()
            if time.monotonic() - began < SCAN_S:
                break
        self._import()
        self._emit(self.analysis.scan(None), writer)

    def _import(self) -> None:
        """Read what is no trace, once."""
        if self.found.any or self.found.problems:
            self.imported = import_files(self.found, self.analysis)

    def follow(
        self, writer: FindingWriter, duration: float | None, until_quiet: float | None
    ) -> None:
        """Read and judge until told to stop."""
        self._live = True
        began = heard = time.monotonic()
        next_scan = began
        self.read()
        self._import()
        # Also where a shell started it in the background, with SIGINT ignored.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.default_int_handler)
        try:
            while True:
                now = time.monotonic()
                if self.read():
                    heard = now
                if now >= next_scan:
                    next_scan = now + SCAN_S
                    self._emit(self.analysis.scan(time.time_ns()), writer)
                if duration is not None and now - began >= duration:
                    break
                if until_quiet is not None and now - heard >= until_quiet:
                    break
                time.sleep(_STEP_S)
        except KeyboardInterrupt:
            pass
        self._emit(self.analysis.scan(time.time_ns()), writer)

    def _emit(self, findings: list[Finding], writer: FindingWriter) -> None:
        writer.write(findings)
        if self._live and not self.as_json:
            for f in findings:
                sys.stdout.write(time.strftime("%H:%M:%S  ") + single(f, sys.stdout.isatty()))
            sys.stdout.flush()
        if self.as_json and findings:
            sys.stdout.write(b"".join(finding_line(f) for f in findings).decode())
            sys.stdout.flush()

    def finish(self) -> None:
        """The report."""
        if self.as_json:
            return
        text = report(self.analysis.matcher.book.all(), self._summary(), sys.stdout.isatty())
        sys.stdout.write(text)
        sys.stdout.flush()

    def _summary(self) -> Summary:
        matcher, counts = self.analysis.matcher, self.analysis.decoder.counts
        processes = [p for p in matcher.processes.values() if not p.snapshot]
        limit = matcher.options.silent_after
        notes = [] if self.imported is None else self.imported.all_notes()
        if torn := self.reader.torn_lines():
            notes.append(f"{torn} torn last lines (writers that died, or are still writing)")
        files = self.reader.counts
        if files.unreadable_files or files.vanished_files:
            n = files.unreadable_files + files.vanished_files
            notes.append(f"{n} files could not be read to their end: {files.examples[0]}")
        if files.oversize_lines:
            notes.append(f"{files.oversize_lines} lines were too long")
        if counts.bad_lines:
            notes.append(f"{counts.bad_lines} lines could not be read: {counts.examples[0]}")
        if counts.unknown_kinds:
            notes.append(f"unknown kinds of lines: {', '.join(sorted(counts.unknown_kinds))}")
        for why, n in sorted(matcher.not_judged().items()):
            notes.append(f"{n} endpoints of communicators not judged, or not surely: {why}")
        if looks := len(matcher.standing.looks):
            notes.append(f"{looks} processes were looked at by inspect")
        if matcher.orphans:
            notes.append(f"{matcher.orphans} calls on communicators without a line")
        if counts.blind_calls:
            notes.append(f"{counts.blind_calls} calls without identity")
        now_silent: dict[Who, str] = {}
        for p in processes:
            if is_silent(p, matcher.now_of(p.source), limit):
                now_silent[p.who] = p.label()
        # Several tracers may have seen one process: it is observed while one of them goes on.
        for p in processes:
            if not is_silent(p, matcher.now_of(p.source), limit):
                now_silent.pop(p.who, None)
        return Summary(
            jobs=len(matcher.jobs.labels()),
            processes=len({p.who for p in processes}),
            calls=counts.calls,
            communicators=matcher.comms_seen,
            lost=sum(p.lost for p in processes),
            silent=list(now_silent.values()),
            notes=notes,
        )

    def exit_code(self) -> ExitCode:
        """What a script wants to know."""
        found = self.analysis.matcher.book.all()
        if any(f.severity == "error" and f.state == "open" for f in found):
            return ExitCode.FINDINGS
        return ExitCode.NOTICES if found else ExitCode.OK
