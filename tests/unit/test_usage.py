"""Wrong usage: one line on standard error that says what, and where to read more."""

from __future__ import annotations

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from nccluprobe.cli.main import build
from nccluprobe.errors import ExitCode


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--foo"], "nccluprobe: No such option: --foo"),
        (["anal"], "No such command 'anal'"),
        (["analyze"], "nccluprobe: Missing argument 'PATH' (see `nccluprobe analyze --help`)"),
        (["analyze", "--late-after", "x", "."], "'x': give seconds"),
        (["attach", "--bar"], "(see `nccluprobe attach --help`)"),
    ],
)
def test_wrong_usage_is_one_line(words: list[str], said: str) -> None:
    result = CliRunner().invoke(build(words), words, prog_name="nccluprobe")
    assert result.exit_code == ExitCode.USAGE
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1 and said in result.stderr


def test_no_command_shows_the_help() -> None:
    result = CliRunner().invoke(build([]), [])
    assert result.exit_code == ExitCode.USAGE
    assert "analyze" in result.stdout and "attach" in result.stdout


def test_help_is_no_error() -> None:
    assert CliRunner().invoke(build(["analyze"]), ["analyze", "--help"]).exit_code == 0


INTERRUPTED_IMPORT = """
import os, signal, sys
from nccluprobe.__main__ import start

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "numpy":
            os.kill(os.getpid(), signal.SIGINT)
            for _ in range(1000):
                pass
            print("went on", flush=True)

sys.meta_path.insert(0, Interrupt())
sys.argv = ["nccluprobe", "analyze", "."]
start()
"""


def test_an_interrupt_waits_for_the_imports() -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_IMPORT], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == ExitCode.INTERRUPTED
    assert (done.stdout, done.stderr) == ("went on\n", "")
