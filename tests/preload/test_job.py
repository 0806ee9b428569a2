"""A hung job under `nccluprobe preload`: the same finding as under eBPF, without root."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.canary import Canary
from support.e2e import Analyze, Stage
from support.traces import read_traces, validate
from support.waiting import clean_env

from nccluprobe.errors import ExitCode
from preload.conftest import Compile, Rings

REPO = Path(__file__).resolve().parents[2]
#: The three that agree on the clocks come first.
SEQ = 3 + 42
#: What differs between two runs of one job, whatever traced them.
VARIES = ("id", "run_id", "detected_at_unix_ns", "comm_uid_hash")


@pytest.fixture
def stage(tmp_path: Path, nccluprobe_command: list[str], simnccl: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path, nccluprobe_command, simnccl)
    try:
        yield stage
    finally:
        stage.close()


def job(stage: Stage) -> list[str | Path]:
    """Rank 3 never enters the AllReduce of step 42."""
    return Canary(stage).command(
        "--pause", "0.01", "--inject", "never:rank=3,at=42", "--hold", "9",
        world=4, ops="all_reduce",
    )  # fmt: skip


def preload(
    nccluprobe: Sequence[str], out: Path, *command: str | Path, code: int = 0, **kwargs: Any
) -> None:
    done = subprocess.run(
        [*map(str, nccluprobe), "preload", "--out", str(out), "--", *map(str, command)],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120, check=False,
        **{"env": clean_env(), **kwargs},
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr


def finding(report: Any) -> dict[str, Any]:
    assert report.rc == 10, report.text
    assert [f["hang_type"] for f in report.errors] == ["collective_missing_enter"]
    found = dict(report.errors[0])
    for key in VARIES:
        found.pop(key, None)
    return found


def test_the_rank_that_never_came(
    stage: Stage, nccluprobe_command: list[str], cli: Any, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    preload(nccluprobe_command, out, *job(stage), code=ExitCode.CANARY_HELD)
    traces = read_traces(out)
    validate(traces)
    assert sorted(t.rank or 0 for t in traces) == [0, 1, 2, 3]
    assert {t.process["front"] for t in traces} == {"preload"}
    found = finding(Analyze(cli, tmp_path)(out))
    assert found["details"]["missing_comm_ranks"] == [3]
    assert found["details"]["entered_comm_ranks"] == [0, 1, 2]
    assert found["comm_seq"] == SEQ


@pytest.mark.root
def test_the_finding_does_not_tell_the_front(
    stage: Stage, nccluprobe_command: list[str], cli: Any, tmp_path: Path
) -> None:
    analyze = Analyze(cli, tmp_path)
    preload(nccluprobe_command, tmp_path / "a", *job(stage), code=ExitCode.CANARY_HELD)
    daemon = stage.attach_glob(out=tmp_path / "b")
    subprocess.run([*map(str, job(stage))], env=clean_env(), check=False, timeout=60,
                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
    daemon.stop()
    a, b = finding(analyze(tmp_path / "a")), finding(analyze(tmp_path / "b"))
    assert a.keys() == b.keys()
    text = json.dumps([a, b])
    assert "preload" not in text and "ebpf" not in text.lower()
    for found in (a, b):
        found["coverage"].pop("through_unix_ns", None)
    for key in ("severity", "role", "comm_seq", "coverage"):
        assert a.get(key) == b.get(key), key
    same = ("api", "expected_nranks", "entered_comm_ranks", "missing_comm_ranks", "reason",
            "confidence", "trace_event_loss_possible")  # fmt: skip
    assert {k: a["details"][k] for k in same} == {k: b["details"][k] for k in same}


@pytest.mark.root
def test_without_root(
    stage: Stage, nccluprobe_command: list[str], simnccl: Path, request: pytest.FixtureRequest
) -> None:
    """As a user who may nothing; what the tests read of this checkout is copied for them."""
    if shutil.which("setpriv") is None:
        pytest.skip("no setpriv")
    tmp = Path("/var/tmp") / f"nccluprobe-{stage.token}"
    tmp.mkdir(mode=0o755)
    request.addfinalizer(lambda: shutil.rmtree(tmp))
    for name in ("nccluprobe", "ebpf", "native", "build/native"):
        shutil.copytree(REPO / name, tmp / "src" / name, symlinks=True)
    shutil.copy(REPO / "pyproject.toml", tmp / "src")
    (tmp / "home").mkdir()
    os.chown(tmp / "home", 65534, 65534)
    if subprocess.run(
        ["setpriv", "--reuid", "65534", "--clear-groups", sys.executable, "-c", "import typer"],
        check=False, capture_output=True,
    ).returncode:  # fmt: skip
        pytest.skip("this Python is not for other users")
    code = (
        "import ctypes, sys; n = ctypes.CDLL(sys.argv[1]);"
        "c = ctypes.c_void_p(); u = (ctypes.c_char * 128)();"
        "n.ncclAllReduce.argtypes = [ctypes.c_void_p]*2 + [ctypes.c_size_t] + [ctypes.c_int]*2"
        " + [ctypes.c_void_p]*2;"
        "[n.ncclAllReduce(None, None, i, 7, 0, None, None) for i in range(5)]"
    )
    lib = tmp / "src/build/native" / simnccl.name
    out = tmp / "home" / "out"
    env = {**clean_env(), "PYTHONPATH": str(tmp / "src"), "HOME": str(tmp / "home")}
    env["PYTHONDONTWRITEBYTECODE"] = "1"
    preload(
        ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", *nccluprobe_command],
        out, sys.executable, "-c", code, lib, env=env, cwd=tmp,
    )  # fmt: skip
    (trace,) = read_traces(out)
    assert trace.counts() == {"ncclAllReduce": 5}
    assert trace.path.stat().st_uid == 65534


def test_fork_on_an_old_kernel(rings: Rings, fake: Path, compile_c: Compile) -> None:
    """Without MADV_WIPEONFORK, which came with Linux 4.14, the fork handler is enough."""
    old = compile_c(
        """#include <errno.h>
        #include <sys/syscall.h>
        #include <unistd.h>
        int madvise(void *at, size_t size, int advice) {
          if (advice == 18) { errno = EINVAL; return -1; }
          return syscall(SYS_madvise, at, size, advice); }""",
        name="old.so", shared=True,
    )  # fmt: skip
    program = compile_c(
        """#include <sys/wait.h>
        #include <unistd.h>
        int ncclAllReduce(const void *, void *, size_t, int, int, void *, void *);
        int main(void) {
          ncclAllReduce(0, 0, 1, 7, 0, (void *)64, 0);
          if (fork() == 0) { ncclAllReduce(0, 0, 10, 7, 0, (void *)64, 0); _exit(0); }
          wait(0);
          ncclAllReduce(0, 0, 2, 7, 0, (void *)64, 0);
          return 0; }""",
        fake, f"-Wl,-rpath,{fake.parent}",
    )  # fmt: skip
    rings.run(program, env={"LD_PRELOAD": f"{old}:{rings.library}"})
    found = rings.records()
    by_pid: dict[int, list[int]] = {}
    for r in found:
        by_pid.setdefault(r.pid, []).append(r.count)
    assert sorted(by_pid.values()) == [[1, 2], [10]]
