"""Options that take a number: one line says what is wrong with it, and what may be given."""

from __future__ import annotations

from collections.abc import Callable

import typer

from nccluprobe import numerals

#: No wait is longer: about three years.
LONGEST_S = 100_000_000
_LARGEST = (1 << 53) - 1


def whole(least: int = 0, most: int = _LARGEST) -> Callable[[str | int], int]:
    """A parser of whole numbers from ``least`` to ``most``."""

    def parse(value: str | int) -> int:
        number = numerals.whole(str(value))
        if number is None or not least <= number <= most:
            raise typer.BadParameter(f"{value!r}: give a whole number, {_range(least, most)}")
        return number

    return parse


def seconds(least: float = 0, most: float = LONGEST_S) -> Callable[[str | float], float]:
    """A parser of times in seconds from ``least`` to ``most``."""

    def parse(value: str | float) -> float:
        number = numerals.decimal(str(value))
        if number is None or not least <= number <= most:
            raise typer.BadParameter(f"{value!r}: give seconds, {_range(least, most)}")
        return number

    return parse


def _range(least: float, most: float) -> str:
    up_to = "" if most == _LARGEST else f" to {most:.0f}"
    return f"from {least:g}{up_to}" if up_to else f"{least:g} or more"
