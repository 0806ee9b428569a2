"""Rank 0's side of the bootstrap: listens, gathers the ranks, gives all of them the id."""

from __future__ import annotations

import contextlib
import errno
import logging
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from nccluprobe.canary.bootstrap_wire import (
    HELLO,
    HELLO_MAGIC,
    MAX_BODY,
    PEER_TIMEOUT,
    REPLY,
    REPLY_MAGIC,
    VERSION,
    Address,
    job_tag,
    receive,
)
from nccluprobe.canary.errors import BootstrapError

logger = logging.getLogger("nccluprobe.canary")

#: Connections that have not said yet who they are; the oldest has to go then.
_MOST_GUESTS = 256
#: Seconds until rank 0 says whom it waits for; each further time after twice as long.
_FIRST_WORD_S = 5.0


def serve(
    world: int, make: Callable[[], bytes], address: Address, timeout: float, job: str | None = None
) -> bytes:
    """Rank 0: waits for ranks 1 to world - 1, then gives the id of `make` to all of them.

    To all or to none: a rank that had the id while another never comes would
    wait in NCCL without end.
    """
    with _listen(address) as server:
        unique = make()
        gathering = _Gathering(server, world, job_tag(job))
        try:
            gathering.wait(timeout)
            for rank, peer in gathering.waiting.items():
                _hand_over(rank, peer, unique)
        except BootstrapError as error:
            for peer in gathering.waiting.values():  # they need not wait for their own timeout
                _refuse(peer, str(error))
            raise
        finally:
            gathering.close()
    return unique


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


@dataclass
class _Guest:
    """A connection that has not said yet who it is, and must until `end`."""

    where: str
    end: float
    data: bytes = b""


class _NotOurs(Exception):
    pass


