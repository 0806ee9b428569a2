"""The command: its report, options, exit codes, the service."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import time
from pathlib import Path

import pytest
from support.waiting import clean_env
from typer.testing import CliRunner

from nccluprobe.canary.errors import ArgumentError
from nccluprobe.canary.truth import say, truths
from nccluprobe.cli.main import build
from nccluprobe.errors import ExitCode

from .command import COMMAND, FULL, SMALL, one_line, one_line_of, run

pytestmark = pytest.mark.timeout(90)


def test_report_of_all_operations_and_datatypes() -> None:
    done = run("--nproc", "2", *SMALL, "--dtypes", "all", "--json")
    assert done.returncode == ExitCode.OK, done.stderr
    found = json.loads(done.stdout)
    assert (found["world"], found["simulated"]) == (2, True)
    rows = found["results"]
    assert len(rows) == 7 * 12 * 2 + 1  # operations, datatypes, sizes; the barrier once
    assert {r["wrong"] for r in rows} == {0}
    assert all(r["checked"] == 2 * (2 + 1) for r in rows)
    for r in rows:
        if r["op"] == "barrier":
            continue
        factor = {"all_gather": 0.5, "reduce_scatter": 0.5, "all_to_all": 0.5}.get(r["op"], 1.0)
        assert r["busbw_gbs"] == pytest.approx(r["algbw_gbs"] * factor, abs=2e-4)
        assert r["algbw_gbs"] == pytest.approx(r["bytes"] / r["time_us"] / 1000, rel=0.02, abs=1e-3)
    arrival = found["arrival"]
    assert arrival["clock"] == "one" and arrival["calls"] == 2 * len(rows)
    assert [r["rank"] for r in arrival["ranks"]] == [0, 1]
    assert sum(r["last"] for r in arrival["ranks"]) == arrival["calls"]


def test_report_for_people() -> None:
    done = run("--nproc", "3", *SMALL, "--ops", "all_reduce,reduce", "--redops", "all")
    assert done.returncode == ExitCode.OK, done.stderr
    assert "stand-in" in done.stdout and "busbw GB/s" in done.stdout
    assert done.stdout.count("0 of 9") == 2 * 5 * 2
    assert "arrival over" in done.stdout
    assert done.stderr == ""  # no bar where there is no terminal


def test_a_bar_on_a_terminal() -> None:
    here, there = pty.openpty()
    try:
        done = subprocess.run(
            [*COMMAND, "--nproc", "2", *SMALL, "--ops", "all_gather,broadcast", "--json"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=there,
            env={**clean_env(), "TERM": "xterm"},
            timeout=60,
            check=False,
        )
        shown = os.read(here, 65536).decode()
    finally:
        os.close(here)
        os.close(there)
    assert done.returncode == 0, shown
    assert json.loads(done.stdout)["canary"] == 1
    assert "broadcast float32 4096 B" in shown and "100%" in shown


def test_one_rank() -> None:
    done = run("--rank", "0", "--world", "1", *SMALL, "--json")
    assert done.returncode == ExitCode.OK, done.stderr
    assert {r["wrong"] for r in json.loads(done.stdout)["results"]} == {0}


def test_a_wrong_result_is_told() -> None:
    """One rank takes the maximum, and the stand-in lets that pass."""
    done = run(
        *("--nproc", "3", "--sim", "--ops", "all_reduce", "--sizes", "4K", "--steps", "6"),
        *("--inject", "op:rank=1,at=3"),
        env={"SIMNCCL_MISMATCH_PASSES": "1"},
    )
    assert done.returncode == ExitCode.CANARY_WRONG, done.stderr
    assert "WRONG on rank" in done.stdout and "step 3, all_reduce sum float32" in done.stdout
    (planted,) = truths(done.stdout.splitlines())
    assert (planted["truth"], planted["rank"], planted["at"]) == ("op", 1, 3)
    assert planted["culprits"] == [[1]] and planted["api"] == "ncclAllReduce"


def test_serve_from_standard_input() -> None:
    text = "run\n\nrun 2\nwalk\nquit\nrun\n"
    done = run("--nproc", "3", *SMALL, "--ops", "all_reduce", "--serve", "--json", text=text)
    assert done.returncode == ExitCode.OK, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line.get("request") for line in lines] == [0, 1, 2, 3, None]
    assert (lines[-1]["steps"], lines[-1]["wrong"]) == (4, 0)
    assert lines[-1]["checked"] == 4 * 2 * 3
    assert "'walk': give run, run N or quit" in done.stderr


def test_a_service_that_nobody_asks_for_anything() -> None:
    done = run("--nproc", "2", *SMALL, "--ops", "all_reduce", "--serve", "--json", text="")
    assert done.returncode == ExitCode.OK, done.stderr
    found = json.loads(done.stdout)
    assert (found["steps"], found["checked"], found["arrival"]["calls"]) == (0, 0, 0)


def test_serve_by_the_clock() -> None:
    began = time.monotonic()
    done = run(
        "--nproc", "2", *SMALL, "--ops", "all_gather",
        "--serve", "--every", "0.3", "--requests", "3",
    )  # fmt: skip
    assert done.returncode == ExitCode.OK, done.stderr
    assert time.monotonic() - began > 0.9
    assert done.stdout.count("request ") == 3


def test_a_late_rank_shows_in_the_arrivals() -> None:
    done = run(
        *("--nproc", "3", "--sim", "--sizes", "8", "--ops", "all_reduce", "--steps", "8"),
        *("--json", "--inject", "late:rank=1,at=3,s=1.5"),
    )
    assert done.returncode == ExitCode.OK, done.stderr
    arrival = json.loads(done.stdout.splitlines()[-1])["arrival"]
    most = [r["behind_first_us"]["max"] for r in arrival["ranks"]]
    assert most[1] == arrival["spread_us"]["max"] == max(most) and 1e6 < most[1] < 3e6


def test_reconnect_goes_on_with_right_results() -> None:
    done = run(
        *("--nproc", "3", "--sim", "--sizes", "4K", "--steps", "12", "--json"),
        *("--inject", "reconnect:at=4", "--inject", "reconnect:at=7"),
    )
    assert done.returncode == ExitCode.OK, done.stderr
    lines = done.stdout.splitlines()
    found = json.loads(lines[-1])
    assert (found["reconnects"], found["wrong"], found["steps"]) == (2, 0, 12)
    hashes = [t["comm"] for t in truths(lines)]
    assert len(hashes) == 2 and len(set(hashes)) == 2


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--ops", "all_reduce,foo"), "'foo'"),
        (("--ops", ","), "--ops"),
        (("--sizes", "8Q"), "'8Q'"),
        (("--sizes", "0"), "'0'"),
        (("--sizes", "99G"), "'99G'"),
        (("--dtypes", "float4"), "'float4'"),
        (("--redops", "xor"), "'xor'"),
        (("--rank", "0"), "--world"),
        (("--rank", "3", "--world", "2", "--address", "127.0.0.1:1000"), "rank 3 of 2"),
        (("--rank", "0", "--world", "2", "--address", "nowhere"), "HOST:PORT"),
        (("--nccl", "x.so"), "--sim"),
        (("--cuda", "x.so"), "--sim"),
        (("--nproc", "2", "--rank", "0", "--world", "2"), "--nproc starts all ranks"),
        (("--nproc", "2", "--address", "127.0.0.1:1000"), "--nproc starts all ranks"),
        (("--rank", "0", "--world", "1", "--hold", "3"), "--hold is for --nproc"),
        (("--nproc", "2", "--serve", "--steps", "3"), "not for --serve"),
        (("--nproc", "2", "--pause", "1"), "--pause is for --steps"),
        (("--nproc", "2", "--inject", "never:rank=1", "--truth", "/nowhere/t"), "--truth"),
        (("--nproc", "1", "--serve"), "two ranks"),
        (("--nproc", "2", "--every", "1"), "--serve"),
        (("--nproc", "2", "--inject", "root:rank=1", "--ops", "all_gather"), "root"),
        (("--nproc", "2", "--inject", "count:rank=1", "--ops", "all_reduce"), "single collective"),
        (("--nproc", "2", "--inject", "never:rank=1,at=9", "--steps", "9"), "9 steps"),
    ],
)
def test_bad_arguments_get_one_line(arguments: tuple[str, ...], says: str) -> None:
    done = run("--sim", *arguments)
    assert done.returncode == ExitCode.USAGE, (done.stdout, done.stderr)
    assert says in one_line(done)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--iters", "0"), "--iters"),
        (("--iters", "many"), "--iters"),
        (("--iters", "99999999"), "--iters"),
        (("--nproc", "0"), "--nproc"),
        (("--steps", "0"), "--steps"),
        (("--deadline", "nan"), "--deadline"),
        (("--deadline", "0"), "--deadline"),
        (("--pause", "inf", "--steps", "2"), "--pause"),
        (("--hold", "inf"), "--hold"),
        (("--requests", "0", "--serve"), "--requests"),
        (("--json=1",), "--json"),
        (("more",), "more"),
    ],
)
def test_a_number_out_of_range_is_an_option_that_is_wrong(
    arguments: tuple[str, ...], says: str
) -> None:
    done = CliRunner().invoke(build(["canary"]), ["canary", "--sim", *arguments])
    assert done.exit_code == ExitCode.USAGE
    assert says in done.output.splitlines()[-1] and "Traceback" not in done.output


def test_real_nccl_without_a_launcher() -> None:
    done = run()
    assert done.returncode == ExitCode.USAGE
    assert "no launcher" in one_line(done)


def test_the_stand_ins_need_no_number_of_ranks() -> None:
    done = run("--sim", "--json", "--iters", "2", env={"NCCL_PROTO": "Simple"})
    assert done.returncode == ExitCode.OK, done.stderr
    assert one_line_of(done.stderr) == "nccluprobe: canary: 2 local ranks; --nproc N for more"
    found = json.loads(done.stdout)
    assert (found["world"], found["settings"]) == (2, {"NCCL_PROTO": "Simple"})
    assert max(r["bytes"] for r in found["results"]) == 64 << 10


def test_verbose_logs_the_libraries_and_the_variables_of_nccl() -> None:
    done = run(
        *("--nproc", "2", *SMALL, "--ops", "barrier", "--verbose"), env={"NCCL_PROTO": "Simple"}
    )
    assert done.returncode == ExitCode.OK, done.stderr
    for rank in range(2):
        assert f"nccluprobe: rank {rank} of 2: NCCL 2." in done.stderr
        assert f"nccluprobe: rank {rank}: NCCL_PROTO=Simple\n" in done.stderr
    assert "\nNCCL_PROTO=Simple\n" in done.stdout


def test_no_library_is_a_failure_in_one_line() -> None:
    done = run("--rank", "0", "--world", "1", "--nccl", "/nowhere/libnccl.so.2")
    assert done.returncode == ExitCode.CANARY_FAILED
    assert "/nowhere/libnccl.so.2" in one_line(done)


def test_a_log_on_a_full_disk_keeps_no_rank_from_its_work() -> None:
    done = run("--nproc", "2", *SMALL, "--ops", "all_gather", env={"NCCLUPROBE_CANARY_LOG": FULL})
    assert done.returncode == ExitCode.OK, done.stderr
    assert done.stderr.count("No space left") == 2


def test_a_truth_on_a_full_disk_is_one_line() -> None:
    with pytest.raises(ArgumentError, match=f"--truth: {FULL} cannot be written: No space left"):
        say({}, Path(FULL))


@pytest.mark.parametrize(
    "arguments",
    [
        ("--json",),
        (),
        ("--serve", "--every", "0.1", "--requests", "2"),
        ("--inject", "never:rank=1,at=0", "--hold", "45"),
    ],
)
def test_a_report_on_a_full_disk_is_one_line(arguments: tuple[str, ...]) -> None:
    with Path(FULL).open("w") as full:
        done = subprocess.run(
            [*COMMAND, "--nproc", "2", *SMALL, "--ops", "all_gather", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=80,
            check=False,
            env=clean_env(),
        )
    assert "Traceback" not in done.stderr
    lines = [line for line in done.stderr.splitlines() if "the output cannot be written" in line]
    assert len(lines) == 1 and "No space left" in lines[0]
    assert done.returncode in (ExitCode.OUTPUT, ExitCode.CANARY_FAILED)
