"""The rule of tests/conftest.py: a privileged test that is skipped can be made a failure."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
REQUIRE = "NCCLUPROBE_REQUIRE_ROOT_TESTS"

SAMPLE = """
import pytest

@pytest.mark.{mark}
def test_skips():
    pytest.skip("nothing here")
"""


def run_sample(folder: Path, text: str, **env: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_sample.py").write_text(text)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n  root:\n  nccl:\n  slow:\n")
    clean = {k: v for k, v in os.environ.items() if not k.startswith("NCCLUPROBE_")}
    path = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-rA", "-p", "conftest", "-p", "no:cacheprovider", folder],
        cwd=folder,
        env={**clean, "PYTHONPATH": path, **env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    ("mark", "required", "code"),
    [("root", "1", 1), ("nccl", "1", 1), ("slow", "1", 0), ("root", "0", 0)],
)
def test_a_skip_fails_only_where_it_is_forbidden(
    mark: str, required: str, code: int, tmp_path: Path
) -> None:
    done = run_sample(tmp_path, SAMPLE.format(mark=mark), **{REQUIRE: required})
    assert done.returncode == code, done.stdout + done.stderr
    assert ("1 failed" if code else "1 skipped") in done.stdout
    assert not code or ("forbids" in done.stdout and "nothing here" in done.stdout)


def test_a_check_that_failed_before_pytest_fails_the_run(tmp_path: Path) -> None:
    text = "def test_passes():\n    pass\n"
    done = run_sample(tmp_path, text, NCCLUPROBE_FAILED_CHECKS="ruff check,mypy")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 passed, 2 errors" in done.stdout.splitlines()[-1]
    assert "ERROR tools/test: mypy" in done.stdout


def test_a_file_that_skips_itself_is_told_too(tmp_path: Path) -> None:
    text = "import pytest\npytest.skip('no bcc', allow_module_level=True)\n"
    done = run_sample(tmp_path, text, **{REQUIRE: "1"})
    assert done.returncode != 0
    assert "forbids" in done.stdout


def test_without_root_the_reason_says_how_to_run_it(tmp_path: Path) -> None:
    text = (
        "import os\n"
        "import conftest\n"
        "def test_reason(monkeypatch):\n"
        "    monkeypatch.setattr(os, 'geteuid', lambda: 1000)\n"
        "    conftest.no_bpf_reason.cache_clear()\n"
        "    assert conftest.no_bpf_reason() == 'needs root'\n"
        "    assert 'sudo ./tools/test' in conftest.FORCE_HINT\n"
    )
    done = run_sample(tmp_path, text)
    assert done.returncode == 0, done.stdout + done.stderr
