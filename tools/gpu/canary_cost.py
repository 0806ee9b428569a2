"""What tracing costs per call on real NCCL, and what it does to the rate of small messages.

canary_cost.py OUT [--pair]

Two pairs of ranks stay alive: one bare, to which probes are put and from which they are
taken, and one under the preload library, which also calls NCCL past the library's wrapper.
So each kind of tracing is compared with the same process, on the same core, without it.
All kinds are measured in turn, several times.
--pair: instead, the two-rank all-reduce against ncclAllReduce.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from _shared import PLAIN, SIM, Attach, end, table

from nccluprobe.canary.ranks import free_port

WORKER = Path(__file__).resolve().parent / "canary_worker.py"
CALLS = 2000 if SIM else 20000
RATE = 2000 if SIM else 40000
ROUNDS = 3 if SIM else 5
PAIR = 1 << (16 if SIM else 22)
#: Of the preload library, so that the collector keeps up with calls without a pause.
RING_KB = "16384"
#: Without tracing: the pair that probes are put to, and the one under the preload library.
BARE, UNDER = "bare", "past preload"


class Pair:
    """Two ranks, and what they answer."""

    def __init__(self, log: Path, port: int, cores: Sequence[int], *front: str) -> None:
        self.ranks: list[subprocess.Popen[str]] = []
        with log.open("w") as file:
            for rank in range(2):
                env = {
                    **os.environ,
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": "2",
                    "NCCLUPROBE_CANARY_ADDRESS": f"127.0.0.1:{port}",
                    **({"CANARY_CORE": str(cores[rank])} if cores else {}),
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
    ranks = Pair(out / "pair.log", free_port(), ())
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


def cores() -> tuple[list[int], set[int]]:
    """A core for each rank, none of them the other thread of another, and all that are left.

    No core for a rank where there are too few.
    """
    free = sorted(os.sched_getaffinity(0))
    pairs: list[set[int]] = []
    for core in free:
        path = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")
        siblings = {core}
        if path.exists():
            for part in path.read_text().strip().split(","):
                first, _, last = part.partition("-")
                siblings |= set(range(int(first), int(last or first) + 1))
        if siblings not in pairs:
            pairs.append(siblings)
    if len(pairs) < 6:
        return [], set(free)
    taken = [pairs[-2], pairs[-4]]
    return [min(t) for t in taken], set(free) - set().union(*taken)


def cost(out: Path) -> int:
    """Rounds of all kinds, in an order that turns: one line of raw figures per measurement."""
    raw: list[dict[str, Any]] = []
    port = free_port()
    places, rest = cores()
    os.sched_setaffinity(0, rest)  # and so the daemons, and NCCL's own threads
    print(f"cores of the ranks: {places or 'not pinned'}")
    with (
        tempfile.TemporaryDirectory(prefix="canary-") as folder,
        (out / "cost.jsonl").open("w") as file,
    ):
        work = Path(folder)
        bare = Pair(out / "cost.bare.log", port, places)
        front = [*PLAIN, "preload", "--ring-kb", RING_KB, "--out", str(work / "preload"), "--"]
        preloaded = Pair(out / "cost.preload.log", port + 4, places, *front)
        offset = bare.hello[0]["offset"]
        pids = [x for pid in bare.pids for x in ("--pid", str(pid))]

        def measure(number: int, kind: str, ranks: Pair, at: str = "") -> None:
            calls = ranks.ask(f"calls {CALLS} {at}")
            rates = ranks.ask(f"rate {RATE} {at}")
            for rank, (spent, rate) in enumerate(zip(calls, rates, strict=True)):
                for where, figures in spent.items():
                    line = {"round": number, "comm": where, "rank": rank, "kind": kind}
                    line |= {k: round(v, 3) for k, v in figures.items()}
                    raw.append(line | {"rate": round(rate[where])})
                    file.write(json.dumps(raw[-1]) + "\n")
            file.flush()

        def attached(number: int, kind: str, *options: str) -> None:
            log = out / f"cost.attach.{kind}.{number}.log"
            attach = Attach(work / f"{kind}{number}", log, *pids, *options)
            try:
                measure(number, kind, bare)
            finally:
                attach.stop()

        kinds: list[Callable[[int], None]] = [
            lambda n: measure(n, BARE, bare),
            lambda n: attached(n, "enter", "--no-exit"),
            lambda n: attached(n, "enter+exit"),
            lambda n: measure(n, UNDER, preloaded, str(offset)),
            lambda n: measure(n, "preload", preloaded),
        ]
        try:
            for ranks in (bare, preloaded):
                ranks.ask(f"calls {CALLS}")  # connections, caches, clocks
            for number in range(ROUNDS):
                for kind in kinds if number % 2 == 0 else kinds[::-1]:
                    kind(number)
                # After every round: whoever has to stop early keeps what is measured.
                print(f"\nround {number + 1} of {ROUNDS}", flush=True)
            report(raw)
        finally:
            bare.end()
            preloaded.end()
    return 0


def report(raw: list[dict[str, Any]]) -> None:
    """Medians over the rounds, rank by rank, beside the same process without tracing."""
    runs: dict[tuple[str, int, str], list[dict[str, Any]]] = defaultdict(list)
    for line in raw:
        runs[line["comm"], line["rank"], line["kind"]].append(line)
    print("\nhost time of ncclAllReduce of 8 bytes through ctypes, us per call: median over the")
    print("rounds of each round's median, least and largest; added to, and times, the same")
    print("process of the same round without tracing (preload: its calls past the wrapper)")
    head = ("communicator", "rank", "tracing", "rounds", "p50", "least - largest", "p99")
    rows = []
    rates = []
    for (comm, rank, kind), lines in sorted(runs.items()):
        against = runs[comm, rank, UNDER if kind == "preload" else BARE]
        base = {line["round"]: line for line in against}
        p50 = [line["p50"] for line in lines]
        added = [line["p50"] - base[line["round"]]["p50"] for line in lines]
        times = [line["p50"] / base[line["round"]]["p50"] for line in lines]
        rows.append(
            (
                *(comm, str(rank), kind, str(len(lines)), f"{median(p50):.2f}"),
                f"{min(p50):.2f} - {max(p50):.2f}",
                f"{median(line['p99'] for line in lines):.2f}",
                *(
                    ("-", "-")
                    if kind in (BARE, UNDER)
                    else (f"{median(added):+.2f}", f"{median(times):.2f}")
                ),
            )
        )
        rate = [line["rate"] / 1000 for line in lines]
        less = [line["rate"] / base[line["round"]]["rate"] for line in lines]
        rates.append(
            (
                *(comm, str(rank), kind, f"{median(rate):.1f}"),
                f"{min(rate):.1f} - {max(rate):.1f}",
                "-" if kind in (BARE, UNDER) else f"{median(less):.2f}",
            )
        )
    table((*head, "added", "times"), rows)
    print("\nqueued ncclAllReduce of 8 bytes, thousands a second: median over the rounds")
    table(("communicator", "rank", "tracing", "rate", "least - largest", "times"), rates)


def main() -> int:
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    return compare_pair(out) if "--pair" in sys.argv[2:] else cost(out)


if __name__ == "__main__":
    sys.exit(main())
