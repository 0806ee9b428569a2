"""What attach prints: names and paths of traced processes are a stranger's text."""

from __future__ import annotations

import sys

import pytest
from typer.testing import CliRunner

from nccluprobe.cli.main import build
from nccluprobe.cli.output import say
from nccluprobe.errors import ExitCode


def test_escape_sequences_are_not_passed_on(capsys: pytest.CaptureFixture[str]) -> None:
    say('library /tmp/\x1b[31m\nnccluprobe: forged \udcff \u202e "é".so')
    said = capsys.readouterr().err
    assert said == (
        'nccluprobe: library /tmp/\\x1b[31m\\nnccluprobe: forged \\udcff \\u202e "é".so\n'
    )


def test_a_closed_stderr_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Closed:
        def write(self, text: str) -> None:
            raise BrokenPipeError

        def flush(self) -> None: ...

    monkeypatch.setattr(sys, "stderr", Closed())
    say("anything")


@pytest.mark.parametrize(
    "options",
    [
        ["--pid-glob", ""],  # an unset variable of a script
        ["--pid-glob", "python", "--pid-glob", ""],
        ["--pid-glob", "python", "--ring-mb", "2048"],  # BCC cannot make it
    ],
)
def test_options_that_cannot_work_are_refused(options: list[str]) -> None:
    command = ["attach", *options]
    assert CliRunner().invoke(build(command), command).exit_code == ExitCode.USAGE
