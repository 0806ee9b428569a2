"""Our probes on NVIDIA's own libnccl, with no GPU, call by call."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support import nccl_cache, nccl_check

pytestmark = [pytest.mark.root, pytest.mark.nccl]

#: Those that must be there, and whatever else was fetched.
VERSIONS = [
    version
    for version in nccl_cache.VERSIONS
    if version in nccl_cache.DEFAULT_VERSIONS or nccl_cache.library(version) is not None
]


def show(result: nccl_check.Result) -> str:
    return "\n".join(result.differences[:20])


@pytest.mark.parametrize("version", VERSIONS)
def test_every_call_is_traced_as_it_was_made(
    version: str, real_nccl: Callable[[str], Path], tmp_path: Path
) -> None:
    result = nccl_check.check(real_nccl(version), version, tmp_path)
    assert not result.differences, show(result)
    assert result.traced == result.made
    assert result.functions >= 18
    # No init was seen: identity comes from the struct, which holds a hash from 2.18
    # and counters from 2.26 on.
    since = tuple(int(part) for part in version.split("."))
    assert result.comms == 6
    assert result.identified == (6 if since >= (2, 18) else 0)
    assert bool(result.with_seq) == (since >= (2, 26))
    assert result.end["how"] in ("exited", "gone")
    assert [lib["nccl_version"] for lib in result.libs] == [version]


@pytest.mark.parametrize("link", ["multi", "perf"])
def test_both_kinds_of_link_give_the_same(
    link: str, real_nccl: Callable[[str], Path], tmp_path: Path
) -> None:
    version = nccl_cache.DEFAULT_VERSIONS[-1]
    result = nccl_check.check(real_nccl(version), version, tmp_path, link=link, calls=97, fewer=11)
    assert not result.differences, show(result)


@pytest.mark.parametrize("version", nccl_cache.DEFAULT_VERSIONS)
def test_a_call_that_never_returned_is_said_to_be_one(
    version: str, real_nccl: Callable[[str], Path], tmp_path: Path
) -> None:
    """The program dies by SIGSEGV inside NCCL: its last call has no return code."""
    result = nccl_check.check(real_nccl(version), version, tmp_path, calls=7, fewer=3, crash=True)
    assert not result.differences, show(result)
    assert result.end["how"] in ("signaled", "gone")
    if result.end["how"] == "signaled":
        assert result.end["signal"] == 11
