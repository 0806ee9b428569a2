"""The newest collectives of an endpoint, kept when their slots are closed."""

from __future__ import annotations

import numpy as np

from nccluprobe.match import model as m


class Tail:
    """The newest collectives of an endpoint: ordinals, entries, streams."""

    KEPT = 64

    __slots__ = ("ord", "stream", "t")

    def __init__(self) -> None:
        none = np.empty(0, np.int64)
        self.ord: m.Int64 = none
        self.t: m.Int64 = none
        self.stream: m.Int64 = none

    def add(self, b: m.Batch) -> None:
        """Take the newest rows of a batch."""
        if b.stream is None:
            return
        n = self.KEPT
        if len(b) >= n:
            self.ord, self.t = b.ord[-n:].copy(), b.t_enter[-n:].copy()
            self.stream = b.stream[-n:].copy()
            return
        self.ord = np.concatenate((self.ord, b.ord))[-n:]
        self.t = np.concatenate((self.t, b.t_enter))[-n:]
        self.stream = np.concatenate((self.stream, b.stream))[-n:]
