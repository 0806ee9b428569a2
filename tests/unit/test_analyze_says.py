"""What ``analyze`` says and leaves of short waits, of odd numbers, and where it cannot write."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from support.analysis import cover, steps
from support.tracegen import Job
from typer.testing import CliRunner

from nccluprobe.cli.main import build
from nccluprobe.errors import ExitCode


def hung(out: Path, waited: float, ended: bool = False) -> None:
    """Four ranks; rank 3 does not come for ``waited`` seconds, and then the job may end."""
    job = Job()
    comms = job.world(4)
    t = steps(comms, 42)
    steps(comms[:3], 1, start=t)
    cover(job.procs, t + waited)
    for p in job.procs if ended else ():
        p.end(t + waited, "signaled", signal=15)
    job.write(out)


def command(*arguments: object) -> tuple[int, str, str]:
    """(exit code, standard output with single spaces, standard error)"""
    words = [*map(str, arguments)]
    done = CliRunner().invoke(build(words), words)
    return done.exit_code, " ".join(done.stdout.split()), done.stderr


def test_a_short_wait_that_was_given_up_is_told_with_its_limit(tmp_path: Path) -> None:
    """The ranks that waited abort their communicator, and live on."""
    job = Job()
    comms = job.world(3)
    t = steps(comms, 5)
    steps(comms[:2], 1, start=t)
    cover(job.procs, t + 15)
    for c in comms[:2]:
        c.proc.comm_end(c, t + 15, "abort")
    for p in job.procs:
        p.cover(t + 16, t + 40)
    job.write(tmp_path)
    code, text, _ = command("analyze", tmp_path)
    assert code == ExitCode.OK
    assert "waited for 15 s before they ended the communicator, no finding: ranks 0-1" in text
    advised = re.search(r"try --missing-after (\d+)", text)
    assert advised is not None
    code, text, _ = command("analyze", tmp_path, "--missing-after", advised[1])
    assert code == ExitCode.FINDINGS


@pytest.mark.parametrize("ended", [True, False])
def test_a_short_wait_is_told_with_the_limit_that_makes_a_finding_of_it(
    tmp_path: Path, ended: bool
) -> None:
    hung(tmp_path, 12, ended)
    code, text, _ = command("analyze", tmp_path)
    assert code == ExitCode.OK
    lasts = "waited for 12 s, until they ended" if ended else "waiting for 12 s"
    assert "No finding." in text and f"{lasts}, no finding: ranks 0-2" in text
    assert ("who waited has ended" in text) is ended
    assert ("wait until then if the job still runs" in text) is not ended
    advised = re.search(r"try --missing-after (\d+)", text)
    assert advised is not None
    code, text, _ = command("analyze", tmp_path, "--missing-after", advised[1])
    assert code == ExitCode.NOTICES
    assert "Rank 3" in text and "--missing-after" not in text


@pytest.mark.parametrize("inside", [True, False])
def test_who_has_ended_does_not_wait_on(tmp_path: Path, inside: bool) -> None:
    """The last process of the job lives on: its time goes on, and theirs does not."""
    job = Job()
    comms = job.world(4)
    t = steps(comms, 10)
    for c in comms if inside else comms[:3]:
        c.proc.enter(c, "ncclAllReduce", t)
    for p in job.procs[:3]:
        p.end(t + 0.5, "signaled", signal=15)
    cover(job.procs[3:], t + 20)
    job.write(tmp_path)
    _, text, _ = command("analyze", tmp_path)
    told = re.findall(
        r"(?:waiting for|inside ncclAllReduce for) (\d+) s, no finding: (\S+ \S+)", text
    )
    assert told == ([("20", "rank 3")] if inside else [])


@pytest.mark.parametrize("ended", [True, False])
def test_ranks_that_are_all_inside_are_told_too(tmp_path: Path, ended: bool) -> None:
    """Nobody is missing: no rank waits for another."""
    job = Job()
    comms = job.world(4)
    t = steps(comms, 10)
    for c in comms:
        c.proc.enter(c, "ncclAllReduce", t)
    cover(job.procs, t + 30)
    for p in job.procs if ended else ():
        p.end(t + 30, "signaled", signal=9)
    job.write(tmp_path)
    code, text, _ = command("analyze", tmp_path)
    assert code == ExitCode.OK
    assert "inside ncclAllReduce for 30 s, no finding: ranks 0-3 of the job" in text
    assert "try --missing-after 27" in text
    if not ended:
        code, text, _ = command("analyze", tmp_path, "--missing-after", 27)
        assert code == ExitCode.NOTICES and "no finding:" not in text


def test_an_end_that_nobody_saw_is_told(tmp_path: Path) -> None:
    job = Job()
    comms = job.world(4)
    t = steps(comms, 42)
    steps(comms[:3], 1, start=t)
    for p in job.procs:
        p.end(t + 1000, "gone", None)
    job.write(tmp_path)
    code, text, _ = command("analyze", tmp_path)
    assert code == ExitCode.OK
    assert "4 processes were found gone at 22:30:05 UTC, nobody saw when" in text
    assert "waited for 0 s or more, until they ended, no finding: ranks 0-2" in text
    assert "not there: rank 3" in text and "try --missing-after 0" in text
    code, text, _ = command("analyze", tmp_path, "--missing-after", 0)
    assert code == ExitCode.NOTICES and "Rank 3" in text


@pytest.mark.parametrize("here", [True, False])
def test_a_trace_that_stops_is_told_of_this_machine_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: bool
) -> None:
    """Another machine's clock may be wrong by minutes."""
    monkeypatch.setattr(
        "nccluprobe.procinfo.boot_id", lambda: "boot-node0" if here else "boot-node1"
    )
    hung(tmp_path, 12)
    _, text, _ = command("analyze", tmp_path)
    said = "the traces of 4 processes stop at 22:13:37 UTC without an end"
    assert (said in text) is here


