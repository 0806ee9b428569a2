"""What a probed call costs the traced thread, beside bpftrace's least.

    sudo python tools/bench capture [--calls N] [--repeats R] [--threads 1,2] [--json FILE]

One process calls ncclAllReduce in a loop, and takes the CPU time of the thread
that calls.  Around it, in turn and several times over in one run: no probe, our
probes (entry and exit, entry only) by each kind of link, and a bpftrace
one-liner that only counts entries and exits.  Medians count, and ratios to
bpftrace in the same run, as absolute times differ between machines by more than
between programs.

Libraries: a stub whose functions do nothing, simnccl with a real communicator
of one rank, and NVIDIA's own libnccl, where the call is refused for its NULL
communicator.  Our ring is drained meanwhile as ``attach`` does; records lost
are shown, as a lost one is cheaper than a kept one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from _targets import Target, compile_parts, targets

from nccluprobe.capture import elf, preload_env
from nccluprobe.capture.bpf import Sizes
from nccluprobe.capture.ebpf_source import EbpfSource
from nccluprobe.capture.preload_source import PreloadSource
from nccluprobe.capture.source import Library
from nccluprobe.nccl import layout as layouts
from nccluprobe.nccl.api import BY_NAME
from nccluprobe.record import KIND_CALL, OFFSETS, SIZE

HERE = Path(__file__).resolve().parent
API = "ncclAllReduce"
BPFTRACE = "uprobe:{lib}:{api} {{ @e = count(); }} uretprobe:{lib}:{api} {{ @x = count(); }}"
DRAIN_PERIOD_S = 0.008

CONFIGS: dict[str, dict[str, Any]] = {
    "multi, entry and exit": {"link": "multi", "exits": True},
    "multi, entry only": {"link": "multi", "exits": False},
    "perf_event, entry and exit": {"link": "perf", "exits": True},
    "perf_event, entry only": {"link": "perf", "exits": False},
}
BARE, PEER = "no probe", "bpftrace, counts entry and exit"
PRELOAD = "preload library"
#: What the project asks of itself, as ratios to the peer.
LIMITS = {"multi, entry and exit": 1.3, "perf_event, entry and exit": 1.45}
#: What the preload library may add: ns, and with 8 threads as a multiple.
PRELOAD_ADDS, PRELOAD_MANY = 80.0, 1.5


@dataclass
class Series:
    """Nanoseconds per call, one number per repeat."""

    ns: list[float] = field(default_factory=list)
    lost: int = 0
    made: int = 0

    @property
    def median(self) -> float:
        return statistics.median(self.ns)


class Caller:
    """The process that calls; it lives through all configurations of a target."""

    def __init__(self, program: Path, target: Target, env: dict[str, str] | None = None) -> None:
        self._process = subprocess.Popen(
            [str(program), str(target.path), target.comm],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **(env or {})},
            text=True,
        )
        self._line("ready")

    def _line(self, wanted: str | None = None) -> str:
        out: IO[str] | None = self._process.stdout
        assert out is not None
        line = out.readline().strip()
        if not line or (wanted and line != wanted):
            raise SystemExit(f"capture: the calling program said {line!r} and ended")
        return line

    def measure(self, calls: int, threads: int) -> float:
        """Nanoseconds of CPU time per call."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{calls} {threads}\n")
        self._process.stdin.flush()
        return float(self._line())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10)


class Drain(threading.Thread):
    """Empties the ring as the collector would, and counts records."""

    def __init__(self, source: EbpfSource | PreloadSource) -> None:
        super().__init__(daemon=True)
        self.records = 0
        self._source = source
        self._stop_asked = threading.Event()

    def run(self) -> None:
        while not self._stop_asked.wait(DRAIN_PERIOD_S):
            self._once()

    def _once(self) -> None:
        for chunk in self._source.drain():
            # Calls only: a communicator's identity comes as a record of its own.
            self.records += bytes(chunk)[OFFSETS["kind"] :: SIZE].count(KIND_CALL)

    def finish(self) -> int:
        self._stop_asked.set()
        self.join()
        self._once()
        return self.records


