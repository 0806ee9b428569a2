"""Device memory with a size, so that a count can be checked before NCCL sees it."""

from __future__ import annotations

from collections.abc import Callable

from nccluprobe.canary.cuda import Cuda
from nccluprobe.canary.errors import ArgumentError


class DeviceBuffer:
    """`nbytes` of device memory at `pointer`. ``free`` may be called twice."""

    def __init__(
        self, cuda: Cuda, pointer: int, nbytes: int, release: Callable[[int], None] | None = None
    ) -> None:
        """`release` frees the pointer; None where the memory is another's."""
        self._cuda = cuda
        self.pointer = pointer
        self.nbytes = nbytes
        self._release = release

    @classmethod
    def alloc(
        cls, cuda: Cuda, nbytes: int, release: Callable[[int], None] | None = None
    ) -> DeviceBuffer:
        """`nbytes` > 0 of new device memory, its content undefined."""
        if nbytes <= 0:
            raise ArgumentError(f"a buffer of {nbytes} bytes: give at least one")
        return cls(cuda, cuda.alloc(nbytes), nbytes, release or cuda.free)

    def write(self, data: bytes | bytearray | memoryview, offset: int = 0) -> None:
        """Copies host bytes to `offset`; work queued on streams is not waited for."""
        self._within(offset, len(data))
        self._cuda.write(self.pointer + offset, data)

    def read(self, nbytes: int | None = None, offset: int = 0) -> bytes:
        """Host copy of `nbytes` (default: all behind `offset`); synchronise first."""
        wanted = self.nbytes - offset if nbytes is None else nbytes
        self._within(offset, wanted)
        return self._cuda.read(self.pointer + offset, wanted)

    def fill(self, value: int = 0) -> None:
        """Sets every byte to `value`."""
        self._cuda.fill(self.pointer, value, self.nbytes)

    def view(self, offset: int, nbytes: int) -> DeviceBuffer:
        """A part of this buffer; the memory stays this buffer's."""
        self._within(offset, nbytes)
        return DeviceBuffer(self._cuda, self.pointer + offset, nbytes)

    def free(self) -> None:
        if self._release is not None and self.pointer:
            pointer, self.pointer = self.pointer, 0
            self.nbytes = 0
            self._release(pointer)

    def _within(self, offset: int, nbytes: int) -> None:
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise ArgumentError(
                f"{nbytes} bytes at {offset} do not fit a buffer of {self.nbytes} bytes"
            )
