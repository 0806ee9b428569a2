"""No false alarm in a life that is normal, the right one in its hung twin."""

from __future__ import annotations

import copy
import functools
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
from cases.test_cases import SCHEMA
from support.analysis import Run
from support.tracegen import Job

import lives.endings
import lives.idle
import lives.orders
import lives.phases
import lives.pipes  # noqa: F401  (these register their lives)
from lives.kit import LIVES, Life, blamed, follow, told
from nccluprobe.match.finding import Finding
from nccluprobe.match.options import SECOND

#: Lives that are not judged right yet -> the rule that is missing.
NOT_YET_NORMAL: dict[str, str] = {}
NOT_YET_HUNG: dict[str, str] = {}
#: Without the state of the hosts.
NOT_YET_BLIND: dict[str, str] = {}
#: When all ranks were killed before anybody looked.
NOT_YET_KILLED: dict[str, str] = {}


def marked(not_yet: dict[str, str]) -> list[Any]:
    """The names, with those that are not right yet as strict expected failures."""
    return [
        pytest.param(
            n, marks=pytest.mark.xfail(reason=not_yet[n], strict=True) if n in not_yet else ()
        )
        for n in LIVES
    ]


@functools.cache
def job_of(name: str, hung: bool) -> Job:
    """Made once for both ways of looking."""
    return LIVES[name].build(hung)


def afterwards(life: Life, job: Job) -> list[Finding]:
    """What ``analyze`` finds when all is over."""
    run = Run(job, life.limits)
    run.all()
    run.scan()
    return run.analysis.matcher.book.all()


@pytest.mark.parametrize("name", marked(NOT_YET_NORMAL))
def test_no_error_in_a_normal_life(name: str) -> None:
    life = LIVES[name]
    live = follow(job_of(name, False), life.limits)
    seen = [f for f in live.written if life.notices is False or f.severity == "error"]
    assert seen == [], told(live.written)
    assert [f for f in live.last if f.state == "open"] == [], told(live.last)
    after = afterwards(life, job_of(name, False))
    assert [f for f in after if f.state == "open" or f.severity == "error"] == [], told(after)


@pytest.mark.parametrize("name", marked(NOT_YET_HUNG))
def test_the_hung_twin_is_found(name: str) -> None:
    life = LIVES[name]
    live = follow(job_of(name, True), life.limits)
    innocent = [
        f for f in live.written if f.severity == "error" and not blamed([f]) <= set(life.blamed)
    ]
    assert innocent == [], told(live.written)
    for found in (live.last, afterwards(life, job_of(name, True))):
        assert blamed(found) == set(life.blamed), told(found)
        assert any(
            f.hang_type in life.hang_type
            and (f.state, f.severity) == ("open", "error")
            and f.role != "downstream"
            for f in found
        ), told(found)


def without_host_state(job: Job) -> Job:
    """The same job by a tracer that cannot see what the main threads do."""
    blind = copy.deepcopy(job)
    for p in blind.procs:
        for _, _, line in p.lines:
            if line["kind"] == "coverage":
                line["main"] = "unknown"
                line.pop("syscall", None)
    return blind


@pytest.mark.parametrize("name", marked(NOT_YET_BLIND))
def test_no_error_without_host_state(name: str) -> None:
    life = LIVES[name]
    found = afterwards(life, without_host_state(job_of(name, False)))
    assert [f for f in found if (f.state, f.severity) == ("open", "error")] == [], told(found)


@pytest.mark.parametrize("name", marked(NOT_YET_BLIND))
def test_without_host_state_something_is_found_and_nobody_innocent_blamed(name: str) -> None:
    life = LIVES[name]
    found = [
        f for f in afterwards(life, without_host_state(job_of(name, True))) if f.state == "open"
    ]
    assert found
    assert blamed(found) <= set(life.blamed), told(found)


@pytest.mark.parametrize("name", marked(NOT_YET_KILLED))
def test_the_hung_twin_is_found_after_somebody_killed_it(name: str) -> None:
    life = LIVES[name]
    job = copy.deepcopy(job_of(name, True))
    for i, p in enumerate(job.procs):
        last = max(when for when, _, _ in p.lines)
        if p.lines[-1][2]["kind"] != "process_end":
            at = (last - p.host.mono) / SECOND + 0.5 + 0.3 * i
            p.end(at, how="signaled", signal=15)
    found = afterwards(life, job)
    assert blamed(found) == set(life.blamed), told(found)
    assert any(f.hang_type in life.hang_type and f.severity == "error" for f in found), told(found)


@pytest.mark.parametrize("name", list(LIVES))
def test_traces_are_valid(name: str) -> None:
    validator = jsonschema.Draft202012Validator(SCHEMA)
    for hung in (False, True):
        for p in job_of(name, hung).procs:
            shapes = {str(sorted(line)): line for line in p.output()}
            for line in shapes.values():
                validator.validate(line)
