"""Advice in messages: it must be of use to who reads it."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest
from support.analysis import cover, steps
from support.tracegen import Host, Job
from typer.testing import CliRunner

from nccluprobe import procinfo
from nccluprobe.cli.collect import command_for
from nccluprobe.cli.main import build
from nccluprobe.collect.safedir import check_out
from nccluprobe.errors import ExitCode, NccluprobeError, remedy
from nccluprobe.inspect import target
from nccluprobe.inspect.doctor_text import render


def refused(*words: object) -> tuple[int, str]:
    """(exit code, standard error)"""
    command = [*map(str, words)]
    done = CliRunner().invoke(build(command), command)
    return done.exit_code, done.stderr


@pytest.mark.parametrize("uid", [0, 1000])
def test_root_is_not_told_to_use_sudo(uid: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    assert ("sudo" in remedy()) is (uid != 0)
    assert ("root is not enough here" in remedy("do this")) is (uid == 0)

    def closed(pid: int) -> None:
        raise PermissionError

    monkeypatch.setattr(target._libraries, "of", closed)
    (problem,) = (
        x for x in target.look_at_target(os.getpid(), {})["problems"] if "maps may not be" in x
    )
    assert ("sudo" in problem) is (uid != 0) and "CAP_SYS_PTRACE" in problem


@pytest.mark.parametrize("out", ["/proc/nccluprobe-out", "/proc/nccluprobe/out", "/proc"])
def test_a_folder_that_nobody_can_make_is_said_to_be_one(out: str) -> None:
    with pytest.raises(NccluprobeError, match=r"lets nobody make a folder there|cannot be written"):
        check_out(Path(out))
    code, said = refused("collect", "--out", out)
    assert code == ExitCode.OUTPUT and "No such file" not in said and "--out" in said


def test_an_output_that_is_none_is_said_first(tmp_path: Path) -> None:
    """Before what is missing to be read: else both are found one after the other."""
    junk = tmp_path / "junk"
    junk.write_text("x")
    code, said = refused("collect", tmp_path / "nothing", "--once", "--out", junk)
    assert code == ExitCode.OUTPUT and str(junk) in said
    assert refused("collect", tmp_path / "nothing", "--once", "--out", tmp_path)[0] == (
        ExitCode.NO_TRACE
    )


def test_who_goes_on_writes_into_the_same_traces(tmp_path: Path) -> None:
    words = shlex.split(command_for("/dev/shm/a b", tmp_path / "my run"))
    assert words == ["nccluprobe", "collect", "/dev/shm/a b", "--out", str(tmp_path / "my run")]


def test_the_rest_of_a_killed_collector_goes_where_the_traces_are(tmp_path: Path) -> None:
    class Here(Host):
        boot_id = procinfo.boot_id()  # type: ignore[assignment]

    out = tmp_path / "my run"
    job = Job()
    cover(job.procs, steps(job.world(2, host=Here()), 5) + 5)
    for p in job.procs:
        folder = out / "tracing" / p.run_id
        folder.mkdir(parents=True, exist_ok=True)
        data = p.data().replace(b'"front":"ebpf"', b'"front":"preload"')
        (folder / f"{p.name}.jsonl").write_bytes(data)
    command = ["analyze", str(out)]
    text = " ".join(CliRunner().invoke(build(command), command).stdout.split())
    assert f"`nccluprobe collect --once --out '{out}'` writes the rest, if it is left" in text
    assert "was killed, or could not write" in text


def test_whose_variables_told_the_rank_is_no_guess_of_the_launcher() -> None:
    """``canary`` sets those of torchrun, as other launchers may."""
    host = {
        "probe_version": "1", "host": "n", "kernel": "6", "checks": [],
        "seccomp_kernel_at_risk": False, "can_attach": True,
    }  # fmt: skip
    found = {
        "pid": 7, "exe": "python3", "rank": 3, "rank_source": "torchrun", "libraries": [],
        "own_pid_namespace": False, "own_mount_namespace": False, "problems": [],
    }  # fmt: skip
    text = "\n".join(render(host, [found]))
    assert "process 7 (python3, rank 3 by the variables of torchrun)" in text