def test_no_limit_is_advised_where_nobody_waits(tmp_path: Path) -> None:
    job = Job()
    cover(job.procs, steps(job.world(4), 42) + 100)
    job.write(tmp_path)
    code, text, _ = command("analyze", tmp_path)
    assert code == ExitCode.OK and "--missing-after" not in text


@pytest.mark.parametrize("how", [(), ("--json",), ("--follow", "--duration", "0.1")])
def test_the_verdict_is_shown_where_it_cannot_be_written(
    tmp_path: Path, how: tuple[str, ...]
) -> None:
    hung(tmp_path, 61)
    (tmp_path / "file").touch()
    code, text, said = command("analyze", tmp_path, "--out", tmp_path / "file" / "out", *how)
    assert code == ExitCode.OUTPUT
    assert "collective_missing_enter" in text
    *first, last = said.splitlines()
    assert "findings.jsonl is not written" in last and "--out DIR" in last
    assert ["watching" in line for line in first] == [True] * ("--follow" in how)


def test_an_error_that_cannot_be_written_is_one_all_the_same(tmp_path: Path) -> None:
    hung(tmp_path, 301)
    (tmp_path / "file").touch()
    code, text, said = command("analyze", tmp_path, "--out", tmp_path / "file" / "out")
    assert code == ExitCode.FINDINGS
    assert "collective_missing_enter" in text and "findings.jsonl is not written" in said


def test_where_no_trace_is_nothing_is_left(tmp_path: Path) -> None:
    code, _, _ = command("analyze", tmp_path)
    assert code == ExitCode.NO_TRACE
    code, _, _ = command("analyze", tmp_path, "--follow", "--duration", "0.1")
    assert code == ExitCode.NO_TRACE
    assert list(tmp_path.iterdir()) == []


def test_a_job_without_a_finding_leaves_an_empty_file(tmp_path: Path) -> None:
    job = Job()
    cover(job.procs, steps(job.world(4), 42) + 100)
    job.write(tmp_path)
    command("analyze", tmp_path)
    assert (tmp_path / "tracing/run/findings.jsonl").read_bytes() == b""


_TIMES = [
    ("analyze", "--missing-after"),
    ("analyze", "--late-after"),
    ("analyze", "--error-after"),
    ("analyze", "--duration"),
    ("analyze", "--until-quiet"),
    ("explain", "--missing-after"),
    ("attach", "--duration"),
    ("inspect", "--seconds"),
    ("canary", "--deadline"),
    ("canary", "--hold"),
    ("canary", "--pause"),
    ("canary", "--every"),
]
_COUNTS = [
    ("attach", "--pid"),
    ("attach", "--ring-mb"),
    ("attach", "--max-bytes"),
    ("collect", "--max-bytes"),
    ("preload", "--max-bytes"),
    ("preload", "--ring-kb"),
    ("inspect", "--max-mb"),
    ("canary", "--iters"),
    ("canary", "--nproc"),
    ("canary", "--rank"),
    ("canary", "--world"),
    ("canary", "--steps"),
    ("canary", "--requests"),
]


@pytest.mark.parametrize(("name", "option"), _TIMES + _COUNTS)
@pytest.mark.parametrize("value", ["nan", "inf", "1_000", "\u0663\u0663", "\uff11\uff12", "-1", ""])
def test_only_plain_numbers_are_numbers(name: str, option: str, value: str) -> None:
    code, _, said = command(name, f"{option}={value}")
    assert code == ExitCode.USAGE
    last = said.splitlines()[-1]
    assert option in last and repr(value) in last and "give" in last


