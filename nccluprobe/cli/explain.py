"""``nccluprobe explain``: what one finding rests on, call by call."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

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
from nccluprobe.match.pipeline import Analysis
from nccluprobe.match.status import rank_status
from nccluprobe.report.evidence import Evidence
from nccluprobe.report.explain import Who
from nccluprobe.report.explain import explain as render
from nccluprobe.report.imported import show
from nccluprobe.report.transfers import asked, marked
from nccluprobe.report.words import NOTHING_KNOWN, why
from nccluprobe.trace.reader import TraceReader

#: Slots shown before and after that of the finding.
_BEFORE, _AFTER = 3, 2


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
        raise nothing_read(session, runs, run_id)
    session.declare()
    session.analysis.scan(None)
    matcher = session.analysis.matcher
    f = _pick(matcher.book.all(), finding_id, runs)
    evidence, members = _evidence(f, session.analysis, session.found.traces, run_id)
    sys.stdout.write(render(f, evidence, members, sys.stdout.isatty()))
    return int(ExitCode.OK)


def _pick(findings: list[Finding], wanted: str, runs: list[Path]) -> Finding:
    matches = [f for f in findings if f.id.startswith(wanted)]
    if len(matches) == 1:
        return matches[0]
    ids = ", ".join(sorted(f.id for f in (matches or findings))[:20]) or "none"
    if matches:
        raise NccluprobeError(f"{wanted}: several findings begin so: {ids}", ExitCode.USAGE)
    where = ", ".join(map(str, runs))
    raise NccluprobeError(
        f"{wanted}: no such finding in {where} with these limits; there are: {ids}; "
        "give the options that analyze had, such as --missing-after",
        ExitCode.USAGE,
    )


def _evidence(
    f: Finding, analysis: Analysis, traces: list[Path], run_id: str | None
) -> tuple[Evidence, dict[int, Who]]:
    matcher = analysis.matcher
    instance = f.details.get("instance") or 0
    mine: list[Endpoint] = [
        e
        for e in matcher.endpoints.values()
        if (e.info.hash, e.info.instance) == (f.comm_uid_hash, instance)
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
        members[rank] = Who(_name(rank, e), e.process.place(), _state(e, now, why(status)))
    seq = f.comm_seq if f.comm_seq is not None else 0
    around = (seq - _BEFORE, seq + _AFTER) if f.comm_seq is not None else (0, -1)
    evidence = Evidence(f.comm_uid_hash or "", instance, around, places, asked(marked(f)))
    reader = TraceReader(traces, run_id)
    reader.discover(force=True)
    for chunk in reader.poll():
        evidence.feed(chunk.source, chunk.data.split(b"\n"))
    show(evidence, analysis.kept or (), analysis.table)
    return evidence, members


def _name(rank: int, e: Endpoint) -> str:
    """Its rank in the job, and in the communicator where that is another number."""
    job = e.process.rank
    if job is None or job == rank:
        return f"rank {rank}"
    return f"rank {job} of the job (rank {rank} of the communicator)"


def _state(e: Endpoint, now: int, text: str) -> str:
    p = e.process
    if p.end is not None and p.ended:
        code = "" if p.end.code is None else f", code {p.end.code}"
        signal = "" if not p.end.signal else f", signal {p.end.signal}"
        return f"its process ended ({p.end.how}{code}{signal})"
    newest = max(p.last_activity, e.last_t)
    quiet = max(0, now - newest) / 1e9
    inside = p.inside_now()
    if inside is not None:
        return f"inside {inside.api} for {(now - inside.t) / 1e9:.1f} s"
    state = text.removeprefix("it is alive and outside this call: ")
    state = "" if state == NOTHING_KNOWN else f": {state}"
    lost = f"; {p.lost} events of it were lost" if p.lost else ""
    # Of dumps not all is known that a process has called.
    return (f"no call for {quiet:.1f} s{state}" if newest else state.removeprefix(": ")) + lost
