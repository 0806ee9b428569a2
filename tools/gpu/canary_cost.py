"""What tracing costs per call on real NCCL, and what it does to the rate of small messages.

canary_cost.py OUT [--pair]

Two pairs of ranks stay alive: one bare, to which probes are put and from which they are
taken, and one under the preload library. All kinds are measured in turn, several times.
--pair: instead, the two-rank all-reduce against ncclAllReduce.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from _canary import PLAIN, SIM, Attach, end, table

from nccluprobe.canary.ranks import free_port

WORKER = Path(__file__).resolve().parent / "canary_worker.py"
CALLS = 2000 if SIM else 20000
RATE = 2000 if SIM else 40000
ROUNDS = 2 if SIM else 4
PAIR = 1 << (16 if SIM else 22)


class Pair:
    """Two ranks, and what they answer."""

    def __init__(self, log: Path, port: int, *front: str) -> None:
        self.ranks: list[subprocess.Popen[str]] = []
        with log.open("w") as file:
            for rank in range(2):
                env = {
                    **os.environ,
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": "2",
                    "NCCLUPROBE_CANARY_ADDRESS": f"127.0.0.1:{port}",
                }
                self.ranks.append(
                    subprocess.Popen(
                        [*front, sys.executable, str(WORKER)],
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=file,
                        env=env,
                        text=True,
                    )
                )
        self.hello = self.answers()

    @property
    def pids(self) -> list[int]:
        return [hello["pid"] for hello in self.hello]

    def answers(self) -> list[dict[str, Any]]:
        found = []
        for rank in self.ranks:
            assert rank.stdout is not None
            line = rank.stdout.readline()
            while line and not line.startswith("{"):
                line = rank.stdout.readline()
            if not line:
                raise SystemExit("a rank ended; see its log")
            found.append(json.loads(line))
        return found

    def ask(self, text: str) -> list[dict[str, Any]]:
        for rank in self.ranks:
            assert rank.stdin is not None
            rank.stdin.write(text + "\n")
            rank.stdin.flush()
        return self.answers()

    def end(self) -> None:
        for rank in self.ranks:
            if rank.poll() is None and rank.stdin is not None:
                rank.stdin.write("quit\n")
                rank.stdin.close()
        for rank in self.ranks:
            try:
                rank.wait(15)
            except subprocess.TimeoutExpired:
                end(rank)


def compare_pair(out: Path) -> int:
    ranks = Pair(out / "pair.log", free_port())
    try:
        answers = ranks.ask(f"pair {PAIR}")
    finally:
        ranks.end()
    rows = [
        (dtype, str(rank), str(a["elements"]), str(a["differ"]), f"{a['max_ulp']:.2f}")
        for rank, answer in enumerate(answers)
        for dtype, a in answer.items()
    ]
    print(f"two-rank all_reduce against ncclAllReduce, NCCL {ranks.hello[0]['nccl']}")
    table(("type", "rank", "elements", "differ", "largest difference, ulp"), rows)
    return 0 if all(a["max_ulp"] <= 1 for answer in answers for a in answer.values()) else 1


def cost(out: Path) -> int:
    spent: dict[tuple[str, str], list[dict[str, float]]] = defaultdict(list)
    rates: dict[tuple[str, str], list[float]] = defaultdict(list)
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="canary-") as folder:
        work = Path(folder)
        bare = Pair(out / "cost.bare.log", port)
        front = [*PLAIN, "preload", "--out", str(work / "preload"), "--"]
        preloaded = Pair(out / "cost.preload.log", port + 4, *front)
        pids = [x for pid in bare.pids for x in ("--pid", str(pid))]

        def measure(kind: str, ranks: Pair) -> None:
            for answer in ranks.ask(f"calls {CALLS}"):
                for where, figures in answer.items():
                    spent[where, kind].append(figures)
            for answer in ranks.ask(f"rate {RATE}"):
                for where, figure in answer.items():
                    rates[where, kind].append(figure)

        try:
            for ranks in (bare, preloaded):
                ranks.ask(f"calls {CALLS}")  # connections, caches, clocks
            for number in range(ROUNDS):
                measure("bare", bare)
                for kind, options in (("enter", ["--no-exit"]), ("enter+exit", [])):
                    log = out / f"cost.attach.{kind}.{number}.log"
                    attach = Attach(work / f"{kind}{number}", log, *pids, *options)
                    try:
                        measure(kind, bare)
                    finally:
                        attach.stop()
                measure("preload", preloaded)
                # After every round: whoever has to stop early keeps what is measured.
                print(f"\nround {number + 1} of {ROUNDS}", flush=True)
                report(spent, rates)
        finally:
            bare.end()
            preloaded.end()
    return 0


def report(spent: dict[Any, list[dict[str, float]]], rates: dict[Any, list[float]]) -> None:
    print("\nhost time of ncclAllReduce of 8 bytes, us per call, through ctypes;")
    print("per kind the least and the largest of the runs' values, both ranks")
    rows = []
    for (where, kind), runs in sorted(spent.items()):
        cells = [
            f"{min(r[q] for r in runs):.2f} - {max(r[q] for r in runs):.2f}"
            for q in ("p50", "p99", "mean")
        ]
        rows.append((where, kind, str(len(runs)), *cells))
    table(("communicator", "tracing", "runs", "p50", "p99", "mean"), rows)
    print("\nrate of queued ncclAllReduce of 8 bytes, thousands a second")
    rows = [
        (where, kind, str(len(runs)), f"{min(runs) / 1000:.1f}", f"{max(runs) / 1000:.1f}")
        for (where, kind), runs in sorted(rates.items())
    ]
    table(("communicator", "tracing", "runs", "least", "largest"), rows)


def main() -> int:
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    return compare_pair(out) if "--pair" in sys.argv[2:] else cost(out)


if __name__ == "__main__":
    sys.exit(main())