class Ours:
    """Our probe on the one function, for one configuration; on and off many times."""

    def __init__(self, target: Target, link: str, exits: bool, ring: int) -> None:
        with target.path.open("rb") as file:
            image = elf.scan(file.fileno())
            if image is None:
                raise SystemExit(f"capture: {target.path} is no copy of NCCL")
            # As attach does: with the layout the program reads the live struct, too.
            try:
                layout = layouts.find(file.fileno(), image)
            except layouts.LayoutError:
                layout = None  # the stub has no struct
        self._path = str(target.path)
        self._offset = image.functions[API].offset
        self._source = EbpfSource(Sizes(ring_bytes=ring), exits=exits, link=link)
        lib = self._source.new_lib_id()
        self._lib = Library(lib, self._path, image.version, image.build_id, layout)
        self._source.add_library(self._lib)

    @contextlib.contextmanager
    def on(self) -> Iterator[Drain]:
        """Attached and drained."""
        self._source.attach(self._lib.lib, self._path, [(BY_NAME[API].id, self._offset)])
        drain = Drain(self._source)
        drain.start()
        try:
            yield drain
        finally:
            self._source.detach(self._lib.lib)

    def close(self) -> None:
        self._source.close()


class Preloaded:
    """The calling process under the preload library, and its reader."""

    def __init__(self, program: Path, target: Target) -> None:
        self._folder = preload_env.private_folder()
        library = preload_env.library(build=True)
        env = preload_env.variables(library, self._folder, 4096, os.environ)
        self.caller = Caller(program, target, env)
        self.source = PreloadSource(self._folder)

    @contextlib.contextmanager
    def on(self) -> Iterator[Drain]:
        """Read as ``preload`` does."""
        drain = Drain(self.source)
        drain.start()
        yield drain

    def close(self) -> None:
        self.caller.close()
        self.source.close()
        shutil.rmtree(self._folder, ignore_errors=True)


