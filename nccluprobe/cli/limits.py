"""Options that every command takes which judges traces, and what they become."""

from __future__ import annotations

from typing import Annotated

import typer

from nccluprobe import numerals
from nccluprobe.cli.numbers import seconds
from nccluprobe.errors import ExitCode, NccluprobeError
from nccluprobe.importers.files import KINDS
from nccluprobe.match.options import SECOND, Options

_LONGEST_PHASE_S = 86_400

MissingAfter = Annotated[
    float,
    typer.Option(parser=seconds(), metavar="SECONDS", help="Until an absence is written."),
]
LateAfter = Annotated[
    float, typer.Option(parser=seconds(), metavar="SECONDS", help="What makes a rank late.")
]
ErrorAfter = Annotated[
    float,
    typer.Option(parser=seconds(), metavar="SECONDS", help="Until an absence is an error."),
]
IdleOk = Annotated[
    list[str] | None,
    typer.Option(help="Communicator (name or hash pattern) that may wait for its root."),
]
PhaseLimit = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=SECONDS",
        help="How long a phase that a heartbeat file declares may last, at most a day (1800; "
        "NAME may be a pattern; 0: the phase excuses nothing). May be repeated.",
    ),
]
Lint = Annotated[
    bool, typer.Option("--lint", help="Report also what is risky but stopped nothing.")
]
SourceKind = Annotated[
    list[str] | None,
    typer.Option(
        "--from",
        metavar="KIND",
        help=f"What the files are: {', '.join(KINDS)} (default: by their contents).",
    ),
]
RunId = Annotated[str | None, typer.Option("--run-id", help="Only traces of this run.")]


def _phase(text: str) -> tuple[str, int]:
    name, _, value = text.rpartition("=")
    limit = numerals.decimal(value)
    if not name or limit is None or not 0 <= limit <= _LONGEST_PHASE_S:
        raise NccluprobeError(
            f"--phase-limit {text}: give NAME=SECONDS, from 0 to {_LONGEST_PHASE_S}, such as "
            "checkpoint=3600",
            ExitCode.USAGE,
        )
    return name, round(limit * SECOND)


def options_of(
    missing_after: float,
    late_after: float,
    error_after: float,
    idle_ok: list[str] | None,
    phase_limit: list[str] | None,
    lint: bool,
) -> Options:
    """Limits given in seconds on a command line."""
    return Options(
        missing_after=round(missing_after * SECOND),
        late_after=round(late_after * SECOND),
        error_after=round(error_after * SECOND),
        idle_ok=tuple(idle_ok or ()),
        phase_limits=tuple(_phase(text) for text in phase_limit or ()),
        lint=lint,
    )
