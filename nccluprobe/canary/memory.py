"""Device memory of a backend, freed when that cannot block.

The driver's free waits for all that runs on the device. A collective that waits for a rank
that never comes runs until its communicator is aborted: before that no memory is freed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from nccluprobe.canary.buffers import DeviceBuffer
from nccluprobe.canary.cuda import Cuda


class Memory:
    """What was allocated on one device and not yet freed."""

    def __init__(self, cuda: Cuda, stuck: Callable[[], bool]) -> None:
        """`stuck` says whether work on the device may never end."""
        self._cuda = cuda
        self._stuck = stuck
        self._lock = threading.Lock()
        self._live: set[int] = set()
        self._later: list[int] = []

    def alloc(self, nbytes: int) -> DeviceBuffer:
        """New memory of `nbytes` > 0; its ``free`` comes back here."""
        buffer = DeviceBuffer.alloc(self._cuda, nbytes, self.free)
        with self._lock:
            self._live.add(buffer.pointer)
        return buffer

    def free(self, pointer: int) -> None:
        """Now, or at the next ``flush`` where that might block; nothing when it is freed."""
        with self._lock:
            if pointer not in self._live:
                return
            self._live.remove(pointer)
            if self._stuck():
                self._later.append(pointer)
                return
        self._cuda.free(pointer)

    def flush(self) -> None:
        """Frees what had to wait, once the communicators are aborted."""
        while True:
            with self._lock:
                if not self._later:
                    return
                pointer = self._later.pop()
            self._cuda.free(pointer)

    def close(self) -> None:
        """Frees everything, also what its user did not."""
        with self._lock:
            self._later += self._live
            self._live.clear()
        self.flush()
