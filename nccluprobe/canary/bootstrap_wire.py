"""What the ranks say to each other over TCP before they have NCCL.

All integers are big-endian. A client sends HELLO (magic, version, rank, world size,
job) and waits. When all have come, the server answers each with REPLY (magic, status,
length) and the body: the unique id when status is 0, else a text that says what is
wrong. The client confirms the id with one byte.
"""

from __future__ import annotations

import hashlib
import socket
import struct

HELLO = struct.Struct("!8sIII8s")
REPLY = struct.Struct("!8sII")
HELLO_MAGIC = b"NCPCANRY"
REPLY_MAGIC = b"NCPYRNAC"  # another one: a client that meets itself must notice
VERSION = 1
MAX_BODY = 4096

#: Seconds for a connected peer to say what it has to say.
PEER_TIMEOUT = 5.0

Address = tuple[str, int]


def job_tag(job: str | None) -> bytes:
    """Tells jobs apart that use one port; zeros when the launcher gave no name."""
    return hashlib.sha256(job.encode()).digest()[:8] if job else bytes(8)


def hello(rank: int, world: int, job: str | None = None) -> bytes:
    """The first words of a client."""
    return HELLO.pack(HELLO_MAGIC, VERSION, rank, world, job_tag(job))


def receive(peer: socket.socket, wanted: int) -> bytes:
    """`wanted` bytes, fewer when the peer ends the connection."""
    data = b""
    while len(data) < wanted:
        part = peer.recv(wanted - len(data))
        if not part:
            break
        data += part
    return data
