"""Options that take a number: one line says what is wrong with it, and what may be given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from nccluprobe import numerals

#: No wait is longer: about three years.
_LONGEST_S = 100_000_000
_LARGEST = (1 << 53) - 1


def whole(least: int = 0, most: int = _LARGEST) -> Callable[[str | int], int]:
    """A parser of whole numbers from ``least`` to ``most``."""

    def parse(value: str | int) -> int:
        number = numerals.whole(str(value))
        if number is None or not least <= number <= most:
            raise typer.BadParameter(f"{value!r}: give a whole number, {_range(least, most)}")
        return number

    return parse


def seconds(least: float = 0, most: float = _LONGEST_S) -> Callable[[str | float], float]:
    """A parser of times in seconds from ``least`` to ``most``."""

    def parse(value: str | float) -> float:
        number = numerals.decimal(str(value))
        if number is None or not least <= number <= most:
            raise typer.BadParameter(f"{value!r}: give seconds, {_range(least, most)}")
        return number

    return parse


def _range(least: float, most: float) -> str:
    return f"{least:g} or more" if most == _LARGEST else f"from {least:g} to {most:.0f}"


MAX_BYTES = 2_000_000_000
MaxBytes = Annotated[
    int,
    typer.Option(
        "--max-bytes",
        parser=whole(1 << 16),
        metavar="BYTES",
        help="Bound of the trace per process.",
    ),
]
