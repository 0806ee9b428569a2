"""The book of findings: written once while they last, resolved, written again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from nccluprobe.match.finding import Finding

_KEPT_RESOLVED = 10_000


class Book:
    """Turns what is true now into what is to be written."""

    def __init__(self) -> None:
        self.open: dict[tuple[Any, ...], Finding] = {}
        #: Newest state of findings that have ended, oldest first.
        self.ended: dict[tuple[Any, ...], Finding] = {}
        self.written = 0

    def update(self, current: Iterable[Finding], now: int) -> list[Finding]:
        """Take all findings that hold now; returns those to write, in order.

        A finding that holds on is written again only when its kind, severity or
        role changes.  One that is not among ``current`` any more has ended.
        """
        out: list[Finding] = []
        seen: set[tuple[Any, ...]] = set()
        for f in current:
            seen.add(f.key)
            before = self.open.get(f.key)
            if f.state == "resolved":
                self._close(f, out)
                continue
            if before is not None:
                f = replace(f, detected_at=before.detected_at)
                changed = (f.hang_type, f.severity, f.role, f.downstream_of) != (
                    before.hang_type,
                    before.severity,
                    before.role,
                    before.downstream_of,
                )
            else:
                changed = True
            self.ended.pop(f.key, None)
            self.open[f.key] = f
            if changed:
                out.append(f)
        for key in [k for k in self.open if k not in seen]:
            f = self.open.pop(key)
            f = f.resolved(max(now, f.detected_at))  # which its own hosts' clock told
            self._keep(f)
            out.append(f)
        self.written += len(out)
        return out

    def _close(self, f: Finding, out: list[Finding]) -> None:
        if f.key in self.ended:
            return
        before = self.open.pop(f.key, None)
        if before is None:
            out.append(replace(f, state="open"))
        else:
            f = replace(f, detected_at=before.detected_at)
        self._keep(f)
        out.append(f)

    def _keep(self, f: Finding) -> None:
        self.ended[f.key] = f
        if len(self.ended) > _KEPT_RESOLVED:
            del self.ended[next(iter(self.ended))]

    def all(self) -> list[Finding]:
        """Every finding in its newest state."""
        return [*self.open.values(), *self.ended.values()]
