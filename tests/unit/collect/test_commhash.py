"""The hashes, against values taken from NCCL itself."""

from __future__ import annotations

import pytest

from nccluprobe.nccl import commhash

A = bytes(range(128))
B = bytes((37 * i + 11) % 256 for i in range(128))


@pytest.mark.parametrize(
    ("unique_id", "djb2a", "log", "new", "child"),
    [
        (A, 0xBF47C767CBDF3105, 0x20B485532CBD7F67, 0x6AFE1CC17717E1F4, 0x221160334D3DEF2E),
        (B, 0x65BB3B0CBA527185, 0xAE3632082B38C8D3, 0x3002DCD1BBE6653D, 0x05E49A444B66BDB0),
    ],
)
def test_known_values(unique_id: bytes, djb2a: int, log: int, new: int, child: int) -> None:
    assert commhash.djb2a(unique_id) == djb2a
    assert commhash.hash_unique_id(unique_id) == log
    assert commhash.hash_226(unique_id) == new
    assert commhash.child_226(new, 1, 3) == child


def test_char_is_unsigned_on_arm() -> None:
    low = bytes(range(64)) * 2
    assert commhash.djb2a(low) == commhash.djb2a(low, signed_char=False)
    assert commhash.djb2a(B) != commhash.djb2a(B, signed_char=False)
    assert commhash.hash_unique_id(B) != commhash.hash_unique_id(B, signed_char=False)


def test_init_hash_by_version() -> None:
    assert commhash.init_hash((2, 16, 2), A) == commhash.hash_unique_id(A)
    assert commhash.init_hash((2, 21, 5), A) == commhash.djb2a(A)
    assert commhash.init_hash((2, 26, 2), A) == commhash.hash_226(A)


def test_child_hash_by_version() -> None:
    parent = 0x00C63EF1B8875642
    text = commhash.djb2a(b"00c63ef1b8875642-3".ljust(128, b"\0"))
    assert commhash.child_hash((2, 21, 5), "split", parent, 7, 3) == text
    text = commhash.djb2a(b"00c63ef1b8875642-7-3".ljust(128, b"\0"))
    assert commhash.child_hash((2, 24, 3), "split", parent, 7, 3) == text
    assert commhash.child_hash((2, 28, 9), "split", parent, 7, 3) == commhash.child_226(
        parent, 7, 3
    )
    assert commhash.child_hash((2, 17, 1), "split", parent, 7, 3) is None
    assert commhash.child_hash((2, 29, 2), "grow", parent, 7, 3) is None


def test_two_shrinks_share_a_hash() -> None:
    first = commhash.child_hash((2, 28, 9), "shrink", 5, 1, 0)
    assert first == commhash.child_hash((2, 28, 9), "shrink", 5, 2, 0)
    assert first == commhash.child_226(5, 0, 0)
    assert commhash.child_hash((2, 26, 2), "shrink", 5, 1, 0) is None


def test_negative_colour_is_eaten_as_an_int() -> None:
    assert commhash.child_226(1, 1, -2) == commhash.child_226(1, 1, 2**32 - 2)


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("2.28.9", (2, 28, 9)),
        ("2.18.1-1", (2, 18, 1)),
        ("2.28.9+cuda13.0", (2, 28, 9)),
        ("2", None),
        ("x.y", None),
        (None, None),
    ],
)
def test_versions(text: str | None, version: tuple[int, ...] | None) -> None:
    assert commhash.parse_version(text) == version
