"""The command: output, exit codes, follow mode; the text for people."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from support.analysis import analyze_job, cover, steps
from support.tracegen import Host, Job, S

from nccluprobe.match.finding import Finding
from nccluprobe.report.text import Summary, report
from nccluprobe.report.words import escape

pytestmark = pytest.mark.alone

REPO = Path(__file__).resolve().parents[3]
COMMAND = [sys.executable, "-m", "nccluprobe.cli.main"]


def run(*args: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *map(str, args)], cwd=REPO, capture_output=True, text=True, timeout=60
    )


def hung(waited: float = 61.0, **proc: Any) -> Job:
    job = Job()
    comms = job.world(4, **proc)
    t = steps(comms, 42)
    steps(comms[:3], 1, start=t)
    cover(job.procs, t + waited)
    return job


def healthy() -> Job:
    job = Job()
    t = steps(job.world(4), 42)
    cover(job.procs, t + 100)
    return job


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize(
    ("job", "code"),
    [(hung(61), 11), (hung(301), 10), (healthy(), 0)],
    ids=["notice", "error", "ok"],
)
def test_exit_codes(tmp_path: Path, job: Job, code: int) -> None:
    job.write(tmp_path)
    done = run("analyze", tmp_path)
    assert (done.returncode, done.stderr) == (code, "")


def test_findings_file_and_json_output_follow_the_schema(tmp_path: Path) -> None:
    hung(301).write(tmp_path)
    done = run("analyze", "--json", tmp_path)
    file = tmp_path / "tracing/run/findings.jsonl"
    assert file.read_text() == done.stdout
    (finding,) = lines(done.stdout)
    schema = json.loads((REPO / "nccluprobe/match/finding.schema.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(finding)
    assert list(finding)[:6] == [
        "hang_type",
        "run_id",
        "comm_uid_hash",
        "comm_seq",
        "detected_at_unix_ns",
        "details",
    ]
    assert (tmp_path / "tracing/run/analyzer.log").read_text().strip()
    assert oct(file.stat().st_mode & 0o777) in ("0o640", "0o600")


def test_every_kind_of_finding_follows_the_schema() -> None:
    schema = json.loads((REPO / "nccluprobe/match/finding.schema.json").read_text())
    validator = jsonschema.Draft202012Validator(schema)
    for f in many_findings():
        validator.validate(json.loads(json.dumps(f.to_json())))


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (["analyze", "/nonexistent"], 12, "no such file or folder"),
        (["analyze"], 2, ""),
        (["analyze", "--frobnicate", "."], 2, ""),
        (["nonsense"], 2, ""),
    ],
)
def test_errors_are_one_line_and_a_code(args: list[str], code: int, said: str) -> None:
    done = run(*args)
    assert done.returncode == code
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_explain_shows_the_calls_around_a_finding(tmp_path: Path) -> None:
    hung().write(tmp_path)
    (found,) = lines(run("analyze", tmp_path, "--json").stdout)
    done = run("explain", tmp_path, found["id"][:6])
    assert done.returncode == 0, done.stderr
    text = done.stdout
    assert max(map(len, text.splitlines())) <= 80
    assert " >#42      ncclAllReduce(count 1024, float32, sum): 0-2" in text
    assert "not made by 3" in text
    first = text.index("rank 3: pid 1003 on node0")
    assert first < text.index("rank 0: pid 1000 on node0")
    assert "no call for 61.1 s: its main thread is running outside NCCL" in text


def test_ranks_without_a_trace_are_told_where_nothing_is_found(tmp_path: Path) -> None:
    hung().write(tmp_path)
    (missing,) = tmp_path.rglob("rank_3*.jsonl")
    missing.unlink()
    done = run("analyze", tmp_path)
    text = " ".join(done.stdout.split())
    assert text.startswith("No finding.") and done.returncode == 0
    assert "not traced: rank 3 of communicator" in text
    assert "no other one has made a call on it for 61 s" in text


def test_a_hung_job_that_was_ended_is_not_called_alive(tmp_path: Path) -> None:
    job = Job()
    comms = job.world(4)
    t = steps(comms, 42)
    steps(comms[:3], 1, start=t)
    cover(job.procs, t + 61)
    for p in job.procs:
        p.end(t + 61.5, "signaled", signal=15)
    job.write(tmp_path)
    text = " ".join(run("analyze", tmp_path).stdout.split())
    assert (
        "rank 3: it was alive and outside this call: its main thread was running outside NCCL, "
        "until its process ended (signal 15)"
    ) in text
    assert "pid 1003 on node0 has ended since" in text
    assert "it is alive" not in text


def test_explain_of_no_such_finding(tmp_path: Path) -> None:
    hung().write(tmp_path)
    (found,) = lines(run("analyze", tmp_path, "--json").stdout)
    done = run("explain", tmp_path, "nothing")
    assert done.returncode == 2
    assert f"there are: {found['id']}" in done.stderr


def test_the_pid_of_who_follows_is_in_the_run_as_long_as_it_does(tmp_path: Path) -> None:
    healthy().write(tmp_path)
    file = tmp_path / "tracing/run/analyzer.pid"
    with subprocess.Popen(
        [*COMMAND, "analyze", str(tmp_path), "--follow"], cwd=REPO, stdout=subprocess.DEVNULL
    ) as process:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and not (file.exists() and file.read_text()):
            time.sleep(0.05)
        assert file.read_text() == f"{process.pid}\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    assert not file.exists()


def test_a_run_that_is_not_there_lists_those_that_are(tmp_path: Path) -> None:
    job = Job(run_id="night")
    job.world(2)
    job.write(tmp_path)
    done = run("analyze", tmp_path, "--run-id", "day")
    assert done.returncode == 12
    assert "--run-id day: no trace of that run; there are: night" in done.stderr


def test_no_trace(tmp_path: Path) -> None:
    done = run("analyze", tmp_path)
    assert done.returncode == 12
    assert len(done.stderr.strip().splitlines()) == 1


def test_version_and_help() -> None:
    assert run("--version").stdout.startswith("nccluprobe ")
    done = run("--help")
    assert "analyze" in done.stdout
    assert "attach" in done.stdout


def test_the_reader_of_the_output_goes_away(tmp_path: Path) -> None:
    hung().write(tmp_path)
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [*COMMAND, "analyze", str(tmp_path)],
        cwd=REPO,
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    os.close(write)
    assert "Traceback" not in done.stderr


def test_follow_finds_resolves_and_finds_again(tmp_path: Path) -> None:
    """A job on this machine's clock, written while it is followed."""
    job = Job()
    host = Host(mono=time.monotonic_ns(), err=1000)
    comms = [job.proc(r, host).comm("00000000000000aa", r, 3) for r in range(3)]
    for p in job.procs:
        p.lines[0][2]["unix"] = time.time_ns()
    began = time.monotonic()
    steps(comms[:2], 1, start=0.2)
    steps(comms[2:], 1, start=2.5)
    steps(comms[:2], 1, start=2.7)
    for p in job.procs:
        p.cover(0.1, 8, 0.1)
        p.output()

    def write() -> None:
        files = [(tmp_path / f"{p.name}.jsonl").open("wb") for p in job.procs]
        todo = []
        for p, f in zip(job.procs, files, strict=True):
            f.write(json.dumps(p.header()).encode() + b"\n")
            todo += [((at - host.mono) / S, n, f, line) for at, n, line in p.lines]
        for at, _, f, line in sorted(todo, key=lambda x: x[:2]):
            time.sleep(max(0.0, began + at - time.monotonic()))
            f.write(json.dumps(line).encode() + b"\n")
            f.flush()

    writer = threading.Thread(target=write)
    writer.start()
    done = run(
        "analyze",
        tmp_path,
        "--follow",
        "--json",
        "--duration",
        7,
        "--missing-after",
        1,
        "--error-after",
        3,
        "--late-after",
        1,
    )
    writer.join()
    states = [(f["state"], f["comm_seq"], f["severity"]) for f in lines(done.stdout)]
    assert states == [
        ("open", 0, "notice"),
        ("resolved", 0, "notice"),
        ("open", 1, "notice"),
        ("open", 1, "error"),
    ]
    assert done.returncode == 10


