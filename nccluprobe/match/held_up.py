"""When a main thread was in a state in which its process works for nobody and waits for no work."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

#: States of the main thread in which a process does not work for anybody.
HELD = frozenset({"stopped", "uninterruptible", "dead"})
_KEPT = 64


@dataclass
class HeldUp:
    """Intervals in which it was seen in such a state each time, unix ns."""

    _spans: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=_KEPT))
    _lasts: bool = False

    def note(self, main: str | None, t: int) -> None:
        """Take a look at the main thread."""
        held = main in HELD
        if held:
            since = self._spans.pop()[0] if self._lasts else t
            self._spans.append((since, t))
        self._lasts = held

    def longest(self, start: int, end: int) -> int:
        """For how long it was held at a stretch between two moments, ns."""
        return max((min(b, end) - max(a, start) for a, b in self._spans), default=0)
