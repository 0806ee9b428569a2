"""NCCL's own log, as one file a rank and as one for all."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from importers.reading import Result


class Log:
    """Lines of a job on one host."""

    def __init__(self, n: int, prefix: str = "", clock: bool = False) -> None:
        self.n = n
        self.prefix = prefix
        self.clock = clock
        self.lines: list[tuple[int, str]] = []
        self.count: dict[int, int] = {}
        self.t = 0

    def say(self, rank: int, text: str) -> None:
        at = f"[2026-05-05 06:{self.t // 60 % 60:02}:{self.t % 60:02}] " if self.clock else ""
        self.t += self.clock
        who = f"node-1:{1000 + rank}:{2000 + rank} [{rank}] NCCL INFO "
        self.lines.append((rank, f"{self.prefix}{at}{who}{text}\n"))

    def init(self, rank: int, comm: str = "0x55aa0", start_only: bool = False) -> None:
        text = (
            f"ncclCommInitRank comm {comm} rank {rank} nranks {self.n} cudaDev {rank} "
            f"nvmlDev {rank} busId 1000 commId 0xfa93daea854b060b - Init "
        )
        self.say(rank, text + "START")
        if not start_only:
            self.say(rank, text + "COMPLETE")

    def call(self, rank: int, api: str = "AllReduce", comm: str = "0x55aa0", **other: int) -> None:
        a = {"count": 1024, "datatype": 7, "op": 0, "root": 0, **other}
        self.say(
            rank,
            f"{api}: opCount {self.count.get(rank, 0):x} sendbuff 0x7f00 recvbuff 0x7f01 "
            f"count {a['count']} datatype {a['datatype']} op {a['op']} root {a['root']} "
            f"comm {comm} [nranks={self.n}] stream 0x5631",
        )
        self.count[rank] = self.count.get(rank, 0) + 1

    def end(self, rank: int, how: str = "Destroy", comm: str = "0x55aa0") -> None:
        self.say(
            rank, f"comm {comm} rank {rank} nranks {self.n} cudaDev 0 busId 1000 - {how} COMPLETE"
        )

    def merged(self, path: Path) -> Path:
        path.write_text("some other line\n" + "".join(line for _, line in self.lines))
        return path

    def apart(self, folder: Path) -> Path:
        for rank in range(self.n):
            mine = [line for r, line in self.lines if r == rank]
            (folder / f"nccl.{rank}.log").write_text("".join(mine))
        return folder


def job(absent: int | None, **options: object) -> Log:
    log = Log(4, **options)  # type: ignore[arg-type]
    for rank in range(4):
        log.init(rank)
    for i in range(5):
        for rank in range(4):
            if not (i == 4 and rank == absent):
                log.call(rank)
    return log


@pytest.mark.parametrize("prefix", ["", "[rank1]: ", "(RayTrainWorker pid=615, ip=10.72.7.6) "])
def test_a_rank_that_did_not_come(tmp_path: Path, prefix: str) -> None:
    result = Result(job(2, prefix=prefix).merged(tmp_path / "all.log"))
    assert result.blamed == {2}
    (finding,) = result.findings
    assert finding.comm_uid_hash == "fa93daea854b060b"
    assert finding.details["missing_rank_status"][0]["pid"] == 1002
    # The log does not say for how long.
    assert finding.severity == "notice"


def test_one_file_a_rank(tmp_path: Path) -> None:
    assert Result(job(2).apart(tmp_path)).blamed == {2}


def test_all_came(tmp_path: Path) -> None:
    assert Result(job(None).apart(tmp_path)).findings == []


def test_a_compressed_log(tmp_path: Path) -> None:
    plain = job(1).merged(tmp_path / "all.log")
    packed = tmp_path / "packed.log.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert Result(packed).blamed == {1}


def test_a_clock(tmp_path: Path) -> None:
    log = job(3, clock=True)
    result = Result(log.merged(tmp_path / "all.log"))
    assert result.blamed == {3}
    assert 60 <= result.findings[0].details["waited_s"] < 70


def test_arguments_that_differ(tmp_path: Path) -> None:
    log = job(None)
    for rank in range(4):
        log.call(rank, count=64 if rank == 1 else 1025)
    result = Result(log.merged(tmp_path / "all.log"))
    assert "collective_mismatch" in result.types
    assert result.blamed == {1}


def test_the_root_counts_in_rooted_calls_only(tmp_path: Path) -> None:
    log = job(None)
    for rank in range(4):
        log.call(rank, root=rank)
        log.call(rank, "AllGather", op=rank)
    assert Result(log.merged(tmp_path / "all.log")).findings == []


def test_ended_communicators(tmp_path: Path) -> None:
    log = job(None)
    for rank in range(4):
        log.end(rank)
    assert Result(log.merged(tmp_path / "all.log")).findings == []


def test_a_pointer_that_is_used_again(tmp_path: Path) -> None:
    log = job(None)
    for rank in range(4):
        log.end(rank)
    for rank in range(4):
        log.init(rank)
        if rank != 1:
            log.call(rank)
    result = Result(log.merged(tmp_path / "all.log"))
    assert result.blamed == {1}
    assert result.findings[0].details["instance"] == 1


def test_an_initialisation_that_lacks_a_rank(tmp_path: Path) -> None:
    log = Log(4)
    for rank in (0, 1, 3):
        log.init(rank, start_only=True)
    result = Result(log.merged(tmp_path / "all.log"))
    assert result.types == {"comm_init_missing_enter"}


def test_a_split(tmp_path: Path) -> None:
    log = job(None)
    for rank in range(4):
        log.say(
            rank,
            f"ncclCommSplit comm 0x77{rank} rank {rank // 2} nranks 2 cudaDev 0 nvmlDev 0 busId 1 "
            f"parent 0x55aa0 splitCount 1 color {rank % 2} key {rank}- Init COMPLETE",
        )
    log.n = 2
    for rank in (0, 1, 2):
        log.call(rank, comm=f"0x77{rank}")
    log.n = 4
    assert Result(log.merged(tmp_path / "all.log")).blamed == {3}


def test_a_log_that_shows_no_calls(tmp_path: Path) -> None:
    path = tmp_path / "all.log"
    path.write_text("node-1:1:1 [0] NCCL INFO Bootstrap : Using eth0:10.0.0.1<0>\n")
    result = Result(path)
    assert result.findings == []
    assert any("NCCL_DEBUG_SUBSYS" in p for p in result.imported.told.problems)
