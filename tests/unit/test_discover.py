"""Which processes match, what their maps say, and which files are found, without privileges."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support import fake_nccl

from nccluprobe.capture import hazards, maps
from nccluprobe.capture.discover import Discovery, DiscoveryEvents, ProcessMatcher
from nccluprobe.capture.processes import glance, parse_stat, script_name
from nccluprobe.errors import ExitCode, NccluprobeError

pytestmark = pytest.mark.alone

LOAD = "import ctypes, sys; libs = [ctypes.CDLL(p) for p in sys.argv[1:]]; print(1, flush=True); "


@contextmanager
def python(code: str, *args: object) -> Iterator[subprocess.Popen[str]]:
    """A Python process that has begun (it prints a line) and is ended at the end."""
    command = [sys.executable, "-c", code, *map(str, args)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    child.stdout.readline()
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


def gather(
    discovery: Discovery, done: Callable[[DiscoveryEvents], bool], seconds: float = 5
) -> DiscoveryEvents:
    """Poll until it is enough; all that was found, in one."""
    total = DiscoveryEvents()
    end = time.monotonic() + seconds
    while True:
        events = discovery.poll()
        for name in vars(total):
            getattr(total, name).extend(getattr(events, name))
        if done(total):
            return total
        assert time.monotonic() < end, total
        time.sleep(0.02)


def close(events: DiscoveryEvents) -> None:
    for found in events.new_files:
        os.close(found.file.fd)


# --- matching -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "script"),
    [
        ("python3 train.py --lr 1", "train.py"),
        ("python3 -u -X dev -W ignore /a/b/train.py x", "train.py"),
        ("python3.11 -m torch.distributed.run x.py", "torch.distributed.run"),
        ("python3 -c code arg", None),
        ("python3", None),
        ("python3 -", None),
        ("python3 -- run.py", "run.py"),
        ("bash -e -o pipefail ./go.sh", "go.sh"),
        ("bash -c x", None),
        ("perl -w tool.pl", "tool.pl"),
        ("node -r hook.js app.js", "app.js"),
        ("sleep 5", None),
        ("pythonista x.py", None),
    ],
)
def test_script_name(command: str, script: str | None) -> None:
    words = command.split()
    assert script_name(words[0], words) == script


def test_matcher(tmp_path: Path) -> None:
    script = tmp_path / "train_llm.py"
    script.write_text("print(1, flush=True)\nimport time\ntime.sleep(60)\n")
    child = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    try:
        seen = glance(child.pid)
        assert seen is not None
        for globs, expected in [
            (["python"], True),
            (["pyth?n*"], True),
            (["ython"], False),
            (["train_llm.py"], True),
            (["*llm*"], True),
            (["train.py"], False),
            (["node", "train_"], True),
            ([], False),
            ([""], False),
        ]:
            assert ProcessMatcher(globs).matches(seen) is expected, globs
        assert ProcessMatcher([], [child.pid]).matches(seen)
    finally:
        child.kill()
        child.communicate()


def test_matcher_spares_itself_and_kernel_threads() -> None:
    me = glance(os.getpid())
    assert me is not None
    assert not ProcessMatcher(["*"], [os.getpid()]).matches(me)
    fake = me._replace(kernel=True, key=me.key._replace(pid=2))
    assert not ProcessMatcher(["*"]).matches(fake)


def test_stat_with_a_strange_name() -> None:
    name = b"a) R (b"
    words = [b"0"] * 49
    words[18] = b"123"
    words[5] = str(0x00200000).encode()
    seen = parse_stat(b"7 (" + name + b") S " + b" ".join(words))
    assert seen is not None
    assert (seen.key, seen.comm, seen.state, seen.kernel) == ((7, 123), "a) R (b", "S", True)
    assert parse_stat(b"") is None


# --- maps ---------------------------------------------------------------------


def test_parse_maps() -> None:
    text = b"""\
