"""NcclBackend: made, split, aborted, reconnected and closed."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from functools import partial
from types import TracebackType

from nccluprobe import numerals
from nccluprobe.canary import bootstrap
from nccluprobe.canary.cuda import Cuda
from nccluprobe.canary.errors import (
    OR_SIM,
    ArgumentError,
    CanaryError,
    CudaError,
    LibraryError,
    NcclError,
)
from nccluprobe.canary.health import HostCalls
from nccluprobe.canary.kernel import PTX, AddKernels
from nccluprobe.canary.launch import (
    DEFAULT_HOST,
    DEFAULT_PORT,
    from_environment,
    job_name,
    nccl_settings,
)
from nccluprobe.canary.libraries import find_cuda, find_nccl
from nccluprobe.canary.memory import Memory
from nccluprobe.canary.nccl import Nccl
from nccluprobe.canary.operations import Operations
from nccluprobe.canary.registration import Registration
from nccluprobe.canary.submission import SubmissionLog
from nccluprobe.nccl.enums import SPLIT_NOCOLOR

logger = logging.getLogger("nccluprobe.canary")

DEFAULT_CAPACITY = 64 << 20
DEFAULT_DEADLINE = 30.0
DEFAULT_BOOTSTRAP_TIMEOUT = 600.0
_LARGEST_INT = (1 << 31) - 1


class NcclBackend(Registration, Operations):
    """One rank of an NCCL communicator, with a stream and a receive buffer of its own.

    Making it is collective: it returns when all `world` ranks have come.
    Use it as a context manager, or ``close()`` it; both also work after an
    error. The attributes ``nccl``, ``cuda``, ``comm`` and ``stream`` are for
    calls by hand.
    """

    _closed: bool

    def __init__(
        self,
        rank: int,
        world: int,
        *,
        address: tuple[str, int] = (DEFAULT_HOST, DEFAULT_PORT),
        device: int | None = None,
        nccl: str | os.PathLike[str] | None = None,
        cuda: str | os.PathLike[str] | None = None,
        capacity: int = DEFAULT_CAPACITY,
        deadline: float = DEFAULT_DEADLINE,
        bootstrap_timeout: float = DEFAULT_BOOTSTRAP_TIMEOUT,
        comm_name: str | None = None,
        init_rank: int | None = None,
        before_init: Callable[[], None] | None = None,
        ptx: bytes = PTX,
    ) -> None:
        """Bootstraps at `address` (rank 0's) and makes the communicator.

        rank, world: ArgumentError unless 0 <= rank < world.
        device: CUDA device; default $LOCAL_RANK, else `rank`, modulo the devices here.
        nccl, cuda: paths of the libraries; see nccluprobe.canary.libraries.
        capacity: bytes of the two-rank receive buffer; zero is refused with two ranks.
        deadline: seconds for a broadcast, and for the watchdog over the host's calls.
        bootstrap_timeout: seconds to wait for the other ranks.
        comm_name: NCCL's name of the communicator, from 2.27 on.
        init_rank: the rank given to NCCL in place of `rank`: a fault to plant.
        before_init: called between bootstrap and NCCL's init, also at a reconnect
            (the attribute may be set later): the place to keep a rank from coming.
        ptx: the add kernels; when they cannot be loaded, that is logged, and a
            two-rank all_reduce says so after it has posted its send and receive.
        """
        super().__init__()
        bootstrap.check_world(rank, world)
        if capacity < 0 or (world == 2 and capacity == 0):
            raise ArgumentError(f"capacity {capacity}: two ranks need a receive buffer; give more")
        if deadline <= 0:
            raise ArgumentError(f"deadline {deadline:g} s: give more than zero")
        self.rank, self.world = rank, world
        self.capacity, self.deadline = capacity, deadline
        self.reconnects = 0
        self.address = address
        self._bootstrap_timeout = bootstrap_timeout
        self._comm_name = comm_name
        self._init_rank = rank if init_rank is None else init_rank
        self.before_init = before_init
        self._parent: NcclBackend | None = None
        self._prepare()
        self.calls = HostCalls(SubmissionLog.from_environment(rank), deadline)
        try:
            self.nccl = Nccl(find_nccl(nccl), self.calls)
            self.cuda = Cuda(find_cuda(cuda))
            self.memory = Memory(self.cuda, self._stuck)
            self._log_start()
            self._open_device(device)
            self.calls.start()
            self.kernels = self._load_kernels(ptx)
            self._open_streams()
            self._connect(address)
        except BaseException:
            self.close(abort=True)
            raise

    @classmethod
    def from_environment(cls, **options: object) -> NcclBackend:
        """As torchrun, Slurm, Open MPI or PMI launched this process; `options` as for the class.

        ArgumentError when no launcher's variables are set.
        """
        launch = from_environment()
        if launch is None:
            raise ArgumentError(
                "no launcher's variables (RANK and WORLD_SIZE, or Slurm's, Open MPI's, PMI's) "
                "are set; give rank and world size"
            )
        settings: dict[str, object] = {"address": launch.address, "device": launch.local_rank}
        # Options are those of __init__, passed on: it checks them.
        return cls(launch.rank, launch.world, **{**settings, **options})  # type: ignore[arg-type]

    @property
    def simulated(self) -> bool:
        """True when NCCL is the stand-in that needs no GPU."""
        return self.nccl.simulated

    # ---- the communicator's life --------------------------------------------------------

    def split(self, color: int, key: int = 0) -> NcclBackend | None:
        """Collective (ncclCommSplit): a backend over the ranks of the same `color`.

        Ranks are ordered by `key`. None for the colour SPLIT_NOCOLOR (-1). The
        child has its own stream, health and receive buffer, is closed before
        its parent, and does not survive the parent's reconnect.
        """
        generation = self.health.require("split")
        if not SPLIT_NOCOLOR <= color <= _LARGEST_INT:
            raise ArgumentError(f"colour {color}: give -1 (no part) or more, below 2**31")
        if not -_LARGEST_INT <= key <= _LARGEST_INT:
            raise ArgumentError(f"key {key}: give a 32-bit number")
        with self._failing(generation, "ncclCommSplit"):
            comm = self.nccl.split(self.comm, color, key)
        self._after("ncclCommSplit", generation)
        if not comm:
            return None
        child = NcclBackend.__new__(NcclBackend)
        child._adopt(self, comm)
        self._children.append(child)
        return child

    def attempt_reconnect(self) -> bool:
        """Aborts the unhealthy communicator and makes a new one, at the port after ours.

        Every rank must call it; it returns when all have come. False when there
        was nothing to do, as another thread had reconnected already. The
        receive buffer is registered again, other registrations are dropped,
        children are aborted. BootstrapError or NcclError when it fails; the
        communicator stays unhealthy then, and it may be tried again.
        """
        if self._parent is not None:
            raise ArgumentError("a split communicator does not reconnect: its parent does")
        with self._reconnect_lock:
            if self.health.healthy:
                return False
            self.cuda.set_current()  # this may be another thread than the one that opened it
            for child in self._children:
                child._end_comm(abort=True)
            self._abort_comm()
            self.memory.flush()  # not before: a free waits for what is stuck
            for child in self._children:
                child.close()
            self._children.clear()
            self._drop_registrations()
            host, port = self.address
            self._connect((host, port + 1))
            self.reconnects += 1
            self.health.renew()
            logger.info("rank %d reconnected (%d)", self.rank, self.reconnects)
            return True

    def abort(self) -> None:
        """ncclCommAbort: ends what is under way; the communicator is unhealthy then.

        May be called by another thread than the one that is blocked.
        """
        self.health.fail(self.health.generation, "it was aborted")
        self.cuda.set_current()
        self._abort_comm()
        if not self._stuck():
            self.memory.flush()

    def close(self, *, abort: bool = False) -> None:
        """Tears everything down; may be called twice, and after any error.

        A healthy communicator whose work is complete within ``deadline`` is
        destroyed; any other one, or with `abort`, is aborted. Errors on the way
        are logged, and what comes after is done all the same.
        """
        if self._closed:
            return
        self._closed = True
        step = self._step
        if getattr(self, "cuda", None) is not None and self.cuda.device >= 0:
            step(self.cuda.set_current)  # maybe another thread than the one that opened it
        # All communicators first: a free waits for all that runs on the device.
        self._end_comm(abort)
        for child in self._children:
            child.close()
        for work in self._works:
            step(work.release)
        if self._buffer_free:
            step(lambda: self.cuda.event_destroy(self._buffer_free))
        for stream in (self._async_stream, getattr(self, "stream", 0)):
            if stream:
                step(partial(self.cuda.stream_destroy, stream))
        for buffer in (self.receive_buffer, self._barrier_buffer):
            if buffer is not None:
                step(buffer.free)
        if self._parent is None:
            if getattr(self, "memory", None) is not None:
                step(self.memory.close)
            if self.kernels is not None:
                step(self.kernels.unload)
            if getattr(self, "cuda", None) is not None:
                step(self.cuda.close)
            if getattr(self, "calls", None) is not None:
                self.calls.stop()

    def __enter__(self) -> NcclBackend:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(abort=kind is not None)

    # ---- inside -------------------------------------------------------------------------

    def _prepare(self) -> None:
        """What close() looks at, before anything that may fail."""
        self.stream = 0
        self.kernels = None
        self.receive_buffer = None
        self._works = []
        self._children: list[NcclBackend] = []
        self._registered = {}
        self._reconnect_lock = threading.Lock()
        self._closed = False
        self.unique_id = b""  # of the newest initialisation; a split has none

    def _log_start(self) -> None:
        logger.info(
            "rank %d of %d: NCCL %s (%s), CUDA driver %s",
            self.rank,
            self.world,
            self.nccl.version_text(),
            self.nccl.path,
            self.cuda.path,
        )
        settings = nccl_settings()
        if settings:
            logger.info("rank %d: %s", self.rank, " ".join(f"{k}={v}" for k, v in settings.items()))

    def _open_device(self, device: int | None) -> None:
        count = self.cuda.device_count()
        if count < 1:
            raise LibraryError(f"there is no CUDA device here; {OR_SIM}")
        if device is None:
            local = numerals.whole(os.environ.get("LOCAL_RANK", ""))
            device = (self.rank if local is None else local) % count
        if not 0 <= device < count:
            raise ArgumentError(f"device {device}: there are devices 0 to {count - 1}")
        self.cuda.open(device)

    def _load_kernels(self, ptx: bytes) -> AddKernels | None:
        try:
            return AddKernels(self.cuda, ptx)
        except CudaError as error:
            logger.error("rank %d: the add kernels cannot be loaded: %s", self.rank, error)
            return None

    def _open_streams(self) -> None:
        self.stream = self.cuda.stream()
        if self.world == 2 and self.capacity:
            self.receive_buffer = self.alloc(self.capacity)

    def _connect(self, address: tuple[str, int]) -> None:
        """Bootstraps and makes the communicator; the receive buffer is registered."""
        unique = bootstrap.exchange(
            self.rank,
            self.world,
            self.nccl.unique_id,
            address,
            self._bootstrap_timeout,
            job_name(),
        )
        if self.before_init is not None:
            self.before_init()
        config = self.nccl.config(name=self._comm_name)
        self.unique_id = unique
        self.comm = self.nccl.init_rank(self.world, unique, self._init_rank, config)
        self._register_receive_buffer()

    def _adopt(self, parent: NcclBackend, comm: int) -> None:
        """Makes this the backend of a communicator that was split off `parent`."""
        Operations.__init__(self)
        self._prepare()
        self._parent = parent
        self.nccl, self.cuda, self.calls = parent.nccl, parent.cuda, parent.calls
        self.kernels, self.memory = parent.kernels, parent.memory
        self.deadline, self.capacity = parent.deadline, parent.capacity
        self.reconnects = 0
        self.comm = comm
        self.rank, self.world = self.nccl.user_rank(comm), self.nccl.count(comm)
        if self.world == 2 and self.capacity == 0:
            self.capacity = DEFAULT_CAPACITY  # the parent had no use for one
        self._open_streams()
        self._register_receive_buffer()

    def _stuck(self) -> bool:
        """Whether work of this communicator, or of a child, may be waiting for ever."""
        if self.comm and not self.healthy:
            return True
        return any(child._stuck() for child in self._children)

    def _end_comm(self, abort: bool) -> None:
        """Destroys the communicator, those of its children before it; or aborts them."""
        for child in self._children:
            child._end_comm(abort)
        step = self._step
        if self.comm and not abort and self.healthy:
            step(lambda: self.synchronize(self.deadline))
        if self.healthy and not abort:
            step(self._deregister_all)
            step(self._destroy_comm)
        self.health.close("it was closed")
        step(self._abort_comm)

    def _take_comm(self) -> int:
        """The communicator, which is nobody else's from now on."""
        with self._comm_lock:
            comm, self.comm = self.comm, 0
        return comm

    def _destroy_comm(self) -> None:
        comm = self._take_comm()
        if comm:
            self.nccl.check("ncclCommDestroy", comm)

    def _abort_comm(self) -> None:
        comm = self._take_comm()
        if comm:
            self.nccl.check("ncclCommAbort", comm)

    def _step(self, action: Callable[[], object]) -> None:
        try:
            action()
        except (CanaryError, NcclError) as error:
            logger.warning("rank %d: tear-down goes on after: %s", self.rank, error)
