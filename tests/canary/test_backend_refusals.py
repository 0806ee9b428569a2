"""What is refused before anything is done, and what works without being there."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nccluprobe.canary import (
    ArgumentError,
    KernelMissingError,
    LibraryError,
)
from nccluprobe.canary.nccl import Nccl

from .ranks import backend, run
from .values import pack, unpack
from .watching import calls_of, logged

# ---- arguments -------------------------------------------------------------------------------


def refusals(rank: int, world: int, port: int) -> Any:
    with backend(rank, world, port, capacity=256) as b:
        buf, small = b.alloc(4096), b.alloc(64)
        seen = calls_of(b)
        attempts: list[Callable[[], object]] = [
            lambda: b.all_reduce(buf, 65, "float32"),  # 260 bytes, the receive buffer has 256
            lambda: b.all_reduce(buf, 129, "bfloat16"),
            lambda: b.all_reduce(small, 17, "float32"),
            lambda: b.all_reduce(buf, 32, "float32", out=small),
            lambda: b.all_reduce(buf, -1, "float32"),
            lambda: b.all_reduce(buf, 1, "float31"),
            lambda: b.all_reduce(buf, 1, "float32", "mean"),
            lambda: b.broadcast(buf, 1, "float32", 2),
            lambda: b.broadcast(buf, 1, "float32", -1),
            lambda: b.broadcast(small, 65, "int8", 0),
            lambda: b.receive_command(small, 65, "int8"),
            lambda: b.reduce(buf, 1, "float32", 2),
            lambda: b.all_gather(buf, small, 9, "float32"),
            lambda: b.reduce_scatter(small, buf, 9, "float32"),
            lambda: b.all_to_all(small, buf, 9, "float32"),
            lambda: b.send(buf, 1, "float32", 2),
            lambda: b.recv(buf, 1, "float32", -1),
            lambda: b.send(buf, 1, "float32", rank),
            lambda: b.split(-2),
            lambda: b.split(1 << 31),
            lambda: b.split(0, 1 << 31),
            lambda: b.all_reduce(buf, 1.5, "float32"),  # type: ignore[arg-type]
            lambda: b.send(buf, 1, "float32", None),  # type: ignore[arg-type]
            lambda: b.alloc(0),
            lambda: small.write(b"x" * 65),
            lambda: small.read(65),
            lambda: small.view(60, 8),
        ]
        for attempt in attempts:
            with pytest.raises(ArgumentError):
                attempt()
        empty: list[Callable[[], object]] = [
            lambda: b.all_reduce(buf, 0, "float32"),
            lambda: b.broadcast(buf, 0, "float32", 0),
            lambda: b.all_gather(buf, buf, 0, "float32"),
            lambda: b.reduce_scatter(buf, buf, 0, "float32"),
            lambda: b.reduce(buf, 0, "float32", 0),
            lambda: b.all_to_all(buf, buf, 0, "float32"),
            lambda: b.send(buf, 0, "float32", 1 - rank),
            lambda: b.recv(buf, 0, "float32", 1 - rank),
        ]
        for nothing in empty:
            nothing()
        assert b.healthy
        before = [name for name in seen if name != "ncclCommGetAsyncError"]
        registrations = seen.count("ncclCommRegister")
        assert b.register(buf) and b.register(buf) and b.registered(buf)
        assert not b.registered(buf.view(0, 8))
        assert seen.count("ncclCommRegister") == registrations + 1
        b.deregister(buf)
        b.deregister(buf)
        assert seen.count("ncclCommDeregister") == 1
        seen.clear()
        b.all_reduce(buf, 64, "float32")  # exactly the capacity
        b.synchronize()
        return [*before, "|", *(name for name in seen if name != "ncclCommGetAsyncError")]


def test_a_refused_or_empty_operation_makes_no_nccl_call() -> None:
    pair = ["ncclGroupStart", "ncclSend", "ncclRecv", "ncclGroupEnd"]
    assert run(2, refusals) == [["|", *pair]] * 2


@pytest.mark.parametrize(
    ("rank", "world", "changes"),
    [
        (2, 2, {}),
        (-1, 2, {}),
        (0, 0, {}),
        (0, 2, {"capacity": 0}),
        (0, 1, {"capacity": -1}),
        (0, 1, {"deadline": 0.0}),
        (0, 2, {"address": ("127.0.0.1", 70000)}),
    ],
)
def test_settings_that_make_no_sense(rank: int, world: int, changes: dict[str, Any]) -> None:
    def attempt(_rank: int, _world: int, port: int) -> str:
        with pytest.raises(ArgumentError) as refused, backend(rank, world, port, **changes):
            pass
        return str(refused.value)

    assert run(1, attempt)[0].count("\n") == 0


def test_no_receive_buffer_is_needed_but_by_two_ranks() -> None:
    def attempt(rank: int, world: int, port: int) -> bool:
        with backend(rank, world, port, capacity=0) as b:
            b.barrier()
            return b.receive_buffer is None

    assert run(3, attempt) == [True] * 3


@pytest.mark.parametrize("which", ["nccl", "cuda"])
def test_a_library_that_is_missing_or_another(which: str, tmp_path: Path) -> None:
    def attempt(_rank: int, _world: int, port: int) -> list[str]:
        said = []
        nothing = tmp_path / "libnothing.so"
        text = tmp_path / "text.so"
        text.write_text("not a library")
        for path in (str(nothing), str(text), "libc.so.6", "libnot_there.so.9"):
            with pytest.raises(LibraryError) as refused, backend(0, 1, port, **{which: path}):
                pass
            said.append(str(refused.value))
        return said

    said = run(1, attempt)[0]
    assert "is no file" in said[0] and all("\n" not in line for line in said)


def test_a_machine_without_a_device_and_a_device_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def attempt(_rank: int, _world: int, port: int) -> list[str]:
        said = []
        for count, device in (("0", None), ("2", 2)):
            os.environ["SIMCUDA_DEVICES"] = count
            with pytest.raises(Exception, match="device") as e, backend(0, 1, port, device=device):
                pass
            said.append(str(e.value))
        return said

    assert run(1, attempt)[0] == [
        "there is no CUDA device here; to try it without a GPU: canary --sim",
        "device 2: there are devices 0 to 1",
    ]


# ---- the add kernel and the registration ------------------------------------------------------


def without_kernel(rank: int, world: int, port: int) -> Any:
    ptx = None if rank else b"not PTX"  # rank 0 has none, its peer is not to suffer
    changes = {} if ptx is None else {"ptx": ptx}
    with logged() as lines, backend(rank, world, port, **changes) as b:
        buf = b.alloc(16)
        buf.write(pack("float32", [1.0, 2.0, 3.0, 4.0]))
        seen = calls_of(b)
        error = ""
        try:
            b.all_reduce(buf, 4, "float32")
        except KernelMissingError as missing:
            error = str(missing)
        posted = [name for name in seen if name != "ncclCommGetAsyncError"]
        b.synchronize()
        b.barrier()
        said = [line for line in lines if "add kernels cannot be loaded" in line]
        return posted, bool(error), len(said), unpack("float32", buf.read())


def test_a_missing_add_kernel_is_an_error_after_the_exchange() -> None:
    pair = ["ncclGroupStart", "ncclSend", "ncclRecv", "ncclGroupEnd"]
    first, second = run(2, without_kernel)
    assert first == (pair, True, 1, [1.0, 2.0, 3.0, 4.0])
    assert second == (pair, False, 0, [2.0, 4.0, 6.0, 8.0])


def unregistered(rank: int, world: int, port: int) -> Any:
    original = Nccl.call

    def refuse(self: Nccl, function: str, *arguments: object) -> int:
        return 1 if function == "ncclCommRegister" else original(self, function, *arguments)

    # In a rank's own process, which ends with the test.
    Nccl.call = refuse  # type: ignore[method-assign]
    with logged() as lines, backend(rank, world, port) as b:
        buf = b.alloc(4)
        buf.write(pack("float32", [1.5]))
        b.all_reduce(buf, 1, "float32")
        b.synchronize()
        assert not b.register(buf)
        assert b.healthy
        said = [line for line in lines if "receive buffer not registered" in line]
        return len(said), unpack("float32", buf.read())


def test_a_failed_registration_is_logged_and_not_fatal() -> None:
    assert run(2, unregistered) == [(1, [3.0])] * 2
