"""``nccluprobe analyze``: read traces, name the rank that broke a collective."""

from __future__ import annotations

import errno
import sys
from pathlib import Path
from typing import Annotated

import typer

from nccluprobe.cli import output
from nccluprobe.cli.collisions import runs_apart
from nccluprobe.cli.judging import Session, nothing_read
from nccluprobe.cli.limits import (
    ErrorAfter,
    IdleOk,
    LateAfter,
    Lint,
    MissingAfter,
    PhaseLimit,
    RunId,
    SourceKind,
    options_of,
)
from nccluprobe.cli.numbers import seconds
from nccluprobe.cli.paths import check_there
from nccluprobe.errors import ExitCode, NccluprobeError, remedy
from nccluprobe.importers.files import Found, find
from nccluprobe.importers.run import one_kind
from nccluprobe.match.options import Options
from nccluprobe.plural import counted
from nccluprobe.report.words import escape
from nccluprobe.report.writer import FINDINGS, FindingWriter


def analyze(
    folders: Annotated[
        list[Path],
        typer.Argument(
            help="Run folders, or folders with runs below; dumps, reports and logs of other tools.",
            metavar="PATH",
            readable=False,
        ),
    ],
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Stay and watch a job that runs.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print findings as JSON lines instead of text.")
    ] = False,
    missing_after: MissingAfter = 60.0,
    late_after: LateAfter = 30.0,
    error_after: ErrorAfter = 300.0,
    idle_ok: IdleOk = None,
    phase_limit: PhaseLimit = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for findings.jsonl (default: the first run folder).")
    ] = None,
    source: SourceKind = None,
    lint: Lint = False,
    run_id: RunId = None,
    duration: Annotated[
        float | None,
        typer.Option(parser=seconds(), metavar="SECONDS", help="With --follow: stop after these."),
    ] = None,
    until_quiet: Annotated[
        float | None,
        typer.Option(
            parser=seconds(),
            metavar="SECONDS",
            help="With --follow: stop when nothing was written for so long.",
        ),
    ] = None,
) -> int:
    """Read traces and name the rank that broke a collective."""
    options = options_of(missing_after, late_after, error_after, idle_ok, phase_limit, lint)
    check_there(folders)
    kind = one_kind(source)
    found = find(folders, kind)
    session = Session(found, options, run_id, as_json)
    if not follow:
        session.load()
        runs = [] if found.any or run_id is not None else runs_apart(session.analysis.matcher)
        if runs:
            return _each(runs, found, options, out, as_json, folders)
    return _judge(session, found, out, folders, follow, duration, until_quiet)


def _each(
    runs: list[str],
    found: Found,
    options: Options,
    out: Path | None,
    as_json: bool,
    folders: list[Path],
) -> int:
    """Judge runs one by one, as their communicators have one hash; the worst exit code."""
    output.say(
        "communicators of several runs have the same hash and ranks: each of the "
        f"{counted(len(runs), 'run')} is judged by itself, as with --run-id, which `explain` "
        "needs, too"
    )
    codes = set()
    for n, run in enumerate(runs):
        if not as_json:
            sys.stdout.write(f"{chr(10) * (n > 0)}Run {escape(run)}:\n\n")
        session = Session(found, options, run, as_json)
        session.load()
        try:
            codes.add(_judge(session, found, out, folders))
        except NccluprobeError as error:
            output.say(str(error))
            codes.add(int(error.code))
    worst = (ExitCode.FINDINGS, ExitCode.OUTPUT, ExitCode.NO_TRACE, ExitCode.NOTICES)
    return int(next((code for code in worst if code in codes), ExitCode.OK))


def _judge(
    session: Session,
    found: Found,
    out: Path | None,
    folders: list[Path],
    follow: bool = False,
    duration: float | None = None,
    until_quiet: float | None = None,
) -> int:
    """Judge, write, show; the exit code."""
    unwritten: NccluprobeError | None = None
    with FindingWriter(out or _default_out(found)) as writer:
        try:
            if follow:
                session.follow(writer, duration, until_quiet)
            else:
                session.afterwards(writer)
        except NccluprobeError as error:
            if error.code is not ExitCode.OUTPUT:
                raise
            unwritten = error
        except OSError as error:
            _unshown(session, error)
    if session.has_input():
        try:
            session.finish()
        except OSError as error:
            _unshown(session, error)
        if writer.made and out is None and not found.traces:
            # Nobody looks for files where no run is, and where they were not asked for.
            output.say(f"{FINDINGS} is in {writer.folder} (--out DIR: elsewhere)")
        if unwritten is None:
            code = session.exit_code()
            lacks = writer.lacks and code is not ExitCode.FINDINGS
            return int(ExitCode.OUTPUT if lacks else code)
        # The verdict is whole, and what waits for it must hear of an error all the same.
        if session.exit_code() is ExitCode.FINDINGS:
            raise NccluprobeError(str(unwritten), ExitCode.FINDINGS)
    if unwritten is not None:
        raise unwritten
    raise nothing_read(session, folders)


def _unshown(session: Session, error: OSError) -> None:
    """Standard output cannot be written: an error that cannot be shown is one all the same."""
    if error.filename is not None or error.errno not in {*output.FULL, errno.EPIPE}:
        raise error
    if session.exit_code() is not ExitCode.FINDINGS:
        raise error
    output.drop()
    if error.errno != errno.EPIPE:  # else, as with ``| head``, who asks for the code gets it
        raise NccluprobeError(
            f"the output cannot be written: {error.strerror}", ExitCode.FINDINGS
        ) from error


def _default_out(found: Found) -> Path:
    if not found.traces:
        return Path.cwd()  # dumps and logs lie in folders that are not ours
    folder = found.traces[0]
    if not folder.is_dir():
        return folder.parent
    runs = folder
    try:
        runs = folder / "tracing" if (folder / "tracing").is_dir() else folder
        inside = [p for p in runs.iterdir() if p.is_dir() and not p.is_symlink()]
    except OSError as error:
        raise NccluprobeError(
            f"{runs} cannot be read: {error.strerror}; "
            + remedy("traces belong to who runs the traced processes, others need sudo"),
            ExitCode.NO_TRACE,
        ) from error
    if len(inside) == 1 and not any(runs.glob("*.jsonl")):
        return inside[0]
    return runs
