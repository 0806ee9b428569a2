"""Bootstrap: rank 0 hands NCCL's unique id to the other ranks over TCP."""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections.abc import Callable

from nccluprobe.canary.bootstrap_server import serve
from nccluprobe.canary.bootstrap_wire import (
    MAX_BODY,
    PEER_TIMEOUT,
    REPLY,
    REPLY_MAGIC,
    Address,
    hello,
    receive,
)
from nccluprobe.canary.errors import ArgumentError, BootstrapError

logger = logging.getLogger("nccluprobe.canary")

RETRY_PERIOD = 1.0
#: From this attempt on it is worth a warning: rank 0 is not merely a little later.
_LONG = 4


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
    job: str | None = None,
) -> bytes:
    """The unique id, the same on all ranks.

    Rank 0 makes it with `make` and serves it at `address` until the other
    ranks have it; they try once a second. BootstrapError after `timeout`
    seconds, and at once for a port in use, a wrong peer, a short read, another
    world size, or a rank claimed twice. `job`: a name that ranks of one job
    share; a rank of a job with another name is sent away.
    """
    check_world(rank, world)
    if not 0 < address[1] < 65536:
        raise ArgumentError(f"port {address[1]}: give one from 1 to 65535")
    if world == 1:
        return make()
    if rank == 0:
        return serve(world, make, address, timeout, job)
    return fetch(rank, world, address, timeout, job)


def fetch(rank: int, world: int, address: Address, timeout: float, job: str | None = None) -> bytes:
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
                    return _ask(peer, hello(rank, world, job), address)
                why = "nobody listens"
        except socket.gaierror as error:
            raise BootstrapError(
                f"bootstrap: {address[0]} is no known host; give the address of rank 0"
            ) from error
        except OSError as error:
            why = error.strerror or str(error)
        elapsed = time.monotonic() - start
        if elapsed + RETRY_PERIOD > timeout:
            raise BootstrapError(
                f"rank {rank} did not reach rank 0 at {address[0]}:{address[1]} within "
                f"{timeout:g} s: {why}"
            )
        if attempt & (attempt - 1) == 0:  # 1, 2, 4, 8...: the log thins out
            logger.log(
                logging.INFO if attempt < _LONG else logging.WARNING,
                "rank %d: rank 0 at %s:%d not reached yet (attempt %d, %.0f s): %s",
                rank,
                *address,
                attempt,
                elapsed,
                why,
            )
        time.sleep(RETRY_PERIOD)


def _ask(peer: socket.socket, words: bytes, address: Address) -> bytes:
    where = f"{address[0]}:{address[1]}"
    peer.sendall(words)
    head = receive(peer, REPLY.size)
    if head and not head.startswith(REPLY_MAGIC[: len(head)]):
        raise BootstrapError(f"bootstrap: the peer at {where} is not rank 0 of a canary")
    if len(head) < REPLY.size:
        raise BootstrapError(
            f"bootstrap: short read from {where}: {len(head)} of {REPLY.size} bytes"
        )
    _, status, length = REPLY.unpack(head)
    if length > MAX_BODY:
        raise BootstrapError(f"bootstrap: the peer at {where} is not rank 0 of a canary")
    body = receive(peer, length)
    if len(body) < length:
        raise BootstrapError(f"bootstrap: short read from {where}: {len(body)} of {length} bytes")
    if status:
        raise BootstrapError(f"rank 0 refused: {body.decode(errors='replace')}")
    with contextlib.suppress(OSError):  # rank 0 saw the connection end: it has served us
        peer.sendall(b"\x01")
    return body
