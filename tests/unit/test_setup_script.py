"""What the set-up scripts may remove."""

from __future__ import annotations

import subprocess
from pathlib import Path

TOOLS = Path(__file__).parents[2] / "tools"


def free_name(path: Path) -> Path:
    done = subprocess.run(
        ["bash", "-euc", f". '{TOOLS}/setup.sh'; free_name '{path}'"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return Path(done.stdout.strip())


def test_what_is_kept_stays(tmp_path: Path) -> None:
    """Only what a failed run has left is used, and so removed, again."""
    demo, second = tmp_path / "demo", tmp_path / "demo.2"
    assert free_name(demo) == demo
    demo.mkdir()
    assert free_name(demo) == second
    second.mkdir()
    (second / ".failed").touch()
    assert free_name(demo) == second
    (second / ".failed").unlink()
    assert free_name(demo) == tmp_path / "demo.3"


def test_the_demo_takes_such_a_name() -> None:
    assert 'DEMO=$(free_name "$REPO/nccluprobe-demo")' in (TOOLS / "quickstart").read_text()
