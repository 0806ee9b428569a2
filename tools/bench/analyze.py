"""How fast the analyzer is, and beside PyTorch's own.

    python tools/bench analyze [--only PART,...] [--peer WHEEL] [--json]

Parts: ``files`` (lines per second from trace files to findings), ``rows``
(decoded batches per second), ``large`` (1,024 ranks), ``peer`` (PyTorch's flight
recorder analyzer on the same incident), ``live`` (4,096 ranks that write while
they are watched), ``scan`` (one scan of 4,096 ranks), ``memory`` (10,000,000
calls), ``counts`` (no count comes again).  Each part runs in a process of its own,
so that its memory is its own.

Rates are of CPU time of the one analyzing thread: what else runs on the machine
does not count, but slows it down all the same.  As a yardstick that travels,
``files`` also times plain parsing of the same lines, one by one, with orjson.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

import _live  # noqa: E402
import _peer  # noqa: E402
import _traffic  # noqa: E402
import numpy as np  # noqa: E402
import orjson  # noqa: E402

from nccluprobe import resources  # noqa: E402
from nccluprobe.cli.judging import COLLECT_AT, Session  # noqa: E402
from nccluprobe.importers.files import find  # noqa: E402
from nccluprobe.match import model as m  # noqa: E402
from nccluprobe.match.matcher import Matcher  # noqa: E402
from nccluprobe.match.options import Options  # noqa: E402
from nccluprobe.match.pipeline import Analysis  # noqa: E402
from nccluprobe.match.signature import Signature  # noqa: E402
from nccluprobe.trace import scanner  # noqa: E402

Result = dict[str, Any]
MEGA = 1 << 20


def _rss_mb() -> float:
    """Memory of this process now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / MEGA


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _write(folder: Path, ranks: int, steps: int, pure: bool) -> int:
    """Trace files of a healthy job; returns the number of calls."""
    folder.mkdir(parents=True)
    for r in range(ranks):
        rank = _traffic.Rank(r, ranks, pure)
        with (folder / f"rank_{r}_pid_{1000 + r}.jsonl").open("wb") as f:
            f.write(rank.head())
            t = _traffic.MONO + _traffic.S
            for _ in range(steps):
                f.write(rank.steps(1, t))
                t = rank.n.through
    return ranks * steps * _traffic.CALLS_PER_STEP


def _analyze(folder: Path) -> tuple[Analysis, float, float]:
    """Reads and judges a folder as ``analyze`` does; the seconds of CPU and of the clock."""
    session = Session(find([folder], None), Options(), None, as_json=True)
    wall, cpu = time.perf_counter(), time.process_time()
    session.load()
    found = session.analysis.scan(None)
    spent = time.process_time() - cpu, time.perf_counter() - wall
    if found:
        raise SystemExit(f"findings in a healthy job: {[f.hang_type for f in found]}")
    return session.analysis, *spent


def files(work: Path, args: argparse.Namespace) -> list[Result]:
    results = []
    for name, pure in (("mixed job", False), ("one communicator", True)):
        folder = work / name.replace(" ", "_")
        calls = _write(folder, args.ranks, 60, pure)
        cpu, wall = min(_analyze(folder)[1:] for _ in range(3))
        data = (folder / f"rank_0_pid_{1000}.jsonl").read_bytes().splitlines()
        plain = []
        for _ in range(20):
            began = time.process_time()
            for line in data:
                orjson.loads(line)
            plain.append((time.process_time() - began) / len(data))
        results.append(
            {
                "what": f"call lines/s from files to findings, {name}, {args.ranks} ranks",
                "value": calls / cpu,
                "target": 500_000,
                "note": f"{calls / wall:,.0f}/s by the clock; parsing alone, line by line: "
                f"{1 / min(plain):,.0f}/s",
            }
        )
    return results


def _matcher(ranks: int) -> Matcher:
    matcher = Matcher()
    for r in range(ranks):
        key = m.ProcessKey("b", r, 1)
        matcher.feed([m.ProcessInfo(r, key, "run", "host", rank=r)])
        matcher.feed([m.CommInfo(r, 0, 0, "00000000000000aa", 0, r, ranks, "init")])
    return matcher


def _fed(matcher: Matcher, batches: list[m.Batch | m.P2PBatch], ranks: int) -> float:
    """Rows per second."""
    began = time.process_time()
    for i, b in enumerate(batches, 1):
        matcher.feed([m.Activity(b.source, b.t_enter, b.t_exit), b])
        if i % ranks == 0:
            matcher.settle()
    return sum(map(len, batches)) / (time.process_time() - began)


