"""A process is traced by one front only, whichever comes first."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.e2e import Stage
from support.traces import read_traces
from support.waiting import clean_env, wait_for

from nccluprobe.capture.preload_marks import NOTES, Notes
from preload.conftest import Compile, Rings

pytestmark = pytest.mark.root

Cli = Callable[..., "subprocess.CompletedProcess[str]"]

#: Calls pncclAllReduce, which no wrapper sees, then ncclAllReduce; waits between.
PROGRAM = """
#include <dlfcn.h>
#include <stdio.h>
typedef int (*all_reduce)(const void *, void *, size_t, int, int, void *, void *);
int main(int argc, char **argv) {
  void *h = dlopen(argv[1], RTLD_NOW);
  const char *names[] = {"pncclAllReduce", "ncclAllReduce"};
  for (int i = 0; i < 2; i++) {
    puts("ready"); fflush(stdout);
    getchar();
    all_reduce f = (all_reduce)dlsym(h, names[argc > 2 ? 1 : i]);
    for (int k = 0; k < 5; k++) f(0, 0, k, 7, 0, (void *)0, 0);
  }
  puts("done"); fflush(stdout);
  getchar();
  return 0;
}
"""


@pytest.fixture
def stage(tmp_path: Path, nccluprobe_command: list[str], simnccl: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path, nccluprobe_command, simnccl)
    try:
        yield stage
    finally:
        stage.close()


class Steps:
    """The program, step by step."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.said()

    def said(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def step(self) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.said()


def start(stage: Stage, rings: Rings, compile_c: Compile, *args: str) -> Steps:
    program = compile_c(PROGRAM, name=stage.token)
    return Steps(
        stage.popen(
            [program, stage.lib, *args],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**clean_env(), **rings.environ()},
        )
    )


def test_preload_first(stage: Stage, rings: Rings, compile_c: Compile) -> None:
    steps = start(stage, rings, compile_c, "both")
    assert steps.step() == "ready"
    daemon = stage.attach_glob()
    assert steps.step() == "done"
    daemon.wait_text("traced by the preload library already")
    assert len(rings.records()) == 10
    steps.step()
    daemon.stop()
    assert not read_traces(daemon.out)


def test_it_is_told_before_anything_is_traced(
    stage: Stage, rings: Rings, compile_c: Compile, cli: Cli
) -> None:
    """doctor and attach --dry-run: the library is loaded, then it records."""
    steps = start(stage, rings, compile_c, "both")
    pid = steps.process.pid
    look = ("attach", "--pid", pid, "--dry-run", "--out", stage.tmp / "out")
    for said in ("preload library is loaded in it", "preload library traces it already"):
        assert f"process {pid}: the {said}" in cli(*look).stdout
        of_doctor = cli("doctor", pid).stdout
        assert f"note: the {said}" in of_doctor
        assert "preload would reach it: yes (it is loaded in it)" in of_doctor
        steps.step()
    other = Steps(
        stage.popen(
            [steps.process.args[0], stage.lib],  # type: ignore[index]
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=clean_env(),
        )
    )  # fmt: skip
    look = ("attach", "--pid", other.process.pid, "--dry-run", "--out", stage.tmp / "out")
    assert "preload library" not in cli(*look).stdout


def test_ebpf_first(stage: Stage, rings: Rings, compile_c: Compile) -> None:
    daemon = stage.attach_glob()
    steps = start(stage, rings, compile_c)
    assert steps.step() == "ready"
    note = NOTES / str(steps.process.pid)
    wait_for(note.exists, "the note of the eBPF front", context=lambda: daemon.stderr.text)
    assert steps.step() == "done"
    steps.step()
    assert steps.process.stderr is not None
    assert "attach: it traces this process already" in steps.process.stderr.read()
    assert rings.files == []
    wait_for(
        lambda: sum(len(t.of("call")) for t in read_traces(daemon.out)) == 10,
        "ten calls by eBPF",
        context=lambda: daemon.stderr.text,
    )
    daemon.stop()
    assert not note.exists()


def test_a_note_of_a_dead_tracer_counts_for_nothing(
    stage: Stage, rings: Rings, compile_c: Compile
) -> None:
    steps = start(stage, rings, compile_c, "both")
    NOTES.mkdir(parents=True, exist_ok=True)
    stat = Path(f"/proc/{steps.process.pid}/stat").read_text().rpartition(")")[2].split()
    note = NOTES / str(steps.process.pid)
    note.write_text(f"{stat[19]} 4194304 1\n")
    try:
        steps.step()
        assert len(rings.records()) == 5
    finally:
        note.unlink()


def test_notes_of_processes_that_are_gone_are_swept(tmp_path: Path) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    (tmp_path / str(gone.pid)).write_text("1 2 3\n")
    (tmp_path / str(os.getpid())).write_text("1 2 3\n")
    notes = Notes(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == [str(os.getpid())]
    notes.add(os.getpid())
    notes.remove(os.getpid())
    assert list(tmp_path.iterdir()) == []
