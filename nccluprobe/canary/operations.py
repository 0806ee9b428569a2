"""The operations: checks, the NCCL calls, the two-rank all-reduce."""

from __future__ import annotations

from nccluprobe.canary.buffers import DeviceBuffer
from nccluprobe.canary.core import Core
from nccluprobe.canary.errors import ArgumentError, KernelMissingError
from nccluprobe.canary.kernel import ADD_KERNELS
from nccluprobe.canary.work import Work

_BARRIER_DTYPE = "int32"


class Operations(Core):
    """Collectives and point-to-point calls, queued on ``stream`` unless told otherwise.

    A count is in elements of `dtype` (names of nccluprobe.nccl.enums). Every
    operation raises UnhealthyError on an unhealthy communicator and
    ArgumentError for a peer, root, count or buffer that does not fit, both
    before NCCL is called; NcclError for what NCCL says, which makes the
    communicator unhealthy. Zero elements are a no-op. Except for broadcast,
    receive_command and barrier an operation returns when it is queued: call
    ``synchronize()`` before reading the result.
    """

    _barrier_buffer: DeviceBuffer | None = None
    _works: list[Work]
    _async_stream: int = 0
    _buffer_free: int = 0  # event: the receive buffer's last use

    # ---- all-reduce ---------------------------------------------------------------------

    def all_reduce(
        self,
        buf: DeviceBuffer,
        count: int,
        dtype: str,
        op: str = "sum",
        out: DeviceBuffer | None = None,
    ) -> None:
        """Reduces `count` elements of all ranks into `out` (default: in place).

        With two ranks a float32 or bfloat16 sum is a grouped send and receive
        and a local add; more than ``capacity`` bytes are an ArgumentError, a
        missing add kernel is a KernelMissingError after send and receive were
        posted. Everything else is ncclAllReduce.
        """
        self._all_reduce(buf, count, dtype, op, out, self.stream)

    def all_reduce_async(
        self,
        buf: DeviceBuffer,
        count: int,
        dtype: str,
        op: str = "sum",
        out: DeviceBuffer | None = None,
    ) -> Work:
        """As all_reduce, on a stream of its own after what ``stream`` holds now."""
        generation = self.health.require("all_reduce_async")
        if self.grouped:
            raise ArgumentError("all_reduce_async cannot be part of a group")
        cuda = self.cuda
        if not self._async_stream:
            self._async_stream = cuda.stream()
        stream = self._async_stream
        start, end = cuda.event(), cuda.event()
        work = Work(
            cuda,
            start,
            end,
            lambda deadline: self._complete("all_reduce_async", generation, stream, deadline),
        )
        self._works = [old for old in self._works if not old.released] + [work]
        with self._failing(generation, "all_reduce_async"):
            cuda.event_record(start, self.stream)
            cuda.stream_wait(stream, start)
            cuda.event_record(start, stream)
        self._all_reduce(buf, count, dtype, op, out, stream)
        with self._failing(generation, "all_reduce_async"):
            cuda.event_record(end, stream)
        return work

    def _all_reduce(
        self,
        buf: DeviceBuffer,
        count: int,
        dtype: str,
        op: str,
        out: DeviceBuffer | None,
        stream: int,
    ) -> None:
        generation = self.health.require("all_reduce")
        number, size = self._datatype(dtype)
        reduction = self._reduction(op)
        out = buf if out is None else out
        nbytes = self._fits(buf, count, size, "all_reduce")
        self._fits(out, count, size, "all_reduce, out")
        paired = self.world == 2 and op == "sum" and dtype in ADD_KERNELS and not self.grouped
        if paired and nbytes > self.capacity:
            raise ArgumentError(
                f"all_reduce of {nbytes} bytes exceeds the receive buffer of {self.capacity} "
                "bytes; make the capacity larger or split the payload"
            )
        if nbytes == 0:
            return
        if paired:
            self._pair_all_reduce(buf, count, dtype, out, stream, generation)
            return
        with self._failing(generation, "ncclAllReduce"):
            self.nccl.check(
                "ncclAllReduce",
                buf.pointer,
                out.pointer,
                count,
                number,
                reduction,
                self.comm,
                stream,
            )
        self._after("ncclAllReduce", generation)

    def _pair_all_reduce(
        self,
        buf: DeviceBuffer,
        count: int,
        dtype: str,
        out: DeviceBuffer,
        stream: int,
        generation: int,
    ) -> None:
        received = self.receive_buffer
        if received is None:
            raise ArgumentError("all_reduce with two ranks needs a receive buffer")
        number, _ = self._datatype(dtype)
        peer = 1 - self.rank
        with self._failing(generation, "all_reduce"):
            if not self._buffer_free:
                self._buffer_free = self.cuda.event()
            self.cuda.stream_wait(stream, self._buffer_free)  # of the other stream's add
            with self.nccl.group():
                self.nccl.check("ncclSend", buf.pointer, count, number, peer, self.comm, stream)
                self.nccl.check(
                    "ncclRecv", received.pointer, count, number, peer, self.comm, stream
                )
        self._after("ncclGroupEnd", generation)
        if self.kernels is None:
            raise KernelMissingError(
                f"all_reduce: the add kernel for {dtype} is missing; send and receive were "
                "posted, the result is not computed"
            )
        with self._failing(generation, "all_reduce"):
            self.kernels.add(dtype, out.pointer, buf.pointer, received.pointer, count, stream)
            self.cuda.event_record(self._buffer_free, stream)

    # ---- the other collectives ----------------------------------------------------------

    def broadcast(self, buf: DeviceBuffer, count: int, dtype: str, root: int) -> None:
        """Copies the root's `count` elements to all ranks, in place.

        Waits for completion at most ``deadline`` seconds, then DeadlineError
        and an unhealthy communicator. Inside a group it does not wait.
        """
        self._broadcast(buf, count, dtype, root, self.deadline)

    def receive_command(self, buf: DeviceBuffer, count: int, dtype: str, root: int = 0) -> None:
        """A broadcast that may wait for its root for ever: how a follower idles.

        The root itself sends with ``broadcast``. An asynchronous error or an
        abort by another thread ends the wait.
        """
        with self.calls.patient():
            self._broadcast(buf, count, dtype, root, None)

    def _broadcast(
        self, buf: DeviceBuffer, count: int, dtype: str, root: int, deadline: float | None
    ) -> None:
        generation = self.health.require("broadcast")
        number, size = self._datatype(dtype)
        self._peer(root, "root")
        if self._fits(buf, count, size, "broadcast") == 0:
            return
        with self._failing(generation, "ncclBroadcast"):
            self.nccl.check(
                "ncclBroadcast",
                buf.pointer,
                buf.pointer,
                count,
                number,
                root,
                self.comm,
                self.stream,
            )
        self._after("ncclBroadcast", generation)
        if not self.grouped:
            self._complete("broadcast", generation, self.stream, deadline)

    def all_gather(self, send: DeviceBuffer, recv: DeviceBuffer, count: int, dtype: str) -> None:
        """`count` elements of every rank, in rank order, into `recv` (world * count)."""
        generation = self.health.require("all_gather")
        number, size = self._datatype(dtype)
        nbytes = self._fits(send, count, size, "all_gather, send")
        self._fits(recv, count * self.world, size, "all_gather, recv")
        if nbytes == 0:
            return
        with self._failing(generation, "ncclAllGather"):
            self.nccl.check(
                "ncclAllGather", send.pointer, recv.pointer, count, number, self.comm, self.stream
            )
        self._after("ncclAllGather", generation)

    def reduce_scatter(
        self, send: DeviceBuffer, recv: DeviceBuffer, count: int, dtype: str, op: str = "sum"
    ) -> None:
        """Reduces world * count elements; this rank's share of `count` goes into `recv`."""
        generation = self.health.require("reduce_scatter")
        number, size = self._datatype(dtype)
        reduction = self._reduction(op)
        nbytes = self._fits(recv, count, size, "reduce_scatter, recv")
        self._fits(send, count * self.world, size, "reduce_scatter, send")
        if nbytes == 0:
            return
        with self._failing(generation, "ncclReduceScatter"):
            self.nccl.check(
                "ncclReduceScatter",
                send.pointer,
                recv.pointer,
                count,
                number,
                reduction,
                self.comm,
                self.stream,
            )
        self._after("ncclReduceScatter", generation)

    def reduce(
        self,
        buf: DeviceBuffer,
        count: int,
        dtype: str,
        root: int,
        op: str = "sum",
        out: DeviceBuffer | None = None,
    ) -> None:
        """Reduces `count` elements of all ranks into the root's `out` (default: in place)."""
        generation = self.health.require("reduce")
        number, size = self._datatype(dtype)
        reduction = self._reduction(op)
        self._peer(root, "root")
        out = buf if out is None else out
        nbytes = self._fits(buf, count, size, "reduce")
        self._fits(out, count, size, "reduce, out")
        if nbytes == 0:
            return
        with self._failing(generation, "ncclReduce"):
            self.nccl.check(
                "ncclReduce",
                buf.pointer,
                out.pointer,
                count,
                number,
                reduction,
                root,
                self.comm,
                self.stream,
            )
        self._after("ncclReduce", generation)

    def all_to_all(self, send: DeviceBuffer, recv: DeviceBuffer, count: int, dtype: str) -> None:
        """Part r of `send` goes to rank r, part r of `recv` comes from it; parts of `count`.

        Grouped sends and receives, which every version of NCCL has.
        """
        generation = self.health.require("all_to_all")
        number, size = self._datatype(dtype)
        part = count * size
        self._fits(send, count * self.world, size, "all_to_all, send")
        self._fits(recv, count * self.world, size, "all_to_all, recv")
        if part == 0:
            return
        with self._failing(generation, "all_to_all"), self.nccl.group():
            for peer in range(self.world):
                at = peer * part
                self.nccl.check(
                    "ncclSend", send.pointer + at, count, number, peer, self.comm, self.stream
                )
                self.nccl.check(
                    "ncclRecv", recv.pointer + at, count, number, peer, self.comm, self.stream
                )
        self._after("ncclGroupEnd", generation)

    # ---- point to point -----------------------------------------------------------------

    def send(self, buf: DeviceBuffer, count: int, dtype: str, peer: int) -> None:
        """Sends `count` elements to `peer`."""
        self._point("ncclSend", buf, count, dtype, peer)

    def recv(self, buf: DeviceBuffer, count: int, dtype: str, peer: int) -> None:
        """Receives `count` elements from `peer`."""
        self._point("ncclRecv", buf, count, dtype, peer)

    def _point(self, function: str, buf: DeviceBuffer, count: int, dtype: str, peer: int) -> None:
        generation = self.health.require(function)
        number, size = self._datatype(dtype)
        self._peer(peer)
        if peer == self.rank and not self.grouped:
            raise ArgumentError(f"{function}: rank {peer} is this rank; use a group for that")
        if self._fits(buf, count, size, function) == 0:
            return
        with self._failing(generation, function):
            self.nccl.check(function, buf.pointer, count, number, peer, self.comm, self.stream)
        self._after(function, generation)

    def barrier(self, deadline: float | None = None) -> None:
        """Returns when every rank has come: an ncclAllReduce of one element, waited for.

        DeadlineError after `deadline` seconds (default: none).
        """
        generation = self.health.require("barrier")
        if self.grouped:
            raise ArgumentError("barrier waits, and cannot be part of a group")
        if self._barrier_buffer is None:
            self._barrier_buffer = self.alloc(4)
            self._barrier_buffer.fill(0)
        number, _ = self._datatype(_BARRIER_DTYPE)
        pointer = self._barrier_buffer.pointer
        with self._failing(generation, "ncclAllReduce"):
            self.nccl.check(
                "ncclAllReduce",
                pointer,
                pointer,
                1,
                number,
                self._reduction("sum"),
                self.comm,
                self.stream,
            )
        self._complete("barrier", generation, self.stream, deadline)
