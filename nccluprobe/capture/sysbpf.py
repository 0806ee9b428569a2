"""The bpf(2) and perf_event_open(2) system calls, as far as they are needed.

BCC compiles and loads; maps are read and links are made here, because BCC
offers neither batches, nor cookies, nor uprobe_multi, and detaches slowly.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Iterator

_NUMBERS = {"x86_64": (321, 298), "aarch64": (280, 241)}
_LIBC = ctypes.CDLL(None, use_errno=True)

_MAP_LOOKUP, _MAP_UPDATE, _MAP_DELETE, _MAP_NEXT = 1, 2, 3, 4
_RAW_TRACEPOINT_OPEN, _LINK_CREATE = 17, 28
_LOOKUP_BATCH, _DELETE_BATCH = 24, 27

#: Expected attach types (enum bpf_attach_type).
ATTACH_PERF_EVENT = 41
ATTACH_UPROBE_MULTI = 48

_MULTI_RETURN = 1
_PERF_CLOEXEC = 8


def _numbers() -> tuple[int, int]:
    try:
        return _NUMBERS[platform.machine()]
    except KeyError:
        raise OSError(errno.ENOSYS, f"no BPF front for {platform.machine()}") from None


def _bpf(cmd: int, attr: bytes) -> int:
    buffer = ctypes.create_string_buffer(attr, max(len(attr), 128))
    return _bpf_buffer(cmd, buffer)


def _bpf_buffer(cmd: int, buffer: ctypes.Array[ctypes.c_char]) -> int:
    result = int(_LIBC.syscall(_numbers()[0], cmd, buffer, ctypes.c_uint(len(buffer))))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


class Map:
    """A BPF map by file descriptor: whole values as bytes."""

    def __init__(self, fd: int, key_size: int, value_size: int, max_entries: int) -> None:
        self.fd = fd
        self.key_size = key_size
        self.value_size = value_size
        self.max_entries = max_entries

    def _element(self, cmd: int, key: bytes, value: ctypes.Array[ctypes.c_char] | None) -> None:
        held = ctypes.create_string_buffer(key, len(key))
        at = 0 if value is None else ctypes.addressof(value)
        _bpf(cmd, struct.pack("=IIQQQ", self.fd, 0, ctypes.addressof(held), at, 0))

    def get(self, key: bytes) -> bytes | None:
        """The value of one key (all CPUs' one after the other for a per-CPU map)."""
        value = ctypes.create_string_buffer(self.value_size)
        try:
            self._element(_MAP_LOOKUP, key, value)
        except OSError as e:
            if e.errno == errno.ENOENT:
                return None
            raise
        return value.raw

    def put(self, key: bytes, value: bytes) -> None:
        """Set one value; OSError E2BIG when the map is full."""
        self._element(_MAP_UPDATE, key, ctypes.create_string_buffer(value, len(value)))

    def drop(self, key: bytes) -> bool:
        """Delete one key; False when it was not there."""
        try:
            self._element(_MAP_DELETE, key, None)
        except OSError as e:
            if e.errno == errno.ENOENT:
                return False
            raise
        return True

    def batches(self, size: int = 4096) -> Iterator[tuple[bytes, bytes]]:
        """All entries, as (keys, values) of up to ``size`` at a time.

        Only for a hash map.  An entry that stays is seen; one that comes or
        goes meanwhile may or may not be.
        """
        cursor_in = ctypes.create_string_buffer(16)
        cursor_out = ctypes.create_string_buffer(16)
        first, size = True, min(size, self.max_entries)
        while True:
            keys = ctypes.create_string_buffer(self.key_size * size)
            values = ctypes.create_string_buffer(self.value_size * size)
            attr = struct.pack(
                "=QQQQIIQQ",
                0 if first else ctypes.addressof(cursor_in),
                ctypes.addressof(cursor_out),
                ctypes.addressof(keys),
                ctypes.addressof(values),
                size,
                self.fd,
                0,
                0,
            )
            buffer = ctypes.create_string_buffer(attr, 128)
            last = False
            try:
                _bpf_buffer(_LOOKUP_BATCH, buffer)
            except OSError as e:
                if e.errno == errno.ENOSPC:  # a bucket holds more than fits
                    size *= 2
                    continue
                if e.errno != errno.ENOENT:
                    raise
                last = True
            n = struct.unpack_from("=I", buffer, 32)[0]
            if n:
                yield (
                    ctypes.string_at(keys, n * self.key_size),
                    ctypes.string_at(values, n * self.value_size),
                )
            if last:
                return
            first = False
            cursor_in, cursor_out = cursor_out, cursor_in

    def drop_all(self, keys: bytes, size: int = 1024) -> None:
        """Delete many keys (joined); those that are not there are passed over."""
        step = self.key_size * size
        for at in range(0, len(keys), step):
            self._drop_some(keys[at : at + step])

    def _drop_some(self, keys: bytes) -> None:
        while keys:
            held = ctypes.create_string_buffer(keys, len(keys))
            attr = struct.pack(
                "=QQQQIIQQ",
                0,
                0,
                ctypes.addressof(held),
                0,
                len(keys) // self.key_size,
                self.fd,
                0,
                0,
            )
            buffer = ctypes.create_string_buffer(attr, 128)
            try:
                _bpf_buffer(_DELETE_BATCH, buffer)
                return
            except OSError as e:
                if e.errno != errno.ENOENT:
                    raise
            # Stopped at a key that is not there: go on behind it.
            done = int(struct.unpack_from("=I", buffer, 32)[0]) + 1
            keys = keys[done * self.key_size :]


def open_raw_tracepoint(name: str, prog_fd: int) -> int:
    """Attach a program to a raw tracepoint by name; closing the result detaches."""
    text = ctypes.create_string_buffer(name.encode())
    return _bpf(_RAW_TRACEPOINT_OPEN, struct.pack("=QI", ctypes.addressof(text), prog_fd))


def link_uprobe_multi(
    prog_fd: int, path: str, offsets: list[tuple[int, int]], returns: bool, pid: int = 0
) -> int:
    """One link for many functions of a file: (file offset, cookie) each."""
    n = len(offsets)
    name = ctypes.create_string_buffer(os.fsencode(path))
    where = (ctypes.c_uint64 * n)(*(offset for offset, _ in offsets))
    cookies = (ctypes.c_uint64 * n)(*(cookie for _, cookie in offsets))
    attr = struct.pack(
        "=IIIIQQQQIII",
        prog_fd,
        0,
        ATTACH_UPROBE_MULTI,
        0,
        ctypes.addressof(name),
        ctypes.addressof(where),
        0,
        ctypes.addressof(cookies),
        n,
        _MULTI_RETURN if returns else 0,
        pid,
    )
    return _bpf(_LINK_CREATE, attr)


def link_perf_event(prog_fd: int, event_fd: int, cookie: int) -> int:
    """Run a program at a perf event, with a cookie (Linux 5.15)."""
    attr = struct.pack("=IIIIQ", prog_fd, event_fd, ATTACH_PERF_EVENT, 0, cookie)
    return _bpf(_LINK_CREATE, attr)


def open_uprobe_event(pmu: int, retprobe_bit: int | None, path: str, offset: int) -> int:
    """A perf event of the uprobe PMU, for all processes.

    ``retprobe_bit`` is the bit of ``config`` that asks for the return, None
    for the entry.
    """
    name = ctypes.create_string_buffer(os.fsencode(path))
    config = 0 if retprobe_bit is None else 1 << retprobe_bit
    attr = struct.pack(
        "=IIQQQQQIIQQ",
        pmu,
        112,  # size: PERF_ATTR_SIZE_VER5
        config,
        1,  # sample_period
        0,
        0,
        0,
        1,  # wakeup_events
        0,
        ctypes.addressof(name),  # uprobe_path
        offset,  # probe_offset
    )
    buffer = ctypes.create_string_buffer(attr, 128)
    fd = int(
        _LIBC.syscall(
            _numbers()[1],
            buffer,
            ctypes.c_int(-1),
            ctypes.c_int(0),
            ctypes.c_int(-1),
            ctypes.c_ulong(_PERF_CLOEXEC),
        )
    )
    if fd < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return fd
