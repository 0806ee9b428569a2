"""The text report: who leads, by which number, why it is not sure, what to look at next."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from cases.test_cases import NAMES, analyze, expected_of
from support.analysis import analyze_job, cover, hang, steps
from support.tracegen import Job
from typer.testing import CliRunner

from nccluprobe.cli.main import build
from nccluprobe.match.finding import Finding
from nccluprobe.report.grounds import grounds
from nccluprobe.report.next_step import next_step
from nccluprobe.report.ranks import in_job, short
from nccluprobe.report.text import Summary, report, single

_DATA = Path(__file__).parents[3] / "shared" / "data" / "fr_nvrx"


def made(kind: str = "collective_missing_enter", **more: Any) -> Finding:
    """A finding on rank 1 of a communicator, which is rank 9 of the job."""
    details: dict[str, Any] = {
        "api": "ncclAllReduce",
        "entered_comm_ranks": [0, 2],
        "missing_comm_ranks": [1],
        "missing_rank_status": [
            {"comm_rank": 1, "global_rank": 9, "reason": "rank_alive_but_not_entered"}
        ],
        "reason": "rank_alive_but_not_entered",
        "confidence": "observed",
        "waited_s": 180.0,
        **more.pop("details", {}),
    }
    values: dict[str, Any] = {
        "role": "root_cause",
        "named": [{"host": "", "pid": 0, "rank": 9}],
        "job_ranks": {0: 8, 1: 9, 2: 10},
        **more,
    }
    key = values.pop("key", (kind, 1))
    return Finding(key, kind, "run", "aa", 7, 1, details, "error", **values)


def flat(f: Finding) -> str:
    return " ".join(single(f).split())


def test_all_ranks_are_those_of_the_job() -> None:
    text = flat(made())
    assert "Rank 9 of the job (rank 1 of the communicator) did not enter" in text
    assert ": ranks 8,10 of the job wait in it for 3.0 min." in text
    assert "- rank 9 of the job: it has not come to this call" in text


def test_whose_number_it_is() -> None:
    assert short({"comm_rank": 1, "global_rank": 9}) == "rank 9 of the job"
    assert short({"comm_rank": 1, "global_rank": 1}) == "rank 1"
    assert short({"comm_rank": 1, "global_rank": None}) == "rank 1 of the communicator"
    assert in_job(made(), [0, 2]) == "ranks 8,10 of the job"
    assert in_job(made(job_ranks={}), [0, 2]) == "ranks 0,2"


def test_where_only_ranks_are_known_the_report_says_what_to_look_at() -> None:
    assert "next: look at the stack of the process of rank 9 of the job (on its node: py-spy" in (
        flat(made())
    )
    gpu = made("collective_missing_exit", details={"reason": "not_complete_here"})
    assert "look at the GPU of rank 9 of the job" in str(next_step(gpu))
    other = made("collective_mismatch", details={"reason": "arguments_differ"})
    assert "compare the code path of rank 9 of the job" in str(next_step(other))
    assert f"explain RUN {other.id}" in str(next_step(other))


def test_both_call_sites_are_shown() -> None:
    calls = [
        {"signature": "a", "comm_ranks": [0, 2], "sites": ["a1"]},
        {"signature": "b", "comm_ranks": [1], "sites": ["b2"]},
    ]
    text = flat(made("collective_mismatch", details={"calls": calls}))
    assert "- call site: rank 9 of the job from b2 - call site: ranks 8,10 of the job from a1" in (
        text
    )
    sites = [{"site": "a1", "comm_ranks": [0, 2]}, {"site": None, "comm_ranks": [1]}]
    text = flat(made(details={"sites": sites}))
    assert "- call site: rank 9 of the job from one that is not known" in text
    assert "call site" not in flat(made())


def test_what_may_be_a_consequence_is_under_the_cause() -> None:
    cause = made()
    other = made(
        "collective_all_ranks_stuck",
        role="unknown",
        named=[],
        details={"perhaps_of": cause.id, "summary": "All are inside."},
    )
    text = report([other, cause], Summary())
    assert "  1 that may be a consequence:\n    . All are inside.\n" in text
    assert "FINDING" not in text
    alone = report([other], Summary())
    assert alone.startswith("FINDING")


@pytest.mark.parametrize("name", [n for n in NAMES if expected_of(n)["hang_type"]])
def test_what_is_not_seen_directly_says_why(name: str) -> None:
    for f in analyze(name):
        sure = re.search(r"how sure: (.*?)(?=; severity)", flat(f))
        assert sure is not None
        if f.details["confidence"] == "inferred":
            assert re.match(r"inferred: \w+ ", sure[1]), sure[1]
        elif f.details["confidence"] == "reduced":
            assert re.match(r"with reduced confidence(: \w+ | \(.+\))", sure[1]), sure[1]


def test_reduced_confidence_says_why() -> None:
    lost = {"confidence": "reduced", "trace_event_loss_possible": True}
    assert grounds(made(details=lost)) == "events were lost that may matter"
    no_dump = {"confidence": "reduced", "reason": "rank_left_no_dump"}
    assert grounds(made(details=no_dump)) == "where it was, no dump tells"
    assert grounds(made(details={"confidence": "reduced"}, coverage={"lost_events": 3})) is None
    assert "(3 events lost)" in flat(
        made(details={"confidence": "reduced"}, coverage={"lost_events": 3})
    )
    assert grounds(made(details={"confidence": "reduced"})) is not None
    assert grounds(made()) is None


def command(*arguments: object) -> tuple[int, str]:
    words = [*map(str, arguments)]
    done = CliRunner().invoke(build(words), words)
    assert all(len(line) <= 80 for line in done.stdout.splitlines())
    return done.exit_code, done.stdout


@pytest.mark.skipif(not _DATA.exists(), reason="the published incidents are not here")
@pytest.mark.parametrize("incident", ["gpu_error_1st", "lock_gil_1st"])
def test_published_incidents_lead_with_the_culprits(incident: str, tmp_path: Path) -> None:
    truth = re.findall(
        r"^Rank (\d+),", (_DATA / incident / "fault_injection.log").read_text(), re.MULTILINE
    )
    _, text = command("analyze", _DATA / incident, "--out", tmp_path)
    causes = re.findall(r"CAUSE  \w+  \[f\w+\]\n  Rank (\d+) of the job", text)
    assert sorted(causes, key=int) == sorted(truth, key=int)
    assert text.count("  - next: look at the ") == len(causes)
    assert "FINDING" not in text
    assert not re.search(r"^  - rank \d+: ", text, re.MULTILINE)


@pytest.mark.parametrize("how", ["abort", "revoke"])
@pytest.mark.parametrize("last", ["lives", "ends"])
def test_who_comes_when_all_others_have_given_up_is_an_error(
    tmp_path: Path, last: str, how: str
) -> None:
    """Also when its own process has ended since: nothing has gone on."""
    job = Job()
    comms = job.world(3)
    t = steps(comms, 20)
    steps(comms[:2], 1, start=t)
    for c in comms[:2]:
        c.proc.comm_end(c, t + 100, how)
    steps(comms[2:], 1, start=t + 120)
    cover(job.procs, t + 125)
    for p in job.procs if last == "ends" else job.procs[:2]:
        p.end(t + 126, "signaled", signal=6)
    job.write(tmp_path)
    code, text = command("analyze", tmp_path)
    assert code == 10, text
    assert "CAUSE  delayed_collective_enter" in text
    assert "ranks 0-1 waited, and have given up." in " ".join(text.split())


def transfers(sends: int, receives: int) -> Job:
    """Rank 0 sends, rank 1 receives, each with its own size; then both go on, and end well."""
    job = Job()
    comms = job.world(2)
    for n in range(sends):
        comms[0].proc.call(comms[0], "ncclSend", 1 + n, peer=1, count=10 + n)
    for n in range(receives):
        comms[1].proc.call(comms[1], "ncclRecv", 1 + n, peer=0, count=10 + n)
    steps(comms, 5, start=20)
    cover(job.procs, 40)
    for p in job.procs:
        p.end(41)
    return job


def test_who_has_no_half_for_an_extra_call_is_not_said_to_have_made_it() -> None:
    """The reason of such a finding is what the other one did."""
    found = [f for f in analyze_job(transfers(4, 3)) if f.hang_type == "p2p_unmatched"]
    assert found and all(f.details["missing_rank_status"] for f in found)
    for f in found:
        assert "rank 1: it " not in flat(f), flat(f)
    extra = made(
        "p2p_unmatched",
        details={
            "reason": "call_extra",
            "missing_rank_status": [
                {"comm_rank": 1, "global_rank": 1, "reason": "call_extra", "pid": 11, "host": "a"}
            ],
            "summary": "Rank 0 made an extra call.",
        },
        named=[{"host": "a", "pid": 10, "rank": 0}],
        job_ranks={},
    )
    assert "it made a call that the others did not make" not in flat(extra)
    extra.named = [{"host": "a", "pid": 11, "rank": 1}]
    assert "rank 1: it made a call that the others did not make" in flat(extra)


def test_who_did_not_come_to_a_split_is_known_by_name() -> None:
    init = "comm_init_missing_enter"
    split = made(init, details={"confidence": "inferred", "summary": "s"})
    assert grounds(split) == "that the others wait for it is not seen"
    unknown = made(init, details={"confidence": "inferred", "summary": "s"}, named=[])
    assert grounds(unknown) == "who did not come is known by number only"


def test_of_orders_and_claims_the_calls_tell_more_than_a_stack() -> None:
    where = {"named": [{"host": "a", "pid": 11, "rank": 1}], "details": {"reason": "x"}}
    for kind in ("cross_comm_order_inversion", "p2p_order_inversion"):
        assert "make these calls in one order on all ranks" in str(next_step(made(kind, **where)))
    claim = made("comm_init_rank_conflict", **where)
    assert next_step(claim) == "see which rank pid 11 on a gives to the initialisation, and why"


@pytest.mark.parametrize(("ranks", "said"), [("3", "rank 3"), ("3-5,8", "ranks 3-5,8")])
def test_one_rank_that_is_not_traced_is_one(ranks: str, said: str) -> None:
    assert f"(not traced: {said})" in flat(made(coverage={"unobserved_comm_ranks": ranks}))


@pytest.mark.parametrize(
    ("who", "said"),
    [
        ((0, 1), "ranks 0-1 waited in it for 6.7 min, until they ended the communicator."),
        ((0,), "rank 1 waits in it for 6.7 min, and rank 0 waited there and has ended the "),
    ],
)
def test_who_destroys_a_communicator_in_order_did_not_give_up(
    who: tuple[int, ...], said: str
) -> None:
    job, comms, t = hang(3, (2,), waited=400)
    for r in who:
        comms[r].proc.comm_end(comms[r], t + 400.1, "destroy")
    found = [f for f in analyze_job(job) if f.hang_type == "collective_missing_enter"]
    assert [said in flat(f) for f in found] == [True]


def test_what_is_over_is_told_as_what_was(tmp_path: Path) -> None:
    """The words of a finding are those of when it was found; they stand under its end."""
    now = made(named=[{"host": "n", "pid": 7, "rank": 9}])
    assert "wait in it for 3.0 min" in flat(now)
    over = now.resolved(1_700_000_000 * 10**9)
    text = flat(over)
    begin = "RESOLVED collective_missing_enter [" + over.id + "] It is over, by 2023-11-14 22:13:20"
    assert text.startswith(begin)
    assert "What was found before that: Rank 9 of the job" in text
    assert "waited in it for 3.0 min" in text and "next:" not in text


def test_one_that_came_late_has_always_been_past() -> None:
    late = made("delayed_collective_enter", state="resolved", details={"summary": "It came late."})
    assert "It is over" not in flat(late)


@pytest.mark.parametrize("reason", ["rank_alive_but_not_entered", "rank_inside_other_call"])
def test_what_to_do_about_a_process_that_was_stopped(reason: str) -> None:
    status = {"comm_rank": 1, "global_rank": 9, "reason": reason, "host": "n", "pid": 7}
    named = [{"host": "n", "pid": 7, "rank": 9}]

    def step(**more: Any) -> str:
        details = {"missing_rank_status": [{**status, **more}], "reason": reason}
        return next_step(made(details=details, named=named)) or ""

    assert "py-spy dump --pid 7" in step(main_thread="syscall")
    text = step(main_thread="stopped")
    assert "who stopped pid 7 on n" in text and "kill -CONT 7" in text and "py-spy" not in text
    assert "kill -CONT" not in step(main_thread="stopped", process_end="signaled")


def test_a_limit_is_told_with_its_value() -> None:
    note = "the looks are too near to each other: look again after a while (--missing-after)"
    f = made(details={"note": note}, limits={"missing_after_s": 60.0})
    assert "after a while (60 s: --missing-after)" in flat(f)


@pytest.mark.parametrize("candidates", [[], [{"rank": 9, "pid": 7, "host": "n"}]])
def test_who_is_traced_and_not_in_an_initialisation_is_not_said_to_lack_a_trace(
    candidates: list[dict[str, Any]],
) -> None:
    status = {"comm_rank": 1, "global_rank": None, "reason": "ranks_not_in_init"}
    details = {"missing_rank_status": [status], "candidates": candidates, "summary": "It waits."}
    text = flat(made("comm_init_missing_enter", details=details))
    assert "not seen in the initialisation" in text
    assert ("it may not be traced" in text) is not candidates
