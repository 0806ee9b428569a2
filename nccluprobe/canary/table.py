"""The canary's report as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from nccluprobe.plural import counted


def bytes_text(number: int) -> str:
    """8, 64K, 16M."""
    for unit, size in (("G", 1 << 30), ("M", 1 << 20), ("K", 1 << 10)):
        if number and number % size == 0:
            return f"{number // size}{unit}"
    return str(number)


def columns(head: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> list[str]:
    """Aligned lines; the first `left` columns to the left."""
    table = [head, *rows]
    widths = [max(len(row[i]) for row in table) for i in range(len(head))]
    return [
        "  ".join(
            cell.ljust(w) if i < left else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    ]


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _results(results: Sequence[dict[str, Any]]) -> list[str]:
    head = ("operation", "type", "op", "bytes", "count", "latency us", "time us", "algbw GB/s",
            "busbw GB/s", "wrong")  # fmt: skip
    rows = [
        (
            r["op"],
            r["dtype"],
            r["redop"] or "-",
            bytes_text(r["bytes"]),
            str(r["count"]),
            _number(r["latency_us"]),
            _number(r["time_us"]),
            _number(r["algbw_gbs"], 3),
            _number(r["busbw_gbs"], 3),
            f"{r['wrong']} of {r['checked']}",
        )
        for r in results
    ]
    return columns(head, rows, left=3)


def _arrival(found: dict[str, Any]) -> list[str]:
    if not found["ranks"]:
        return []
    bound = ""
    if found["clock"] == "estimated":
        bound = f"; clocks of several nodes, known to {found['bound_us']:.0f} us"
    spread = found["spread_us"]
    lines = [
        f"arrival over {found['calls']} calls: first to last rank {spread['p50']:.1f} us (p50), "
        f"{spread['p99']:.1f} (p99), {spread['max']:.1f} (max){bound}"
    ]
    rows = [
        (
            str(r["rank"]),
            *(_number(r["behind_first_us"][q], 1) for q in ("p50", "p99", "max")),
            str(r["last"]),
        )
        for r in found["ranks"]
    ]
    head = ("rank", "behind the first, us: p50", "p99", "max", "times last")
    return lines + columns(head, rows, left=1)


def text(found: dict[str, Any]) -> str:
    """The report for people."""
    kind = "simnccl, a stand-in without a GPU" if found["simulated"] else "NCCL"
    ranks = counted(found["world"], "rank")
    lines = [f"{kind} {found['nccl']}, {ranks}, {found['device']}"]
    lines += [f"{name}={value}" for name, value in found["settings"].items()] + [""]
    if "results" in found:
        lines += [*_results(found["results"]), ""]
    if "steps" in found:
        lines.append(
            f"{found['steps']} steps, {found['checked']} results checked, {found['wrong']} wrong"
            + (f", {found['reconnects']} reconnects" if found["reconnects"] else "")
        )
    lines += _arrival(found["arrival"])
    for r in [*found.get("results", []), found]:
        if r.get("wrong"):
            ranks = ", ".join(map(str, r["wrong_ranks"]))
            lines.append(f"WRONG on rank {ranks}: {r.get('op', '')} {r['first_wrong']}")
    return "\n".join(lines) + "\n"


def wrong(found: dict[str, Any]) -> int:
    """How many results were wrong."""
    return int(found.get("wrong", 0)) + sum(int(r["wrong"]) for r in found.get("results", []))