def test_a_second_analysis_does_not_write_the_same_again(tmp_path: Path) -> None:
    hung(61).write(tmp_path)
    run("analyze", tmp_path)
    assert run("analyze", tmp_path).returncode == 11
    file = tmp_path / "tracing/run/findings.jsonl"
    assert len(file.read_text().splitlines()) == 1


def test_what_could_not_be_judged_is_said(tmp_path: Path) -> None:
    job = Job()
    for r in range(3):
        c = job.proc(r).comm("00000000000000aa", r, 3, learnt="struct")
        steps([c], 5)
    cover(job.procs, 100)
    job.write(tmp_path)
    done = run("analyze", tmp_path)
    assert done.returncode == 0
    assert "2 endpoints of communicators not judged, or not surely" in " ".join(done.stdout.split())


def test_follow_until_quiet(tmp_path: Path) -> None:
    healthy().write(tmp_path)
    assert run("analyze", tmp_path, "--follow", "--until-quiet", 0.5).returncode in (0, 11)


# -- text ------------------------------------------------------------------


def many_findings() -> list[Finding]:
    job = Job()
    comms = job.world(4)
    more = [c.proc.comm("00000000000000bb", r, 4, name="dp") for r, c in enumerate(comms)]
    third = [c.proc.comm("00000000000000cc", r, 4) for r, c in enumerate(comms)]
    t = steps([*comms, *more, *third], 20)
    for r, c in enumerate(third):
        c.proc.call(c, "ncclAllReduce", t + (40 if r == 1 else 0))
    t += 41
    for r, c in enumerate(third):
        c.proc.call(c, "ncclReduce", t, count=7 if r == 2 else 8)
    third[0].proc.call(third[0], "ncclAllReduce", t, rc=4)
    steps(comms[:3], 1, start=t)
    steps([more[0]], 1, start=t + 1)
    p = job.proc(None, pid=9)
    p.enter(None, "ncclCommInitRank", t, uid_hash="00000000000000dd", nranks=2, rank=0)
    cover(job.procs, t + 400)
    return analyze_job(job)


