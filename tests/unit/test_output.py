"""Standard output and error that are full, closed or not read: the exit code stays right."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from nccluprobe.errors import ExitCode

CASE = Path(__file__).parents[1] / "cases" / "alive_and_never_enters"
ERROR = f"analyze --missing-after 1 --error-after 5 {CASE}"
NOTICE = f"analyze --missing-after 1 {CASE}"


def shell(words: str, redirection: str, out: Path) -> tuple[int, str, str]:
    out_option = f" --out '{out}'" if str(CASE) in words else ""
    line = f"'{sys.executable}' -m nccluprobe {words}{out_option} {redirection}"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", line], capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("words", "redirection", "code"),
    [
        ("--version", ">/dev/null", ExitCode.OK),
        ("--version", ">/dev/full", ExitCode.OUTPUT),
        ("", ">/dev/null", ExitCode.USAGE),
        ("analyze --help", ">/dev/full", ExitCode.OUTPUT),
        ("--help", "| true", ExitCode.OK),
        ("bogus", "2>/dev/full", ExitCode.USAGE),
        ("bogus", "2>&-", ExitCode.USAGE),
        ("analyze /nonexist", "2>/dev/full", ExitCode.NO_TRACE),
        (ERROR, ">&-", ExitCode.FINDINGS),
        (ERROR, ">/dev/full", ExitCode.FINDINGS),
        (ERROR, ">/dev/full 2>/dev/full", ExitCode.FINDINGS),
        (ERROR, "| true", ExitCode.FINDINGS),
        (ERROR + " --json", ">/dev/full", ExitCode.FINDINGS),
        (NOTICE, ">/dev/full", ExitCode.OUTPUT),
        (NOTICE, ">/dev/null", ExitCode.NOTICES),
    ],
)
def test_the_exit_code_is_right_whatever_cannot_be_said(
    words: str, redirection: str, code: ExitCode, tmp_path: Path
) -> None:
    status, out, err = shell(words, redirection, tmp_path)
    assert status == code, (out, err)
    assert out == "" and len(err.splitlines()) <= 1
    assert "Traceback" not in err