@pytest.mark.parametrize("value", ["nan", "inf", "1_0", "\u0663", "-1", "", "1e9"])
def test_only_plain_numbers_limit_a_phase(tmp_path: Path, value: str) -> None:
    code, _, said = command("analyze", tmp_path, "--phase-limit", f"checkpoint={value}")
    assert code == ExitCode.USAGE
    assert len(said.splitlines()) == 1 and "give NAME=SECONDS" in said


@pytest.mark.parametrize("name", ["doctor", "inspect"])
@pytest.mark.parametrize("value", ["\u0663", "1_0", "0", "x"])
def test_only_plain_numbers_are_processes(name: str, value: str) -> None:
    code, _, said = command(name, value)
    assert code == ExitCode.USAGE and "give a whole number" in said.splitlines()[-1]


def test_explain_takes_the_folders_that_analyze_took(tmp_path: Path) -> None:
    """A node with ranks 0 and 1 and one with ranks 2 and 3, each with a folder."""
    hung(tmp_path / "all", 61)
    nodes = [tmp_path / "node1", tmp_path / "node2"]
    for rank, trace in enumerate(sorted((tmp_path / "all").rglob("rank_*.jsonl"))):
        folder = nodes[rank // 2] / "tracing" / "run"
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(trace, folder)
    code, text, _ = command("analyze", *nodes, "--out", tmp_path)
    found = re.search(r"\[(f[0-9a-f]+)\]", text)
    assert code == ExitCode.NOTICES and found is not None
    code, text, _ = command("explain", *nodes, found[1])
    assert code == ExitCode.OK and "(count 1024, float32, sum): 0-2 not made by 3" in text
    assert "host 10.0 us ncclAllReduce" in text and "finished on the GPU" in text
    code, _, said = command("explain", *nodes, "nothing")
    assert code == ExitCode.USAGE and f"no such finding in {nodes[0]}, {nodes[1]}" in said
    code, _, said = command("explain", found[1])
    assert code == ExitCode.USAGE and "give what analyze was given before it" in said
    code, _, said = command("explain", nodes[0])
    assert code == ExitCode.USAGE and "give the id of a finding after it" in said
    code, _, said = command("explain")
    assert code == ExitCode.USAGE and "Missing argument 'FINDING_ID'" in said
    (tmp_path / "empty").mkdir()
    code, _, said = command("explain", tmp_path / "empty", found[1])
    assert code == ExitCode.NO_TRACE and "no readable trace in" in said
    code, _, said = command("explain", tmp_path / "none", found[1])
    assert code == ExitCode.NO_TRACE and "give explain RUN... FINDING_ID" in said


@pytest.mark.parametrize("n", [91, 92])
def test_that_orders_were_compared_of_some_communicators_only(tmp_path: Path, n: int) -> None:
    """Two ranks use n communicators: n (n - 1) / 2 pairs, of which 4,096 are compared."""
    job = Job()
    comms = [job.world(2)]
    comms += [[c.proc.comm(f"{i:016x}", r, 2) for r, c in enumerate(comms[0])] for i in range(1, n)]
    for i, both in enumerate(comms):
        for c in both:
            c.proc.call(c, "ncclAllReduce", 1 + i * 0.01)
    cover(job.procs, 100)
    job.write(tmp_path)
    _, text, _ = command("analyze", tmp_path)
    said = "4,096 pairs were compared, so a rank that uses two in another order" in text
    assert said == (n > 91)


@pytest.mark.parametrize("again", [False, True])
def test_who_was_there_when_tracing_ended_has_not_ended(tmp_path: Path, again: bool) -> None:
    """The tracer is stopped, in the second case on the other three only."""
    job = Job()
    comms = job.world(4)
    t = steps(comms, 42)
    steps(comms[:3], 1, start=t)
    cover(job.procs, t + 100)
    for p in job.procs[again:]:
        p.end(t + 100, "detached", code=None)
    job.write(tmp_path)
    _, text, _ = command("analyze", tmp_path)
    assert "ended since" not in text
    assert "look at the stack of pid" in text
    n = 3 if again else 4
    assert f"{n} processes were there when tracing ended, at" in text


@pytest.mark.parametrize("waited", [5, 130])
def test_ranks_without_a_trace_are_told_when_the_others_had_waited(
    tmp_path: Path, waited: int
) -> None:
    """Of four ranks two are traced: they make no call any more, and end."""
    job = Job()
    comms = job.world(2, nranks=4)
    t = steps(comms, 20)
    cover(job.procs, t + waited)
    for p in job.procs:
        p.end(t + waited, "signaled", signal=9)
    job.write(tmp_path)
    _, text, _ = command("analyze", tmp_path)
    said = "not traced: ranks 2-3 of communicator" in text
    assert said == (waited == 130)
    assert ("no other one has made a call on it for 130 s" in text) == said


@pytest.mark.parametrize(("how", "told"), [("destroy", False), ("abort", True), (None, False)])
def test_who_went_on_elsewhere_had_not_waited_for_ranks_without_a_trace(
    tmp_path: Path, how: str | None, told: bool
) -> None:
    """Two of four ranks make calls on a second communicator for 200 s, and end.

    The first one they destroy at once, or leave as it is; or they abort it, after 100 s.
    """
    job = Job()
    xs = job.world(2, nranks=4)
    t = steps(xs, 20)
    again = t + (100 if how == "abort" else 1)
    for x in xs if how else ():
        x.proc.comm_end(x, again - 0.5, how or "")
    ys = [x.proc.comm("00000000000000bb", r, 2, t=again) for r, x in enumerate(xs)]
    steps(ys, 200, start=again, step=1)
    cover(job.procs, again + 200)
    for p in job.procs:
        p.end(again + 200)
    job.write(tmp_path)
    _, text, _ = command("analyze", tmp_path)
    assert ("not traced: ranks 2-3" in text) == told
    assert ("no other one has made a call on it for 100 s" in text) == told


@pytest.mark.parametrize("calls", ["none", "sends"])
def test_for_how_long_nobody_called_where_some_ranks_are_not_traced(
    tmp_path: Path, calls: str
) -> None:
    """The communicator is made at 100 s, and not used; or its ranks send until 190 s."""
    job = Job()
    procs = [job.proc(r) for r in (0, 1)]
    comms = [p.comm("00000000000000aa", p.rank, 4, t=100) for p in procs]
    for i in range(90 if calls == "sends" else 0):
        procs[0].call(comms[0], "ncclSend", 101 + i, peer=1)
        procs[1].call(comms[1], "ncclRecv", 101 + i, peer=0)
    cover(procs, 200)
    job.write(tmp_path)
    _, text, _ = command("analyze", tmp_path)
    assert "not traced: ranks 2-3 of communicator" in text
    assert ("no other one has made a call on it for 100 s" in text) == (calls == "none")
    assert ("no other one" in text) == (calls == "none")


@pytest.mark.parametrize("declared", [True, False])
def test_a_wait_that_was_declared_is_said_to_be(tmp_path: Path, declared: bool) -> None:
    job = Job()
    comms = job.world(3)
    t = steps(comms, 5)
    for c in comms[1:]:
        c.proc.call(c, "ncclBroadcast", t, root=0)
    cover(job.procs, t + (100 if declared else 20))
    job.write(tmp_path)
    _, text, _ = command("analyze", tmp_path, *(("--idle-ok", "*aa") if declared else ()))
    assert "no finding: ranks 1-2" in text
    assert ("declared as idle (--idle-ok)" in text) is declared


def held_up(out: Path, api: str, waited: float, **call: int) -> None:
    """Three ranks wait for a fourth, which was in a long wait itself until just now."""
    job = Job()
    comms = job.world(4)
    t = steps(comms, 5)
    other = job.procs[3].comm("00000000000000bb", 0, 2, t=t)
    late = job.proc(4).comm("00000000000000bb", 1, 2, t=t)
    other.proc.call(other, "ncclAllReduce", t, dur=waited - 0.2)
    late.proc.call(late, "ncclAllReduce", t + waited - 0.21)
    for c in comms[:3]:
        c.proc.enter(c, api, t + 0.1, **call)
    cover(job.procs, t + waited + 0.1)
    job.write(out)


def test_no_limit_of_nothing_is_advised(tmp_path: Path) -> None:
    held_up(tmp_path, "ncclAllReduce", 10)
    limits = ("--missing-after", 4, "--late-after", 3)
    _, text, _ = command("analyze", tmp_path, *limits)
    assert "waiting for 10 s, no finding: ranks 0-2" in text and "missed for 0.3 s of it" in text
    assert "finding from 4 s on (--missing-after), counted from when" in text
    assert "try --missing-after" not in text


def test_the_limit_that_is_advised_for_a_split_makes_a_finding(tmp_path: Path) -> None:
    """Whoever was held up meanwhile: a split is waited for from its first caller on."""
    held_up(tmp_path, "ncclCommSplit", 3.7, color=0, key=0, ord=1)
    _, text, _ = command("analyze", tmp_path, "--missing-after", 4, "--late-after", 3)
    assert "No finding." in text and "in ncclCommSplit 1; not there: rank 3" in text
    assert "try --missing-after 3," in text
    code, text, _ = command("analyze", tmp_path, "--missing-after", 3, "--late-after", 3)
    assert code == ExitCode.NOTICES and "Rank 3 did not enter split 1" in text
