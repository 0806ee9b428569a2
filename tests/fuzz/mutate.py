"""Mutations of files: what writers that die, disks, other versions and enemies leave."""

from __future__ import annotations

import os
import pickle
import random
from pathlib import Path
from typing import Any

import orjson

_VALUES: list[Any] = [
    None, True, False, -1, 0, 1, 2, 7, 2**31, 2**62, 2**63 - 1, 2**63, 2**64, -(2**63),
    10**30, 1.5, float(2**53), "", "x", "0", "ncclAllReduce", "\ud7ff", "a" * 3000, [], [1], {},
    {"a": {}}, [[]], [None] * 20, "00000000000000aa",
]  # fmt: skip


class _Runs:
    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, ("/nonexistent/by/a/pickle",))


_PICKLES = [
    b"cos\nsystem\n(S'true'\ntR.",
    b"\x80\x02" + b"(" * 50_000,
    b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f",
    b"\x80\x02]r\xff\xff\xff\x7f.",
    b"\x80\x02}q\x00h\x00h\x00s.",  # itself as its own key
    pickle.dumps({"entries": [_Runs()]}, 2),
]


def _value(rng: random.Random, like: Any) -> Any:
    if type(like) is int and rng.random() < 0.5:
        return like + rng.choice([-(2**40), -1000, -2, -1, 1, 2, 1000, 2**40])
    return rng.choice(_VALUES)


def _inner(rng: random.Random, row: Any, depth: int = 0) -> None:
    """Change something somewhere in a JSON value."""
    if isinstance(row, dict) and row:
        key = rng.choice(list(row))
        if isinstance(row[key], (dict, list)) and row[key] and depth < 6 and rng.random() < 0.7:
            _inner(rng, row[key], depth + 1)
        elif rng.random() < 0.2:
            del row[key]
        elif rng.random() < 0.1:
            row[str(rng.choice(_VALUES))[:50]] = row.pop(key)
        else:
            row[key] = _value(rng, row[key])
    elif isinstance(row, list) and row:
        at = rng.randrange(len(row))
        if isinstance(row[at], (dict, list)) and row[at] and depth < 6 and rng.random() < 0.7:
            _inner(rng, row[at], depth + 1)
        elif rng.random() < 0.3:
            del row[at]
        elif rng.random() < 0.3:
            row.insert(at, row[at])
        else:
            row[at] = _value(rng, row[at])


def _dumps(row: Any) -> bytes:
    try:
        return orjson.dumps(row)
    except (orjson.JSONEncodeError, UnicodeEncodeError):
        return repr(row).encode("utf-8", "replace")  # numbers that JSON of 64 bits has not


def _bytes(rng: random.Random, data: bytes) -> bytes:
    out = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 8])):
        if not out:
            break
        at = rng.randrange(len(out))
        kind = rng.randrange(6)
        if kind == 0:
            out[at] = rng.randrange(256)
        elif kind == 1:
            del out[at : at + rng.choice([1, 2, 10, 1000])]
        elif kind == 2:
            out[at:at] = rng.choice([b"\x00", b"\xff\xfe", b"\n", b"{", b"[" * 300, b'"', b"e5"])
        elif kind == 3:
            out[at:at] = out[at : at + rng.choice([1, 10, 200])]
        elif kind == 4 and out[at] in b"0123456789":
            out[at:at] = b"9" * rng.choice([1, 5, 20, 400])
        else:
            out[at] ^= 1 << rng.randrange(8)
    return bytes(out)


