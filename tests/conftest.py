"""Fixtures shared by all tests, and the rule that a skip must not hide a test.

A test marked ``root`` needs root and BPF, one marked ``nccl`` a copy of
NVIDIA's libnccl from the cache that ``tools/nccl-matrix fetch`` fills.  Where
these are missing such a test is skipped and says how to run it; with
``NCCLUPROBE_REQUIRE_ROOT_TESTS=1`` (set by ``tools/test``) the skip is a
failure.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any, Protocol

import pytest
from support import nccl_cache

from nccluprobe import resources

REPO = Path(__file__).resolve().parent.parent
REQUIRE = "NCCLUPROBE_REQUIRE_ROOT_TESTS"
#: Names of checks that failed before pytest, separated by commas; set by tools/test.
FAILED_CHECKS = "NCCLUPROBE_FAILED_CHECKS"
FORCE_HINT = f"run `sudo ./tools/test`; {REQUIRE}=1 makes this skip a failure"

# Programs that the tests start import the checkout, whatever is installed.
os.environ["PYTHONPATH"] = os.pathsep.join(
    p for p in (str(REPO), os.environ.get("PYTHONPATH", "")) if p
)


# A shell that starts the tests in the background has SIGINT ignored, and programs
# started from here would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


# --- what this machine can do -------------------------------------------------


@functools.cache
def no_bpf_reason() -> str | None:
    """Why privileged tests cannot run here; None when they can."""
    if os.geteuid() != 0:
        return "needs root"
    if importlib.util.find_spec("bcc") is None:
        return "needs BCC's Python module (apt: python3-bpfcc) in this environment"
    number = {"x86_64": 321, "aarch64": 280}.get(platform.machine())
    if number is None:
        return f"needs x86-64 or aarch64, not {platform.machine()}"
    # BPF_MAP_CREATE of an array with one entry: the least that a tracer does.
    attr = (ctypes.c_uint32 * 32)(2, 4, 8, 1)
    libc = ctypes.CDLL(None, use_errno=True)
    fd = libc.syscall(number, 0, ctypes.byref(attr), ctypes.sizeof(attr))
    if fd < 0:
        return f"the kernel refuses BPF: {os.strerror(ctypes.get_errno())}"
    os.close(fd)
    return None


#: Folders of tests that share nothing with each other and trace nothing.
_TOGETHER = (
    "canary", "cases", "conformance", "fuzz", "importers", "layout", "lives", "model", "unit",
)  # fmt: skip


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--part",
        choices=("together", "alone"),
        help="only tests that may run side by side, or only those that need the machine alone",
    )


def _may_run_side_by_side(item: pytest.Item) -> bool:
    folder = item.path.relative_to(REPO / "tests").parts[0]
    marks = ("root", "alone")
    return folder in _TOGETHER and not any(item.get_closest_marker(m) for m in marks)


def _pick_part(config: pytest.Config, items: list[pytest.Item]) -> None:
    part = config.getoption("--part")
    if part is None:
        return
    others = [i for i in items if _may_run_side_by_side(i) != (part == "together")]
    config.hook.pytest_deselected(items=others)
    items[:] = [i for i in items if i not in set(others)]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _pick_part(config, items)
    reason = no_bpf_reason()
    if reason is None:
        return
    skip = pytest.mark.skip(reason=f"{reason}; {FORCE_HINT}")
    for item in items:
        if item.get_closest_marker("root"):
            item.add_marker(skip)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if (
        os.environ.get(REQUIRE) == "1"
        and report.skipped
        and not hasattr(report, "wasxfail")
        and (item.get_closest_marker("root") or item.get_closest_marker("nccl"))
    ):
        report.longrepr = f"skipped, which {REQUIRE}=1 forbids: {_skip_text(report.longrepr)}"
        report.outcome = "failed"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    # A file that skips itself while it is imported shows no marker, so every one counts.
    report = yield
    if os.environ.get(REQUIRE) == "1" and report.skipped:
        report.longrepr = f"skipped, which {REQUIRE}=1 forbids: {_skip_text(report.longrepr)}"
        report.outcome = "failed"
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Checks of tools/test that failed before pytest count as errors of the run."""
    names = [name for name in os.environ.get(FAILED_CHECKS, "").split(",") if name]
    terminal = session.config.pluginmanager.get_plugin("terminalreporter")
    if not names or terminal is None:
        return
    for name in names:
        report = pytest.TestReport(
            nodeid=f"tools/test: {name}",
            location=("tools/test", None, name),
            keywords={},
            outcome="failed",
            longrepr="failed before pytest: see the output above",
            when="setup",
        )
        terminal.stats.setdefault("error", []).append(report)
    session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _skip_text(longrepr: object) -> str:
    return str(longrepr[2]) if isinstance(longrepr, tuple) else str(longrepr)


# --- what tests use -----------------------------------------------------------


@pytest.fixture(scope="session")
def native_dir() -> Path:
    """Folder of the native parts, built from this checkout."""
    folder = resources.native_dir(build=True)
    assert folder is not None
    return folder


@pytest.fixture(scope="session")
def simnccl(native_dir: Path) -> Path:
    """The CPU stand-in for NCCL."""
    return native_dir / resources.SIMNCCL


@pytest.fixture(scope="session")
def nccl_load(native_dir: Path) -> Path:
    """The load generator."""
    return native_dir / resources.NCCL_LOAD


@pytest.fixture(scope="session")
def real_nccl() -> Callable[[str], Path]:
    """``real_nccl("2.28.9")``: NVIDIA's own libnccl of that version; skips when absent."""

    def find(version: str) -> Path:
        path = nccl_cache.library(version)
        if path is None:
            pytest.skip(
                f"no libnccl {version} in {nccl_cache.folder()}: "
                f"run `tools/nccl-matrix fetch {version}`; {REQUIRE}=1 makes this skip a failure"
            )
        return path

    return find


class Cli(Protocol):
    """Runs ``nccluprobe ARGS`` of this checkout to its end."""

    def __call__(
        self, *args: str | Path, timeout: float = 60, **kwargs: Any
    ) -> subprocess.CompletedProcess[str]: ...


#: ``nccluprobe`` of this checkout, for tests that start it themselves.
NCCLUPROBE: Sequence[str] = (
    sys.executable,
    "-c",
    "import sys; sys.argv[0] = 'nccluprobe'; from nccluprobe.cli.main import run; sys.exit(run())",
)


@pytest.fixture(scope="session")
def nccluprobe_command() -> list[str]:
    """The start of a command line that runs this checkout's ``nccluprobe``."""
    return list(NCCLUPROBE)


@pytest.fixture(scope="session")
def cli() -> Cli:
    """Runs a command of nccluprobe and gives its exit code and output."""

    def run(
        *args: str | Path, timeout: float = 60, **kwargs: Any
    ) -> subprocess.CompletedProcess[str]:
        kwargs.setdefault("stdin", subprocess.DEVNULL)
        return subprocess.run(
            [*NCCLUPROBE, *map(str, args)],
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            **kwargs,
        )

    return run
