"""How ranks find together over TCP, and what they say when they do not."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from nccluprobe.canary import ArgumentError, BootstrapError, bootstrap
from nccluprobe.canary import bootstrap_server as server_side
from nccluprobe.canary import bootstrap_wire as wire
from nccluprobe.canary.launch import (
    Launch,
    first_node,
    from_environment,
    job_name,
    parse_address,
)
from nccluprobe.canary.libraries import simulated
from nccluprobe.canary.nccl import Nccl

from .ranks import free_port

ID = bytes(range(128))
HOST = "127.0.0.1"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "RETRY_PERIOD", 0.05)


class Attempt(threading.Thread):
    """One rank; its result or its error."""

    def __init__(
        self, rank: int, world: int, port: int, timeout: float = 10.0, job: str | None = None
    ) -> None:
        super().__init__(daemon=True)
        self.arguments = (rank, world, lambda: ID, (HOST, port), timeout, job)
        self.result: bytes | None = None
        self.error = ""
        self.start()

    def run(self) -> None:
        try:
            self.result = bootstrap.exchange(*self.arguments)
        except BootstrapError as error:
            self.error = str(error)

    def outcome(self) -> bytes | str | None:
        self.join(15)
        assert not self.is_alive()
        return self.result or self.error


@pytest.mark.parametrize("world", [1, 2, 5])
def test_all_ranks_get_the_id(world: int) -> None:
    port = free_port()
    others = [Attempt(rank, world, port) for rank in range(1, world)]
    time.sleep(0.1)  # rank 0 comes last: the others retry
    ranks = [Attempt(0, world, port), *others]
    assert [rank.outcome() for rank in ranks] == [ID] * world


def test_a_port_can_be_used_again_at_once() -> None:
    port = free_port()
    for _ in range(3):
        ranks = [Attempt(rank, 2, port) for rank in range(2)]
        assert [rank.outcome() for rank in ranks] == [ID, ID]


@pytest.mark.parametrize(("rank", "world"), [(2, 2), (-1, 2), (0, 0), (0, -1)])
def test_invalid_rank_and_world(rank: int, world: int) -> None:
    with pytest.raises(ArgumentError, match=f"rank {rank} of {world} ranks"):
        bootstrap.exchange(rank, world, lambda: ID, (HOST, 1))


@pytest.mark.parametrize("port", [0, -1, 65536])
def test_invalid_port(port: int) -> None:
    with pytest.raises(ArgumentError, match="port"):
        bootstrap.exchange(0, 2, lambda: ID, (HOST, port))


def test_port_in_use() -> None:
    with socket.create_server((HOST, 0)) as other:
        assert "port is in use" in str(Attempt(0, 2, other.getsockname()[1]).outcome())


def test_an_address_of_another_machine() -> None:
    with pytest.raises(BootstrapError, match="none of this machine"):
        bootstrap.exchange(0, 2, lambda: ID, ("192.0.2.1", free_port()), 1.0)


def test_a_host_that_is_not_known() -> None:
    with pytest.raises(BootstrapError, match=r"no known host|did not reach"):
        bootstrap.exchange(1, 2, lambda: ID, ("host.invalid", 29777), 0.2)


def test_another_world_size_is_said_on_both_sides() -> None:
    port = free_port()
    server, right, wrong = Attempt(0, 3, port), Attempt(1, 3, port), None
    time.sleep(0.3)
    wrong = Attempt(2, 4, port)
    text = "rank 2 expects 4 ranks, rank 0 expects 3"
    assert text in str(server.outcome())
    assert str(wrong.outcome()).startswith("rank 0 refused") and text in wrong.error
    assert text in str(right.outcome()), "who waited is told, too"


def test_a_rank_claimed_twice() -> None:
    port = free_port()
    server, first = Attempt(0, 3, port), Attempt(1, 3, port)
    time.sleep(0.3)
    second = Attempt(1, 3, port)
    for rank in (server, first, second):
        assert "rank 1 was claimed twice" in str(rank.outcome())


def test_a_rank_whose_connection_broke_may_come_again() -> None:
    port = free_port()
    server = Attempt(0, 2, port)
    hello = wire.hello(1, 3)
    with retry(port) as peer:
        peer.sendall(hello[:10])
    assert Attempt(1, 2, port).outcome() == ID and server.outcome() == ID
    port = free_port()
    server = Attempt(0, 3, port)
    with retry(port) as peer:
        peer.sendall(hello)
        time.sleep(0.2)
    ranks = [Attempt(rank, 3, port) for rank in (1, 2)]
    assert [rank.outcome() for rank in (server, *ranks)] == [ID] * 3


@contextmanager
def retry(port: int) -> Iterator[socket.socket]:
    for _ in range(100):
        try:
            with socket.create_connection((HOST, port)) as peer:
                yield peer
            return
        except ConnectionRefusedError:
            time.sleep(0.02)
    raise AssertionError("nobody listens")


@pytest.mark.parametrize("noise", [b"", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x00" * 100])
def test_strangers_do_not_end_the_job(noise: bytes, caplog: pytest.LogCaptureFixture) -> None:
    port = free_port()
    server = Attempt(0, 2, port)
    with retry(port) as peer:
        peer.sendall(noise)
        with contextlib.suppress(OSError):  # rank 0 may have hung up already
            peer.shutdown(socket.SHUT_WR)
        time.sleep(0.1)
    assert Attempt(1, 2, port).outcome() == ID and server.outcome() == ID
    assert any("ignored: not a rank" in line for line in caplog.messages)


def test_clients_that_say_nothing_keep_nobody_waiting(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_side, "_MOST_GUESTS", 3)
    port = free_port()
    server = Attempt(0, 3, port)
    with contextlib.ExitStack() as stack:
        for number in range(5):
            peer = stack.enter_context(retry(port))
            peer.sendall(wire.hello(1, 3)[:number])  # and some that begin and stop
        start = time.monotonic()
        ranks = [Attempt(rank, 3, port) for rank in (1, 2)]
        assert [rank.outcome() for rank in (server, *ranks)] == [ID] * 3
        assert time.monotonic() - start < wire.PEER_TIMEOUT / 2
    assert sum("too many connections" in line for line in caplog.messages) >= 2


def test_a_client_that_says_nothing_is_sent_away(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_side, "PEER_TIMEOUT", 0.2)
    port = free_port()
    server = Attempt(0, 2, port)
    with retry(port) as peer:
        peer.settimeout(5)
        assert peer.recv(1) == b""
    assert Attempt(1, 2, port).outcome() == ID and server.outcome() == ID
    assert any("it said nothing for 0.2 s" in line for line in caplog.messages)


def test_a_rank_of_another_job_ends_only_that_job() -> None:
    """Two jobs at one port: the second one's rank 0 finds it in use, its others ask ours."""
    port = free_port()
    ours = [Attempt(rank, 3, port, job="a") for rank in (0, 1)]
    time.sleep(0.3)
    theirs = [Attempt(0, 3, port, job="b"), Attempt(1, 3, port, job="b")]
    assert "port is in use" in str(theirs[0].outcome())
    assert "rank 0 refused: this is rank 1 of another job" in str(theirs[1].outcome())
    ours.append(Attempt(2, 3, port, job="a"))
    assert [rank.outcome() for rank in ours] == [ID] * 3


