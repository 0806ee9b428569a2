"""Bootstrap: rank 0 hands NCCL's unique id to the other ranks over TCP.

Protocol, all integers big-endian. A client sends HELLO (magic, version, rank,
world size) and waits. When all have come, the server answers each with REPLY
(magic, status, length) and the body: the unique id when status is 0, else a
text that says what is wrong. The client confirms the id with one byte.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import socket
import struct
import time
from collections.abc import Callable

from nccluprobe.canary.errors import ArgumentError, BootstrapError

logger = logging.getLogger("nccluprobe.canary")

HELLO = struct.Struct("!8sIII")
REPLY = struct.Struct("!8sII")
HELLO_MAGIC = b"NCPCANRY"
REPLY_MAGIC = b"NCPYRNAC"  # another one: a client that meets itself must notice
VERSION = 1
MAX_BODY = 4096

RETRY_PERIOD = 1.0
#: Seconds for a connected peer to say what it has to say.
PEER_TIMEOUT = 5.0

Address = tuple[str, int]


def check_world(rank: int, world: int) -> None:
    """ArgumentError unless 0 <= rank < world."""
    if world < 1 or not 0 <= rank < world:
        raise ArgumentError(
            f"rank {rank} of {world} ranks: a rank is from 0 to the number of ranks less one"
        )


def exchange(
    rank: int,
    world: int,
    make: Callable[[], bytes],
    address: Address,
    timeout: float = 600.0,
) -> bytes:
    """The unique id, the same on all ranks.

    Rank 0 makes it with `make` and serves it at `address` until the other
    ranks have it; they try once a second. BootstrapError after `timeout`
    seconds, and at once for a port in use, a wrong peer, a short read, another
    world size, or a rank claimed twice.
    """
    check_world(rank, world)
    if not 0 < address[1] < 65536:
        raise ArgumentError(f"port {address[1]}: give one from 1 to 65535")
    if world == 1:
        return make()
    if rank == 0:
        return serve(world, make, address, timeout)
    return fetch(rank, world, address, timeout)


# ---- rank 0 ----------------------------------------------------------------------------------


def _listen(address: Address) -> socket.socket:
    host, port = address
    try:
        family, _, _, _, where = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        return socket.create_server(where[:2], family=family, backlog=1024)
    except OSError as error:
        what = {
            errno.EADDRINUSE: "the port is in use; give another port",
            errno.EADDRNOTAVAIL: "the address is none of this machine; rank 0 must run there",
        }.get(error.errno or 0, error.strerror or str(error))
        raise BootstrapError(f"rank 0 cannot listen on {host}:{port}: {what}") from error


def serve(world: int, make: Callable[[], bytes], address: Address, timeout: float) -> bytes:
    """Rank 0: listens, waits for ranks 1 to world - 1, then gives the id to all of them.

    To all or to none: a rank that had the id while another never comes would
    wait in NCCL without end.
    """
    end = time.monotonic() + timeout
    waiting: dict[int, socket.socket] = {}
    with _listen(address) as server:
        unique = make()
        try:
            while len(waiting) < world - 1 or _drop_gone(waiting):
                _admit(server, world, waiting, end, timeout)
            for rank, peer in waiting.items():
                _hand_over(rank, peer, unique)
        except BootstrapError as error:
            for peer in waiting.values():  # they need not wait for their own timeout
                with contextlib.suppress(OSError):
                    _refuse(peer, str(error))
            raise
        finally:
            for peer in waiting.values():
                peer.close()
    return unique


class _NotOurs(Exception):
    pass


def _admit(
    server: socket.socket,
    world: int,
    waiting: dict[int, socket.socket],
    end: float,
    timeout: float,
) -> None:
    """Takes one connection; a rank of ours is among `waiting` then."""
    left = end - time.monotonic()
    if left <= 0:
        missing = set(range(1, world)) - set(waiting)
        raise BootstrapError(
            f"after {timeout:g} s {len(missing)} of {world} ranks have not come: {_some(missing)}"
        )
    server.settimeout(left)
    try:
        peer, where = server.accept()
    except TimeoutError:
        return
    peer.settimeout(min(left, PEER_TIMEOUT))
    try:
        rank = _greet(peer, world, waiting)
    except (OSError, _NotOurs) as error:
        # A port scan or a client that went away must not end the job.
        logger.warning("bootstrap: connection from %s ignored: %s", where[0], error)
        peer.close()
        return
    except BootstrapError as error:
        with contextlib.suppress(OSError):
            _refuse(peer, str(error))
        peer.close()
        raise
    waiting[rank] = peer


def _greet(peer: socket.socket, world: int, waiting: dict[int, socket.socket]) -> int:
    """The rank at the other end; BootstrapError when it does not fit the job."""
    data = _receive(peer, HELLO.size)
    if len(data) < HELLO.size or not data.startswith(HELLO_MAGIC):
        raise _NotOurs(f"not a rank of a canary ({len(data)} bytes)")
    version, rank, theirs = (int(number) for number in HELLO.unpack(data)[1:])
    wrong = None
    if version != VERSION:
        wrong = f"rank {rank} speaks protocol {version}, rank 0 speaks {VERSION}"
    elif theirs != world:
        wrong = f"rank {rank} expects {theirs} ranks, rank 0 expects {world}"
    elif not 0 < rank < world:
        wrong = f"rank {rank} does not exist among {world} ranks, or is rank 0 itself"
    elif rank in waiting and not _gone(waiting[rank]):
        wrong = f"rank {rank} was claimed twice"
    if wrong:
        raise BootstrapError(f"bootstrap: {wrong}; start all ranks with the same settings")
    if rank in waiting:  # it lost its connection and has come again
        waiting.pop(rank).close()
    return rank


def _gone(peer: socket.socket) -> bool:
    """True when the other end has closed the connection."""
    peer.setblocking(False)
    try:
        return peer.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def _drop_gone(waiting: dict[int, socket.socket]) -> bool:
    """Forgets ranks that have gone away; True when there were any."""
    gone = [rank for rank, peer in waiting.items() if _gone(peer)]
    for rank in gone:
        waiting.pop(rank).close()
    return bool(gone)


def _hand_over(rank: int, peer: socket.socket, unique: bytes) -> None:
    try:
        peer.settimeout(PEER_TIMEOUT)
        peer.sendall(REPLY.pack(REPLY_MAGIC, 0, len(unique)) + unique)
        confirmed = _receive(peer, 1)
    except OSError as error:
        raise BootstrapError(f"bootstrap: rank {rank} went away: {error}") from error
    if not confirmed:
        raise BootstrapError(f"bootstrap: rank {rank} went away before it had the id")


def _refuse(peer: socket.socket, why: str) -> None:
    body = why.encode()[:MAX_BODY]
    peer.sendall(REPLY.pack(REPLY_MAGIC, 1, len(body)) + body)


# ---- the others ------------------------------------------------------------------------------


def fetch(rank: int, world: int, address: Address, timeout: float) -> bytes:
    """A rank other than 0: asks once a second until rank 0 is there."""
    start = time.monotonic()
    attempt = 0
    while True:
        attempt += 1
        left = start + timeout - time.monotonic()
        try:
            with socket.create_connection(
                address, timeout=max(0.1, min(left, PEER_TIMEOUT))
            ) as peer:
                # On a free port of the same machine a client can connect to itself.
                if peer.getsockname() != peer.getpeername():
                    peer.settimeout(max(0.1, left))
                    return _ask(peer, rank, world, address)
                why = "nobody listens"
        except socket.gaierror as error:
            raise BootstrapError(f"bootstrap: {address[0]} is no known host: {error}") from error
        except OSError as error:
            why = error.strerror or str(error)
        elapsed = time.monotonic() - start
        if elapsed + RETRY_PERIOD > timeout:
            raise BootstrapError(
                f"rank {rank} did not reach rank 0 at {address[0]}:{address[1]} within "
                f"{timeout:g} s: {why}"
            )
        if attempt & (attempt - 1) == 0:  # 1, 2, 4, 8...: the log thins out
            logger.info(
                "rank %d: rank 0 at %s:%d not reached yet (attempt %d, %.0f s): %s",
                rank,
                *address,
                attempt,
                elapsed,
                why,
            )
        time.sleep(RETRY_PERIOD)


def _ask(peer: socket.socket, rank: int, world: int, address: Address) -> bytes:
    where = f"{address[0]}:{address[1]}"
    peer.sendall(HELLO.pack(HELLO_MAGIC, VERSION, rank, world))
    head = _receive(peer, REPLY.size)
    if head and not head.startswith(REPLY_MAGIC[: len(head)]):
        raise BootstrapError(f"bootstrap: the peer at {where} is not rank 0 of a canary")
    if len(head) < REPLY.size:
        raise BootstrapError(
            f"bootstrap: short read from {where}: {len(head)} of {REPLY.size} bytes"
        )
    _, status, length = REPLY.unpack(head)
    if length > MAX_BODY:
        raise BootstrapError(f"bootstrap: the peer at {where} is not rank 0 of a canary")
    body = _receive(peer, length)
    if len(body) < length:
        raise BootstrapError(f"bootstrap: short read from {where}: {len(body)} of {length} bytes")
    if status:
        raise BootstrapError(f"rank 0 refused: {body.decode(errors='replace')}")
    with contextlib.suppress(OSError):  # rank 0 saw the connection end: it has served us
        peer.sendall(b"\x01")
    return body


def _receive(peer: socket.socket, wanted: int) -> bytes:
    """`wanted` bytes, fewer when the peer ends the connection."""
    data = b""
    while len(data) < wanted:
        part = peer.recv(wanted - len(data))
        if not part:
            break
        data += part
    return data


def _some(ranks: set[int]) -> str:
    shown = sorted(ranks)[:8]
    return "ranks " + ", ".join(map(str, shown)) + (", ..." if len(ranks) > len(shown) else "")
