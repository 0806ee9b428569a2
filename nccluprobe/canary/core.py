"""What every operation stands on: one communicator, its stream, its health."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

from nccluprobe.canary.buffers import DeviceBuffer
from nccluprobe.canary.cuda import Cuda
from nccluprobe.canary.errors import (
    ArgumentError,
    CudaError,
    DeadlineError,
    NcclError,
    UnhealthyError,
)
from nccluprobe.canary.health import Health, HostCalls
from nccluprobe.canary.kernel import AddKernels
from nccluprobe.canary.memory import Memory
from nccluprobe.canary.nccl import Nccl
from nccluprobe.nccl.enums import (
    DATATYPE_BYTES,
    DATATYPE_IDS,
    IN_PROGRESS,
    REDUCTION_OPS,
    SUCCESS,
)

REDUCTION_IDS = {name: value for value, name in REDUCTION_OPS.items()}

#: Polls without a pause, then with one that grows: a GPU's latency is not hidden by
#: sleeping, and a long wait costs no core.
_SPIN_SECONDS = 0.0005
_FIRST_PAUSE, _LONGEST_PAUSE = 0.00005, 0.002


class Core:
    """Communicator `comm` of `rank` among `world`, with `stream` for its work.

    ``nccl`` and ``cuda`` are the loaded libraries; a fault is planted by
    calling them directly with ``comm`` and ``stream``.
    """

    rank: int
    world: int
    nccl: Nccl
    cuda: Cuda
    calls: HostCalls
    memory: Memory
    comm: int
    stream: int
    deadline: float
    capacity: int
    kernels: AddKernels | None
    receive_buffer: DeviceBuffer | None

    def __init__(self) -> None:
        self.health = Health()
        self.comm = 0
        self._comm_lock = threading.Lock()
        self._local = threading.local()

    @property
    def healthy(self) -> bool:
        """False after a failure, an abort or a missed deadline, until a reconnect."""
        return self.health.healthy

    # ---- checks before a call -----------------------------------------------------------

    def _datatype(self, dtype: str) -> tuple[int, int]:
        """ncclDataType_t and bytes of one element."""
        if dtype not in DATATYPE_IDS:
            raise ArgumentError(f"datatype {dtype!r}: give one of {', '.join(DATATYPE_IDS)}")
        return DATATYPE_IDS[dtype], DATATYPE_BYTES[dtype]

    def _reduction(self, op: str) -> int:
        if op not in REDUCTION_IDS:
            raise ArgumentError(f"reduction {op!r}: give one of {', '.join(REDUCTION_IDS)}")
        return REDUCTION_IDS[op]

    def _peer(self, peer: int, what: str = "peer") -> int:
        if not isinstance(peer, int) or not 0 <= peer < self.world:
            raise ArgumentError(f"{what} {peer}: the communicator has ranks 0 to {self.world - 1}")
        return peer

    def _fits(self, buffer: DeviceBuffer, count: int, size: int, what: str) -> int:
        """`count` elements as bytes; ArgumentError unless they fit `buffer`."""
        if not isinstance(count, int):  # NCCL would be inside a group when ctypes says so
            raise ArgumentError(f"{what}: count {count!r}: give a whole number of elements")
        nbytes = count * size
        if count < 0 or nbytes > buffer.nbytes:
            raise ArgumentError(
                f"{what}: {count} elements are {nbytes} bytes, its buffer has {buffer.nbytes}"
            )
        return nbytes

    # ---- groups -------------------------------------------------------------------------

    @property
    def grouped(self) -> bool:
        """True for a thread that is inside ``group()``."""
        return getattr(self._local, "depth", 0) > 0

    @contextlib.contextmanager
    def group(self) -> Iterator[None]:
        """Operations inside take effect together at the end (ncclGroupStart, ncclGroupEnd).

        Inside, nothing is waited for, and a two-rank all_reduce is
        ncclAllReduce, as its local add could not be queued before the end.
        """
        generation = self.health.require("group")
        self._local.depth = getattr(self._local, "depth", 0) + 1
        try:
            with self._failing(generation, "ncclGroupEnd"), self.nccl.group():
                yield
        finally:
            self._local.depth -= 1
        self._after("ncclGroupEnd", generation)

    # ---- after a call -------------------------------------------------------------------

    @contextlib.contextmanager
    def _failing(self, generation: int, function: str) -> Iterator[None]:
        """An error of NCCL or of the driver inside marks the communicator unhealthy."""
        try:
            yield
        except (NcclError, CudaError) as error:
            self.health.fail(generation, str(error) or function, raised=True)
            raise

    def _after(self, function: str, generation: int) -> None:
        """Asks NCCL for an asynchronous error, as after each collective."""
        if self.grouped:
            return
        with self._comm_lock:  # abort must not free the communicator meanwhile
            self.health.current(generation, function)
            if not self.comm:
                raise UnhealthyError(f"{function} did not complete, its communicator was aborted")
            result = self.nccl.async_error(self.comm)
        if result not in (SUCCESS, IN_PROGRESS):
            error = self.nccl.error(function, result)
            self.health.fail(generation, f"asynchronous error: {error}", raised=True)
            raise error

    def _complete(
        self, function: str, generation: int, stream: int, deadline: float | None
    ) -> None:
        """Polls until the work queued on `stream` is done.

        DeadlineError after `deadline` seconds (None: never); NcclError for an
        asynchronous error; both mark the communicator unhealthy.
        """
        start = time.monotonic()
        pause = 0.0
        while True:
            with self._failing(generation, function):
                done = self.cuda.stream_done(stream)
            elapsed = time.monotonic() - start
            if done or pause:
                # Also at the end: what an abort drops looks complete on the stream.
                self._after(function, generation)
            if done:
                return
            if deadline is not None and elapsed > deadline:
                line = f"{function} was not complete after {deadline:g} s"
                self.health.fail(generation, line, raised=True)
                raise DeadlineError(f"{line}: a rank did not come, or the fabric stands still")
            if elapsed > _SPIN_SECONDS:
                pause = min(_LONGEST_PAUSE, max(_FIRST_PAUSE, pause * 1.5))
                time.sleep(pause)

    def synchronize(self, deadline: float | None = None) -> None:
        """Waits for the work on the communicator's stream.

        `deadline` in seconds (default: none), then DeadlineError. An
        asynchronous error or an abort by another thread ends the wait.
        """
        generation = self.health.require("synchronize")
        self._complete("synchronize", generation, self.stream, deadline)

    def alloc(self, nbytes: int) -> DeviceBuffer:
        """New device memory of `nbytes` > 0; ``close()`` frees what was not freed before."""
        return self.memory.alloc(nbytes)