def test_rank_0_says_whom_it_waits_for(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_side, "_FIRST_WORD_S", 0.1)
    port = free_port()
    server = Attempt(0, 3, port, 1.0)
    Attempt(2, 3, port)
    server.outcome()
    said = [line for line in caplog.messages if "has waited" in line]
    assert 1 <= len(said) <= 4 and said[-1].endswith("1 of 3 ranks: ranks 1")


def test_a_protocol_of_another_version() -> None:
    port = free_port()
    server = Attempt(0, 2, port)
    with retry(port) as peer:
        peer.sendall(wire.HELLO.pack(wire.HELLO_MAGIC, 9, 1, 2, bytes(8)))
        assert "speaks protocol 9" in str(server.outcome())


def fake_server(answer: Callable[[socket.socket], Any]) -> int:
    server = socket.create_server((HOST, 0))

    def serve() -> None:
        peer, _ = server.accept()
        with server, peer:
            peer.recv(wire.HELLO.size)
            answer(peer)

    threading.Thread(target=serve, daemon=True).start()
    return int(server.getsockname()[1])


REPLY = wire.REPLY.pack(wire.REPLY_MAGIC, 0, 128)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"SSH-2.0-OpenSSH_9.2\r\n", "not rank 0 of a canary"),
        (b"HTTP/1.1 400 Bad Request\r\n", "not rank 0 of a canary"),
        (b"", "short read from .*: 0 of 16 bytes"),
        (REPLY[:9], "short read from .*: 9 of 16 bytes"),
        (REPLY + ID[:100], "short read from .*: 100 of 128 bytes"),
        (wire.REPLY.pack(wire.REPLY_MAGIC, 0, 1 << 30), "not rank 0 of a canary"),
    ],
)
def test_a_wrong_peer_and_a_short_read(answer: bytes, said: str) -> None:
    port = fake_server(lambda peer: peer.sendall(answer))
    with pytest.raises(BootstrapError, match=said):
        bootstrap.exchange(1, 2, lambda: ID, (HOST, port), 5.0)


