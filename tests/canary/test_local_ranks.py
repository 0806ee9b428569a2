"""Local ranks: named when they die, ended by signals and with their parent; what they leave."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import signal
import struct
import subprocess
import time
from pathlib import Path

import pytest
from support.waiting import clean_env, wait_for

from nccluprobe.canary import libraries
from nccluprobe.canary.sweep import sweep
from nccluprobe.canary.truth import truths
from nccluprobe.errors import ExitCode

from .command import COMMAND, SERVICE, SMALL, one_line, ranks_of, run

pytestmark = pytest.mark.timeout(90)


def test_a_rank_that_dies_is_named_and_held_ranks_are_ended() -> None:
    done = run(
        *("--nproc", "3", "--sim", "--ops", "all_reduce", "--sizes", "8"),
        *("--inject", "kill:rank=1,at=2", "--hold", "6"),
    )
    assert done.returncode == 128 + signal.SIGKILL
    (planted,) = truths(done.stdout.splitlines())
    assert f"rank 1 (pid {planted['pid']}) was ended by SIGKILL" in done.stderr
    assert "--hold 6 s is over: ranks 0, 2 still here" in done.stderr


def test_a_hang_that_nothing_ends_says_how_to_end_it() -> None:
    """When it begins, on the screen."""
    with subprocess.Popen(
        [*COMMAND, *SMALL, "--nproc", "2", "--ops", "all_reduce", "--inject", "never:rank=1,at=2"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=clean_env(),
    ) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
    assert line.startswith("nccluprobe: rank 1: never is planted: if the job hangs now")
    assert "until Ctrl-C" in line and "--hold SECONDS" in line


def test_a_rank_that_does_not_come_is_a_missed_deadline() -> None:
    done = run(
        *("--nproc", "2", "--sim", "--ops", "all_gather", "--sizes", "8", "--deadline", "1"),
        *("--inject", "never:rank=1,at=2", "--hold", "7"),
    )
    assert done.stderr.count("not complete after 1 s") == 1, done.stderr
    assert "is planted" not in done.stderr
    assert "nccluprobe: rank 0: synchronize was not complete" in done.stderr
    assert "rank 0 (pid" in done.stderr and "ended with 21" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_end_all_ranks(number: signal.Signals) -> None:
    process = subprocess.Popen(
        [*COMMAND, *SMALL, "--nproc", "2", "--ops", "all_reduce", "--inject", "stop:rank=1,at=2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=clean_env(),
    )
    assert process.stdout is not None
    planted = truths([process.stdout.readline()])[0]
    process.send_signal(number)
    assert process.wait(20) == (130 if number == signal.SIGINT else 128 + number)
    wait_for(lambda: not Path(f"/proc/{planted['pid']}").exists(), "the stopped rank's end")


@pytest.mark.parametrize(
    ("number", "after"),
    [(signal.SIGINT, 0.0), (signal.SIGINT, 0.15), (signal.SIGINT, 1.0), (signal.SIGTERM, 0.3)],
)
def test_a_terminal_that_ends_a_service(number: signal.Signals, after: float) -> None:
    """Ctrl-C goes to every process at once, at any time: no traceback, no process left."""
    process = subprocess.Popen(
        [*COMMAND, *SERVICE],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        env=clean_env(),
        start_new_session=True,
    )
    wait_for(lambda: len(ranks_of(process.pid)) == 3, "the ranks", timeout=30)
    time.sleep(after)
    pids = ranks_of(process.pid)
    os.killpg(process.pid, number)
    _, told = process.communicate(timeout=20)
    assert process.returncode == 128 + number and told == ""
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


@pytest.mark.parametrize(("victim", "after"), [(0, 0.1), (1, 0.5), (2, 1.0)])
def test_a_rank_killed_at_any_time_ends_the_rest(victim: int, after: float) -> None:
    process = subprocess.Popen(
        [*COMMAND, *SERVICE, "--deadline", "1"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        env=clean_env(),
    )
    wait_for(lambda: len(ranks_of(process.pid)) == 3, "the ranks", timeout=30)
    time.sleep(after)
    pids = ranks_of(process.pid)
    os.kill(pids[victim], signal.SIGKILL)
    wait_for(lambda: not Path(f"/proc/{pids[victim]}").exists(), "the end of a rank")
    _, told = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGKILL
    assert f"rank {victim} (pid {pids[victim]}) was ended by SIGKILL" in told
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


@pytest.mark.parametrize("victim", ["parent", "ranks"])
def test_no_file_is_left_whoever_is_killed(victim: str) -> None:
    process = subprocess.Popen(
        [*COMMAND, *SERVICE],
        stdout=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        env=clean_env(),
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith("request 0")
    pids = ranks_of(process.pid)
    maps = Path(f"/proc/{pids[0]}/maps").read_text()
    mine = set(re.findall(r"/dev/shm/(simnccl-[0-9a-f]+)", maps))
    assert mine
    for pid in [process.pid] if victim == "parent" else pids:
        os.kill(pid, signal.SIGKILL)
    process.communicate(timeout=30)
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "the ranks' end")
    assert not [name for name in mine if Path("/dev/shm", name).exists()]


def test_the_sweep_leaves_what_a_living_rank_holds() -> None:
    path = Path(f"/dev/shm/simnccl-{os.getpid():016x}")
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        lock = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 16, 1, 0)
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, lock)
        sweep()
        assert path.exists()
    finally:
        os.close(fd)
    sweep()
    assert not path.exists()


def test_ranks_end_with_their_parent() -> None:
    process = subprocess.Popen(
        [*COMMAND, *SMALL, "--nproc", "2", "--ops", "all_reduce", "--inject", "never:rank=1,at=2"],
        stdout=subprocess.PIPE,
        text=True,
        env=clean_env(),
    )
    assert process.stdout is not None
    planted = truths([process.stdout.readline()])[0]
    process.kill()
    process.wait()
    wait_for(lambda: not Path(f"/proc/{planted['pid']}").exists(), "the rank's end")


def test_ranks_that_cannot_be_started() -> None:
    """The limit on processes of a user who has none yet; root itself has no limit."""
    limit = ("prlimit", "--nproc=1:1", "setpriv", "--reuid=65533", "--clear-groups")
    if os.geteuid() != 0 or not all(shutil.which(tool) for tool in ("prlimit", "setpriv")):
        pytest.skip("needs root, prlimit and setpriv")
    done = subprocess.run(
        [*limit, *COMMAND, "--nproc", "3", *SMALL],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**clean_env(), "PYTHONDONTWRITEBYTECODE": "1", "OPENBLAS_NUM_THREADS": "1"},
    )
    assert done.returncode == ExitCode.CANARY_FAILED, done.stderr
    assert "rank 0 cannot be started: Resource temporarily unavailable" in one_line(done)


def test_a_peer_that_never_came_ends_the_others() -> None:
    """A rank that fails at the start would leave the rest waiting for ever."""
    done = run(
        *("--nproc", "2", "--sim", "--ops", "all_reduce", "--sizes", "8", "--deadline", "2"),
        env={"NCCLUPROBE_CANARY_LOG": "nonsense"},
    )
    assert done.returncode == ExitCode.USAGE
    assert done.stderr.count("NCCLUPROBE_CANARY_LOG") == 2


def test_a_machine_without_nccl_is_told_once_and_what_works_there() -> None:
    done = run("--nproc", "3", "--nccl", "libnccl-of-nobody.so.2")
    assert done.returncode == ExitCode.CANARY_FAILED
    assert done.stderr.count("NCCL cannot be loaded") == done.stderr.count("canary --sim") == 1


def test_a_machine_without_a_gpu_is_told_what_works_there() -> None:
    nccl, _ = libraries.simulated()
    done = run("--rank", "0", "--world", "1", "--nccl", nccl, "--cuda", "libcuda-of-nobody.so.1")
    assert done.returncode == ExitCode.CANARY_FAILED
    assert "the CUDA driver cannot be loaded" in one_line(done) and "canary --sim" in done.stderr
