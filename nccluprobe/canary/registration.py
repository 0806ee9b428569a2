"""Buffers that NCCL knows beforehand (ncclCommRegister): none is ever a must."""

from __future__ import annotations

import logging

from nccluprobe.canary.buffers import DeviceBuffer
from nccluprobe.canary.core import Core
from nccluprobe.canary.errors import CanaryError

logger = logging.getLogger("nccluprobe.canary")


class Registration(Core):
    """Registers and deregisters buffers with the communicator."""

    #: Handles by pointer and size.
    _registered: dict[tuple[int, int], int]

    def register(self, buffer: DeviceBuffer) -> bool:
        """ncclCommRegister; False, with a log line, when NCCL refuses."""
        self.health.require("ncclCommRegister")
        return self.registered(buffer) or self._register(buffer, "buffer")

    def deregister(self, buffer: DeviceBuffer) -> None:
        """ncclCommDeregister; nothing for a buffer that is not registered."""
        self.health.require("ncclCommDeregister")
        handle = self._registered.pop((buffer.pointer, buffer.nbytes), None)
        if handle is not None:
            self.nccl.check("ncclCommDeregister", self.comm, handle)

    def registered(self, buffer: DeviceBuffer) -> bool:
        return (buffer.pointer, buffer.nbytes) in self._registered

    def _register(self, buffer: DeviceBuffer, what: str) -> bool:
        try:
            handle = self.nccl.register(self.comm, buffer.pointer, buffer.nbytes)
        except CanaryError as error:
            logger.warning(
                "rank %d: %s not registered, going on without: %s", self.rank, what, error
            )
            return False
        self._registered[buffer.pointer, buffer.nbytes] = handle
        return True

    def _register_receive_buffer(self) -> None:
        if self.receive_buffer is not None:
            self._register(self.receive_buffer, "receive buffer")

    def _deregister_all(self) -> None:
        while self._registered:
            _, handle = self._registered.popitem()
            self.nccl.check("ncclCommDeregister", self.comm, handle)

    def _drop_registrations(self) -> None:
        self._registered.clear()  # they went with the communicator