@pytest.mark.parametrize("sent", [b"", ID[:5], ID + b"x"])
def test_an_id_that_is_none(sent: bytes) -> None:
    nccl, _ = simulated()
    with pytest.raises(BootstrapError, match="rank 0 is another program"):
        Nccl(nccl).init_rank(2, sent, 1)


def test_retries_until_the_timeout_with_a_log_that_thins_out(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bootstrap, "RETRY_PERIOD", 0.01)
    caplog.set_level(logging.INFO, "nccluprobe.canary")
    with pytest.raises(BootstrapError, match=r"did not reach rank 0 at .* within 0.5 s"):
        bootstrap.exchange(1, 2, lambda: ID, (HOST, free_port()), 0.5)
    attempts = [int(line.split("attempt ")[1].split(",")[0]) for line in caplog.messages]
    assert attempts == [1, 2, 4, 8, 16, 32][: len(attempts)] and len(attempts) >= 3


def test_the_missing_ranks_are_named() -> None:
    port = free_port()
    server, first = Attempt(0, 4, port, 0.6), Attempt(1, 4, port, 5.0)
    text = "after 0.6 s 2 of 4 ranks have not come: ranks 2, 3"
    assert server.outcome() == text
    assert first.outcome() == f"rank 0 refused: {text}"


def test_a_long_wait_for_rank_0_is_a_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bootstrap, "RETRY_PERIOD", 0.01)
    caplog.set_level(logging.INFO, "nccluprobe.canary")
    with pytest.raises(BootstrapError):
        bootstrap.exchange(1, 2, lambda: ID, (HOST, free_port()), 0.3)
    levels = [record.levelno for record in caplog.records]
    assert levels[:3] == [logging.INFO, logging.INFO, logging.WARNING]


# ---- the launcher's variables ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (
            {
                "RANK": "3",
                "WORLD_SIZE": "8",
                "LOCAL_RANK": "1",
                "MASTER_ADDR": "n1",
                "MASTER_PORT": "29500",
            },
            Launch(3, 8, 1, ("n1", 29500), "environment"),
        ),
        (
            {
                "RANK": "0",
                "WORLD_SIZE": "2",
                "LOCAL_RANK": "0",
                "MASTER_ADDR": "n1",
                "MASTER_PORT": "29500",
                "TORCHELASTIC_RUN_ID": "x",
            },
            Launch(0, 2, 0, ("n1", 29510), "torchrun"),
        ),
        (
            {
                "SLURM_PROCID": "5",
                "SLURM_NTASKS": "6",
                "SLURM_LOCALID": "1",
                "SLURM_STEP_ID": "0",
                "SLURM_STEP_NODELIST": "gpu[03-05,9],x1",
            },
            Launch(5, 6, 1, ("gpu03", 29777), "slurm"),
        ),
        (
            {
                "OMPI_COMM_WORLD_RANK": "1",
                "OMPI_COMM_WORLD_SIZE": "2",
                "OMPI_COMM_WORLD_LOCAL_RANK": "1",
                "NCCLUPROBE_CANARY_ADDRESS": "10.0.0.7:4000",
            },
            Launch(1, 2, 1, ("10.0.0.7", 4000), "openmpi"),
        ),
        (
            {"PMI_RANK": "1", "PMI_SIZE": "2"},
            Launch(1, 2, None, ("127.0.0.1", 29777), "pmi"),
        ),
        ({"RANK": "1"}, None),
        ({}, None),
    ],
)
def test_from_environment(environ: dict[str, str], expected: Launch | None) -> None:
    assert from_environment(environ) == expected


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"}, "x"),
        ({"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}, None),
        (
            {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "2", "SLURM_PROCID": "0", "SLURM_NTASKS": "2"},
            "7.2",
        ),
        ({"RANK": "0", "WORLD_SIZE": "2"}, None),
    ],
)
def test_the_name_of_a_job(environ: dict[str, str], name: str | None) -> None:
    assert job_name(environ) == name


@pytest.mark.parametrize("port", ["", "x", "0", "65536", "-1"])
def test_a_port_of_the_environment_that_makes_no_sense(port: str) -> None:
    with pytest.raises(ArgumentError):
        from_environment({"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": port})


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("a", "a"), ("a,b", "a"), ("n[1-3]", "n1"), ("n[007,9]-ib", "n007-ib"), ("", "")],
)
def test_first_node(nodes: str, first: str) -> None:
    assert first_node(nodes) == first


def test_addresses() -> None:
    assert parse_address("h:1") == ("h", 1)
    assert parse_address("[::1]:29777") == ("::1", 29777)
    for text in ("", "h", "h:", ":1", "h:x", "h:65536", "h:\u00b2", "h:\uff11", "h:1_0"):
        with pytest.raises(ArgumentError):
            parse_address(text)
