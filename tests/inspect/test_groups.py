"""Grouping of ``inspect`` lines, and reading memory with care: without privileges."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import time
from collections.abc import Sequence
from typing import Any

import pytest

from nccluprobe import memory
from nccluprobe.inspect import pages, text
from nccluprobe.inspect.groups import groups
from nccluprobe.inspect.lines import sound

Line = dict[str, Any]


def line(pid: int, *comms: Line, **more: Any) -> Line:
    made: Line = {
        "kind": "inspect",
        "host": "node",
        "boot_id": "b",
        "pid": pid,
        "start": 1,
        "rank": None,
        "exe": "python",
        "alive": True,
        "main": "running",
        "threads": [],
        "libs": [],
        "notes": [],
        "took": 1,
        "searched": 0,
        "comms": list(comms),
    }
    return {**made, **more}


def comm(rank: int, nranks: int, seqs: Sequence[int] | None, hash_: str = "ab" * 8) -> Line:
    return {
        "hash": hash_,
        "comm_rank": rank,
        "nranks": nranks,
        "dev": 0,
        "name": None,
        "seqs": None if seqs is None else list(seqs),
        "async_error": 0,
        "moving": False,
    }


def shown(lines: Sequence[Line]) -> str:
    return "\n".join("\n".join(text.group(g)) for g in groups(lines))


def test_behind_in_several_functions_the_furthest_first() -> None:
    lines = [
        line(1, comm(0, 3, (0, 0, 0, 5, 20))),
        line(2, comm(1, 3, (0, 0, 0, 3, 20))),
        line(3, comm(2, 3, (0, 0, 0, 5, 13))),
    ]
    (group,) = groups(lines)
    assert [(x.member.rank, x.api, x.calls, x.by) for x in group.lags()] == [
        (2, "ncclAllReduce", 13, 7),
        (1, "ncclReduceScatter", 3, 2),
    ]
    assert "2 ranks are behind" in shown(lines)


def test_groups_are_told_by_hash_and_size() -> None:
    lines = [
        line(1, comm(0, 2, (0, 0, 0, 0, 9)), comm(0, 2, (3, 0, 0, 0, 0), "cd" * 8)),
        line(2, comm(1, 2, (0, 0, 0, 0, 9)), comm(1, 2, (1, 0, 0, 0, 0), "cd" * 8)),
    ]
    found = groups(lines)
    assert [g.hash for g in found] == ["cd" * 8, "ab" * 8]
    assert "all equal (9 AllReduce)" in shown(lines)


def test_what_is_not_known_is_said() -> None:
    assert "counters not known" in shown([line(1, comm(0, 2, None))])
    assert "nothing to compare" in shown([line(1, comm(3, 9, (0, 0, 0, 0, 1)))])
    assert "not looked at: ranks 0-2, 4-8; their processes have ended, or were not among" in (
        shown([line(1, comm(3, 9, (0, 0, 0, 0, 1)))])
    )
    # Two communicators with one hash in one process: which is which?
    twice = line(1, comm(0, 2, (0, 0, 0, 0, 1)), comm(0, 2, (0, 0, 0, 0, 4)))
    both = shown([twice, line(2, comm(1, 2, (0, 0, 0, 0, 1)))])
    assert "cannot be told" in both and "behind" not in both


def test_a_rank_that_is_gone_is_not_one_of_all() -> None:
    """Rank 2 of 4 has ended, so nobody read its memory."""
    three = [line(r, comm(r, 4, (0, 0, 0, 0, 9))) for r in (0, 1, 3)]
    assert shown(three) == (
        "communicator abababababababab, 4 ranks, 3 looked at: the 3 that could be read are equal "
        "(9 AllReduce)\n"
        "  not looked at: rank 2; its process has ended, or was not among those looked at"
    )
    dead = line(2, comm(2, 4, None), alive=False)
    assert shown([*three, dead]) == (
        "communicator abababababababab, 4 ranks, 4 looked at: the 3 that could be read are equal "
        "(9 AllReduce)\n"
        "  counters not known: rank 2\n"
        "  rank 2: its process has ended since"
    )


def test_text_of_the_target_is_escaped() -> None:
    evil = comm(0, 2, (0, 0, 0, 0, 1))
    evil["name"] = "x\x1b[2J\n"
    one = line(1, evil, exe="\x07py")
    out = "\n".join([*text.process(one), shown([one])])
    assert "\x1b" not in out and "\x07" not in out


@pytest.mark.parametrize(
    "change",
    [
        {"pid": "1"},
        {"comms": [{}]},
        {"comms": [comm(2, 2, None)]},
        {"comms": [comm(0, 2, (1, 2))]},
        {"comms": 3},
        {"alive": None},
    ],
)
def test_lines_from_files_are_checked(change: Line) -> None:
    assert sound(line(1, comm(0, 2, None)))
    assert not sound({**line(1, comm(0, 2, None)), **change})
    assert not sound(json.loads("[]"))


def test_only_present_private_anonymous_pages() -> None:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    private = mmap.mmap(-1, 64 * pages.PAGE, flags=flags)
    shared = mmap.mmap(-1, 64 * pages.PAGE)
    for page in (3, 4, 9):
        private[page * pages.PAGE] = 1
    shared[0] = 1
    at = ctypes.addressof(ctypes.c_char.from_buffer(private))
    elsewhere = ctypes.addressof(ctypes.c_char.from_buffer(shared))
    looked = pages.regions(os.getpid(), time.monotonic() + 10)
    assert looked.complete
    there = pages.Present(os.getpid())
    for region in looked.readable:
        there.add(region)
    there.close()
    page = pages.PAGE
    assert there.covers(at + 3 * page, 2 * page) and there.covers(at + 9 * page, 8)
    assert not there.covers(at + 4 * page, 2 * page)
    assert not there.covers(at + 2 * page, 8) and not there.covers(at + 10 * page - 4, 8)
    assert not there.covers(elsewhere, 8)


def test_reading_memory() -> None:
    text_ = ctypes.create_string_buffer(b"0123456789abcdef")
    at = ctypes.addressof(text_)
    assert memory.read(os.getpid(), at + 2, 4) == b"2345"
    assert memory.read(os.getpid(), 16, 8) is None
    with pytest.raises(OSError):
        memory.read(2**22 - 1, at, 8)
