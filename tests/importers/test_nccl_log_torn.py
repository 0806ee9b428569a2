"""Logs of processes that drive several GPUs, torn logs, and what is not compared: it is said."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from importers.reading import Result
from importers.test_nccl_log import Log, job


def several_gpus(
    path: Path, of_each: int, processes: int = 1, absent: int | None = None, odd: int | None = None
) -> Path:
    """A job of five calls; ``of_each``: GPUs of each process, which has one thread."""
    n = of_each * processes
    lines = []

    def say(rank: int, text: str) -> None:
        pid, device = 1000 + rank // of_each, rank % of_each
        lines.append(f"node-1:{pid}:{pid} [{device}] NCCL INFO {text}\n")

    for what in ("START", "COMPLETE"):
        for r in range(n):
            say(
                r,
                f"ncclCommInitRank comm 0x55a{r} rank {r} nranks {n} cudaDev {r % of_each} nvmlDev "
                f"{r % of_each} busId 1000 commId 0xfa93daea854b060b - Init {what}",
            )
    for i in range(5):
        for r in range(n):
            if i < 4 or r != absent:
                count = 64 if i == 2 and r == odd else 1024
                say(
                    r,
                    f"AllReduce: opCount {i} sendbuff 0x7f00 recvbuff 0x7f01 count {count} datatype"
                    f" 7 op 0 root 0 comm 0x55a{r} [nranks={n}] stream (nil)",
                )
    path.write_text("".join(lines))
    return path


def lost(result: Result) -> list[int]:
    """Events lost, of each rank."""
    ranks = sorted(result.analysis.matcher.processes.items())
    return [p.lost for _, p in ranks]


@pytest.mark.parametrize(("of_each", "processes"), [(4, 1), (2, 2)])
def test_ranks_of_one_process_are_compared(tmp_path: Path, of_each: int, processes: int) -> None:
    path = tmp_path / "all.log"
    assert Result(several_gpus(path, of_each, processes)).findings == []
    result = Result(several_gpus(path, of_each, processes, absent=2))
    assert result.blamed == {2}
    (finding,) = result.findings
    assert finding.details["instance"] == 0
    assert finding.named[0]["pid"] == 1000 + 2 // of_each
    result = Result(several_gpus(path, of_each, processes, odd=1))
    assert (result.types, result.blamed) == ({"collective_mismatch"}, {1})


def test_a_gpu_that_does_not_come_to_the_initialisation(tmp_path: Path) -> None:
    path = several_gpus(tmp_path / "all.log", 4)
    lines = [x for x in path.read_text().splitlines(True) if "START" in x]
    path.write_text("".join(lines[:3]))
    assert Result(path).types == {"comm_init_missing_enter"}


def test_communicators_without_an_initialisation_are_told(tmp_path: Path) -> None:
    path = several_gpus(tmp_path / "all.log", 4, absent=2)
    lines = [x for x in path.read_text().splitlines(True) if "Init" not in x]
    path.write_text("".join(lines))
    result = Result(path)
    assert result.findings == []
    (told,) = result.imported.told.problems
    assert told.startswith("19 calls on 4 communicators whose initialisation is not in the log")


def calls(log: Log) -> tuple[list[str], list[int]]:
    """All lines, and the places of those of calls: that of step i and rank r is 4 i + r."""
    lines = [line for _, line in log.lines]
    return lines, [i for i, line in enumerate(lines) if "AllReduce" in line]


def test_a_call_whose_end_is_missing_is_lost_and_keeps_its_place(tmp_path: Path) -> None:
    path = tmp_path / "all.log"
    lines, at = calls(job(None))
    lines[at[5]] = lines[at[5]][:100] + "\n"  # rank 1 goes on
    path.write_text("".join(lines))
    result = Result(path)
    assert result.findings == []
    assert lost(result) == [0, 1, 0, 0]
    (told,) = result.imported.told.problems
    assert "1 call is torn" in told


def test_the_last_line_is_half_written(tmp_path: Path) -> None:
    """Its rank has made the call: it is not named for it."""
    path = tmp_path / "all.log"
    lines, at = calls(job(None))
    lines[at[-1]] = lines[at[-1]][:90]
    path.write_text("".join(lines))
    result = Result(path)
    assert result.blamed == set()
    assert lost(result) == [0, 0, 0, 1]


def test_who_did_not_come_is_less_sure_when_calls_are_torn(tmp_path: Path) -> None:
    path = tmp_path / "all.log"
    lines, at = calls(job(2))
    lines[at[6]] = lines[at[6]][:100] + "\n"
    path.write_text("".join(lines))
    result = Result(path)
    assert result.blamed == {2}
    assert result.findings[0].details["confidence"] == "reduced"


@pytest.mark.parametrize("cut", [35, 48, 60, 100, 150])
def test_the_two_parts_of_a_line_are_found_together(tmp_path: Path, cut: int) -> None:
    """Another line stands between them, or has run into the first part, or the second."""
    path = tmp_path / "all.log"
    for between in ("{a}\n{other}{b}", "{a}{other}{b}", "{a}\n{b}{other}"):
        lines, at = calls(job(None))
        one, other = lines[at[5]], lines[at[6]]
        b = one[cut:].rstrip("\n") if between.endswith("{other}") else one[cut:]
        lines[at[5]] = between.format(a=one[:cut], b=b, other=other)
        lines[at[6]] = ""
        path.write_text("".join(lines))
        result = Result(path)
        assert result.findings == [], between
        assert sum(lost(result)) == 0, between
        assert len(lost(result)) == 4, between
        assert result.imported.told.calls == 20


def test_a_line_that_lost_its_end_of_line(tmp_path: Path) -> None:
    path = tmp_path / "all.log"
    lines, at = calls(job(None))
    for i in at[:-1]:
        lines[i] = lines[i].rstrip("\n")
    path.write_text("".join(lines))
    result = Result(path)
    assert result.findings == []
    assert len(lost(result)) == 4
    assert result.imported.told.calls == 20


def test_a_torn_call_of_nobody_knows_whom(tmp_path: Path) -> None:
    """It may be of any rank: what follows is not compared, and that is counted."""
    path = tmp_path / "all.log"
    lines, at = calls(job(None))
    lines[at[9]] = "ce: opCount 2 sendbuff 0x7f00 rec\n"
    path.write_text("".join(lines))
    result = Result(path)
    assert result.blamed == set()
    assert result.errors == []
    assert all(lost(result))
    (told,) = result.imported.told.problems
    assert "1 call is torn" in told and "10 later calls have no place" in told


def test_a_torn_send_keeps_its_place_where_its_peer_is_told(tmp_path: Path) -> None:
    path = tmp_path / "all.log"
    log = Log(2)
    for rank in range(2):
        log.init(rank)
    for _ in range(3):
        log.call(0, "Send", root=1)
        log.call(1, "Recv", root=0)
    lines = [line for _, line in log.lines]
    path.write_text("".join(lines))
    assert Result(path).findings == []
    lines[6] = lines[6][: lines[6].index("comm ")] + "\n"  # the second send
    path.write_text("".join(lines))
    result = Result(path)
    assert result.blamed == set()
    assert lost(result) == [1, 0]


def test_the_end_of_an_initialisation_is_torn(tmp_path: Path) -> None:
    """It is over, as its communicator is used."""
    path = tmp_path / "all.log"
    lines = [line for _, line in job(2).lines]
    lines = [x for x in lines if not ("COMPLETE" in x and " [1] " in x)]
    path.write_text("".join(lines))
    result = Result(path)
    assert (result.types, result.blamed) == ({"collective_missing_enter"}, {2})


def test_a_function_that_is_not_known_is_told(tmp_path: Path) -> None:
    log = job(None)
    log.call(0, "MadeUpReduce")
    (told,) = Result(log.merged(tmp_path / "all.log")).imported.told.problems
    assert told == "1 call of MadeUpReduce is not compared: it is not known"


def test_thousands_of_communicators(tmp_path: Path) -> None:
    """No more pairs of them are made than are looked at, of 8 million."""
    path = tmp_path / "all.log"
    with path.open("w") as f:
        for c in range(4000):
            for r in range(2):
                who = f"node-1:{1000 + r}:{1000 + r} [{r}] NCCL INFO"
                f.write(
                    f"{who} ncclCommInitRank comm 0x55a{c:x}0 rank {r} nranks 2 cudaDev {r} "
                    f"nvmlDev {r} busId 1000 commId 0x{0xFA0000 + c:x} - Init COMPLETE\n"
                    f"{who} AllReduce: opCount 0 sendbuff 0x7f00 recvbuff 0x7f01 count 8 datatype "
                    f"7 op 0 root 0 comm 0x55a{c:x}0 [nranks=2] stream 0x56\n"
                )
    began = time.process_time()
    assert Result(path).findings == []
    assert time.process_time() - began < 8
