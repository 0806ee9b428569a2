"""``nccluprobe explain`` of findings that rest on dumps, reports and logs."""

from __future__ import annotations

import pickle
import re
from pathlib import Path

import pytest
from cases.kit import LARGE
from support.tracegen import Job
from typer.testing import CliRunner

from importers.frgen import one_group
from importers.test_fr import stalled
from nccluprobe.cli.main import build
from nccluprobe.errors import ExitCode

SAMPLES = Path(__file__).parents[2] / "docs" / "samples"
_DATA = Path(__file__).parents[3] / "shared" / "data" / "fr_nvrx"


def command(*arguments: object) -> str:
    words = [*map(str, arguments)]
    done = CliRunner().invoke(build(words), words)
    assert done.exit_code in (ExitCode.OK, ExitCode.FINDINGS, ExitCode.NOTICES), done.stderr
    assert all(len(line) <= 80 for line in done.stdout.splitlines())
    return done.stdout


def explained(where: Path, out: Path, kind: str = "", *options: object) -> str:
    """The first finding (of a kind), explained."""
    report = command("analyze", where, "--out", out, *options)
    found = re.search(rf"  {kind or '[a-z0-9_]+'}  \[(f[0-9a-f]+)\]", report)
    assert found is not None, report
    return command("explain", where, found[1], *options)


CALLS = {
    "fr": (
        " >#4       ncclAllReduce(count 8192, float32): 0-1,3\n           not made by 2",
        "rank 2: ",
        "  >#4      06:55:05.300  not complete    ncclAllReduce(count 8192, float32)",
        "   #3      06:55:05.200  complete        ncclAllReduce(count 8192, float32)",
    ),
    "nccl-log": (
        " >#4       ncclAllReduce(count 1024, float32, sum): 0-1,3\n           not made by 2",
        "rank 2: pid 1002 on node-1\n   #1      06:00:14.000  called  ",
    ),
    "inspector": (
        " >#4       ncclAllReduce(count 4096, bytes): 0-2\n"
        "  #4       ncclAllReduce(count 8, bytes): 3\n",
        "rank 3: pid 103 on node-1\n   #1      19:59:37.100  complete  ",
    ),
    "ras": (
        "   rank    Broadcast  Reduce  AllGather  ReduceScatter  AllReduce  read at\n"
        "  >2               7       7          7              7          8  06:02:00.000\n"
        "           1 AllReduce behind the furthest\n"
        "   0               7       7          7              7          9  06:02:00.000\n",
    ),
}


@pytest.mark.parametrize("kind", sorted(CALLS))
def test_imports_are_shown_rank_by_rank(kind: str, tmp_path: Path) -> None:
    text = explained(SAMPLES / kind, tmp_path)
    assert "No calls to show" not in text
    for part in CALLS[kind]:
        assert part in text, text


def test_a_dump_that_begins_later_is_not_said_to_lack_a_call(tmp_path: Path) -> None:
    """Of the ring of rank 1 older calls are gone: what it does not show, it may have made."""
    job = one_group(2)
    for n in range(12):
        job.ranks[0].call("0", n / 10, done=n < 9)
        job.ranks[1].call("0", n / 10)
    folder = job.write(tmp_path / "dumps", ring=4)
    dump = job.ranks[0].dump()
    (folder / "nccl_trace_rank_0").write_bytes(pickle.dumps(dump))
    text = explained(folder, tmp_path)
    assert "not known of 1: what is at hand begins later" in text and "not made by" not in text


@pytest.mark.skipif(not _DATA.exists(), reason="the published incidents are not here")
@pytest.mark.parametrize("incident", ["gpu_error_1st", "lock_gil_1st"])
def test_published_incidents_show_calls(incident: str, tmp_path: Path) -> None:
    text = explained(_DATA / incident, tmp_path)
    assert "No calls to show" not in text
    marked = r"^  >(#\d+)? +\d\d:\d\d:\d\d\.\d{3}  not complete "  # sends have no slots of all
    assert re.search(marked, text, re.MULTILINE), text
    if incident == "lock_gil_1st":
        assert "  >#0       ncclSend(count 10485760, bfloat16, peer 1): 22:47:17." in text
        assert "            no such receive to be seen" in text


def test_sends_and_receives_of_a_pair_are_laid_beside_each_other(tmp_path: Path) -> None:
    """Rank 1 does not come to a third receive: the send that waits for it is marked."""
    job = Job()
    comms = job.world(2)
    for n in range(2):
        job.procs[0].call(comms[0], "ncclSend", 1.0 + n, peer=1, count=10 + n)
        job.procs[1].call(comms[1], "ncclRecv", 1.0 + n, peer=0, count=10 + n)
    job.procs[0].enter(comms[0], "ncclSend", 4.0, peer=1, count=LARGE)
    for p in job.procs:
        for t in range(1, 400):
            p.coverage(float(t), main="nccl" if p is job.procs[0] and t > 4 else "running")
    job.write(tmp_path)
    text = explained(tmp_path, tmp_path, "p2p_unmatched")
    pair = text[text.index("  from rank 0 to rank 1:\n") :]
    calls = re.findall(r"^  ([ >])(#\d|  ) +(nccl\w+)\(count (\d+)", pair, re.MULTILINE)
    assert calls[:5] == [
        (" ", "#0", "ncclSend", "10"),
        (" ", "  ", "ncclRecv", "10"),
        (" ", "#1", "ncclSend", "11"),
        (" ", "  ", "ncclRecv", "11"),
        (">", "#2", "ncclSend", str(LARGE)),
    ]
    assert "            no such receive to be seen\n" in pair
    rows = r"^  > +\d\d:\d\d:\d\d\.\d+  inside +ncclSend\(.*\n.*, #2 to rank 1$"
    assert re.search(rows, pair, re.MULTILINE), pair


@pytest.mark.parametrize("kind", ["inspector", "fr"])
def test_of_files_that_end_with_a_call_no_time_without_calls_is_told(
    kind: str, tmp_path: Path
) -> None:
    text = explained(SAMPLES / kind, tmp_path)
    assert "Rank by rank" in text and "no call for 0.0 s" not in text


def test_the_id_does_not_hang_on_how_the_path_is_spelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "dumps"
    stalled().write(folder)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(folder)
    ids = set()
    for spelled in (folder, "dumps", "dumps/", "./dumps", "dumps/../dumps", "link"):
        ids |= {*re.findall(r"\[(f[0-9a-f]+)\]", command("analyze", spelled, "--out", "out"))}
    assert len(ids) == 1