@dataclass
class _Gathering:
    """All connections side by side: one that says nothing keeps no rank waiting."""

    server: socket.socket
    world: int
    tag: bytes
    guests: dict[socket.socket, _Guest] = field(default_factory=dict)
    waiting: dict[int, socket.socket] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.server.setblocking(False)
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.server, selectors.EVENT_READ)

    def wait(self, timeout: float) -> None:
        """Until all ranks are among ``waiting``; BootstrapError after `timeout` seconds."""
        start = time.monotonic()
        word = _FIRST_WORD_S
        while len(self.waiting) < self.world - 1 or self._drop_gone():
            elapsed = time.monotonic() - start
            missing = set(range(1, self.world)) - set(self.waiting)
            if elapsed >= timeout:
                raise BootstrapError(
                    f"after {timeout:g} s {len(missing)} of {self.world} ranks have not come: "
                    f"{_some(missing)}"
                )
            if elapsed >= word:
                word *= 2
                logger.warning(
                    "rank 0 has waited %.0f s for %d of %d ranks: %s",
                    elapsed,
                    len(missing),
                    self.world,
                    _some(missing),
                )
            ends = [start + timeout, start + word, *(g.end for g in self.guests.values())]
            for key, _ in self.selector.select(max(0.0, min(ends) - time.monotonic())):
                peer = key.fileobj
                assert isinstance(peer, socket.socket)
                if peer is self.server:
                    self._accept()
                elif peer in self.guests:
                    self._listen_to(peer)
            self._drop_silent()

    def close(self) -> None:
        self.selector.close()
        for peer in [*self.guests, *self.waiting.values()]:
            peer.close()

    # ---- connections --------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            peer, where = self.server.accept()
        except BlockingIOError:
            return
        except OSError as error:  # gone before it was taken, or no more file descriptors
            logger.warning("bootstrap: a connection was not taken: %s", error.strerror)
            time.sleep(0.05)
            return
        peer.setblocking(False)
        if len(self.guests) >= _MOST_GUESTS:
            self._ignore(next(iter(self.guests)), "too many connections that say nothing")
        self.guests[peer] = _Guest(str(where[0]), time.monotonic() + PEER_TIMEOUT)
        self.selector.register(peer, selectors.EVENT_READ)

    def _listen_to(self, peer: socket.socket) -> None:
        guest = self.guests[peer]
        try:
            part = peer.recv(HELLO.size - len(guest.data))
            guest.data += part
            known = guest.data[: len(HELLO_MAGIC)]
            short = len(guest.data) < HELLO.size
            if not HELLO_MAGIC.startswith(known) or (short and not part):
                raise _NotOurs(f"not a rank of a canary ({len(guest.data)} bytes)")
            if short:
                return
            rank = self._rank_of(guest.data)
        except OSError as error:  # a client that went away must not end the job
            self._ignore(peer, error.strerror or "the connection ended")
            return
        except _NotOurs as error:  # nor must a port scan
            self._ignore(peer, str(error))
            return
        except BootstrapError as error:
            _refuse(peer, str(error))
            raise
        self.selector.unregister(peer)
        del self.guests[peer]
        if rank in self.waiting:  # it lost its connection and has come again
            self.waiting.pop(rank).close()
        self.waiting[rank] = peer

    def _rank_of(self, data: bytes) -> int:
        """The rank at the other end; BootstrapError when it does not fit the job."""
        _, version, rank, theirs, tag = HELLO.unpack(data)
        wrong = None
        if version != VERSION:
            wrong = f"rank {rank} speaks protocol {version}, rank 0 speaks {VERSION}"
        elif any(tag) and any(self.tag) and tag != self.tag:
            # Another job's rank at our port is that job's mistake, and not the end of ours.
            raise _NotOurs(f"rank {rank} of another job; give that job another port")
        elif theirs != self.world:
            wrong = f"rank {rank} expects {theirs} ranks, rank 0 expects {self.world}"
        elif not 0 < rank < self.world:
            wrong = f"rank {rank} does not exist among {self.world} ranks, or is rank 0 itself"
        elif rank in self.waiting and not _gone(self.waiting[rank]):
            wrong = f"rank {rank} was claimed twice"
        if wrong:
            raise BootstrapError(f"bootstrap: {wrong}; start all ranks with the same settings")
        return int(rank)

    def _ignore(self, peer: socket.socket, why: str) -> None:
        guest = self.guests.pop(peer)
        logger.warning("bootstrap: connection from %s ignored: %s", guest.where, why)
        if len(guest.data) == HELLO.size:  # it speaks our language, and need not guess
            _refuse(peer, f"this is {why}")
        self.selector.unregister(peer)
        peer.close()

    def _drop_silent(self) -> None:
        now = time.monotonic()
        for peer, guest in list(self.guests.items()):
            if now >= guest.end:
                self._ignore(peer, f"it said nothing for {PEER_TIMEOUT:g} s")

    def _drop_gone(self) -> bool:
        """Forgets ranks that have gone away; True when there were any."""
        gone = [rank for rank, peer in self.waiting.items() if _gone(peer)]
        for rank in gone:
            self.waiting.pop(rank).close()
        return bool(gone)


def _gone(peer: socket.socket) -> bool:
    """True when the other end has closed the connection."""
    try:
        return peer.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def _hand_over(rank: int, peer: socket.socket, unique: bytes) -> None:
    try:
        peer.settimeout(PEER_TIMEOUT)
        peer.sendall(REPLY.pack(REPLY_MAGIC, 0, len(unique)) + unique)
        confirmed = receive(peer, 1)
    except OSError as error:
        raise BootstrapError(
            f"bootstrap: rank {rank} went away: {error.strerror or 'it does not answer'}"
        ) from error
    if not confirmed:
        raise BootstrapError(f"bootstrap: rank {rank} went away before it had the id")


def _refuse(peer: socket.socket, why: str) -> None:
    """Says why, as far as the peer's buffer takes it: nobody waits for it."""
    body = why.encode()[:MAX_BODY]
    with contextlib.suppress(OSError):
        peer.send(REPLY.pack(REPLY_MAGIC, 1, len(body)) + body)


def _some(ranks: set[int]) -> str:
    shown = sorted(ranks)[:8]
    return "ranks " + ", ".join(map(str, shown)) + (", ..." if len(ranks) > len(shown) else "")
