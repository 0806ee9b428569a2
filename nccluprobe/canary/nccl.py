"""NCCL over ctypes: its functions with their types, and nothing of torch.

Every call goes through ``Nccl.call``, which tells an observer (submission log
and watchdog) before and after; so does a call made by hand to plant a fault.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from typing import Protocol

from nccluprobe.canary.errors import OR_SIM, BootstrapError, LibraryError, NcclError
from nccluprobe.nccl.enums import IN_PROGRESS, RESULTS, SUCCESS

UNIQUE_ID_BYTES = 128
_UNDEFINED = -(1 << 31)  # NCCL_CONFIG_UNDEF_INT
_CONFIG_MAGIC = 0xCAFEBEEF
#: The configuration below is the one of this version; a newer NCCL reads it as such.
_CONFIG_VERSION = 22703

_ptr, _size, _int, _uint = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_uint


class UniqueId(ctypes.Structure):
    """ncclUniqueId, passed by value."""

    _fields_ = [("internal", ctypes.c_ubyte * UNIQUE_ID_BYTES)]


class Config(ctypes.Structure):
    """ncclConfig_t as of NCCL 2.27; older versions read a part of it."""

    _fields_ = [
        ("size", _size),
        ("magic", _uint),
        ("version", _uint),
        ("blocking", _int),
        ("cga_cluster_size", _int),
        ("min_ctas", _int),
        ("max_ctas", _int),
        ("net_name", ctypes.c_char_p),
        ("split_share", _int),
        ("traffic_class", _int),
        ("comm_name", ctypes.c_char_p),
        ("collnet_enable", _int),
        ("cta_policy", _int),
        ("shrink_share", _int),
        ("nvls_ctas", _int),
    ]


_COLLECTIVE = [_ptr, _ptr, _size, _int]
#: Arguments of the functions that the canary uses; all return ncclResult_t.
SIGNATURES: dict[str, list[type]] = {
    "ncclGetVersion": [_ptr],
    "ncclGetUniqueId": [_ptr],
    "ncclCommInitRank": [_ptr, _int, UniqueId, _int],
    "ncclCommInitRankConfig": [_ptr, _int, UniqueId, _int, _ptr],
    "ncclCommSplit": [_ptr, _int, _int, _ptr, _ptr],
    "ncclCommFinalize": [_ptr],
    "ncclCommDestroy": [_ptr],
    "ncclCommAbort": [_ptr],
    "ncclCommCount": [_ptr, _ptr],
    "ncclCommUserRank": [_ptr, _ptr],
    "ncclCommCuDevice": [_ptr, _ptr],
    "ncclCommGetAsyncError": [_ptr, _ptr],
    "ncclCommRegister": [_ptr, _ptr, _size, _ptr],
    "ncclCommDeregister": [_ptr, _ptr],
    "ncclAllReduce": [*_COLLECTIVE, _int, _ptr, _ptr],
    "ncclBroadcast": [*_COLLECTIVE, _int, _ptr, _ptr],
    "ncclReduce": [*_COLLECTIVE, _int, _int, _ptr, _ptr],
    "ncclAllGather": [*_COLLECTIVE, _ptr, _ptr],
    "ncclReduceScatter": [*_COLLECTIVE, _int, _ptr, _ptr],
    "ncclSend": [_ptr, _size, _int, _int, _ptr, _ptr],
    "ncclRecv": [_ptr, _size, _int, _int, _ptr, _ptr],
    "ncclGroupStart": [],
    "ncclGroupEnd": [],
}
#: Functions that older versions of NCCL lack.
_OPTIONAL = {"ncclCommSplit", "ncclCommRegister", "ncclCommDeregister"}


class Observer(Protocol):
    """Told of every host call: before it, and with its result after it."""

    def enter(self, function: str, arguments: tuple[object, ...]) -> int: ...

    def exit(self, token: int, function: str, result: int) -> None: ...


class Nccl:
    """One loaded copy of NCCL.

    ``call`` returns the ncclResult_t, ``check`` raises NcclError for anything
    but ncclSuccess and ncclInProgress. Handles (communicators, streams,
    buffers) are plain integers.
    """

    def __init__(self, path: str | os.PathLike[str], observer: Observer | None = None) -> None:
        self.path = os.fspath(path)
        self.observer = observer
        try:
            self._lib = ctypes.CDLL(self.path)
        except OSError as error:
            raise LibraryError(
                f"NCCL cannot be loaded: {error}; install nvidia-nccl-cu12 or set NCCLUPROBE_NCCL; "
                f"{OR_SIM}"
            ) from error
        for name, arguments in SIGNATURES.items():
            function = getattr(self._lib, name, None)
            if function is not None:
                function.argtypes, function.restype = arguments, _int
            elif name not in _OPTIONAL:
                raise LibraryError(f"{self.path} has no {name}: it is not NCCL 2.14 or newer")
        for name in ("ncclGetErrorString", "ncclGetLastError"):
            function = getattr(self._lib, name, None)
            if function is not None:
                function.restype = ctypes.c_char_p
                function.argtypes = [_int if name == "ncclGetErrorString" else _ptr]

    @property
    def simulated(self) -> bool:
        """True for the stand-in that needs no GPU."""
        return hasattr(self._lib, "simCleanup")

    def has(self, function: str) -> bool:
        return hasattr(self._lib, function)

    def call(self, function: str, *arguments: object) -> int:
        """Calls `function`, tells the observer, returns its ncclResult_t."""
        if not hasattr(self._lib, function):
            raise LibraryError(f"NCCL {self.version_text()} has no {function}")
        observer = self.observer
        if observer is None:
            return int(getattr(self._lib, function)(*arguments))
        token = observer.enter(function, arguments)
        result = -1
        try:
            result = int(getattr(self._lib, function)(*arguments))
        finally:
            observer.exit(token, function, result)
        return result

    def check(self, function: str, *arguments: object) -> int:
        """As ``call``; NcclError unless the result is ncclSuccess or ncclInProgress."""
        result = self.call(function, *arguments)
        if result not in (SUCCESS, IN_PROGRESS):
            raise self.error(function, result)
        return result

    def error(self, function: str, result: int) -> NcclError:
        text = self._lib.ncclGetErrorString(result)
        words = [RESULTS.get(result, f"result {result}"), text.decode(errors="replace")]
        if hasattr(self._lib, "ncclGetLastError"):
            last = self._lib.ncclGetLastError(None)
            words += [last.decode(errors="replace")] if last else []
        # NCCL's own texts may have several lines.
        return NcclError(function, result, ": ".join(" ".join(w.split()) for w in words if w))

    # ---- typed conveniences -------------------------------------------------------------

    def version(self) -> int:
        """NCCL_VERSION_CODE, for instance 22809."""
        value = _int()
        if self._lib.ncclGetVersion(ctypes.byref(value)) != SUCCESS:
            raise LibraryError(f"{self.path}: ncclGetVersion failed")
        return value.value

    def version_text(self) -> str:
        code = self.version()
        base = 10000 if code >= 10000 else 1000
        return f"{code // base}.{code % base // 100}.{code % 100}"

    def unique_id(self) -> bytes:
        """A new unique id, 128 bytes."""
        unique = UniqueId()
        self.check("ncclGetUniqueId", ctypes.byref(unique))
        return bytes(unique.internal)

    def config(self, *, blocking: bool = True, name: str | None = None) -> Config:
        """A configuration with everything else left to NCCL's defaults.

        `name` (commName) is used from NCCL 2.27 on. The Config must live until
        the call that takes it has returned.
        """
        config = Config(ctypes.sizeof(Config), _CONFIG_MAGIC, min(self.version(), _CONFIG_VERSION))
        # ctypes allows fields of three parts, bit fields, which Config has none of.
        for field, kind in Config._fields_[4:]:  # type: ignore[misc]
            if kind is _int:
                setattr(config, field, _UNDEFINED)
        config.blocking = int(blocking)
        config.comm_name = name.encode() if name else None
        return config

    def init_rank(self, world: int, unique: bytes, rank: int, config: Config | None = None) -> int:
        """ncclCommInitRankConfig, or ncclCommInitRank without a config: the communicator."""
        if len(unique) != ctypes.sizeof(UniqueId):  # what rank 0 sent over the network
            raise BootstrapError(
                f"the unique id has {len(unique)} bytes, not {ctypes.sizeof(UniqueId)}: "
                "rank 0 is another program"
            )
        identity = UniqueId.from_buffer_copy(unique)
        comm = _ptr()
        if config is None:
            self.check("ncclCommInitRank", ctypes.byref(comm), world, identity, rank)
        else:
            self.check(
                "ncclCommInitRankConfig",
                ctypes.byref(comm),
                world,
                identity,
                rank,
                ctypes.byref(config),
            )
        return comm.value or 0

    def split(self, comm: int, color: int, key: int, config: Config | None = None) -> int:
        """ncclCommSplit: the new communicator, 0 for the colour SPLIT_NOCOLOR."""
        child = _ptr()
        reference = ctypes.byref(config) if config is not None else None
        self.check("ncclCommSplit", comm, color, key, ctypes.byref(child), reference)
        return child.value or 0

    def user_rank(self, comm: int) -> int:
        return self._number("ncclCommUserRank", comm)

    def count(self, comm: int) -> int:
        return self._number("ncclCommCount", comm)

    def async_error(self, comm: int) -> int:
        """The communicator's ncclResult_t: ncclSuccess, ncclInProgress or what went wrong."""
        return self._number("ncclCommGetAsyncError", comm)

    def register(self, comm: int, pointer: int, nbytes: int) -> int:
        """ncclCommRegister: the handle."""
        handle = _ptr()
        self.check("ncclCommRegister", comm, pointer, nbytes, ctypes.byref(handle))
        return handle.value or 0

    @contextlib.contextmanager
    def group(self) -> Iterator[None]:
        """GroupStart and GroupEnd; the end comes also after an error inside."""
        self.check("ncclGroupStart")
        try:
            yield
        except BaseException:
            self.call("ncclGroupEnd")
            raise
        self.check("ncclGroupEnd")

    def _number(self, function: str, comm: int) -> int:
        value = _int()
        self.check(function, comm, ctypes.byref(value))
        return value.value
