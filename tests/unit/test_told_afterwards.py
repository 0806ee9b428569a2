"""What is said of jobs that are gone: in the past, what is known last, and how they ended."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cases.make  # noqa: F401 - registers the cases
import orjson
import pytest
from cases.kit import CASES
from support.analysis import analyze_job, cover, hang, steps
from support.looks import comm, look
from support.tracegen import Job
from typer.testing import CliRunner

from nccluprobe.cli.main import build
from nccluprobe.match.finding import Finding
from nccluprobe.plural import counted, plural, verb
from nccluprobe.report.text import sentence, single
from nccluprobe.report.words import why

#: What is said of who does it now; "is gone" and the like are no such words.
PRESENT = re.compile(
    r"\b(waits?( in| on| itself| for)|(is|are) inside|(is|are) (alive|running|stopped|blocked)|"
    r"stands? still|has not returned|hold up|does not end|is not going on|is missing|"
    r"(is|are) in the system call)\b"
)
#: Cases that hang; the reports of other tools among them tell of no end.
HANGING = [n for n, c in CASES.items() if c.verdict.hang_type and c.build().procs]
ENDS: dict[str, dict[str, Any]] = {
    "killed": {"how": "signaled", "signal": 9},
    "told to end": {"how": "signaled", "signal": 15},
    "gave up": {"how": "exited", "code": 1},
    "found gone": {"how": "gone", "code": None},
}


def command(*arguments: object) -> str:
    words = [*map(str, arguments)]
    done = CliRunner().invoke(build(words), words)
    assert all(len(line) <= 80 for line in done.stdout.splitlines())
    return " ".join(done.stdout.split())


def end_all(job: Job, **how: Any) -> None:
    """All processes that live end, at one time, after all that is seen."""
    host = max((at - p.host.mono) / 1e9 for p in job.procs for at, _, _ in p.lines)
    for p in job.procs:
        if not any(line["kind"] == "process_end" for _, _, line in p.lines):
            p.end(host + 0.3, **how)


def flat(f: Finding) -> str:
    return " ".join(single(f).split())


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("name", HANGING)
def test_who_has_ended_does_nothing_now(name: str, end: str) -> None:
    job = CASES[name].build()
    end_all(job, **ENDS[end])
    options = {k: round(v * 1e9) for k, v in CASES[name].verdict.options.items()}
    for f in analyze_job(job, **options):
        text = flat(f)
        assert not PRESENT.search(text), text
        assert "py-spy dump --pid" not in text, text


@pytest.mark.parametrize("name", HANGING)
def test_who_is_there_does_it_now(name: str) -> None:
    """The twin: the words that the test above looks for are those that are used."""
    job = CASES[name].build()
    options = {k: round(v * 1e9) for k, v in CASES[name].verdict.options.items()}
    alive = not any(
        line["kind"] in ("process_end", "comm_end") for p in job.procs for _, _, line in p.lines
    )
    for f in analyze_job(job, **options) if alive else ():
        assert ", until " not in flat(f)
        if f.details["waited_s"] and f.hang_type != "collective_mismatch":
            assert PRESENT.search(flat(f)) or f.hang_type in (
                "skipped_or_extra_call",
                "delayed_collective_enter",
            ), flat(f)


def test_one_finding_does_not_say_that_a_rank_is_alive_and_has_ended() -> None:
    job, _, t = hang(3, (2,), waited=400)
    for p in job.procs:
        p.end(t + 400.3, "signaled", signal=15)
    (f,) = analyze_job(job)
    assert sentence(f).endswith("ranks 0-1 waited in it for 6.7 min, until they ended.")
    text = flat(f)
    assert (
        "rank 2: it was alive and outside this call: its main thread was running outside NCCL, "
        "until its process ended (signal 15)"
    ) in text
    assert "it is alive" not in text


def test_who_waits_on_and_who_has_ended_are_told_apart() -> None:
    job, comms, t = hang(4, (3,), waited=400, covered=False)
    cover(job.procs[1:], t + 400)
    cover(job.procs[:1], t + 100)
    comms[0].proc.end(t + 100, "exited", 0)
    found = [f for f in analyze_job(job) if f.hang_type == "collective_missing_enter"]
    assert [sentence(f).split(": ", 1)[1] for f in found] == [
        "ranks 1-2 wait in it for 6.7 min, and rank 0 waited there and has ended."
    ]


@pytest.mark.parametrize("dies", [False, True])
def test_who_gave_up_does_not_wait_on(dies: bool) -> None:
    """The ranks that wait abort; their processes may live on, or end as watchdogs end them."""
    job, comms, t = hang(3, (2,), waited=400)
    for c in comms[:2]:
        c.proc.comm_end(c, t + 400.2, "abort")
        c.proc.call(c, "ncclCommAbort", t + 400.2, dur=0.05)
        if dies:
            c.proc.end(t + 400.5, "signaled", signal=6)
    for p in job.procs[2 if dies else 0 :]:
        p.cover(t + 401, t + 420)
    found = [f for f in analyze_job(job) if f.hang_type == "collective_missing_enter"]
    assert [sentence(f).split(": ", 1)[1] for f in found] == [
        "ranks 0-1 waited in it for 6.7 min, until they gave up."
    ]


@pytest.mark.parametrize("end", [None, *ENDS])
def test_what_is_not_decidable_is_told_in_the_same_tense(end: str | None) -> None:
    job = Job()
    comms = job.world(3)
    t = steps(comms, 5)
    for c in comms[1:]:
        c.proc.enter(c, "ncclBroadcast", t)
    cover(job.procs, t + 100)
    if end is not None:
        end_all(job, **ENDS[end])
    (f,) = [f for f in analyze_job(job) if f.details.get("idle")]
    then = (
        "the root was outside NCCL, and nothing else was blocked; it may have had nothing to send"
    )
    now = "the root is outside NCCL, and nothing else is blocked; it may have nothing to send"
    assert (now if end is None else then) in flat(f)


@pytest.mark.parametrize("ended", [True, False])
def test_nobody_is_sent_to_the_stack_of_a_process_that_is_gone(ended: bool) -> None:
    """Of a call of one rank the finding lists no ranks that did not come."""
    job = Job()
    comms = job.world(2)
    t = steps(comms, 5)
    comms[0].proc.enter(comms[0], "ncclMemAlloc", t)
    cover(job.procs, t + 400)
    if ended:
        end_all(job, how="signaled", signal=15)
    (f,) = [f for f in analyze_job(job) if f.hang_type == "nccl_missing_exit"]
    text = flat(f)
    if ended:
        assert "had not returned to rank 0, pid 1000 on node0 for 400.3 s, until that one" in text
        assert "next: pid 1000 on node0 has ended since: look at the end of its log" in text
    else:
        assert "has not returned to rank 0, pid 1000 on node0 for 400.0 s;" in text
        assert "next: look at pid 1000 on node0 (py-spy dump --pid 1000)" in text


def test_an_error_tells_how_the_other_had_ended() -> None:
    job = Job()
    comms = job.world(2)
    t = steps(comms, 5)
    cover(job.procs[1:], t + 1)
    comms[1].proc.end(t + 1, "gone", None)
    comms[0].proc.call(comms[0], "ncclAllReduce", t + 2, rc=2)
    cover(job.procs[:1], t + 20)
    texts = [flat(f) for f in analyze_job(job) if f.hang_type == "nccl_error_exit"]
    assert any("had ended (exit code not known)." in text for text in texts), texts


def status(reason: str, **more: Any) -> dict[str, Any]:
    return {"comm_rank": 1, "reason": reason, "heartbeat": "absent", **more}


ENDED = {"process_end": "exited", "exit_code": 3, "signal": None}


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        (
            status("rank_alive_but_not_entered", phase="checkpoint", phase_s=200.0, **ENDED),
            "it was in the phase checkpoint, by its own word, for 3.3 min, until its process ended "
            "(exit code 3)",
        ),
        (
            status("rank_waiting_elsewhere", waits_in_comm="aa", waits_in_comm_seq=5, **ENDED),
            "it waited itself in #5 of communicator aa, until its process ended (exit code 3)",
        ),
        (
            status("rank_inside_other_call", inside="ncclSend", inside_s=9.0, **ENDED),
            "it was inside ncclSend for 9.0 s, until its process ended (exit code 3)",
        ),
        (
            status("rank_alive_but_not_entered"),
            "it was alive and outside this call until its process ended",
        ),
        (
            status("rank_ended_communicator", comm_end="abort", **ENDED | {"exit_code": None}),
            "it ended the communicator (abort), and its process has ended since (exit code not "
            "known)",
        ),
        (
            status("rank_exited", process_end="gone", exit_code=None, signal=None),
            "its process has ended; its exit code is not known",
        ),
        (
            status("rank_exit_or_crash_suspected", process_end="signaled", signal=None),
            "its process was ended by a signal that is not known",
        ),
        (
            status("call_not_returned", **ENDED),
            "its call did not return, until its process ended (exit code 3), although nothing is "
            "known to have held it up",
        ),
    ],
)
def test_what_is_known_last_of_a_rank(facts: dict[str, Any], said: str) -> None:
    assert why(facts) == said


@pytest.mark.parametrize(
    ("end", "said"),
    [
        ({"how": "gone", "code": None}, "its process ended (exit code not known)"),
        ({"how": "exited", "code": 3}, "its process ended (exit code 3)"),
        ({"how": "signaled", "signal": 9}, "its process ended (signal 9)"),
    ],
)
def test_explain_says_how_each_ended(tmp_path: Path, end: dict[str, Any], said: str) -> None:
    job, _, t = hang(3, (2,), waited=400)
    for p in job.procs:
        p.end(t + 400.3, **end)
    job.write(tmp_path)
    (f,) = analyze_job(job)
    # In what is said of rank 2, and of each of the three below it.
    assert command("explain", tmp_path, f.id).count(said) == 4


def inverted(job: Job) -> None:
    """Ranks 0 and 1 of the job use two communicators in opposite orders, and wait."""
    world = job.world(3)
    one = [world[r].proc.comm("00000000000000a0", n, 2) for n, r in enumerate((1, 2))]
    two = [world[r].proc.comm("00000000000000b0", n, 2) for n, r in enumerate((1, 2))]
    t = steps(two, 3, start=steps(one, 5))
    one[0].proc.enter(one[0], "ncclAllReduce", t)
    two[1].proc.enter(two[1], "ncclAllReduce", t + 0.1)
    cover(job.procs, t + 400)


def test_explain_shows_all_communicators_of_an_inversion(tmp_path: Path) -> None:
    job = Job()
    inverted(job)
    job.write(tmp_path)
    (f,) = [f for f in analyze_job(job) if f.hang_type == "cross_comm_order_inversion"]
    text = command("explain", tmp_path, f.id)
    made = "ncclAllReduce(count 1024, float32, sum)"
    assert "A: communicator 00000000000000a0, the call in question is #5" in text
    assert "B: communicator 00000000000000b0, the call in question is #3" in text
    assert f">#5 {made}: 0 not made by 1" in text
    assert f">#3 {made}: 1 not made by 0" in text
    ranks = text[text.index("Rank by rank") :]
    first, second = ranks.split("rank 2 of the job (rank 1 of A, rank 1 of B): ")
    assert "rank 1 of the job (rank 0 of A, rank 0 of B): pid 1001 on node0" in first
    assert re.search(r"B #2 .*>A #5 \S+ inside", first) and ">B" not in first
    assert re.search(r"A #4 .*>B #3 \S+ inside", second) and ">A" not in second


@pytest.mark.parametrize(
    ("waited", "ended"), [(55, False), (55, True), (20.5, True), (1.4, False), (3, True)]
)
def test_the_limit_that_is_advised_makes_a_finding(
    tmp_path: Path, waited: float, ended: bool
) -> None:
    job, _, t = hang(4, (3,), waited=waited)
    for p in job.procs if ended else ():
        p.end(t + waited, "signaled", signal=15)
    job.write(tmp_path)
    text = command("analyze", tmp_path)
    advised = re.search(r"try --missing-after (\d+), by which one of \1 s or more is a", text)
    assert advised is not None and int(advised[1]) <= waited
    assert "Rank 3 (pid 1003 on node0) did not enter" in command(
        "analyze", tmp_path, "--missing-after", advised[1]
    )


@pytest.mark.parametrize("declared", [True, False])
def test_no_limit_is_advised_for_a_wait_that_is_declared_normal(
    tmp_path: Path, declared: bool
) -> None:
    job = Job()
    comms = job.world(3)
    t = steps(comms, 5)
    for c in comms[1:]:
        c.proc.enter(c, "ncclBroadcast", t)
    cover(job.procs, t + 20)
    job.write(tmp_path)
    options = ("--idle-ok", "*aa") if declared else ()
    text = command("analyze", tmp_path, *options)
    assert "waiting for 20 s, no finding: ranks 1-2" in text
    assert ("try --missing-after 18" in text) is not declared
    told = command("analyze", tmp_path, "--missing-after", 18, *options)
    assert told.startswith("No finding.") is declared


@pytest.mark.parametrize("gone", [(), (2,), (0, 2)])
def test_looks_tell_whom_nobody_read(tmp_path: Path, gone: tuple[int, ...]) -> None:
    """The process of a rank that has ended has no memory to read."""
    looks = [
        look(r, t, [comm("00000000000000aa", r, 4, AllReduce=9)])
        for t in (10.0, 100.0)
        for r in range(4)
        if r not in gone
    ]
    (tmp_path / "looks.jsonl").write_bytes(b"".join(orjson.dumps(x) + b"\n" for x in looks))
    text = command("analyze", tmp_path)
    read = 4 - len(gone)
    assert f"{read} processes, {read} ranks of 1 communicator, looked at 2 times" in text
    said = re.search(r"not read: (.*)", text)
    assert (said and said[1]) == {
        (): None,
        (2,): "rank 2 of the 4 ranks of communicator 00000000000000aa: its process may have "
        "ended, or was not looked at",
        (0, 2): "ranks 0,2 of the 4 ranks of communicator 00000000000000aa: their processes may "
        "have ended, or were not looked at",
    }[gone]


def test_counts_agree_with_what_they_count() -> None:
    assert counted(1, "process", "was") == "1 process was"
    assert counted(2000, "process", "was") == "2,000 processes were"
    assert counted(1, "torn last line") == "1 torn last line"
    assert counted(0, "event") == "0 events"
    assert [plural(2, x) for x in ("entry", "key", "match", "box")] == [
        "entries",
        "keys",
        "matches",
        "boxes",
    ]
    assert [verb(n, x) for n in (1, 2) for x in ("is", "waits", "has no place")] == [
        *("is", "waits", "has no place"),
        *("are", "wait", "have no place"),
    ]


_ONE = re.compile(r"(?<![\d,.#-])1 (?:more |later |other |torn last |bad )?[a-z]+s\b(?!')")


def _torn(folder: Path) -> None:
    (file,) = folder.rglob("rank_0_*.jsonl")
    with file.open("ab") as f:
        f.write(b'{"kind":"call"')


def _bad(folder: Path) -> None:
    (file,) = folder.rglob("rank_0_*.jsonl")
    file.write_bytes(file.read_bytes() + b"nonsense\n")


def _nothing(folder: Path) -> None:
    assert folder.is_dir()


@pytest.mark.parametrize("spoil", [_torn, _bad, _nothing])
def test_of_one_nothing_is_plural(tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    job = Job()
    comms = job.world(2)
    t = steps(comms, 5)
    comms[0].proc.call(comms[0], "ncclAllReduce", t)
    cover(job.procs, t + 100)
    job.write(tmp_path)
    spoil(tmp_path)
    text = command("analyze", tmp_path)
    assert [x for x in _ONE.findall(text) if x != "1 process"] == [], text
    if spoil is _torn:
        assert "1 torn last line (a writer that died, or is still writing): " in text
    if spoil is _bad:
        assert "1 line could not be read: " in text
