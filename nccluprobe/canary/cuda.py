"""The CUDA driver over ctypes: as much of it as an NCCL client needs.

Handles and device pointers are plain integers. Every method raises CudaError
with the driver's own text; sizes are bytes.
"""

from __future__ import annotations

import ctypes
import os

from nccluprobe.canary.errors import OR_SIM, CudaError, LibraryError

_ptr, _size, _int, _uint = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_uint
_device_ptr = ctypes.c_uint64

SUCCESS = 0
NOT_READY = 600
_STREAM_NON_BLOCKING = 1
_EVENT_TIMING = 0

SIGNATURES: dict[str, list[type]] = {
    "cuInit": [_uint],
    "cuDriverGetVersion": [_ptr],
    "cuDeviceGetCount": [_ptr],
    "cuDeviceGet": [_ptr, _int],
    "cuDeviceGetName": [_ptr, _int, _int],
    "cuDevicePrimaryCtxRetain": [_ptr, _int],
    "cuDevicePrimaryCtxRelease_v2": [_int],
    "cuCtxSetCurrent": [_ptr],
    "cuMemAlloc_v2": [_ptr, _size],
    "cuMemFree_v2": [_device_ptr],
    "cuMemcpyHtoD_v2": [_device_ptr, _ptr, _size],
    "cuMemcpyDtoH_v2": [_ptr, _device_ptr, _size],
    "cuMemcpyDtoDAsync_v2": [_device_ptr, _device_ptr, _size, _ptr],
    "cuMemsetD8_v2": [_device_ptr, ctypes.c_ubyte, _size],
    "cuStreamCreate": [_ptr, _uint],
    "cuStreamDestroy_v2": [_ptr],
    "cuStreamSynchronize": [_ptr],
    "cuStreamQuery": [_ptr],
    "cuStreamWaitEvent": [_ptr, _ptr, _uint],
    "cuEventCreate": [_ptr, _uint],
    "cuEventDestroy_v2": [_ptr],
    "cuEventRecord": [_ptr, _ptr],
    "cuEventQuery": [_ptr],
    "cuEventElapsedTime": [_ptr, _ptr, _ptr],
    "cuModuleLoadData": [_ptr, ctypes.c_char_p],
    "cuModuleUnload": [_ptr],
    "cuModuleGetFunction": [_ptr, _ptr, ctypes.c_char_p],
    "cuLaunchKernel": [_ptr, *[_uint] * 7, _ptr, _ptr, _ptr],
    "cuGetErrorString": [_int, _ptr],
}