def test_the_cause_comes_first_and_in_one_sentence() -> None:
    text = report(analyze_job(hung()), Summary(jobs=1, processes=4))
    first, second = text.splitlines()[:2]
    assert first.startswith("CAUSE")
    assert second.startswith("  Rank 3 (pid 1003 on node0) did not enter ncclAllReduce #42")
    assert "\x1b" not in text
    assert "py-spy dump --pid 1003" in text


def test_text_fits_80_columns() -> None:
    found = many_findings()
    kinds = {f.hang_type for f in found}
    assert {
        "collective_missing_enter",
        "delayed_collective_enter",
        "collective_mismatch",
        "nccl_error_exit",
        "comm_init_missing_enter",
    } <= kinds
    text = report(found, Summary(jobs=2, processes=5, silent=["rank 3, pid 5 on node1"]))
    assert max(map(len, text.splitlines())) <= 80
    assert "consequence" in text
    assert "not observed, collector silent: rank 3" in text


def test_jobs_are_reported_apart() -> None:
    job = Job()
    for n in (1, 2):
        comms = [
            job.proc(r, pid=100 * n + r, run_id=f"run{n}").comm(f"00000000000000a{n}", r, 3)
            for r in range(3)
        ]
        t = steps(comms, 5)
        steps(comms[:2], 1, start=t)
    cover(job.procs, 100)
    text = report(analyze_job(job), Summary(jobs=2))
    assert text.index("Job of run run1") < text.index("00000000000000a1")
    assert text.index("Job of run run2") < text.rindex("00000000000000a2")
    assert text.index("#5 of communicator\n  00000000000000a1") < text.index("Job of run run2")
    nameless = report([replace(f, run_id="") for f in analyze_job(job)], Summary(jobs=2))
    assert "\nJob (first communicator 00000000000000a2):\n" in nameless
    nowhere = [replace(f, job=None if f.run_id == "run2" else f.job) for f in analyze_job(job)]
    told = report(nowhere, Summary(jobs=2))
    assert "Job of run run2 (whose communicators are not known):" in told and "None" not in told


def test_colour_only_when_asked() -> None:
    assert "\x1b[" in report(analyze_job(hung()), Summary(), colour=True)


def test_names_from_the_target_are_escaped() -> None:
    assert escape("a\x1b[31m\nb\u202e") == "a\\x1b[31m\\nb\\u202e"
    job = hung(host=Host("evil\x1b]0;x\x07"))
    for p in job.procs:
        for _, _, line in p.lines:
            if line["kind"] == "comm":
                line["name"] = "na\x1b[2Jme"
    text = report(analyze_job(job), Summary())
    assert "\x1b" not in text
    assert "\x07" not in text


def test_no_finding() -> None:
    assert report([], Summary(jobs=1, processes=2, calls=7)).startswith("No finding.")
