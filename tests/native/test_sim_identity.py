"""The stand-in for libnccl: how a communicator is identified."""

from __future__ import annotations

import ctypes
import platform
import subprocess
from pathlib import Path

import pytest

from .sim import (
    FORK,
    ID_B,
    INT,
    NATIVE,
    PTR,
    SUCCESS,
    Nccl,
    UniqueId,
    native_build,
    ranks,
)

HASHES_C = r"""
#include <stdio.h>
#include "ncp_hash.h"
int main(void) {
  unsigned char id[128];
  for (int v = 0; v < 2; v++) {
    for (int i = 0; i < 128; i++) id[i] = (unsigned char)(v ? 37 * i + 11 : i);
    printf("%llx %llx %llx %llx\n", ncp_hash_djb2a(id), ncp_hash_uniqueid(id), ncp_hash_226(id),
           ncp_hash_226_child(ncp_hash_226(id), 1, 3));
  }
}
"""
HASHES = [
    [0xBF47C767CBDF3105, 0x20B485532CBD7F67, 0x6AFE1CC17717E1F4, 0x221160334D3DEF2E],
    [0x65BB3B0CBA527185, 0xAE3632082B38C8D3, 0x3002DCD1BBE6653D, 0x05E49A444B66BDB0],
]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="values of signed char")
def test_hash_check_values(tmp_path: Path) -> None:
    source = tmp_path / "hashes.c"
    source.write_text(HASHES_C)
    program = tmp_path / "hashes"
    subprocess.run(
        ["cc", "-Wall", "-Wextra", "-Werror", f"-I{NATIVE / 'include'}", source, "-o", program],
        check=True,
    )
    out = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    assert [[int(word, 16) for word in line.split()] for line in out.splitlines()] == HASHES


@pytest.mark.skipif(platform.machine() != "x86_64", reason="reads x86-64 code")
@pytest.mark.parametrize(("version", "expected"), [(None, 2), ("2.21.5", 0)])
def test_struct_holds_the_hash(version: str | None, expected: int, tmp_path: Path) -> None:
    path = native_build.build(tmp_path, ["libsimnccl.so"], sim_version=version)["libsimnccl.so"]

    def body(nccl: Nccl, _uid: UniqueId, _rank: int) -> object:
        number = INT()
        nccl.ncclGetVersion(ctypes.byref(number))
        comm = nccl.init(UniqueId.from_buffer_copy(ID_B), 1, 0)
        return number.value, nccl.field(comm, "hash")

    assert ranks(path, 1, body) == [(22105 if version else 22809, HASHES[1][expected])]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="reads x86-64 code")
def test_split_and_shrink_agree_across_ranks(built: dict[str, Path]) -> None:
    def body(nccl: Nccl, uid: UniqueId, rank: int) -> object:
        comm = nccl.init(uid, 4, rank)
        first = nccl.split(comm, rank % 2, key=-rank)
        second = nccl.split(comm, -1 if rank == 0 else 7)
        exclude = (INT * 1)(3)
        shrunk = PTR()
        if rank != 3:
            assert nccl.ncclCommShrink(comm, exclude, 1, ctypes.byref(shrunk), None, 0) == SUCCESS
        views = [
            c and (nccl.field(c, "hash"), nccl.field(c, "rank"), nccl.field(c, "nranks"))
            for c in (comm, first, second, shrunk.value)
        ]
        assert first and nccl.allreduce(first) == SUCCESS and nccl.sync() == 0
        return views

    views = ranks(built["libsimnccl.so"], 4, body)
    world, first, second, shrunk = (list(column) for column in zip(*views, strict=True))
    assert [v[1:] for v in world] == [(r, 4) for r in range(4)]
    assert len({v[0] for v in world}) == 1
    assert first[0][0] == first[2][0] != first[1][0] == first[3][0]
    assert [v[1:] for v in first] == [(1, 2), (1, 2), (0, 2), (0, 2)]  # the key turns the order
    assert second[0] is None and len({v[0] for v in second[1:]}) == 1
    assert shrunk[3] is None and [v[1:] for v in shrunk[:3]] == [(r, 3) for r in range(3)]


def test_grow(built: dict[str, Path]) -> None:
    path = built["libsimnccl.so"]
    here, there = FORK.Pipe(duplex=False)

    def body(nccl: Nccl, uid: UniqueId, rank: int) -> object:
        grown = PTR()
        if rank < 2:
            comm = nccl.init(uid, 2, rank)
            if rank == 0:
                new = UniqueId()
                assert nccl.ncclCommGetUniqueId(comm, ctypes.byref(new)) == SUCCESS
                there.send_bytes(bytes(new))
            rc = nccl.ncclCommGrow(comm, 3, None, -1, ctypes.byref(grown), None)
        else:
            new = UniqueId.from_buffer_copy(here.recv_bytes())
            rc = nccl.ncclCommGrow(None, 3, ctypes.byref(new), 2, ctypes.byref(grown), None)
        assert rc == SUCCESS and grown.value
        return nccl.allreduce(grown.value) == SUCCESS and nccl.sync() == 0

    assert ranks(path, 3, body) == [True] * 3