@contextlib.contextmanager
def bpftrace(target: Target) -> Iterator[None]:
    """The peer: counts, and nothing else."""
    script = BPFTRACE.format(lib=target.path, api=API)
    process = subprocess.Popen(
        ["bpftrace", "-e", f'BEGIN {{ printf("on\\n"); }} {script}'],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.strip() == "on":
                break
        else:
            assert process.stderr is not None
            raise SystemExit(f"capture: bpftrace failed: {process.stderr.read().strip()}")
        time.sleep(0.3)  # BEGIN runs before the last probe is on
        yield
    finally:
        process.terminate()
        process.wait(60)


def measure(
    caller_program: Path, target: Target, args: argparse.Namespace
) -> dict[int, dict[str, Series]]:
    """All configurations in turn, ``repeats`` times; by number of threads and name."""
    found: dict[int, dict[str, Series]] = {
        threads: {name: Series() for name in (BARE, PRELOAD, *CONFIGS, PEER)}
        for threads in args.threads
    }
    caller = Caller(caller_program, target)
    preloaded = Preloaded(caller_program, target)
    names = [BARE, PRELOAD, *CONFIGS, *([PEER] if shutil.which("bpftrace") else [])]
    sources = {
        name: Ours(target, ring=args.ring_mb << 20, **config) for name, config in CONFIGS.items()
    }
    for repeat in range(args.repeats):
        # Turned around each time, so that no one always comes after the same.
        for name in names if repeat % 2 == 0 else reversed(names):
            with contextlib.ExitStack() as stack:
                drain: Drain | None = None
                calling = preloaded.caller if name == PRELOAD else caller
                if name == PEER:
                    stack.enter_context(bpftrace(target))
                elif name == PRELOAD:
                    drain = stack.enter_context(preloaded.on())
                elif name != BARE:
                    drain = stack.enter_context(sources[name].on())
                calling.measure(args.calls // 10, 1)  # warms up
                made = args.calls // 10
                for threads in args.threads:
                    series = found[threads][name]
                    series.ns.append(calling.measure(args.calls, threads))
                    series.made += args.calls * threads
                    made += args.calls * threads
                if drain is not None:
                    lost = made - drain.finish()
                    found[args.threads[-1]][name].lost += lost
    caller.close()
    preloaded.close()
    for source in sources.values():
        source.close()
    return found


def table(target: Target, threads: int, series: dict[str, Series]) -> str:
    bare = series[BARE].median
    peer = series[PEER].median - bare if series[PEER].ns else None
    lines = [
        f"{target.name}, {threads} thread{'s' if threads > 1 else ''}",
        f"    {'':34} {'ns/call':>8} {'min':>8} {'max':>8} {'adds':>8} {'ratio':>6} {'lost':>8}",
    ]
    for name, one in series.items():
        if not one.ns:
            continue
        adds = one.median - bare
        ratio = f"{one.median / series[PEER].median:.2f}" if peer and name != BARE else ""
        lost = str(one.lost) if name in (PRELOAD, *CONFIGS) else ""
        lines.append(
            f"    {name:34} {one.median:8.1f} {min(one.ns):8.1f} {max(one.ns):8.1f} "
            f"{adds:8.1f} {ratio:>6} {lost:>8}"
        )
    return "\n".join(lines)


def too_dear(target: Target, threads: int, measured: dict[int, dict[str, Series]]) -> list[str]:
    """Whether the preload library costs more than it may."""
    adds = {n: s[PRELOAD].median - s[BARE].median for n, s in measured.items()}
    limit = {1: PRELOAD_ADDS, 8: PRELOAD_MANY * adds.get(1, PRELOAD_ADDS)}.get(threads)
    late = limit is not None and adds[threads] > limit
    return [f"{target.name}, {threads} threads: {PRELOAD} adds {adds[threads]:.0f} ns"] * late


def machine() -> dict[str, Any]:
    model = "unknown"
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    return {"kernel": platform.release(), "cpu": model, "cpus": os.cpu_count()}


def main() -> int:
    parser = argparse.ArgumentParser(description="cost of a probed call")
    parser.add_argument("--calls", type=int, default=200_000, help="per measurement and thread")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", default="1,2,8", help="numbers of calling threads")
    parser.add_argument("--lib", type=Path, help="NVIDIA's libnccl.so.2; default: from the cache")
    parser.add_argument("--target", action="append", help="only targets that begin so")
    parser.add_argument("--ring-mb", type=int, default=64, help="size of our ring")
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    args = parser.parse_args()
    args.threads = [int(n) for n in args.threads.split(",")]
    if os.geteuid() != 0:
        print("capture: needs root: sudo python tools/bench capture", file=sys.stderr)
        return 3
    where = machine()
    print(f"kernel {where['kernel']}, {where['cpus']} CPUs, {where['cpu']}")
    print(f"{args.calls} calls x {args.repeats} repeats; medians; ratio to bpftrace's ns/call")
    result: dict[str, Any] = {"machine": where, "calls": args.calls, "targets": {}}
    late = []
    with tempfile.TemporaryDirectory(prefix="nccluprobe-bench-") as folder:
        caller, stub = compile_parts(Path(folder))
        for target in targets(stub, args.lib):
            if args.target and not target.name.startswith(tuple(args.target)):
                continue
            measured = measure(caller, target, args)
            for threads, series in measured.items():
                print(table(target, threads, series), flush=True)
                late += too_dear(target, threads, measured)
                peer = series[PEER]
                for name, limit in LIMITS.items():
                    if threads == 1 and peer.ns and series[name].median / peer.median > limit:
                        late.append(f"{target.name}: {name} is above {limit} x bpftrace")
            result["targets"][target.name] = {
                str(threads): {
                    name: {"median": one.median, "ns": one.ns, "lost": one.lost}
                    for name, one in series.items()
                    if one.ns
                }
                for threads, series in measured.items()
            }
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    for line in late:
        print(f"above the limit: {line}")
    return 1 if late else 0


if __name__ == "__main__":
    sys.exit(main())
