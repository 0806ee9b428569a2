"""``nccluprobe explain``: what one finding rests on, call by call."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from nccluprobe.cli.collisions import runs_apart
from nccluprobe.cli.ends import TRACERS
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
from nccluprobe.cli.paths import check_there
from nccluprobe.errors import ExitCode, NccluprobeError
from nccluprobe.importers.files import find
from nccluprobe.importers.run import one_kind
from nccluprobe.match.endpoint import Endpoint
from nccluprobe.match.finding import Finding
from nccluprobe.match.matcher import Matcher
from nccluprobe.match.status import how_ended, process_facts, rank_status
from nccluprobe.match.untimed import ALL, TIMEOUT
from nccluprobe.plural import counted, verb
from nccluprobe.report.evidence import Evidence
from nccluprobe.report.explain import Who
from nccluprobe.report.explain import explain as render
from nccluprobe.report.imported import show
from nccluprobe.report.several import MOST, Part, calls_of, explain_several
from nccluprobe.report.transfers import asked, marked
from nccluprobe.report.words import NOTHING_KNOWN, why
from nccluprobe.trace.reader import TraceReader

#: Slots shown before and after that of the finding.
_BEFORE, _AFTER = 3, 2
#: A time that is shown as more than nothing, s.
_LEAST_S = 0.05


def explain(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(help="What was given to analyze.", metavar="RUN", readable=False),
    ] = None,
    *,
    finding_id: Annotated[
        str,
        typer.Argument(
            help="Id of the finding, as in the report ([f...]); its beginning will do.",
            metavar="FINDING_ID",
        ),
    ],
    missing_after: MissingAfter = 60.0,
    late_after: LateAfter = 30.0,
    error_after: ErrorAfter = 300.0,
    idle_ok: IdleOk = None,
    phase_limit: PhaseLimit = None,
    source: SourceKind = None,
    lint: Lint = False,
    run_id: RunId = None,
) -> int:
    """Show the calls that a finding rests on, rank by rank.

    The traces are judged again: give it the options that analyze had.
    """
    if not runs:
        what = (
            "give the id of a finding after it, as analyze shows it: [f...]"
            if os.path.exists(finding_id)  # noqa: PTH110 - False also of a name that is too long
            else "give what analyze was given before it: explain RUN... FINDING_ID"
        )
        raise NccluprobeError(f"{finding_id}: {what}", ExitCode.USAGE)
    check_there(runs, "; give explain RUN... FINDING_ID")
    kind = one_kind(source)
    options = options_of(missing_after, late_after, error_after, idle_ok, phase_limit, lint)
    session = Session(find(runs, kind), options, run_id, False)
    session.analysis.kept = []
    session.load()
    if not session.has_input():
        raise nothing_read(session, runs)
    session.declare()
    session.analysis.scan(None)
    apart = [] if run_id else runs_apart(session.analysis.matcher)
    f = _pick(session.analysis.matcher.book.all(), finding_id, runs, apart)
    sys.stdout.write(_text(f, session, run_id))
    return int(ExitCode.OK)


def _pick(findings: list[Finding], wanted: str, runs: list[Path], apart: list[str]) -> Finding:
    """``apart``: names of runs that analyze judges each by itself."""
    matches = [f for f in findings if f.id.startswith(wanted)]
    if len(matches) == 1:
        return matches[0]
    ids = ", ".join(sorted(f.id for f in (matches or findings))[:20]) or "none"
    if matches:
        raise NccluprobeError(f"{wanted}: several findings begin so: {ids}", ExitCode.USAGE)
    where = ", ".join(map(str, runs))
    if apart:
        raise NccluprobeError(
            f"{wanted}: no such finding of all runs in {where} together, as communicators of "
            f"several have the same hash and ranks; give --run-id, one of: {', '.join(apart)}",
            ExitCode.USAGE,
        )
    raise NccluprobeError(
        f"{wanted}: no such finding in {where} with these limits; there are: {ids}; "
        "give the options that analyze had, such as --missing-after",
        ExitCode.USAGE,
    )


def _text(f: Finding, session: Session, run_id: str | None) -> str:
    """The finding with its calls, as read from the traces again."""
    analysis, colour = session.analysis, sys.stdout.isatty()
    calls = calls_of(f)
    places = [_place(f, *call, analysis.matcher) for call in calls[:MOST]]
    reader = TraceReader(session.found.traces, run_id)
    reader.discover(force=True)
    for chunk in reader.poll():
        lines = chunk.data.split(b"\n")
        for part in places:
            part.evidence.feed(chunk.source, lines)
    for part in places:
        show(part.evidence, analysis.kept or (), analysis.table)
    if len(places) == 1:
        return render(f, places[0].evidence, places[0].members, colour)
    return explain_several(f, places, len(calls) - len(places), colour)


def _place(f: Finding, comm_hash: str, instance: int, seq: int | None, matcher: Matcher) -> Part:
    """What is to be shown of one communicator; its calls are still to be read."""
    mine: list[Endpoint] = [
        e
        for e in matcher.endpoints.values()
        if (e.info.hash, e.info.instance) == (comm_hash, instance)
    ]
    places: dict[tuple[int, int], tuple[int, int]] = {}
    members: dict[int, Who] = {}
    for e in mine:
        rank = e.comm_rank
        if rank is None:
            continue
        comm = matcher.comm_of((e.info.source, e.info.id))
        zeros = 0 if comm is None else comm.zeros
        places[e.info.source, e.info.id] = (rank, e.entered - e.next_ord - zeros)
        now = matcher.now_of(e.process.source)
        status = rank_status(
            comm, rank, e, now, matcher.options.silent_after, "rank_alive_but_not_entered"
        )
        state = _state(e, now, why(status))
        members[rank] = Who(_name(rank, e), e.process.place(), state, e.process.rank)
    around = (0, -1) if seq is None else (seq - _BEFORE, seq + _AFTER)
    transfers = asked(marked(f)) if comm_hash == f.comm_uid_hash else {}
    untimed = {e.info.source for e in mine if e.process.info and e.process.info.untimed == ALL}
    evidence = Evidence(comm_hash, instance, around, places, transfers, untimed)
    name = next((e.info.name for e in mine if e.info.name), None)
    return Part(comm_hash, name, seq, evidence, members)


def _name(rank: int, e: Endpoint) -> str:
    """Its rank in the job, and in the communicator where that is another number."""
    job = e.process.rank
    if job is None or job == rank:
        return f"rank {rank}"
    return f"rank {job} of the job (rank {rank} of the communicator)"


def _state(e: Endpoint, now: int, text: str) -> str:
    p = e.process
    if p.end is not None and p.ended:
        return f"its process ended{how_ended(process_facts(p))}"
    if p.info is not None and p.info.untimed:
        return "" if p.info.untimed == TIMEOUT else "no later call in the log"
    newest = max(p.last_activity, e.last_t)
    quiet = max(0, now - newest) / 1e9
    inside = p.inside_now()
    if inside is not None:
        return f"inside {inside.api} for {(now - inside.t) / 1e9:.1f} s"
    state = text.removeprefix("it is alive and outside this call: ")
    state = "" if state == NOTHING_KNOWN else f": {state}"
    lost = f"; {counted(p.lost, 'event')} of it {verb(p.lost, 'was')} lost" if p.lost else ""
    # Of dumps not all is known that a process has called; other tools' files may end with a call.
    told = newest and (quiet >= _LEAST_S or (p.info is not None and p.info.front in TRACERS))
    return (f"no call for {quiet:.1f} s{state}" if told else state.removeprefix(": ")) + lost
