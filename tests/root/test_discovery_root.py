"""Discovery with the kernel's events, in containers, overlays and with deleted files."""

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

from nccluprobe.capture import maps
from nccluprobe.capture.discover import Discovery, DiscoveryEvents, FoundFile, ProcessMatcher
from nccluprobe.capture.mmap_events import MmapEvents

pytestmark = pytest.mark.root

#: Loads each library that it is told on its input; says so.
LOADER = """
import ctypes, sys
libs = []
print("ready", flush=True)
for line in sys.stdin:
    libs.append(ctypes.CDLL(line.strip()))
    print("loaded", flush=True)
"""


class Loader:
    """A process that loads libraries when told, perhaps in a mount namespace of its own."""

    def __init__(self, setup: str | None = None) -> None:
        command = [sys.executable, "-c", LOADER]
        if setup is not None:
            script = f'set -e; {setup}\nexec "$@"'
            command = ["unshare", "-m", "sh", "-c", script, "sh", *command]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.pid = self.process.pid
        self._hear("ready")

    def _hear(self, word: str) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline().strip() == word

    def load(self, path: Path | str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{path}\n")
        self.process.stdin.flush()
        self._hear("loaded")

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def loader() -> Iterator[Callable[..., Loader]]:
    made: list[Loader] = []

    def make(setup: str | None = None) -> Loader:
        made.append(Loader(setup))
        return made[-1]

    yield make
    for one in made:
        one.end()


@contextmanager
def discovery(*loaders: Loader, events: bool = True) -> Iterator[Discovery]:
    found = Discovery(ProcessMatcher([], [one.pid for one in loaders]), events=events)
    assert (found.fallback is None) is events, found.fallback
    try:
        yield found
    finally:
        found.close()


def poll_until(
    it: Discovery, done: Callable[[DiscoveryEvents], bool], seconds: float = 3
) -> DiscoveryEvents:
    total = DiscoveryEvents()
    end = time.monotonic() + seconds
    while not done(total):
        assert time.monotonic() < end, total
        events = it.poll()
        for name in vars(total):
            getattr(total, name).extend(getattr(events, name))
        time.sleep(0.02)
    for found in total.new_files:
        os.close(found.file.fd)
    return total


def settle(it: Discovery) -> DiscoveryEvents:
    """Everything there is to find now."""
    end = time.monotonic() + 0.6
    return poll_until(it, lambda _: time.monotonic() > end and not it.busy)


@pytest.mark.parametrize("events", [True, False])
def test_loaded_later(loader: Callable[..., Loader], tmp_path: Path, events: bool) -> None:
    lib = fake_nccl.build(tmp_path / "libnccl.so.2")
    one = loader()
    with discovery(one, events=events) as it:
        assert settle(it).new_files == []
        it._next_sweep = time.monotonic() + (60 if events else 0)
        one.load(lib)
        began = time.monotonic()
        total = poll_until(it, lambda e: bool(e.new_files))
        assert time.monotonic() - began < 0.5
        assert total.new_files[0].file.path == str(lib)


def test_process_that_starts_later_and_forks(tmp_path: Path) -> None:
    lib = fake_nccl.build(tmp_path / "libnccl.so.2")
    name = tmp_path / "unlikely_name"
    shutil.copy(os.path.realpath(sys.executable), name)
    code = f"import ctypes, os, time; ctypes.CDLL({str(lib)!r}); os.fork(); time.sleep(60)"
    env = {**os.environ, "PYTHONHOME": sys.base_prefix}
    it = Discovery(ProcessMatcher(["unlikely_name"]))
    settle(it)
    it._next_sweep = time.monotonic() + 60
    child = subprocess.Popen([name, "-c", code], env=env, start_new_session=True)
    try:
        began = time.monotonic()
        total = poll_until(it, lambda e: len(e.uses) == 2)
        assert time.monotonic() - began < 1.5
        assert len(total.new_files) == 1
        assert len(total.new_processes) == 2
        os.killpg(child.pid, 9)
        child.wait()
        poll_until(it, lambda e: len(e.gone) == 2)
    finally:
        it.close()
        child.kill()


def test_two_copies_in_one_process(loader: Callable[..., Loader], tmp_path: Path) -> None:
    libs = [fake_nccl.build(tmp_path / d / "libnccl.so.2") for d in ("a", "b")]
    one = loader()
    with discovery(one) as it:
        for lib in libs:
            one.load(lib)
        total = settle(it)
        assert {f.file.path for f in total.new_files} == {str(lib) for lib in libs}
        assert len({f for _, f in total.uses}) == 2


def test_deleted_and_replaced_library(loader: Callable[..., Loader], tmp_path: Path) -> None:
    lib = fake_nccl.build(tmp_path / "libnccl.so.2")
    inode = lib.stat().st_ino
    one = loader()
    one.load(lib)
    lib.unlink()
    fake_nccl.build(lib, fake_nccl.source(version="2.21.5"))
    two = loader()
    two.load(lib)
    with discovery(one, two) as it:
        total = settle(it)
        found = {f.pid: f for f in total.new_files}
        assert found[one.pid].image.version == "2.28.9"
        assert found[one.pid].file.inode == inode
        assert found[two.pid].image.version == "2.21.5"


def test_library_in_another_mount_namespace(loader: Callable[..., Loader], tmp_path: Path) -> None:
    """A tmpfs that only the process sees, over a path that is another file for us."""
    lib = fake_nccl.build(tmp_path / "hidden" / "libnccl.so.2")
    inside = fake_nccl.build(tmp_path / "src.so", fake_nccl.source(version="2.21.5"))
    folder = lib.parent
    one = loader(f"mount -t tmpfs none {folder}; cp {inside} {lib}")
    one.load(lib)
    with discovery(one) as it:
        (found,) = settle(it).new_files
        assert found.image.version == "2.21.5"
        assert found.file.path == str(lib)
        assert found.file.id.dev != lib.stat().st_dev


def overlay(folder: Path, lower: Path, name: str, options: str = "") -> tuple[str, Path]:
    """Commands that mount an overlay of ``lower``, and where."""
    for part in ("u", "w", "m"):
        (folder / name / part).mkdir(parents=True)
    where = folder / name
    layers = f"lowerdir={lower},upperdir={where}/u,workdir={where}/w"
    return f"mount -t overlay overlay -o {layers}{options} {where}/m", where / "m"


def test_overlays_of_one_layer_are_one_file(loader: Callable[..., Loader], tmp_path: Path) -> None:
    """Two containers of one image, and the host: one inode, to be probed once."""
    lib = fake_nccl.build(tmp_path / "lower" / "lib" / "libnccl.so.2")
    real = maps.FileId(lib.stat().st_dev, lib.stat().st_ino)
    loaders = [loader()]
    loaders[0].load(lib)
    for name in ("a", "b"):
        setup, point = overlay(tmp_path, lib.parents[1], name)
        loaders.append(loader(setup))
        loaders[-1].load(point / "lib" / "libnccl.so.2")
    for order in (loaders, loaders[::-1]):
        with discovery(*order) as it:
            total = settle(it)
            assert len(total.new_files) == 1
            assert total.new_files[0].file.id == real
            assert {(k.pid, f) for k, f in total.uses} == {(one.pid, real) for one in loaders}


def test_file_copied_up_is_another(loader: Callable[..., Loader], tmp_path: Path) -> None:
    """chmod in an overlay copies the file: same inode number, size, mtime and build id."""
    lib = fake_nccl.build(tmp_path / "lower" / "libnccl.so.2")
    setup, point = overlay(tmp_path, lib.parent, "a")
    one, two = loader(f"{setup}; chmod 700 {point}/libnccl.so.2"), loader()
    one.load(point / "libnccl.so.2")
    two.load(lib)
    with discovery(one, two) as it:
        total = settle(it)
        assert {f.file.id.inode for f in total.new_files} == {
            lib.stat().st_ino,
            (tmp_path / "a" / "u" / "libnccl.so.2").stat().st_ino,
        }


def test_metadata_copied_up_is_the_same(loader: Callable[..., Loader], tmp_path: Path) -> None:
    lib = fake_nccl.build(tmp_path / "lower" / "libnccl.so.2")
    setup, point = overlay(tmp_path, lib.parent, "a", ",metacopy=on")
    one, two = loader(f"{setup}; chmod 700 {point}/libnccl.so.2"), loader()
    one.load(point / "libnccl.so.2")
    two.load(lib)
    with discovery(one, two) as it:
        (found,) = settle(it).new_files
        assert found.file.id == maps.FileId(lib.stat().st_dev, lib.stat().st_ino)


def test_layers_that_cannot_be_found(loader: Callable[..., Loader], tmp_path: Path) -> None:
    """Relative layer paths: the files are told apart, or taken for one, by their marks."""
    lib = fake_nccl.build(tmp_path / "lower" / "libnccl.so.2")
    pair = []
    for name in ("a", "b"):
        setup, point = overlay(tmp_path, Path("lower"), name)
        pair.append(loader(f"cd {tmp_path}; {setup}"))
        pair[-1].load(point / "libnccl.so.2")
    host = loader()
    host.load(lib)
    with discovery(*pair, host) as it:
        (found,) = settle(it).new_files
        assert len(settle(it).uses) == 0
        assert isinstance(found, FoundFile)


def test_container_that_pivoted_its_root(loader: Callable[..., Loader], tmp_path: Path) -> None:
    """The path in the maps is the container's; the overlay is its root."""
    lib = fake_nccl.build(tmp_path / "lower" / "only_inside" / "libnccl.so.2")
    setup, point = overlay(tmp_path, lib.parents[1], "c")
    # All of the host's root, as the checkout and its Python can be anywhere.
    binds = " ".join(
        f"mkdir -p {point}/{d.name}; mount --rbind {d} {point}/{d.name};"
        for d in Path("/").iterdir()
        if d.is_dir()
    )
    one = loader(f"{setup}; {binds} cd {point}; mkdir -p old; pivot_root . old; cd /")
    one.load("/only_inside/libnccl.so.2")
    with discovery(one) as it:
        (found,) = settle(it).new_files
        assert found.file.path.endswith("/only_inside/libnccl.so.2")
        assert found.file.resolved
        assert found.file.id == maps.FileId(lib.stat().st_dev, lib.stat().st_ino)


def test_events_that_were_lost_lead_to_a_sweep(
    loader: Callable[..., Loader], tmp_path: Path
) -> None:
    lib = fake_nccl.build(tmp_path / "libnccl.so.2")
    one = loader()
    with discovery(one) as it:
        settle(it)
        it._next_sweep = time.monotonic() + 60
        one.load(lib)
        assert it._events is not None
        it._events.poll()  # taken by somebody else
        assert it.poll().new_files == []
        # All on one processor, which is idle after it: nothing more is written there.
        everywhere = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {min(everywhere)})
        try:
            for _ in range(1500):
                subprocess.run(["/bin/true"], check=True)
        finally:
            os.sched_setaffinity(0, everywhere - {min(everywhere)} or everywhere)
        try:
            total = poll_until(it, lambda e: bool(e.new_files))
        finally:
            os.sched_setaffinity(0, everywhere)
        assert total.new_files[0].file.path == str(lib)


def test_mmap_events_are_of_processes() -> None:
    events = MmapEvents()
    events.poll()
    child = subprocess.Popen(["/bin/true"])
    child.wait()
    batch = events.poll()
    for seen in (batch.mapped, batch.execs, batch.forks, batch.exits):
        assert child.pid in seen
    assert not batch.lost
    assert len(events.fds()) == len(os.sched_getaffinity(0)) or len(events.fds()) > 0
    events.close()


def test_unprivileged_discovery_says_what_it_may_not_read(tmp_path: Path) -> None:
    code = (
        "import sys, time\n"
        "from nccluprobe.capture.discover import Discovery, ProcessMatcher\n"
        "d = Discovery(ProcessMatcher([], [int(sys.argv[1])]))\n"
        "e = d.poll()\n"
        "print(d.fallback is not None, [k.pid for k in e.unreadable])\n"
    )
    target = subprocess.Popen(["sleep", "60"])
    try:
        out = subprocess.run(
            [sys.executable, "-c", code, str(target.pid)],
            capture_output=True,
            text=True,
            check=True,
            user=65534,
            group=65534,
            extra_groups=[],
            cwd="/",
        ).stdout
        assert out.strip() == f"True [{target.pid}]"
    finally:
        target.kill()
        target.wait()