def rows(work: Path, args: argparse.Namespace) -> list[Result]:
    ranks, block, blocks = 64, 1000, 40
    zero = np.zeros(block, np.int64)
    rc = zero.astype(np.int32)
    collectives, pairs = _matcher(ranks), _matcher(ranks)
    calls = [Signature("ncclAllReduce", 1024 + i % 7) for i in range(block)]
    sig = np.array([collectives.table.intern(s) for s in calls], np.int32)
    transfer = pairs.table.intern(Signature("ncclSend", 4096, "float32"))
    receive = pairs.table.intern(Signature("ncclRecv", 4096, "float32"))
    send = np.arange(block) % 2 == 0
    one: list[m.Batch | m.P2PBatch] = []
    two: list[m.Batch | m.P2PBatch] = []
    for b in range(blocks):
        order = np.arange(b * block, (b + 1) * block, dtype=np.int64)
        t = _traffic.UNIX + order * 50_000
        for r in range(ranks):
            times = (t + r, t + r + 8000)
            one.append(m.Batch(r, 0, order, order, sig, *times, rc, zero, zero))
            peer = np.where(send, (r + 1) % ranks, (r - 1) % ranks).astype(np.int32)
            both = np.where(send, transfer, receive).astype(np.int32)
            two.append(
                m.P2PBatch(r, 0, send, peer, order // 2, order, both, *times, rc, zero, zero)
            )
    results = []
    for what, matcher, batches in (
        ("collectives", collectives, one),
        ("sends and receives", pairs, two),
    ):
        rate = _fed(matcher, batches, ranks)
        if matcher.scan(None) or matcher.p2p.pairs.open:
            raise SystemExit("a healthy job is not closed")
        results.append(
            {"what": f"decoded rows/s, {what}", "value": rate, "target": 2_000_000, "note": ""}
        )
    return results


def large(work: Path, args: argparse.Namespace) -> list[Result]:
    calls = _write(work / "large", 1024, 2000 // _traffic.CALLS_PER_STEP + 1, False)
    _, cpu, wall = _analyze(work / "large")
    what = f"1,024 ranks x {calls // 1024:,} calls"
    return [
        {
            "what": f"{what}, s of CPU",
            "value": cpu,
            "target": -5.0,
            "note": f"{wall:.1f} s by the clock",
        },
        {"what": f"{what}, MB", "value": _peak_mb(), "target": -1024.0, "note": "peak RSS"},
    ]


def scan(work: Path, args: argparse.Namespace) -> list[Result]:
    """A scan with all that came since the last one: a healthy job, then one rank stays away."""
    gc.set_threshold(COLLECT_AT, 50, 50)  # as the command does
    analysis, ranks = Analysis(None, scanner.load()), [_traffic.Rank(r, 4096) for r in range(4096)]
    analysis.open((k.rank, f"rank {k.rank}") for k in ranks)
    for k in ranks:
        analysis.feed(k.rank, "x", 1, k.head(), False)
    t, healthy, hung = _traffic.MONO + _traffic.S, [], []
    for _ in range(3):
        for k in ranks:
            analysis.feed(k.rank, "x", 4, k.steps(1, t), True)
        t = ranks[0].n.through
        began = time.process_time()
        if analysis.scan(_traffic.unix(t) + _traffic.S):
            raise SystemExit("findings in a healthy job")
        healthy.append(time.process_time() - began)
    after, found = analysis.matcher.options.missing_after, []
    for n in range(3):
        # The others run ahead, as hosts do, and then wait.
        for k in ranks:
            more = k.steps(1, t) if n < 2 and k.rank != _live.STALLED else k.coverage(t + after)
            analysis.feed(k.rank, "x", 4, more, True)
        t = ranks[0].n.through if n < 2 else t + after
        began = time.process_time()
        found += analysis.scan(_traffic.unix(t) + _traffic.S)
        hung.append(time.process_time() - began)
    blamed = {p["rank"] for f in found for p in f.named}
    if blamed != {_live.STALLED}:
        raise SystemExit(f"rank {_live.STALLED} hangs, and {sorted(blamed)} are blamed")
    what = f"4,096 ranks in {len(analysis.matcher.comms):,} communicators, s"
    return [
        {
            "what": f"one scan of a healthy job, {what}",
            "value": sorted(healthy)[1],
            "target": -0.5,
            "note": "",
        },
        {
            "what": f"one scan with one rank hung, {what}",
            "value": max(hung),
            "target": -1.0,
            "note": "the longest of three: the others run ahead, run ahead, are reported",
        },
    ]


def memory(work: Path, args: argparse.Namespace) -> list[Result]:
    """Memory while a healthy job runs on, from a tenth of it to its end."""
    ranks = [_traffic.Rank(r, 64) for r in range(64)]
    analysis = Analysis(None, scanner.load())
    analysis.open((k.rank, f"rank {k.rank}") for k in ranks)
    for k in ranks:
        analysis.feed(k.rank, "x", 1, k.head(), False)
    t, early, per = _traffic.MONO + _traffic.S, 0.0, 4
    rounds = args.calls // (64 * per * _traffic.CALLS_PER_STEP) + 1
    for i in range(rounds):
        for k in ranks:
            analysis.feed(k.rank, "x", 4, k.steps(per, t), True)
        t = ranks[0].n.through
        if i % 50 == 0 and analysis.scan(_traffic.unix(t) + _traffic.S):
            raise SystemExit("findings in a healthy job")
        if i == rounds // 10:
            early = _rss_mb()
    return [
        {
            "what": f"growth of memory over {analysis.decoder.counts.calls:,} calls, MB",
            "value": _rss_mb() - early,
            "target": -8.0,
            "note": f"{early:.0f} MB after a tenth, {_rss_mb():.0f} MB at the end",
        }
    ]


def counts(work: Path, args: argparse.Namespace) -> list[Result]:
    """Memory of a job whose counts never come again."""
    ranks = [_traffic.Rank(r, 8, pure=True) for r in range(8)]
    analysis = Analysis(None, scanner.load())
    for k in ranks:
        analysis.feed(k.rank, "x", 1, k.head(), False)
    t, early, block, blocks = _traffic.MONO + _traffic.S, 0.0, 1000, args.counts // 1000
    for i in range(blocks):
        for k in ranks:
            sizes = range(1 + i * block, 1 + (i + 1) * block)
            lines = [
                k.collective(b"ncclAllReduce", t + at * k.gap, _traffic.WORLD, size)
                for at, size in enumerate(sizes)
            ]
            end = t + block * k.gap
            analysis.feed(k.rank, "x", 4, b"".join(lines) + k.coverage(end), True)
        t = end
        if i == blocks // 5:
            early = _rss_mb()
    if analysis.scan(None):
        raise SystemExit("findings in a healthy job")
    return [
        {
            "what": f"growth of memory over {args.counts:,} different counts, from a fifth on, MB",
            "value": _rss_mb() - early,
            "target": -16.0,
            "note": f"{early:.0f} MB after a fifth, {_rss_mb():.0f} MB at the end, "
            f"{len(analysis.table):,} signatures held",
        }
    ]


def live(work: Path, args: argparse.Namespace) -> list[Result]:
    return _live.measure(work, args.live_ranks, args.seconds)


PARTS: dict[str, Callable[[Path, argparse.Namespace], list[Result]]] = {
    f.__name__: f for f in (files, rows, large, scan, _peer.peer, live, memory, counts)
}


def _table(results: list[Result]) -> str:
    lines = ["| what | measured | target | |", "|---|---|---|---|"]
    for r in results:
        value, target = r["value"], r["target"]
        shown = "-" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.2f}"
        wanted = (
            ""
            if target is None
            else f"at least {target:,}"
            if target > 0
            else f"at most {-target:,g}"
        )
        lines.append(f"| {r['what']} | {shown} | {wanted} | {r['note']} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default=",".join(PARTS), help="parts, by commas")
    parser.add_argument("--peer", help="a wheel of torch (default: pip gets one)")
    parser.add_argument("--ranks", type=int, default=128, help="of the part files")
    parser.add_argument("--calls", type=int, default=10_000_000, help="of the part memory")
    parser.add_argument("--counts", type=int, default=1_000_000, help="of the part counts")
    parser.add_argument("--live-ranks", type=int, default=4096)
    parser.add_argument("--seconds", type=float, default=20.0, help="of healthy live traffic")
    parser.add_argument("--dir", help="where traces are written (default: the temporary folder)")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    parts = args.only.split(",")
    if unknown := set(parts) - set(PARTS):
        raise SystemExit(f"no such part: {', '.join(sorted(unknown))}")
    if len(parts) == 1:
        resources.native_dir(build=True)
        with tempfile.TemporaryDirectory(dir=args.dir) as work:
            results = PARTS[parts[0]](Path(work), args)
    else:
        results = []
        rest = [x for i, x in enumerate(sys.argv[1:]) if x != "--json"]
        for part in parts:
            command = [sys.executable, str(HERE), "analyze", *rest, "--only", part, "--json"]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            results += json.loads(done.stdout)
            print(f"{part} done", file=sys.stderr)
    print(json.dumps(results) if args.json else _table(results))


if __name__ == "__main__":
    main()
