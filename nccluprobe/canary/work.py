"""A handle of an asynchronous operation."""

from __future__ import annotations

from collections.abc import Callable

from nccluprobe.canary.cuda import Cuda


class Work:
    """An operation queued on its own stream, between two events."""

    def __init__(
        self, cuda: Cuda, start: int, end: int, complete: Callable[[float | None], None]
    ) -> None:
        self._cuda = cuda
        self._start = start
        self._end = end
        self._complete = complete
        self.released = False
        self._elapsed: float | None = None

    def done(self) -> bool:
        """True when the operation is complete; does not wait."""
        return self.released or self._cuda.event_done(self._end)

    def wait(self, deadline: float | None = None) -> None:
        """Waits on the host; DeadlineError after `deadline` seconds (default: none)."""
        self._complete(deadline)

    def elapsed_ms(self) -> float:
        """Milliseconds on the stream from start to end; waits for the end."""
        if self._elapsed is None:
            self._complete(None)
            self._elapsed = self._cuda.elapsed_ms(self._start, self._end)
        return self._elapsed

    def release(self) -> None:
        """Gives the events back; ``NcclBackend.close`` does it for works that were not."""
        if not self.released:
            self.released = True
            self._cuda.event_destroy(self._start)
            self._cuda.event_destroy(self._end)
