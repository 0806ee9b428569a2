"""One operation, datatype and size: its buffers, its call, its check, its bandwidth.

Sizes and bandwidths are those of NCCL's own tests: the size is that of the
larger of a rank's two buffers, algorithm bandwidth is size over time, and bus
bandwidth is that times a factor that makes operations comparable.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

from nccluprobe.canary.backend import NcclBackend
from nccluprobe.canary.buffers import DeviceBuffer
from nccluprobe.canary.checks import (
    Wrong,
    compare_bytes,
    compare_values,
    given,
    moved,
    result,
)
from nccluprobe.canary.kernel import ADD_KERNELS
from nccluprobe.nccl.enums import DATATYPE_BYTES

OPERATIONS = (
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "sendrecv",
    "barrier",
)
REDUCTIONS = frozenset({"all_reduce", "reduce", "reduce_scatter"})
ROOTED = frozenset({"broadcast", "reduce"})
#: Operations whose buffers hold a part for every rank.
_PARTS = frozenset({"all_gather", "reduce_scatter", "all_to_all"})
_POISON = 0xA5


def bus_factor(op: str, world: int) -> float:
    """Bus bandwidth over algorithm bandwidth, as NCCL's tests define it."""
    if op == "all_reduce":
        return 2 * (world - 1) / world
    if op in _PARTS:
        return (world - 1) / world
    return 1.0


@dataclass
class Case:
    """`op` on `nbytes` of `dtype`, rounded down to whole elements, at least one.

    ``open`` allocates device memory, ``close`` frees it. `room`: how many
    times the size is allocated, for a fault that passes a larger count.
    """

    op: str
    dtype: str
    nbytes: int
    redop: str = "sum"
    root: int = 0
    room: int = 1
    count: int = field(init=False, default=0)
    seed: int = field(init=False, default=0)

    def open(self, backend: NcclBackend) -> None:
        self.backend = backend
        world, size = backend.world, DATATYPE_BYTES[self.dtype]
        parts = world if self.op in _PARTS else 1
        self.count = 0 if self.op == "barrier" else max(1, self.nbytes // (size * parts))
        #: Bytes of one part, and of the larger buffer.
        self.part = self.count * size
        self.nbytes = self.part * parts
        room = self.room * max(self.nbytes, 8)
        self._send: DeviceBuffer | None = backend.alloc(room)
        self._recv: DeviceBuffer | None = backend.alloc(room)

    def close(self) -> None:
        for buffer in (self._send, self._recv):
            if buffer is not None:
                buffer.free()
        self._send = self._recv = None

    @property
    def label(self) -> str:
        reduction = f" {self.redop}" if self.op in REDUCTIONS else ""
        return f"{self.op}{reduction} {self.dtype} {self.nbytes} B"

    def paired(self, world: int) -> bool:
        """Whether the backend makes it of a send and a receive in place of one collective."""
        if self.op in ("sendrecv", "all_to_all"):
            return True
        reduction = self.op == "all_reduce" and self.redop == "sum" and self.dtype in ADD_KERNELS
        return reduction and world == 2

    @property
    def api(self) -> str:
        """NCCL's function, for the truth of a fault."""
        names = {"barrier": "ncclAllReduce", "sendrecv": "ncclSend", "all_to_all": "ncclSend"}
        words = "".join(word.capitalize() for word in self.op.split("_"))
        return names.get(self.op, "nccl" + words)

    # ---- data -----------------------------------------------------------------------------

    def _buffers(self) -> tuple[DeviceBuffer, DeviceBuffer]:
        assert self._send is not None and self._recv is not None
        return self._send, self._recv

    def fill(self, seed: int) -> None:
        """Writes the input of this rank and spoils the output; waits for the copy."""
        self.seed = seed
        if self.op == "barrier":
            return
        send, recv = self._buffers()
        recv.fill(_POISON)
        rank, world = self.backend.rank, self.backend.world
        if self.op in REDUCTIONS:
            n = self.count * (world if self.op == "reduce_scatter" else 1)
            send.write(given(rank, world, n, self.dtype, self.redop, seed))
        elif self.op == "broadcast":
            if rank == self.root:
                recv.write(moved(rank, self.part, seed))
        elif self.op == "all_to_all":
            send.write(b"".join(moved(rank, self.part, seed, to) for to in range(world)))
        else:
            send.write(moved(rank, self.part, seed))

    def check(self) -> Wrong | None:
        """Compares this rank's output, once the stream has been waited for."""
        if self.op == "barrier" or (self.op == "reduce" and self.backend.rank != self.root):
            return None
        _, recv = self._buffers()
        rank, world, seed = self.backend.rank, self.backend.world, self.seed
        if self.op in REDUCTIONS:
            start = rank * self.count if self.op == "reduce_scatter" else 0
            expected = result(world, self.count, self.dtype, self.redop, seed, start)
            return compare_values(recv.read(self.part), expected, world, self.dtype, self.redop)
        if self.op == "broadcast":
            want = moved(self.root, self.part, seed)
        elif self.op == "all_gather":
            want = b"".join(moved(source, self.part, seed) for source in range(world))
        elif self.op == "all_to_all":
            want = b"".join(moved(source, self.part, seed, rank) for source in range(world))
        else:
            want = moved((rank - 1) % world, self.part, seed)
        return compare_bytes(recv.read(len(want)), want)

    # ---- the call -------------------------------------------------------------------------

    def call(
        self,
        *,
        op: str | None = None,
        count: int | None = None,
        dtype: str | None = None,
        redop: str | None = None,
        root: int | None = None,
    ) -> None:
        """Queues the operation; a fault gives other arguments than the case's own.

        A barrier is also waited for.
        """
        b = self.backend
        send, recv = self._buffers()
        op = self.op if op is None else op
        count = self.count if count is None else count
        dtype = dtype or self.dtype
        redop = redop or self.redop
        root = self.root if root is None else root
        if op == "all_reduce":
            b.all_reduce(send, count, dtype, redop, out=recv)
        elif op == "broadcast":
            with b.group():  # inside a group a broadcast is not waited for
                b.broadcast(recv, count, dtype, root)
        elif op == "reduce":
            b.reduce(send, count, dtype, root, redop, out=recv)
        elif op == "all_gather":
            b.all_gather(send, recv, count, dtype)
        elif op == "reduce_scatter":
            b.reduce_scatter(send, recv, count, dtype, redop)
        elif op == "all_to_all":
            b.all_to_all(send, recv, count, dtype)
        elif op == "sendrecv":
            with b.group() if b.world > 1 else contextlib.nullcontext():
                if b.world == 1:
                    b.cuda.copy_async(recv.pointer, send.pointer, self.part, b.stream)
                else:
                    b.send(send, count, dtype, (b.rank + 1) % b.world)
                    b.recv(recv, count, dtype, (b.rank - 1) % b.world)
        else:
            b.barrier(b.deadline)