def _lines(rng: random.Random, data: bytes) -> bytes:
    lines = data.split(b"\n")
    for _ in range(rng.choice([1, 2, 5, 20])):
        at = rng.randrange(len(lines))
        kind = rng.randrange(8)
        if kind == 0:
            del lines[at]
        elif kind == 1:
            lines.insert(rng.randrange(len(lines)), lines[at])
        elif kind == 2:
            other = rng.randrange(len(lines))
            lines[at], lines[other] = lines[other], lines[at]
        elif kind == 3:
            lines[at] = lines[at][: rng.randrange(len(lines[at]) + 1)]
        elif kind == 4:
            lines[at] = _bytes(rng, lines[at])
        else:
            try:
                row = orjson.loads(lines[at])
            except orjson.JSONDecodeError:
                continue
            _inner(rng, row)
            lines[at] = _dumps(row)
        if not lines:
            return b""
    if rng.random() < 0.05:
        head = min(len(lines), 3)
        rest = lines[head:]
        rng.shuffle(rest)
        lines = lines[:head] + rest
    return b"\n".join(lines)


def _tree(rng: random.Random, data: bytes) -> bytes:
    """Another valid pickle or JSON document."""
    try:
        content = pickle.loads(data) if data[:1] == b"\x80" else orjson.loads(data)
    except Exception:
        return _bytes(rng, data)
    for _ in range(rng.choice([1, 2, 5, 20])):
        _inner(rng, content)
    if data[:1] == b"\x80":
        return pickle.dumps(content, rng.randrange(6))
    return _dumps(content)


def mutated(rng: random.Random, data: bytes, by_lines: bool) -> bytes:
    """A file's contents, changed."""
    kind = rng.random()
    if not data or kind < 0.02:
        return rng.choice([b"", b"\n", b"\n\n\n", b"\x00" * 5000, bytes(range(256)) * 20])
    if kind < 0.05 and data[:1] == b"\x80":
        return rng.choice(_PICKLES)
    if kind < 0.1:
        return data[: rng.randrange(len(data))]
    if kind < 0.2:
        return _bytes(rng, data)
    return _lines(rng, data) if by_lines else _tree(rng, data)


def mixed(rng: random.Random, data: bytes) -> tuple[bytes, int, int]:
    """A trace with lines that come again, or too late; how many of each."""
    lines = data.splitlines(keepends=True)
    covers = [i for i, line in enumerate(lines) if b'"kind":"coverage"' in line]
    late = rng.randrange(2)
    if late:
        at = rng.randrange(len(covers) - 1)
        a, b = covers[at], covers[at + 1]
        lines[a], lines[b] = lines[b], lines[a]
    again = rng.choice([0, 1, 3, 20])
    for _ in range(again):
        at = rng.randrange(len(lines))
        while b'"kind":"coverage"' not in lines[at] and b'"kind":"call"' not in lines[at]:
            at = rng.randrange(len(lines))
        lines.insert(rng.randrange(at + 1, min(len(lines), at + 40) + 1), lines[at])
    return b"".join(lines), again, late


def odd_things(rng: random.Random, folder: Path) -> set[str]:
    """Links, loops and pipes in a folder of traces; their paths."""
    made = set()
    for name in rng.sample(["loop", "loop.jsonl", "zero.jsonl", "fifo.jsonl"], rng.randrange(5)):
        path = folder / name
        if name == "fifo.jsonl":
            os.mkfifo(path)
        else:
            to = {"loop": str(folder), "loop.jsonl": "loop.jsonl", "zero.jsonl": "/dev/zero"}
            path.symlink_to(to[name])
        made.add(str(path))
    return made


def write(rng: random.Random, folder: Path, files: dict[str, bytes], odd: float = 1.0) -> None:
    """Write files, some under other names, with odd things beside them; ``odd``: how often."""
    for name, data in files.items():
        if rng.random() < 0.03 * odd:
            name = rng.choice(
                ["a", "b.jsonl", "x.part1.jsonl", "\udcff.jsonl", "_dump_9", "y.json"]
            )
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    if rng.random() < 0.1 * odd:
        loop = folder / rng.choice(["loop", "loop.jsonl", "_dump_77"])
        if not loop.is_symlink() and not loop.exists():
            loop.symlink_to(rng.choice([str(folder), "/dev/zero", "loop", "nowhere"]))
    if rng.random() < 0.05 * odd and not (folder / "fifo.jsonl").exists():
        os.mkfifo(folder / "fifo.jsonl")
