"""What /proc tells of a process, and which of it is kept."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from nccluprobe import procinfo
from nccluprobe.procinfo import RankInfo, ranks_of
from nccluprobe.syscalls import syscall_name

pytestmark = pytest.mark.alone

TORCH = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "16",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
}
OMPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, RankInfo()),
        (TORCH, RankInfo(3, 8, 1, "environment")),
        ({**TORCH, "TORCHELASTIC_RUN_ID": "none"}, RankInfo(3, 8, 1, "torchrun")),
        ({**TORCH, "TORCHELASTIC_RUN_ID": "abc"}, RankInfo(3, 8, 1, "torchrun", "abc")),
        (SLURM, RankInfo(5, 16, 1, "slurm", "77")),
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "8"}, RankInfo(5, 8, 1, "slurm", "77")),
        # the batch script itself is no rank
        ({**SLURM, "SLURM_STEP_ID": "4294967291"}, RankInfo(job="77")),
        ({k: v for k, v in SLURM.items() if k != "SLURM_STEP_ID"}, RankInfo(job="77")),
        (OMPI, RankInfo(2, 4, 0, "openmpi")),
        # mpirun inside srun: Slurm's variables are those of mpirun's daemon
        ({**SLURM, **OMPI}, RankInfo(2, 4, 0, "openmpi", "77")),
        # torchrun inside srun
        ({**SLURM, **TORCH, "TORCHELASTIC_RUN_ID": "none"}, RankInfo(3, 8, 1, "torchrun", "77")),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, RankInfo(1, 2, None, "pmi")),
        ({"PMIX_RANK": "1", "PMIX_NAMESPACE": "ns.1"}, RankInfo(1, None, None, "pmi", "ns.1")),
        # srun with PMIx: the size is known from Slurm
        ({**SLURM, "PMIX_RANK": "5"}, RankInfo(5, 16, 1, "slurm", "77")),
        # nonsense is ignored
        ({**TORCH, "RANK": "-1"}, RankInfo()),
        ({**TORCH, "RANK": "8"}, RankInfo()),
        ({**TORCH, "RANK": "3x"}, RankInfo()),
        ({**TORCH, "RANK": "٣"}, RankInfo()),
        ({**TORCH, "RANK": "9" * 400}, RankInfo()),
        ({**TORCH, "WORLD_SIZE": ""}, RankInfo(3, None, 1, "environment")),
        ({**TORCH, "LOCAL_RANK": "99"}, RankInfo(3, 8, None, "environment")),
        ({"TORCHELASTIC_RUN_ID": "a\nb"}, RankInfo()),
        ({"SLURM_JOB_ID": "x" * 300}, RankInfo()),
    ],
)
def test_ranks(environ: dict[str, str], expected: RankInfo) -> None:
    assert ranks_of(environ) == expected


def test_read_keeps_no_secret() -> None:
    env = {**TORCH, "TORCHELASTIC_RUN_ID": "job-1", "AWS_SECRET_ACCESS_KEY": "hunter2"}
    child = subprocess.Popen(["sleep", "60"], env=env)
    try:
        # In the middle of an exec the new environment is not there yet.
        wait_for(lambda: (i := procinfo.read(child.pid)).exe == "sleep" and i.environ_read)
        info = procinfo.read(child.pid)
        assert info.ranks == RankInfo(3, 8, 1, "torchrun", "job-1")
        assert info.environ_read
        assert (info.uid, info.gid) == (os.getuid(), os.getgid())
        assert info.ns_pid == child.pid
        assert info.host and len(info.boot_id) == 36
        assert "hunter2" not in repr(info)
        age = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - info.start_ns
        assert 0 <= age < 60e9
    finally:
        child.kill()
        child.wait()
    with pytest.raises(ProcessLookupError):
        procinfo.read(child.pid)


def wait_for(check: object, seconds: float = 5) -> None:
    assert callable(check)
    end = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < end, "did not come"
        time.sleep(0.01)


def test_states() -> None:
    child = subprocess.Popen(["sleep", "60"])
    try:
        wait_for(lambda: procinfo.read_state(child.pid).syscall == "clock_nanosleep")
        state = procinfo.read_state(child.pid)
        assert state.alive and state.main == "syscall"
        child.send_signal(signal.SIGSTOP)
        wait_for(lambda: procinfo.read_state(child.pid).main == "stopped")
        assert procinfo.read_state(child.pid).alive
    finally:
        child.kill()
    wait_for(lambda: procinfo.read_state(child.pid).main == "dead")
    assert not procinfo.read_state(child.pid).alive
    child.wait()
    state = procinfo.read_state(child.pid)
    assert (state.alive, state.main) == (False, "dead")


def test_a_spinning_process_is_running() -> None:
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        wait_for(lambda: procinfo.read_state(child.pid).cpu_ns > 50_000_000)
        assert procinfo.read_state(child.pid).main == "running"
    finally:
        child.kill()
        child.wait()


def test_a_dead_first_thread_is_not_a_dead_process() -> None:
    code = (
        "import ctypes, threading, time\n"
        "threading.Thread(target=time.sleep, args=(60,)).start()\n"
        "ctypes.CDLL(None).pthread_exit(None)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code])
    try:
        wait_for(lambda: procinfo.read_state(child.pid).main == "dead")
        assert procinfo.read_state(child.pid).alive
    finally:
        child.kill()
        child.wait()


def test_state_is_cheap() -> None:
    pid = os.getppid()
    best = min(_time(pid) for _ in range(5))
    assert best < 100e-6  # some 15 us on an idle machine


def _time(pid: int) -> float:
    began = time.perf_counter()
    for _ in range(100):
        procinfo.read_state(pid)
    return (time.perf_counter() - began) / 100


def test_syscall_names() -> None:
    assert syscall_name(202, "x86_64") == "futex"
    assert syscall_name(98, "aarch64") == "futex"
    assert syscall_name(9999, "x86_64") == "9999"
    assert syscall_name(1, "riscv64") == "1"