class Cuda:
    """The loaded driver and the primary context of one device.

    A context belongs to a thread: a thread other than the one that made this
    object calls ``set_current()`` first.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self.device = -1
        self._context = 0
        try:
            self._lib = ctypes.CDLL(self.path)
        except OSError as error:
            raise LibraryError(
                f"the CUDA driver cannot be loaded: {error}; is there an NVIDIA driver here? "
                f"Set NCCLUPROBE_CUDA for another path; {OR_SIM}"
            ) from error
        for name, arguments in SIGNATURES.items():
            function = getattr(self._lib, name, None)
            if function is None:
                raise LibraryError(f"{self.path} has no {name}: it is no CUDA driver")
            function.argtypes, function.restype = arguments, _int
        try:
            self._check("cuInit", 0)
        except CudaError as error:
            raise LibraryError(f"no GPU can be used here: {error}; {OR_SIM}") from error

    @property
    def simulated(self) -> bool:
        """True for the stand-in with host memory in place of the device's."""
        return hasattr(self._lib, "simcudaHolds")

    def error(self, function: str, result: int) -> CudaError:
        text = ctypes.c_char_p()
        self._lib.cuGetErrorString(result, ctypes.byref(text))
        words = text.value.decode(errors="replace") if text.value else "unknown error"
        return CudaError(function, result, words)

    def _check(self, function: str, *arguments: object) -> None:
        result = int(getattr(self._lib, function)(*arguments))
        if result != SUCCESS:
            raise self.error(function, result)

    def _make(self, function: str, *arguments: object) -> int:
        handle = _ptr()
        self._check(function, ctypes.byref(handle), *arguments)
        return handle.value or 0

    def _ready(self, function: str, handle: int) -> bool:
        result = int(getattr(self._lib, function)(handle))
        if result not in (SUCCESS, NOT_READY):
            raise self.error(function, result)
        return result == SUCCESS

    # ---- device and context -------------------------------------------------------------

    def device_count(self) -> int:
        value = _int()
        self._check("cuDeviceGetCount", ctypes.byref(value))
        return value.value

    def device_name(self) -> str:
        text = ctypes.create_string_buffer(256)
        self._check("cuDeviceGetName", text, 256, self.device)
        return text.value.decode(errors="replace")

    def open(self, device: int) -> None:
        """Retains the primary context of `device` and makes it this thread's."""
        handle = _int()
        self._check("cuDeviceGet", ctypes.byref(handle), device)
        self._context = self._make("cuDevicePrimaryCtxRetain", handle.value)
        self.device = handle.value
        self.set_current()

    def set_current(self) -> None:
        """Makes the device's context the calling thread's."""
        self._check("cuCtxSetCurrent", self._context)

    def close(self) -> None:
        """Gives the primary context back; everything made in it must be gone."""
        if self._context:
            self._context = 0
            self._check("cuDevicePrimaryCtxRelease_v2", self.device)

    # ---- memory -------------------------------------------------------------------------

    def alloc(self, nbytes: int) -> int:
        pointer = _device_ptr()
        self._check("cuMemAlloc_v2", ctypes.byref(pointer), nbytes)
        return pointer.value

    def free(self, pointer: int) -> None:
        self._check("cuMemFree_v2", pointer)

    def write(self, pointer: int, data: bytes | bytearray | memoryview) -> None:
        """Copies host bytes to the device; returns when they are there."""
        raw = bytes(data)
        self._check("cuMemcpyHtoD_v2", pointer, raw, len(raw))
        self._settle()

    def read(self, pointer: int, nbytes: int) -> bytes:
        raw = ctypes.create_string_buffer(nbytes)
        self._check("cuMemcpyDtoH_v2", raw, pointer, nbytes)
        return raw.raw

    def fill(self, pointer: int, value: int, nbytes: int) -> None:
        """Sets bytes of the device; returns when they are set."""
        self._check("cuMemsetD8_v2", pointer, value, nbytes)
        self._settle()

    def _settle(self) -> None:
        """Waits for the default stream, which our streams do not wait for: a set, and a
        copy from pageable memory, may go on after the call has returned."""
        self._check("cuStreamSynchronize", None)

    def copy_async(self, target: int, source: int, nbytes: int, stream: int) -> None:
        self._check("cuMemcpyDtoDAsync_v2", target, source, nbytes, stream)

    # ---- streams and events -------------------------------------------------------------

    def stream(self) -> int:
        """A new stream that does not wait for the default stream."""
        return self._make("cuStreamCreate", _STREAM_NON_BLOCKING)

    def stream_destroy(self, stream: int) -> None:
        self._check("cuStreamDestroy_v2", stream)

    def stream_synchronize(self, stream: int) -> None:
        """Waits without a deadline and cannot be interrupted; see NcclBackend.synchronize."""
        self._check("cuStreamSynchronize", stream)

    def stream_done(self, stream: int) -> bool:
        return self._ready("cuStreamQuery", stream)

    def stream_wait(self, stream: int, event: int) -> None:
        """Work queued on `stream` from now on waits for `event`."""
        self._check("cuStreamWaitEvent", stream, event, 0)

    def event(self) -> int:
        """A new event that keeps the time."""
        return self._make("cuEventCreate", _EVENT_TIMING)

    def event_destroy(self, event: int) -> None:
        self._check("cuEventDestroy_v2", event)

    def event_record(self, event: int, stream: int) -> None:
        self._check("cuEventRecord", event, stream)

    def event_done(self, event: int) -> bool:
        return self._ready("cuEventQuery", event)

    def elapsed_ms(self, start: int, end: int) -> float:
        """Milliseconds between two events that are done."""
        value = ctypes.c_float()
        self._check("cuEventElapsedTime", ctypes.byref(value), start, end)
        return value.value

    # ---- kernels ------------------------------------------------------------------------

    def module(self, image: bytes) -> int:
        """Loads PTX text; the driver compiles it for this device."""
        return self._make("cuModuleLoadData", image)

    def module_unload(self, module: int) -> None:
        self._check("cuModuleUnload", module)

    def function(self, module: int, name: str) -> int:
        return self._make("cuModuleGetFunction", module, name.encode())

    def launch(
        self, function: int, grid: int, block: int, arguments: list[int], stream: int
    ) -> None:
        """Queues a one-dimensional launch; `arguments` are 64-bit integers or pointers."""
        values = [ctypes.c_uint64(argument) for argument in arguments]
        pointers = (_ptr * len(values))(
            *[ctypes.cast(ctypes.byref(value), _ptr).value for value in values]
        )
        self._check("cuLaunchKernel", function, grid, 1, 1, block, 1, 1, 0, stream, pointers, None)
