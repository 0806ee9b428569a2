"""Many calls, and readers that take turns: every record is read once or counted once.

    python tests/preload/soak.py [--calls 100000000] [--threads 4]

Half of the calls are made as fast as they go, so that most are overwritten;
the others at a pace that a reader can follow.  Each reader reads for a moment,
lets go, and the next one goes on.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

if __package__ in (None, ""):
    sys.path[:0] = [str(Path(__file__).resolve().parents[n]) for n in (1, 2)]

from bpf import fakelib

from nccluprobe.capture import preload_env
from nccluprobe.capture.preload_layout import RECORD
from nccluprobe.capture.preload_source import PreloadSource

PROGRAM = r"""
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
int ncclAllReduce(const void *, void *, size_t, int, int, void *, void *);
static long calls;
static void *work(void *arg) {
  size_t n = (size_t)arg;
  for (long i = 0; i < calls; i++) {
    ncclAllReduce((void *)i, 0, (size_t)i, 7, 0, (void *)(4096 * (n + 1)), (void *)n);
    if (i >= calls / 2 && i % 4000 == 0) usleep(20000);
  }
  return 0;
}
int main(int argc, char **argv) {
  pthread_t t[64];
  long threads = atol(argv[1]);
  calls = atol(argv[2]);
  for (long i = 0; i < threads; i++) pthread_create(&t[i], 0, work, (void *)i);
  for (long i = 0; i < threads; i++) pthread_join(t[i], 0);
  return argc == 99;
}
"""


@dataclass
class Result:
    """What became of the calls."""

    called: int
    published: int = 0
    read: int = 0
    overwritten: int = 0
    readers: int = 0
    errors: list[str] = field(default_factory=list)


def run(library: Path, fake: Path, work: Path, *, calls: int, threads: int) -> Result:
    """``calls`` in all, by ``threads`` threads of one process."""
    program, rings = work / "soak", work / "rings"
    each = calls // threads
    subprocess.run(
        ["gcc", "-x", "c", "-", "-O1", "-o", program, "-x", "none", fake,
         f"-Wl,-rpath,{fake.parent}", "-lpthread"],
        input=PROGRAM, text=True, check=True,
    )  # fmt: skip
    env = {**os.environ, **preload_env.variables(library, rings, 1024, {})}
    process = subprocess.Popen([str(program), str(threads), str(each)], env=env)
    result = Result(each * threads)
    last: dict[int, int] = {}
    rest = 1
    while rest:
        if process.poll() is not None:
            rest -= 1  # once more after its end, to the last record
        source = PreloadSource(rings)
        result.readers += 1
        end = time.monotonic() + random.uniform(0.05, 0.4)
        while time.monotonic() < end:
            for chunk in source.drain():
                check(np.frombuffer(chunk, RECORD), last, result)
            time.sleep(0.004)
        if not rest:
            time.sleep(0.3)
            for chunk in source.drain():
                check(np.frombuffer(chunk, RECORD), last, result)
        # Kept in the file from reader to reader; the last one that sees it ended removes it.
        result.overwritten = max(result.overwritten, sum(source.losses().overwritten.values()))
        source.close()
    result.published = result.read + result.overwritten
    if process.returncode:
        result.errors.append(f"the program ended with {process.returncode}")
    if last != dict.fromkeys(range(threads), each - 1):
        result.errors.append(f"last calls {last}")
    return result


def check(rows: np.ndarray, last: dict[int, int], result: Result) -> None:
    """Whole records, each thread's in order, none twice."""
    result.read += len(rows)
    same = rows["count"] == rows["call_idx"]
    if not same.all() or not (rows["t_exit"] >= rows["t_enter"]).all():
        result.errors.append("a torn record")
    for thread in np.unique(rows["stream"]).tolist():
        idx = rows["call_idx"][rows["stream"] == thread].astype(np.int64)
        if idx[0] <= last.get(thread, -1) or (np.diff(idx) <= 0).any():
            result.errors.append(f"thread {thread}: not in order after {last.get(thread)}")
        last[thread] = int(idx[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--calls", type=int, default=100_000_000)
    parser.add_argument("--threads", type=int, default=4)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="nccluprobe-soak-") as folder:
        work = Path(folder)
        fake = fakelib.build(work / "libnccl.so.2")
        began = time.monotonic()
        result = run(
            preload_env.library(build=True), fake, work, calls=args.calls, threads=args.threads
        )
    print(
        f"{result.called} calls in {time.monotonic() - began:.0f} s, {result.readers} readers: "
        f"{result.read} read, {result.overwritten} overwritten unread"
    )
    if result.published != result.called:
        result.errors.append(f"{result.called - result.published} records are missing")
    for error in result.errors[:20]:
        print(f"error: {error}")
    return 1 if result.errors else 0


if __name__ == "__main__":
    sys.exit(main())
