"""Process events from the kernel's proc connector: exits with their codes, and execs.

A netlink multicast of all threads on the machine; a filter in the kernel lets
through only execs, exits of first threads, and those of other threads with a
status that is not 0.  It is to be had in the initial pid, user and network
namespaces with CAP_NET_ADMIN only.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import socket
import struct
import sys
from dataclasses import dataclass, field

_NETLINK_CONNECTOR = 11
_CN_IDX_PROC = _CN_VAL_PROC = 1
_LISTEN, _IGNORE = 1, 2
_EVENT_ACK, _EVENT_EXEC, _EVENT_EXIT = 0, 0x00000002, 0x80000000
_SO_ATTACH_FILTER, _SO_RCVBUFFORCE = 26, 33
_BUFFER = 8 << 20
_NLMSG_DONE = 3

#: nlmsghdr (16), cn_msg (20), then proc_event: what, cpu, timestamp, pid, tgid, ...
_NLMSG = struct.Struct("=IHHII")
_CN = struct.Struct("=IIIIHH")
_EVENT = struct.Struct("=IIQ")
_AT_WHAT = _NLMSG.size + _CN.size
_AT_PID = _AT_WHAT + _EVENT.size
_MAX_MESSAGES = 20_000


@dataclass
class ProcEvents:
    """Events since the last drain; times are CLOCK_MONOTONIC ns.

    ``exits`` are (process id, wait status, time) of threads: of first threads,
    without which the process may go on, and of others whose status is not 0.
    ``lost``: the kernel dropped some.
    """

    exits: list[tuple[int, int, int]] = field(default_factory=list)
    execs: list[tuple[int, int]] = field(default_factory=list)
    lost: bool = False


class ProcConnector:
    """A subscription.  OSError from the constructor: it cannot be had, and why."""

    def __init__(self) -> None:
        self._socket = socket.socket(
            socket.AF_NETLINK,
            socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK,
            _NETLINK_CONNECTOR,
        )
        try:
            self._filter()
            try:
                self._socket.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _BUFFER)
            except OSError:
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
            self._socket.bind((0, _CN_IDX_PROC))
            self._port = int(self._socket.getsockname()[0])
            self._control(_LISTEN)
            self._acknowledged()
        except OSError:
            self._socket.close()
            raise

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        """Unsubscribe: with no listener left, the kernel makes no messages at all."""
        with contextlib.suppress(OSError):
            self._control(_IGNORE)
        self._socket.close()

    def drain(self) -> ProcEvents:
        """All events waiting; never blocks."""
        found = ProcEvents()
        for _ in range(_MAX_MESSAGES):
            try:
                data, sender = self._socket.recvfrom(4096)
            except BlockingIOError:
                break
            except OSError as err:
                if err.errno != errno.ENOBUFS:
                    raise
                found.lost = True
                continue
            if sender[0] == 0:  # from the kernel, not from another program
                _parse(data, found)
        return found

    def _control(self, operation: int) -> None:
        body = struct.pack("=I", operation)
        message = _CN.pack(_CN_IDX_PROC, _CN_VAL_PROC, 0, 0, len(body), 0) + body
        head = _NLMSG.pack(_NLMSG.size + len(message), _NLMSG_DONE, 0, 0, self._port)
        self._socket.send(head + message)

    def _acknowledged(self) -> None:
        """The kernel answers within the send, or not at all when it takes us for a stranger."""
        for _ in range(_MAX_MESSAGES):
            try:
                data, sender = self._socket.recvfrom(4096)
            except BlockingIOError:
                break
            if sender[0] == 0 and len(data) >= _AT_PID + 4:
                what, _, _ = _EVENT.unpack_from(data, _AT_WHAT)
                (error,) = struct.unpack_from("=I", data, _AT_PID)
                if what == _EVENT_ACK:
                    if error:
                        raise OSError(error, f"proc connector: {os.strerror(error)}")
                    return
        raise OSError(
            errno.EPERM,
            "proc connector: no answer (needs the initial namespaces and CAP_NET_ADMIN)",
        )

    def _filter(self) -> None:
        """Classic BPF that passes acknowledgements and what the module's text says."""
        code = [
            (0x20, 0, 0, _AT_WHAT),  # load what
            (0x15, 8, 0, _big(_EVENT_ACK)),  # ack: pass
            (0x15, 3, 0, _big(_EVENT_EXEC)),  # exec: is it the first thread?
            (0x15, 0, 7, _big(_EVENT_EXIT)),  # anything but exit: drop
            (0x20, 0, 0, _AT_PID + 8),  # load the status
            (0x15, 0, 4, 0),  # not 0: pass
            (0x20, 0, 0, _AT_PID),
            (0x07, 0, 0, 0),  # x = pid
            (0x20, 0, 0, _AT_PID + 4),
            (0x1D, 0, 1, 0),  # tgid == x ?
            (0x06, 0, 0, 0xFFFFFFFF),  # pass
            (0x06, 0, 0, 0),  # drop
        ]
        program = b"".join(struct.pack("=HBBI", *line) for line in code)
        buffer = ctypes.create_string_buffer(program)
        header = struct.pack("@HP", len(code), ctypes.addressof(buffer))
        self._socket.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, header)


def _big(value: int) -> int:
    """A host-order word as the filter, which loads big-endian, sees it."""
    return int.from_bytes(value.to_bytes(4, sys.byteorder), "big")


def _parse(data: bytes, found: ProcEvents) -> None:
    if len(data) < _AT_PID + 8:
        return
    idx, val, *_ = _CN.unpack_from(data, _NLMSG.size)
    if (idx, val) != (_CN_IDX_PROC, _CN_VAL_PROC):
        return
    what, _, time_ns = _EVENT.unpack_from(data, _AT_WHAT)
    pid, tgid = struct.unpack_from("=II", data, _AT_PID)
    if what == _EVENT_EXEC and pid == tgid:
        found.execs.append((pid, time_ns))
    elif what == _EVENT_EXIT and len(data) >= _AT_PID + 12:
        (status,) = struct.unpack_from("=I", data, _AT_PID + 8)
        if status or pid == tgid:
            found.exits.append((tgid, status, time_ns))
