"""Chunks of lines through decoder and matcher: one analysis."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import replace

from nccluprobe.match.decode import Decoder, Lines
from nccluprobe.match.finding import Finding
from nccluprobe.match.lines import Boots
from nccluprobe.match.matcher import Due, Matcher
from nccluprobe.match.model import Item
from nccluprobe.match.options import Options
from nccluprobe.match.signature import SignatureTable
from nccluprobe.match.skew import skews

#: Slots are closed after so many lines: memory stays bounded, and the work does
#: not grow with the number of small chunks.
_SETTLE_LINES = 50_000


class Analysis:
    """Feed lines, ask for findings.  Pure, like everything in this package."""

    def __init__(self, options: Options | None = None, native: ctypes.CDLL | None = None) -> None:
        """``native``: the native reader of call lines, from ``trace.scanner.load``."""
        self.table = SignatureTable()
        self.decoder = Decoder(self.table, native)
        self.matcher = Matcher(options, self.table)
        self._opened: set[int] = set()
        self._settled = 0  # lines until the last time
        #: What came by ``take``, for who wants to show it; None: it is not kept.
        self.kept: list[Item] | None = None
        self._native = native
        #: Boot id -> how far its clock was found ahead of that of others, ns: set right.
        self.skews: dict[str, int] = {}

    def corrected(self) -> Analysis | None:
        """An analysis to feed anew, with clocks of hosts that are wrong set right; None: none is.

        To be asked when all is read.
        """
        matcher, boots = self.matcher, self.decoder.boots
        wrong = {} if self.skews else skews(matcher.processes.values(), matcher.endpoints.values())
        if not wrong:
            return None
        other = Analysis(matcher.options, self._native)
        other.skews, other.kept = wrong, self.kept
        right = {boot: boots.offsets[boot] - ahead for boot, ahead in wrong.items()}
        other.decoder.boots = Boots(right, frozenset(right))
        return other

    def open(self, sources: Iterable[tuple[int, str]]) -> None:
        """Sources that exist: until one is read, nothing is closed that it may speak of."""
        new = [(s, name) for s, name in sources if s not in self._opened]
        self._opened.update(s for s, _ in new)
        self.matcher.feed(self.decoder.opened(s, name) for s, name in new)

    def feed(self, source: int, path: str, first_line: int, data: Lines, caught_up: bool) -> int:
        """Take a chunk of whole lines; returns how far in time the source has been read."""
        if source not in self._opened:
            self.open([(source, path)])
        self.matcher.feed(self.decoder.decode(source, path, first_line, data, caught_up))
        if self.decoder.counts.lines - self._settled >= _SETTLE_LINES:
            self._settled = self.decoder.counts.lines
            self.matcher.settle()
            if self.table.crowded:
                self.matcher.forget_signatures()
        return self.decoder.through(source)

    def heard(self, source: int, now: int) -> None:
        """A source that grows has been read to its end at this moment, unix ns."""
        self.matcher.heard(source, now)

    def take(self, items: Iterable[Item]) -> None:
        """Take items of another source than a trace; nothing is closed before the next scan."""
        if self.kept is not None:
            items = list(items)
            self.kept += items
        self.matcher.feed(items)

    def count_calls(self, n: int) -> None:
        """Calls that came by ``take``, for the report."""
        self.decoder.counts.calls += n

    def lower_limits(self, waited: int) -> None:
        """A source tells of waits of at most ``waited`` ns: that much is long."""
        o = self.matcher.options
        self.matcher.options = replace(
            o,
            missing_after=min(o.missing_after, waited),
            error_after=min(o.error_after, waited),
        )

    def scan(self, now: int | None = None) -> list[Finding]:
        """Findings to write, new or changed."""
        return self.matcher.scan(now)

    def due(self, now: int) -> Due | None:
        """When a scan may find more, though nothing is read; None: not known of any."""
        return self.matcher.due(now)
