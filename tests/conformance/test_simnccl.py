"""A part of the suite on real processes: simnccl, traced by both fronts."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.e2e import Stage
from support.traces import Trace, read_traces, validate
from support.waiting import Output, clean_env, wait_for

from conformance.cases import by_id
from conformance.truth import SILENCE, faults_of, text
from nccluprobe.match.finding import Finding
from nccluprobe.match.options import SECOND, Options
from nccluprobe.match.pipeline import Analysis

#: One for each kind of fault, and the operations in turn.
CHOSEN = (
    "ncclAllGather-missing_call-stop_sync-n2",
    "ncclBroadcast-missing_call-skip_ahead-n4",
    "ncclReduceScatter-extra_call-ahead-n4",
    "ncclAlltoAll-swapped_order-ahead-n4",
    "ncclAllReduce-wrong_count-sync-n4",
    "ncclAllReduce-wrong_count-sync-n2",
    "ncclAllGather-wrong_datatype-sync-n4",
    "ncclReduce-wrong_op-ahead-n4",
    "ncclBcast-wrong_root-sync-n4",
    "ncclScatter-wrong_communicator-ahead-n4",
    "ncclGather-early_exit-signal_9_sync-n2",
    "ncclAllReduce-deadlock_across_communicators-one_rank_sync-n4",
    "ncclSend-missing_call-stop_sync-n4",
    "ncclSend-early_exit-code_1_sync-n2",
    "ncclRecv-missing_call-skip_sync-n2",
    "ncclRecv-asymmetric_pair-ring_sync-n2",
    # The stand-in does not mind sizes of messages that differ.
    "ncclSend-wrong_count-pass-n2",
    "ncclAllReduce-twin-groups_ahead-n2",
    "ncclSend-twin-all_to_all_big_sync-n4",
    "ncclSend-twin-exits_after_the_last-n2",
    # With a configuration, of the communicators too.
    "ncclAllReduceConfig-wrong_op-sync-n2",
    "ncclBroadcastConfig-early_exit-code_1_sync-n2",
    "ncclReduceConfig-wrong_root-sync-n2",
    "ncclAllGatherConfig-missing_call-stop_sync-n2",
    "ncclReduceScatterConfig-wrong_datatype-sync-n2",
    "ncclAlltoAllConfig-extra_call-ahead-n2",
    "ncclGatherConfig-swapped_order-sync-n2",
    "ncclScatterConfig-wrong_communicator-sync-n2",
    "ncclAllReduceConfig-twin-two_spellings-n2",
)
LIMITS = Options(
    missing_after=SECOND, late_after=3 * SECOND, error_after=2 * SECOND, decide_after=SECOND
)
#: Coverage after the last call, in seconds, that these limits need.
ENOUGH = 2.6
RUNNER = Path(__file__).with_name("runner.py")

Preload = list[str | Path]


@pytest.fixture(scope="module")
def stage(
    tmp_path_factory: pytest.TempPathFactory, nccluprobe_command: list[str], simnccl: Path
) -> Iterator[Stage]:
    stage = Stage(tmp_path_factory.mktemp("conformance"), nccluprobe_command, simnccl)
    try:
        yield stage
    finally:
        stage.close()


def jobs(out: Path) -> dict[str, list[Trace]]:
    found: dict[str, list[Trace]] = {}
    for trace in read_traces(out):
        found.setdefault(trace.path.parent.name, []).append(trace)
    return found


def looked_on(traces: list[Trace]) -> bool:
    """Whether all ranks of a job have begun, stand still, and were watched long enough since."""
    calls = [[line for kind in ("call", "enter") for line in t.of(kind)] for t in traces]
    if not all(any(line["api"] == "ncclAllReduce" for line in own) for own in calls):
        return False
    last = max(line["t"] for own in calls for line in own)
    return all(
        t.end is not None or t.coverage["through"] > last + ENOUGH * 1e9 for t in traces
    )  # fmt: skip


def run(stage: Stage, out: Path, prefix: Preload) -> dict[str, list[Trace]]:
    """All chosen programs at once; their traces once they tell enough."""
    signs = out.with_suffix(".signs")
    signs.mkdir()
    process = stage.popen(
        [*prefix, sys.executable, RUNNER, stage.script, stage.lib, signs, *CHOSEN],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=clean_env(),
    )
    assert process.stdout is not None and process.stderr is not None
    said, errors = Output(process.stdout), Output(process.stderr)

    def started() -> bool:
        assert process.poll() is None, errors.finish()
        return "started" in said.text

    wait_for(started, "the start", context=lambda: errors.text)
    sizes = {i: by_id()[i].n for i in CHOSEN}

    def unmet() -> list[str]:
        return [i for i, n in sizes.items() if len(list(out.glob(f"tracing/{i}/*.jsonl"))) < n]

    def moving() -> list[str]:
        found = jobs(out)
        return [i for i in sizes if not looked_on(found[i])]

    try:
        wait_for(lambda: not unmet(), "a file of each rank", context=lambda: f"not of {unmet()}")
        (signs / "go").touch()
        wait_for(lambda: not moving(), "long waits", poll=0.5, context=lambda: f"not {moving()}")
        return jobs(out)
    finally:
        (signs / "done").touch()
        process.wait(30)


@pytest.fixture(scope="module")
def ebpf(stage: Stage) -> dict[str, list[Trace]]:
    daemon = stage.attach_glob(out=stage.tmp / "ebpf")
    found = run(stage, daemon.out, [])
    daemon.stop()
    return found


@pytest.fixture(scope="module")
def preload(stage: Stage) -> dict[str, list[Trace]]:
    out = stage.tmp / "preload"
    return run(stage, out, [*stage.nccluprobe, "preload", "--lib", stage.lib, "--out", out, "--"])


def findings(traces: list[Trace]) -> list[Finding]:
    """What the matcher says of these files, as they were when they were read."""
    analysis = Analysis(LIMITS)
    analysis.open([(i, t.path.name) for i, t in enumerate(traces)])
    for i, t in enumerate(traces):
        lines = t.path.read_bytes().splitlines()[: len(t.lines)]
        analysis.feed(i, t.path.name, 1, lines, True)
    analysis.scan()
    return sorted(analysis.matcher.book.all(), key=lambda f: (f.since, f.id))


def check(case_id: str, traces: list[Trace], front: str) -> None:
    case = by_id()[case_id]
    validate(traces)
    assert {t.process["front"] for t in traces} == {front}
    apis = {line["api"] for t in traces for line in (*t.of("call"), *t.of("enter"))}
    assert case_id.split("-")[0] in apis
    assert ("ncclCommInitRankConfig" in apis) == ("Config-" in case_id)
    first = next(t for t in traces if t.rank == 0)
    hashes = [first.comms[i]["hash"] for i in sorted(first.comms)]
    names = dict(zip(case.build().comms, hashes, strict=False))
    found = findings(traces)
    if case.truth is SILENCE:
        found = [f for f in found if f.state == "open"]
    wrong = faults_of(case.truth, found, names)
    assert not wrong, "\n".join([*wrong, f"({case.truth.why})", "findings:", *map(text, found)])


@pytest.mark.root
@pytest.mark.timeout(120)
@pytest.mark.parametrize("case_id", CHOSEN)
def test_ebpf(case_id: str, ebpf: dict[str, list[Trace]]) -> None:
    check(case_id, ebpf[case_id], "ebpf")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("case_id", CHOSEN)
def test_preload(case_id: str, preload: dict[str, list[Trace]]) -> None:
    check(case_id, preload[case_id], "preload")
