"""What a collector that ends says of lines that are in no trace."""

from __future__ import annotations

from collections.abc import Callable

from nccluprobe.collect.admission import Stats
from nccluprobe.errors import ExitCode, NccluprobeError
from nccluprobe.plural import counted


def say_unwritten(stats: Stats, say: Callable[[str], None]) -> None:
    """A line where any was not written, and one where traces do not tell so."""
    if stats.skipped:
        say(
            f"{counted(stats.skipped, 'line', 'was')} not written: no room, or no way to the "
            f"files{'' if stats.unclosed else '; the traces say of which processes'}"
        )
    if stats.unclosed:
        say(
            f"{counted(stats.unclosed, 'trace', 'has')} no closing lines, as they could not be "
            "written: `analyze` says that it is not known what is missing there"
        )


def refuse_unclosed(some: list[Stats]) -> None:
    """NccluprobeError (OUTPUT) where there are traces that do not tell what they lack."""
    if any(stats.unclosed for stats in some):
        raise NccluprobeError(
            "not all that was captured is written or counted in the traces; make room, or give "
            "another --out folder",
            ExitCode.OUTPUT,
        )
