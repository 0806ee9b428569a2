"""The canary's NCCL backend: a real NCCL client over ctypes, without torch.

from nccluprobe.canary import NcclBackend

with NcclBackend(rank, world, address=("10.0.0.1", 29777)) as backend:
    buf = backend.alloc(4096)
    backend.all_reduce(buf, 1024, "float32")
    backend.synchronize()
"""

from nccluprobe.canary.backend import NcclBackend
from nccluprobe.canary.buffers import DeviceBuffer
from nccluprobe.canary.errors import (
    ArgumentError,
    BootstrapError,
    CanaryError,
    CudaError,
    DeadlineError,
    KernelMissingError,
    LibraryError,
    NcclError,
    UnhealthyError,
)
from nccluprobe.canary.launch import Launch, from_environment
from nccluprobe.canary.work import Work

__all__ = [
    "ArgumentError",
    "BootstrapError",
    "CanaryError",
    "CudaError",
    "DeadlineError",
    "DeviceBuffer",
    "KernelMissingError",
    "Launch",
    "LibraryError",
    "NcclBackend",
    "NcclError",
    "UnhealthyError",
    "Work",
    "from_environment",
]
