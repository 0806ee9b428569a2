"""The library in programs that do what programs do."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from nccluprobe.record import FLAG_NO_RETURN, FLAG_UNWOUND
from preload.conftest import Compile, Rings

HEAD = """
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>
int ncclAllReduce(const void *, void *, size_t, int, int, void *, void *);
int ncclGroupStart(void);
int ncclGroupEnd(void);
static void call(size_t n) { ncclAllReduce(0, 0, n, 7, 0, (void *)64, 0); }
"""


@pytest.fixture
def linked(compile_c: Compile, fake: Path) -> object:
    def make(body: str) -> Path:
        return compile_c(HEAD + body, fake, f"-Wl,-rpath,{fake.parent}")

    return make


@pytest.mark.parametrize(
    "how", ["fork()", "syscall(SYS_fork)", "syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0)"]
)
def test_fork(how: str, linked: object, rings: Rings) -> None:
    program = linked(  # type: ignore[operator]
        f"""int main(void) {{
          call(1);
          pid_t child = {how};
          if (child == 0) {{ call(10); call(11); _exit(0); }}
          waitpid(child, 0, 0);
          call(2);
          pid_t silent = fork();
          if (silent == 0) _exit(0);
          waitpid(silent, 0, 0);
          return 0; }}"""
    )
    rings.run(program)
    found = rings.records()
    by_pid: dict[int, list[tuple[int, int]]] = {}
    for r in found:
        by_pid.setdefault(r.pid, []).append((r.count, r.call_idx))
    assert sorted(by_pid.values()) == [[(1, 0), (2, 1)], [(10, 0), (11, 1)]]
    assert len(rings.files) == 2


def test_exec_and_vfork(linked: object, rings: Rings) -> None:
    program = linked(  # type: ignore[operator]
        """int main(int argc, char **argv) {
          call(argc);
          if (vfork() == 0) { execl("/bin/true", "true", (char *)0); _exit(1); }
          wait(0);
          if (argc == 1) execl(argv[0], argv[0], "again", (char *)0);
          if (system("true")) return 1;
          return 0; }"""
    )
    rings.run(program)
    found = rings.records()
    assert sorted(r.count for r in found) == [1, 2]
    assert len({r.epoch for r in found}) == 2 and len({r.pid for r in found}) == 1


def test_many_short_threads_share_slots(linked: object, rings: Rings) -> None:
    program = linked(  # type: ignore[operator]
        """static void *work(void *n) { call((size_t)n); return 0; }
        int main(void) {
          for (size_t i = 0; i < 500; i++) {
            pthread_t t;
            pthread_create(&t, 0, work, (void *)i);
            pthread_join(t, 0);
          }
          return 0; }"""
    )
    rings.run(program)
    found = rings.records()
    assert [r.count for r in found] == list(range(500))
    assert [r.call_idx for r in found] == list(range(500))
    size = rings.files[0].stat().st_blocks * 512
    assert size < 4 << 20  # two slots or three, not five hundred


def test_more_threads_than_slots_are_counted(linked: object, rings: Rings) -> None:
    program = linked(  # type: ignore[operator]
        """static pthread_barrier_t b;
        static void *work(void *n) {
          pthread_barrier_wait(&b);
          call((size_t)n);
          pthread_barrier_wait(&b);
          return 0; }
        int main(void) {
          pthread_t t[150];
          pthread_barrier_init(&b, 0, 150);
          for (size_t i = 0; i < 150; i++) pthread_create(&t[i], 0, work, (void *)i);
          for (size_t i = 0; i < 150; i++) pthread_join(t[i], 0);
          return 0; }"""
    )
    rings.run(program, ring_kb=64)
    found = rings.records()
    assert len(found) + sum(rings.losses.by_process.values()) == 150
    assert len(found) == 128


def test_signals_that_call_and_interrupt(linked: object, rings: Rings) -> None:
    program = linked(  # type: ignore[operator]
        """static volatile int hits;
        static void on(int s) { hits++; call(5); }
        int main(void) {
          struct itimerval every = {{0, 300}, {0, 300}};
          signal(SIGALRM, on);
          setitimer(ITIMER_REAL, &every, 0);
          for (int i = 0; i < 400000; i++) call(1);
          memset(&every, 0, sizeof every);
          setitimer(ITIMER_REAL, &every, 0);
          return hits == 0; }"""
    )
    rings.run(program, ring_kb=65536)
    found = Counter(r.count for r in rings.records())
    # A handler's call inside another is taken for NCCL's own; outside it counts.
    assert found[1] >= 399_000


def test_exit_handlers_and_destructors(linked: object, rings: Rings) -> None:
    program = linked(  # type: ignore[operator]
        """static void at_exit(void) { call(2); }
        __attribute__((constructor)) static void first(void) { call(0); }
        __attribute__((destructor)) static void last(void) { call(3); }
        int main(void) { atexit(at_exit); call(1); return 0; }"""
    )
    rings.run(program)
    assert [r.count for r in rings.records()] == [0, 1, 2, 3]


def test_cancelled_thread_and_longjmp(rings: Rings, fake: Path, compile_c: Compile) -> None:
    program = compile_c(
        HEAD
        + """extern unsigned fake_sleep_us;
        int drive_jump(int, void *);
        int drive_cancel(void *);
        int main(void) {
          drive_jump(0, (void *)64);
          drive_jump(3000, (void *)64);
          fake_sleep_us = 30000000;
          drive_cancel((void *)64);
          fake_sleep_us = 0;
          pthread_t t;
          pthread_create(&t, 0, (void *(*)(void *))call, (void *)9);
          pthread_join(t, 0);
          return 0; }""",
        fake, f"-Wl,-rpath,{fake.parent}",
    )  # fmt: skip
    rings.run(program)
    found = [(r.count, r.flags & (FLAG_UNWOUND | FLAG_NO_RETURN)) for r in rings.records()]
    assert sorted(found) == [
        (9, 0), (111, FLAG_UNWOUND), (111, FLAG_UNWOUND), (222, 0), (222, 0), (333, FLAG_NO_RETURN)
    ]  # fmt: skip


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=600k", "nccluprobe-test", folder], check=True
    )
    yield folder
    subprocess.run(["umount", "-l", folder], check=False)


CALLS = "int main(void) { for (int i = 0; i < 99999; i++) call(1); return 6; }"


@pytest.mark.root
def test_full_shared_memory(small: Path, linked: object, rings: Rings) -> None:
    program = linked(CALLS)  # type: ignore[operator]
    env = {"NCCLUPROBE_PRELOAD_DIR": str(small)}
    done = rings.run(program, rc=6, env=env)
    assert done.stderr.count("\n") == 1 and "tracing is off" in done.stderr
    assert not list(small.iterdir())


@pytest.mark.root
def test_threads_that_find_no_room(tmp_path: Path, linked: object, rings: Rings) -> None:
    folder = tmp_path / "tight"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "nccluprobe-test", folder], check=True)
    try:
        program = linked(  # type: ignore[operator]
            """static int done;
            static void *work(void *n) {
              for (int i = 0; i < 9999; i++) call(1);
              __sync_fetch_and_add(&done, 1);
              pause();
              return 0; }
            int main(void) {
              pthread_t t;
              for (int i = 0; i < 20; i++) pthread_create(&t, 0, work, 0);
              while (__sync_fetch_and_add(&done, 0) < 20) usleep(1000);
              _exit(0); }"""
        )
        rings.folder = folder
        rings.run(program)
        found = rings.records()
        counted = len(found) + sum(rings.losses.by_process.values())
        counted += sum(rings.losses.overwritten.values())
        assert counted == 20 * 9999 and rings.losses.by_process
    finally:
        subprocess.run(["umount", "-l", folder], check=False)


@pytest.mark.parametrize("folder", ["/nowhere/at/all", "/proc", "/dev/null"])
def test_no_folder(folder: str, linked: object, rings: Rings) -> None:
    program = linked(CALLS)  # type: ignore[operator]
    done = rings.run(program, rc=6, env={"NCCLUPROBE_PRELOAD_DIR": folder})
    assert done.stderr.count("\n") == 1 and folder in done.stderr


def test_strangers_folder_is_refused(linked: object, rings: Rings, tmp_path: Path) -> None:
    program = linked(CALLS)  # type: ignore[operator]
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    for folder in (open_to_all, link):
        done = rings.run(program, rc=6, env={"NCCLUPROBE_PRELOAD_DIR": str(folder)})
        assert "tracing is off" in done.stderr and not list(open_to_all.iterdir())


def test_switched_off(linked: object, rings: Rings) -> None:
    program = linked(CALLS)  # type: ignore[operator]
    done = rings.run(program, rc=6, env={"NCCLUPROBE_PRELOAD": "0"})
    assert done.stderr == "" and not rings.folder.exists()


def test_file_is_private(linked: object, rings: Rings) -> None:
    rings.run(linked("int main(void) { call(1); return 0; }"))  # type: ignore[operator]
    assert rings.files[0].stat().st_mode & 0o777 == 0o600
    assert rings.folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.root
def test_time_namespace(linked: object, rings: Rings) -> None:
    if shutil.which("unshare") is None:
        pytest.skip("no unshare")
    program = linked(CALLS)  # type: ignore[operator]
    before = time_ns()
    rings.run(
        "unshare", "--time", "--fork", "--monotonic", "86400", "--boottime", "7200", program, rc=6
    )
    found = rings.records()
    assert found and all(before < r.t_enter <= r.t_exit < time_ns() for r in found)


@pytest.mark.root
def test_pid_namespace(linked: object, rings: Rings) -> None:
    program = linked(
        'int main(void) { call(1); puts("called"); fflush(stdout); pause(); return 0; }'
    )  # type: ignore[operator]
    process = rings.popen("unshare", "--pid", "--fork", "--kill-child", program)
    try:
        assert process.stdout is not None and process.stdout.readline() == "called\n"
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        found = rings.records()
        assert [(r.pid, r.tid) for r in found] == [(int(children[0]), int(children[0]))]
    finally:
        for child in children:
            os.kill(int(child), signal.SIGKILL)
        process.kill()
        process.wait()


def time_ns() -> int:
    import time

    return time.clock_gettime_ns(time.CLOCK_MONOTONIC)