7f0000000000-7f0000001000 r--p 00000000 fe:00 12 /lib/a.so
7f0000001000-7f0000002000 r-xp 00001000 fe:00 12                    /lib/a.so
7f0000003000-7f0000004000 r-xp 00000000 00:29 13                    /lib/b c.so (deleted)
7f0000005000-7f0000006000 r-xp 00000000 00:00 0
7f0000007000-7f0000008000 r-xp 00000000 00:00 0                     [vdso]
7f0000009000-7f000000a000 rwxs 00000000 00:01 99                    /memfd:x (deleted)
"""
    found = maps.parse_maps(text)
    assert [(m.path, m.deleted, m.inode, m.dev, m.offset) for m in found] == [
        ("/lib/a.so", False, 12, (254, 0), 4096),
        ("/lib/b c.so", True, 13, (0, 41), 0),
        ("/memfd:x", True, 99, (0, 1), 0),
    ]


def test_maps_of_the_dead() -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    assert maps.read_maps(child.pid) == []


def test_overlay_mounts() -> None:
    text = (
        rb"65 43 0:39 / /m\040x rw,relatime - overlay overlay rw,lowerdir=/l1:/l\0402:/l\1343,"
        rb"upperdir=/u,workdir=/w" + b"\n"
        rb"66 43 0:40 /sub /n rw shared:1 - overlay ov rw,lowerdir+=/a:b,lowerdir+=/c,datadir+=/d"
        b"\n67 43 8:1 / /home rw - ext4 /dev/sda1 rw\n"
    )
    first, second = maps.overlay_mounts(text)
    assert (first.point, first.root, first.dev) == ("/m x", "/", os.makedev(0, 39))
    assert first.layers == ("/u", "/l1", "/l 2", "/l\\3")
    assert (second.root, second.layers) == ("/sub", ("/a:b", "/c", "/d"))


def test_same_file() -> None:
    def file(dev: int, ctime: int, resolved: bool) -> maps.OpenFile:
        file_id = maps.FileId(dev, 5) if resolved else maps.FileId(-1, 5, ctime, 10)
        return maps.OpenFile(0, "", 10, 1, ctime, 5, file_id, not resolved, resolved)

    assert file(1, 3, True).same_file(file(1, 3, True))
    assert not file(1, 3, True).same_file(file(2, 3, True))
    assert file(1, 3, True).same_file(file(2, 3, False))
    # copied up: same inode number, size and mtime, later change time
    assert not file(1, 3, True).same_file(file(2, 4, False))


# --- discovery without the kernel's events ------------------------------------


@pytest.fixture
def fake(tmp_path: Path) -> Path:
    return fake_nccl.build(tmp_path / "libnccl.so.2")


def test_finds_a_process_and_its_copies(tmp_path: Path, fake: Path) -> None:
    second = shutil.copy(fake, tmp_path / "other.so")
    with python(LOAD + "sys.stdin.read()", fake, second) as child:
        discovery = Discovery(ProcessMatcher([], [child.pid]), events=False)
        assert discovery.fallback == "switched off"
        events = gather(discovery, lambda e: len(e.new_files) == 2)
        key = events.new_processes[0]
        assert key.pid == child.pid
        assert {f.file.path for f in events.new_files} == {str(fake), str(second)}
        assert {f.pid for f in events.new_files} == {child.pid}
        assert len(events.uses) == 2
        assert os.path.samestat(os.fstat(events.new_files[0].file.fd), fake.stat()) or (
            os.path.samestat(os.fstat(events.new_files[1].file.fd), fake.stat())
        )
        close(events)
        assert discovery.processes == [key]
        # a second user of the same files
        with python(LOAD + "sys.stdin.read()", fake) as again:
            discovery._matcher = ProcessMatcher([], [child.pid, again.pid])
            discovery._processes.pop(again.pid, None)
            more = gather(discovery, lambda e: bool(e.uses))
            assert more.new_files == []
            assert [k.pid for k, _ in more.uses] == [again.pid]
    gone = gather(discovery, lambda e: key in e.gone)
    assert not gone.new_files
    assert discovery.processes == []
    discovery.close()


def test_files_of_others_are_left_alone(fake: Path) -> None:
    with python(LOAD + "sys.stdin.read()", fake):
        discovery = Discovery(ProcessMatcher(["nobody-is-called-this"]), events=False)
        assert discovery.poll() == DiscoveryEvents()


def test_library_loaded_later_and_exec(fake: Path) -> None:
    code = "import ctypes, os, sys\nprint(1, flush=True)\n"
    code += "sys.stdin.readline(); ctypes.CDLL(sys.argv[1]); sys.stdin.readline()\n"
    code += "os.execv('/bin/sleep', ['sleep', '60'])\n"
    with python(code, fake) as child:
        assert child.stdin is not None
        discovery = Discovery(ProcessMatcher(["python"]), events=False)
        gather(discovery, lambda e: child.pid in [k.pid for k in e.new_processes])
        child.stdin.write("\n")
        child.stdin.flush()
        began = time.monotonic()
        events = gather(discovery, lambda e: bool(e.new_files))
        assert time.monotonic() - began < 1.5
        close(events)
        child.stdin.write("\n")
        child.stdin.flush()
        gather(discovery, lambda e: child.pid in [k.pid for k in e.gone])


def test_overwritten_in_place(tmp_path: Path, fake: Path) -> None:
    text = "int more(int a) { return a * 77 / (a + 3); }\n" + fake_nccl.source()
    moved = fake_nccl.build(tmp_path / "new.so", text)
    with python(LOAD + "sys.stdin.read()", fake) as child:
        discovery = Discovery(ProcessMatcher([], [child.pid]), events=False)
        first = gather(discovery, lambda e: bool(e.new_files)).new_files[0]
        child.kill()
        child.wait()
        fake.write_bytes(moved.read_bytes())
        with python(LOAD + "sys.stdin.read()", fake) as again:
            discovery._matcher = ProcessMatcher([], [again.pid])
            discovery._processes.clear()
            events = gather(discovery, lambda e: bool(e.new_files))
            assert events.changed == [first.file.id]
            assert events.new_files[0].file.id == first.file.id
            close(events)
        os.close(first.file.fd)


def test_given_library(fake: Path, tmp_path: Path) -> None:
    discovery = Discovery(ProcessMatcher(), [str(fake), str(fake)], events=False)
    events = discovery.poll()
    assert [(f.pid, f.file.path) for f in events.new_files] == [(0, str(fake))]
    close(events)
    for wrong in (tmp_path / "none", Path(sys.executable), Path(__file__), tmp_path):
        with pytest.raises(NccluprobeError) as info:
            Discovery(ProcessMatcher(), [str(wrong)], events=False)
        assert info.value.code is ExitCode.NOT_NCCL
        assert str(wrong) in str(info.value)


def test_forget(fake: Path) -> None:
    with python(LOAD + "sys.stdin.read()", fake) as child:
        discovery = Discovery(ProcessMatcher([], [child.pid]), events=False)
        found = gather(discovery, lambda e: bool(e.new_files)).new_files[0]
        os.close(found.file.fd)
        discovery.forget(found.file.id)
        discovery._processes.clear()
        close(gather(discovery, lambda e: bool(e.new_files)))


def test_sweep_of_many_processes_is_cheap() -> None:
    children = [subprocess.Popen(["sleep", "60"]) for _ in range(200)]
    try:
        discovery = Discovery(ProcessMatcher(["nobody"]), events=False)
        discovery.poll()
        count = len(discovery._processes)
        began = time.process_time()
        discovery._sweep(time.monotonic(), True, DiscoveryEvents())
        per_process = (time.process_time() - began) / count
        assert per_process < 100e-6  # 100 ms per 1,000
    finally:
        for child in children:
            child.kill()
            child.wait()


# --- hazards ------------------------------------------------------------------

#: Installs a seccomp filter that allows everything.
FILTERED = """
import ctypes, struct, time
libc = ctypes.CDLL(None)
libc.prctl(38, 1, 0, 0, 0)
allow = ctypes.create_string_buffer(struct.pack("=HBBI", 6, 0, 0, 0x7FFF0000))
program = ctypes.create_string_buffer(struct.pack("@HP", 1, ctypes.addressof(allow)))
print(libc.prctl(22, 2, program), flush=True)
time.sleep(60)
"""


def test_seccomp_risk() -> None:
    def at(release: str) -> hazards.Kernel:
        return hazards.Kernel(release, hazards.parse_release(release), "x86_64")

    with python(FILTERED) as child:
        assert hazards.seccomp_mode(child.pid) == 2
        for release, risky in (
            ("6.10.9", False),
            ("6.11.0", True),
            ("6.13", True),
            ("6.14", False),
        ):
            risk = hazards.seccomp_risk([os.getppid(), child.pid], at(release))
            assert risk.kernel_at_risk is risky
            assert child.pid in risk.pids or not risky
            assert (risk.warning is not None) is risky
        assert "--no-exit" in (hazards.seccomp_risk([child.pid], at("6.12")).warning or "")
    assert hazards.seccomp_risk([], at("6.12")).warning is None
    assert hazards.seccomp_mode(child.pid) is None


def test_capabilities() -> None:
    assert hazards.judge_capabilities((1 << 41) - 1).lacks == ()
    none = hazards.judge_capabilities(0)
    assert len(none.lacks) == 8
    assert none.effective == frozenset()
    assert str(none.lacks[0]) == "CAP_BPF and CAP_PERFMON, or CAP_SYS_ADMIN"
    some = hazards.judge_capabilities(1 << 38 | 1 << 39 | 1 << 19 | 1 << 2)
    assert {lack.purpose: lack.missing for lack in some.lacks} == {
        "probes through perf_event_open": ("sys_admin",),
        "opening mapped files that were deleted or lie in other mount namespaces": (
            "checkpoint_restore",
        ),
        "exit codes by the proc connector": ("net_admin",),
    }
    assert len(hazards.judge_capabilities((1 << 41) - 1, initial_user_ns=False).lacks) == 8


def test_kernel_facts() -> None:
    assert hazards.kernel().version > (3, 0)
    assert hazards.parse_release("nonsense") == (0, 0)
    assert isinstance(hazards.uprobe_pmu(), bool)
    assert isinstance(hazards.tracefs(), hazards.Tracefs)
    assert isinstance(hazards.capabilities(), hazards.Capabilities)
