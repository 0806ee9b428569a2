"""Every case of this folder: the right verdict, the exact ranks, nobody else."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, Protocol

import jsonschema  # type: ignore[import-untyped]
import orjson
import pytest
from lives.kit import follow

from cases.kit import CASES
from cases.make import FOLDER, contents, write
from nccluprobe import trace
from nccluprobe.importers.files import find
from nccluprobe.importers.run import import_files
from nccluprobe.match.finding import Finding
from nccluprobe.match.options import SECOND, Options
from nccluprobe.match.pipeline import Analysis
from nccluprobe.report.text import sentence
from nccluprobe.trace.reader import TraceReader

#: Cases that are not right yet -> the rule that is missing.
NOT_YET: dict[str, str] = {}
BLAMES_INNOCENT: dict[str, str] = {}
#: The same for the text of the command.
NOT_YET_TOLD: dict[str, str] = {}
NAMES = sorted(p.parent.name for p in FOLDER.glob("*/expected.json"))
#: Those of traces: the others are reports that another tool wrote.
TRACED = [n for n in NAMES if (FOLDER / n / "tracing").is_dir()]
SCHEMA = orjson.loads((Path(trace.__file__).parent / "trace.schema.json").read_bytes())


def marked(names: list[str], not_yet: dict[str, str]) -> list[Any]:
    """The names, with those that are not right yet as strict expected failures."""
    return [
        pytest.param(
            n, marks=pytest.mark.xfail(reason=not_yet[n], strict=True) if n in not_yet else ()
        )
        for n in names
    ]


def expected_of(name: str) -> dict[str, Any]:
    found: dict[str, Any] = orjson.loads((FOLDER / name / "expected.json").read_bytes())
    return found


def analyze(name: str, folder: Path = FOLDER) -> list[Finding]:
    """What ``nccluprobe analyze`` finds, through the real reader."""
    options = {k: round(v * SECOND) for k, v in expected_of(name)["options"].items()}
    reader, analysis = TraceReader([folder / name], None), Analysis(Options(**options))
    reader.discover(force=True)
    analysis.open(reader.names())
    for c in reader.poll():
        analysis.feed(c.source, c.path, c.first_line, c.data, c.caught_up)
    if (reports := folder / name / "ras").is_dir():
        assert not import_files(find([reports], None), analysis).told.problems
    analysis.scan(None)
    return analysis.matcher.book.all()


def blamed(findings: list[dict[str, Any]]) -> set[int]:
    """Global ranks that are named as the cause."""
    return {
        c["rank"]
        for f in findings
        if f["role"] == "root_cause" and f["state"] == "open"
        for c in f["culprits"]
    }


def agrees(f: dict[str, Any], expected: dict[str, Any]) -> bool:
    """Whether a finding is the one that leads."""
    return (
        f["state"] == "open"
        and f["hang_type"] in expected["hang_type"]
        and f["severity"] in (expected["severity"], "error", "notice")[: _width(expected)]
        and f["role"] in expected["role"]
        and f["details"]["reason"] in (expected["reason"] or [f["details"]["reason"]])
        and f["details"]["confidence"] in (expected["confidence"] or [f["details"]["confidence"]])
    )


def _width(expected: dict[str, Any]) -> int:
    return 3 if expected["severity"] == "any" else 1


@pytest.mark.parametrize("name", marked(NAMES, NOT_YET))
def test_the_verdict_is_exact(name: str) -> None:
    expected = expected_of(name)
    found = analyze(name)
    lines = [f.to_json() for f in found]
    told = [
        (f.hang_type, f.state, f.severity, f.role, [c["rank"] for c in f.named], sentence(f))
        for f in found
    ]
    assert blamed(lines) == set(expected["blamed"]), told
    if not expected["hang_type"]:
        assert [t for t in told if t[1] == "open"] == []
        return
    leading = [f for f in found if agrees(f.to_json(), expected)]
    assert leading, told
    for word in expected["words"]:
        assert any(word in sentence(f) for f in leading), (word, told)
    for f in found:
        if f.severity == "error" and f.role == "root_cause" and f.state == "open":
            assert f.hang_type in expected["hang_type"], told


def without_host_state(data: bytes) -> bytes:
    """The trace of a tracer that cannot see what the main thread does."""
    lines = [orjson.loads(line) for line in data.splitlines()]
    for line in lines:
        if line["kind"] == "coverage":
            line["main"] = "unknown"
            line.pop("syscall", None)
    return b"".join(orjson.dumps(line) + b"\n" for line in lines)


@pytest.mark.parametrize("name", marked(TRACED, BLAMES_INNOCENT))
def test_without_host_state_nobody_innocent_is_blamed(name: str, tmp_path: Path) -> None:
    run = tmp_path / name / "tracing" / "run"
    run.mkdir(parents=True)
    for p in FOLDER.glob(f"{name}/tracing/run/*.jsonl"):
        (run / p.name).write_bytes(without_host_state(p.read_bytes()))
    found = [f.to_json() for f in analyze(name, tmp_path)]
    assert blamed(found) <= set(expected_of(name)["blamed"]), found


@pytest.mark.parametrize("name", marked(TRACED, BLAMES_INNOCENT))
def test_live_nobody_innocent_is_ever_blamed(name: str) -> None:
    options = {k: round(v * SECOND) for k, v in expected_of(name)["options"].items()}
    live = follow(CASES[name].build(), Options(**options), step=1.0)
    for f in live.written:
        assert f.severity == "notice" or blamed([f.to_json()]) <= set(
            expected_of(name)["blamed"]
        ), sentence(f)


@pytest.mark.parametrize("name", sorted(CASES))
def test_the_folder_is_what_the_script_makes(name: str, tmp_path: Path) -> None:
    """If not: run ``python tests/cases/make.py``."""
    write(CASES[name], tmp_path / name)
    assert contents(FOLDER / name) == contents(tmp_path / name)


def test_no_folder_is_left_over() -> None:
    assert sorted(CASES) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_traces_are_valid_and_small(name: str) -> None:
    files = contents(FOLDER / name)
    assert sum(map(len, files.values())) < 100_000
    assert len((FOLDER / name / "why.md").read_text().splitlines()) == 1
    validator = jsonschema.Draft202012Validator(SCHEMA)
    for path, data in files.items():
        if path.endswith(".jsonl"):
            lines = [orjson.loads(line) for line in data.splitlines()]
            kinds = {str(sorted(x)): x for x in lines}  # one of each shape: enough, and fast
            for line in kinds.values():
                validator.validate(line)


BY_COMMAND = [
    "alive_and_never_enters",
    "all_reconnect",
    "blind_in_a_cuda_graph",
    "broadcast_of_another_size",
    "checkpoint_past_the_timeout",
    "counts_apart_inside_a_cuda_graph",
    "one_small_all_reduce_among_many",
]


class Cli(Protocol):
    def __call__(self, *args: str | Path, timeout: float = 60) -> Any: ...


@pytest.mark.parametrize("name", marked(BY_COMMAND, NOT_YET_TOLD))
def test_by_the_command(name: str, tmp_path: Path, cli: Cli) -> None:
    expected = expected_of(name)
    run = shutil.copytree(FOLDER / name, tmp_path / name)
    options = [
        word
        for key, value in expected["options"].items()
        for word in (f"--{key.replace('_', '-')}", str(value))
    ]
    done = cli("analyze", run if name in TRACED else run / "ras", *options, "--out", run)
    assert done.returncode == (10 if expected["hang_type"] else 0), done.stdout + done.stderr
    text = " ".join(done.stdout.split())
    assert all(word in text for word in (*expected["words"], *expected["report"])), done.stdout
    assert not any(word in text for word in expected["without"]), done.stdout
    (written,) = run.rglob("findings.jsonl")
    lines = written.read_bytes().splitlines()
    assert blamed([orjson.loads(line) for line in lines]) == set(expected["blamed"])
