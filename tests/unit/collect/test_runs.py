"""Run ids as folder names."""

from __future__ import annotations

import re

import pytest

from nccluprobe.collect.runs import component, dated, run_id


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("job-7.a_b", "job-7.a_b"),
        ("../../etc", "_.._etc"),
        ("..", ""),
        (".", ""),
        ("/", "_"),
        ("--rm", "rm"),
        (".hidden", "hidden"),
        ("a b\n\0c", "a_b_c"),
        ("ü", "_"),
        ("x" * 300, "x" * 100),
        ("", ""),
    ],
)
def test_component(text: str, expected: str) -> None:
    assert component(text) == expected
    assert "/" not in component(text)


def test_which_one_wins() -> None:
    assert run_id("told", "job", "date") == "told"
    assert run_id(None, "job", "date") == "job"
    assert run_id(None, None, "date") == "date"
    assert run_id(None, "..", "date") == "date"
    assert re.fullmatch(r"\d{8}T\d{6}", dated(0.0))
