"""The native reader of dumps says what the one in Python says, or leaves a dump to it."""

from __future__ import annotations

import importlib.util
import pickle
import random
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from importers.fr_incidents import FORMS, make
from importers.frgen import one_group
from nccluprobe import resources
from nccluprobe.importers import fr_native
from nccluprobe.importers.fr_dump import natively, parse_dump

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
Content = dict[str, Any]

#: What stands in the place of a value of a dump.
ODD: tuple[Any, ...] = (
    None, True, False, -1, 0, 2**31, 2**62 - 1, 2**62, 2**63, -(2**62), 1.5, float("nan"), "", "x",
    "é", "completed", b"x", [], [1], [[]], [[-1]], [[2**40, 2**40]], [[0, 2**62]], [[1, 2], [3]],
    ["Float"], ("0", "x"), ("0",), ["0", "x"], ("0", 1), {}, {"a": 1}, {1: 2},
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def native() -> Iterator[None]:
    resources.native_dir(build=True)
    fr_native._reader.cache_clear()
    assert fr_native._reader() is not None
    yield


def told(data: bytes) -> Any:
    """All of a dump, or what is wrong with it."""
    try:
        dump = parse_dump(data)
    except ValueError as error:
        return str(error)
    found = {}
    for f in fields(dump):
        value = getattr(dump, f.name)
        array = isinstance(value, np.ndarray)
        found[f.name] = (value.dtype, value.tolist()) if array else value
    return found


def in_python(data: bytes) -> Any:
    with pytest.MonkeyPatch.context() as m:
        m.setattr(fr_native, "_reader", lambda: None)
        return told(data)


def is_native(data: bytes) -> bool:
    return natively(data) is not None


def some_dump() -> Content:
    """Of all that an entry may hold."""
    job = one_group(4)
    for i in range(3):
        job.all("0", i * 0.1)
    r = job.ranks[1]
    r.transfer("0", 0.5, True, 2, input_sizes=[[4]], output_sizes=[[4]])
    r.part("0", 0.6, "all_gather", input_sizes=[[2, 3], [5]], output_sizes=[[24]])
    r.part("0", 0.6, "coalesced", input_sizes=[], output_sizes=[], input_dtypes=[])
    r.call("0", 0.7, "broadcast", False, state="started", timeout_ms=5, output_dtypes=[])
    r.call("0", 0.8, "barrier", False, input_dtypes=[], output_dtypes=[], pg_id="text")
    dump: Content = r.dump()
    dump["more"] = {"a": [1.5, None, True, -5, 2**40, ("x", [])], "b": {}}
    for e in dump["entries"]:
        e["frames"] = [{"name": "f", "filename": "f.py", "line": 3}] * 2
    return dump


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_all_that_an_entry_may_hold(protocol: int) -> None:
    data = pickle.dumps(some_dump(), protocol)
    assert is_native(data)
    assert told(data) == in_python(data)


@pytest.mark.parametrize("form", sorted(f for f in FORMS if not FORMS[f]().as_json))
def test_incidents(form: str) -> None:
    taken = 0
    for kind in ("hang-any", "crash-one"):
        incident = next(x for s in range(20) if (x := make(kind, s)) is not None)
        for data in incident.dumps(FORMS[form]()).values():
            assert told(data) == in_python(data)
            taken += is_native(data)
    assert taken > 8


def test_memory_of_one_dump_is_not_that_of_the_next() -> None:
    one, two = some_dump(), one_group(2)
    two.all("0", 1.0, name="reduce", input_dtypes=["Half"])
    first, second = pickle.dumps(one, 2), pickle.dumps(two.ranks[0].dump(), 2)
    for data in (first, second, first, b"\x80\x02", second):
        assert told(data) == in_python(data)


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every (dict or list, key or index) inside."""
    inside = value.items() if isinstance(value, dict) else enumerate(value)
    for key, part in list(inside):
        yield value, key
        if isinstance(part, (dict, list)):
            yield from _places(part)


@pytest.mark.parametrize("at", range(2))
def test_odd_values(at: int) -> None:
    """In every place of a dump, in turn: what the native reader takes means the same."""
    taken = left = 0
    content = some_dump()
    content["entries"] = content["entries"][3 + at :][:2]
    for holder, key in list(_places(content)):
        before = holder[key]
        for odd in ODD:
            holder[key] = odd
            data = pickle.dumps(content, 2)
            assert told(data) == in_python(data), (key, odd)
            taken, left = taken + is_native(data), left + (not is_native(data))
        holder[key] = before
    assert taken > 500 and left > 500


def _mutants(n: int) -> Iterator[bytes]:
    rng = random.Random(7)
    whole = [pickle.dumps(some_dump(), p) for p in (2, 4)]
    for _ in range(n):
        data = bytearray(rng.choice(whole))
        for _ in range(rng.choice((1, 1, 2, 5))):
            at = rng.randrange(len(data))
            how = rng.random()
            if how < 0.6:
                data[at] = rng.choice((rng.randrange(256), *b"(u.esatNhqr]}\x85\x86\x94\x8a"))
            elif how < 0.8:
                del data[at : at + rng.randrange(1, 9)]
            else:
                data[at:at] = data[at - rng.randrange(1, 40) : at]
        yield bytes(data)


def test_broken_bytes() -> None:
    taken = 0
    for data in _mutants(3000):
        # What is left to Python may ask for all memory: that has a process of its own.
        if is_native(data):
            taken += 1
            assert told(data) == in_python(data)
    assert taken > 100


def test_under_the_sanitizers(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("native_build", ROOT / "native" / "build.py")
    assert spec is not None and spec.loader is not None
    build = importlib.util.module_from_spec(spec)
    sys.modules["native_build"] = build
    spec.loader.exec_module(build)
    sources = [str(ROOT / "native" / s) for s in build.TARGETS[resources.DUMPS].sources]
    program = tmp_path / "driver"
    flags = ["-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    command = ["cc", *build.WARNINGS, "-Werror", *flags, "-o", str(program)]
    subprocess.run([*command, str(HERE / "dumps_driver.c"), *sources], check=True)
    whole = pickle.dumps(some_dump(), 2)
    cut = (whole[:n] for n in range(1, len(whole), 11))
    paths = []
    for i, data in enumerate([whole, *cut, *hostile(), *_mutants(1500)]):
        path = tmp_path / str(i)
        path.write_bytes(data)
        paths.append(str(path))
    done = subprocess.run([program, *paths], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout) > 50


def hostile() -> Iterator[bytes]:
    """Small files that ask for much: every one is left to the guarded reader."""
    yield b"\x80\x02}r" + struct.pack("<I", 0x7FFFFFFF) + b"."
    yield b"\x80\x02" + b"]" * 500_000 + b"a" * 499_999 + b"."
    yield b"\x80\x02" + b"(" * 1_000_000 + b"."
    yield b"\x80\x02(" + b"N" * 1_000_000 + b"l."
    # One entry with much in it, in many places: as it should be, but for its size.
    dump = some_dump()
    sizes = {"input_sizes": [[1]] * 300_000}
    for much in (sizes, {f"key {i}": None for i in range(100_000)}):
        dump["entries"] = [dump["entries"][0] | much] * 20_000
        yield pickle.dumps(dump, 2)
    # Lists of lists of lists: each twice in the next.
    twice = b"]q\x03" + b"".join(
        b"](h" + bytes([i]) + b"h" + bytes([i]) + b"eq" + bytes([i + 1]) for i in range(3, 60)
    )
    yield b"\x80\x02}(X\x01\x00\x00\x00a" + twice + b"X\x07\x00\x00\x00entries](}eu."


@pytest.mark.parametrize("data", list(hostile()), ids=lambda d: f"{len(d)}")
def test_files_that_ask_for_much(data: bytes) -> None:
    began = time.process_time()
    assert natively(data) is None
    assert time.process_time() - began < 1
