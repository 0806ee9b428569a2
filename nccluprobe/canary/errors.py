"""Errors of the canary: what failed, why, and what to do, in one line each."""

from __future__ import annotations

from nccluprobe.errors import ExitCode, NccluprobeError


class CanaryError(NccluprobeError):
    """Anything that keeps the canary's backend from doing what it was asked."""


class ArgumentError(CanaryError):
    """A rank, world size, peer, root, count, datatype or buffer that does not fit."""

    def __init__(self, message: str) -> None:
        super().__init__(message, ExitCode.USAGE)


class LibraryError(CanaryError):
    """NCCL or the CUDA driver cannot be loaded, or lacks a function; or there is no GPU."""


#: For whoever has no GPU.
OR_SIM = "to try it without a GPU: canary --sim"


class BootstrapError(CanaryError):
    """The ranks did not find together over TCP."""


class UnhealthyError(CanaryError):
    """The communicator failed or was aborted before: only a reconnect helps."""


class DeadlineError(CanaryError):
    """An operation was not complete in time; the communicator is unhealthy now."""


class KernelMissingError(CanaryError):
    """The add kernel could not be loaded; raised after the send and receive were posted."""


class NcclError(CanaryError):
    """An NCCL call or its communicator failed. `result` is the ncclResult_t."""

    def __init__(self, function: str, result: int, text: str) -> None:
        super().__init__(f"{function} failed: {text}")
        self.function = function
        self.result = result


class CudaError(CanaryError):
    """A CUDA driver call failed. `result` is the CUresult."""

    def __init__(self, function: str, result: int, text: str) -> None:
        super().__init__(f"{function} failed: {text} ({result})")
        self.function = function
        self.result = result
