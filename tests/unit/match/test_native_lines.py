"""The native reader of call lines and the one in Python make the same of the same lines."""

from __future__ import annotations

import ctypes
import random
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from fuzz.corpus import traces
from fuzz.mutate import mutated
from support.tracegen import MONO, S

from nccluprobe import resources
from nccluprobe.match import model as m
from nccluprobe.match.decode import Decoder
from nccluprobe.match.fastcalls import FastCalls
from nccluprobe.match.signature import SignatureTable
from nccluprobe.nccl.api import BY_NAME, Kind
from nccluprobe.trace import scanner

_HEAD = b'{"kind":"call","api":"ncclAllReduce","t":%d,"thread":7,"dur":8,"rc":0,"comm":0,'
_CALL = _HEAD + b'"idx":%d,"ord":%d,"count":4,"datatype":"float32","op":"sum","stream":0}\n'


@pytest.fixture(scope="module")
def native(native_dir: Path) -> ctypes.CDLL:
    found = scanner.load()
    assert found is not None
    return found


def _plain(value: Any, table: SignatureTable, name: str = "") -> Any:
    """An item as something that compares; signatures by what they say."""
    if name == "sig" and value is not None:
        return [table[s] for s in np.atleast_1d(value).tolist()]
    if isinstance(value, np.ndarray):
        return value.dtype, value.tolist()
    if is_dataclass(value):
        parts = [(f.name, getattr(value, f.name)) for f in fields(value)]
        return type(value), [(n, _plain(v, table, n)) for n, v in parts]
    if isinstance(value, (list, tuple)):
        return type(value), [_plain(v, table) for v in value]
    return value


def _decoded(chunks: list[bytes], native: ctypes.CDLL | None) -> tuple[Any, ...]:
    table = SignatureTable()
    decoder = Decoder(table, native)
    decoder.opened(0, "x")
    found, line = [], 1
    for chunk in chunks:
        items = decoder.decode(0, "x", line, chunk, False)
        found += [_plain(item, table) for item in items]
        line += chunk.count(b"\n")
    return found, decoder.counts, decoder.through(0)


def _same(data: bytes, native: ctypes.CDLL, size: int = 1 << 20) -> None:
    lines = data.splitlines(keepends=True) if b"\r" not in data else data.split(b"\n")
    if b"\r" in data:
        lines = [x + b"\n" for x in lines[:-1]]
    chunks = [b"".join(lines[i : i + size]) for i in range(0, len(lines), size)]
    assert _decoded(chunks, native) == _decoded(chunks, None)


def _fast(native: ctypes.CDLL, data: bytes) -> scanner.Scanned:
    return FastCalls(SignatureTable(), native).read(data)


@pytest.mark.parametrize("size", [1, 7, 1 << 20])
def test_whole_traces(native: ctypes.CDLL, size: int) -> None:
    for data in traces().values():
        _same(data, native, size)


def test_mutated_traces(native: ctypes.CDLL) -> None:
    files = list(traces().values())
    for seed in range(600):
        rng = random.Random(seed)
        data = mutated(rng, rng.choice(files), True)
        # Lines that are wrong each alone, and right together, are nobody's business.
        _same(data[: data.rfind(b"\n") + 1], native, rng.choice([1, 3, 1 << 20]))


def test_plain_lines_are_taken(native: ctypes.CDLL) -> None:
    data = b"".join(_CALL % (MONO + i * S, i, i) for i in range(100))
    found = _fast(native, data)
    assert (found.lines, found.calls.shape[1], found.rest.shape[1]) == (100, 100, 0)
    assert found.calls[scanner.T].tolist() == [MONO + i * S for i in range(100)]
    assert found.calls[scanner.ORD].tolist() == list(range(100))


def test_every_function_is_taken_as_the_collectors_write_it(native: ctypes.CDLL) -> None:
    from support.tracegen import Job

    for name, api in BY_NAME.items():
        if api.kind not in (Kind.COLLECTIVE, Kind.P2P):
            continue
        job = Job()
        (comm, _) = job.world(2)
        comm.proc.call(comm, name, 1.0)
        (line,) = [x for x in comm.proc.data().splitlines(keepends=True) if b'"call"' in x]
        assert _fast(native, line).calls.shape[1] == 1, line


_LINE = (_CALL % (MONO, 0, 0)).decode()
_ODD = [
    _LINE.replace('"rc":0', '"rc":2'),
    _LINE.replace('"rc":0', '"rc":null'),
    _LINE.replace('"rc":0', '"rc":null,"end":"no_return"'),
    _LINE.replace('"rc":0', '"rc":null,"end":"enter_only"'),
    _LINE.replace('"rc":0', '"rc":null,"end":"lost"'),
    _LINE.replace('"rc":0', '"rc":null,"end":"unwound"'),
    _LINE.replace('"rc":0', '"rc":-1'),
    _LINE.replace('"rc":0', '"rc":-0'),
    _LINE.replace('"rc":0', '"rc":00'),
    _LINE.replace('"rc":0', '"rc":0.0'),
    _LINE.replace('"rc":0', '"rc":0e0'),
    _LINE.replace('"rc":0', '"rc":0,"rc":7'),
    _LINE.replace('"rc":0', '"rc":0,"site":"00000000000000aa"'),
    _LINE.replace('"rc":0', '"rc":0,"site":null'),
    _LINE.replace('"rc":0', '"rc":0,"capture":"yes"'),
    _LINE.replace('"rc":0', '"rc":0,"capture":"no"'),
    _LINE.replace('"rc":0', '"rc":0,"new":"x","other":null,"yes":true,"no":false,"n":-5'),
    _LINE.replace('"rc":0', '"rc":0,"new":[1]'),
    _LINE.replace('"rc":0', '"rc":0,"new":{}'),
    _LINE.replace('"rc":0', '"rc":0,"new":"\\u0041"'),
    _LINE.replace('"rc":0', '"rc":0,"new":"\\"'),
    _LINE.replace('"rc":0', '"rc":0,"new":"ä"'),
    _LINE.replace('"rc":0', '"rc":0,"new":nul'),
    _LINE.replace('"rc":0', '"rc":0,"new":1,"new":2'),
    _LINE.replace('"rc":0', '"rc":0,"":1'),
    _LINE.replace('"rc":0', '"rc":0,"' + "n" * 70 + '":1'),
    _LINE.replace('"rc":0', '"rc":0,"gpos":1,"again":true,"uid_hash":"x"'),
    _LINE.replace('"rc":0', '"rc":0,' + ",".join(f'"new{i}":1' for i in range(1200))),
    _LINE.replace('"rc":0', '"rc":0,"kind":"state"'),
    _LINE.replace('"rc":0', '"rc":0,"k\\u0069nd":"state"'),
    _LINE.replace('"rc":0', '"rc" :0'),
    _LINE.replace('"rc":0,', ""),
    _LINE.replace('"dur":8', '"dur":null'),
    _LINE.replace('"dur":8', '"dur":-1'),
    _LINE.replace('"dur":8', '"dur":-9'),
    _LINE.replace('"dur":8', f'"dur":{2**62}'),
    _LINE.replace('"comm":0', '"comm":null'),
    _LINE.replace('"comm":0', '"comm":"0"'),
    _LINE.replace('"comm":0,', ""),
    _LINE.replace('"comm":0', '"comm":true'),
    _LINE.replace('"count":4', '"count":null'),
    _LINE.replace('"count":4', f'"count":{2**63}'),
    _LINE.replace('"count":4', f'"count":{10**17}'),
    _LINE.replace('"count":4', '"count":"4"'),
    _LINE.replace('"op":"sum"', '"op":"custom"'),
    _LINE.replace('"op":"sum"', '"op":""'),
    _LINE.replace('"op":"sum"', '"op":"' + "x" * 32 + '"'),
    _LINE.replace('"op":"sum"', '"op":"' + "x" * 33 + '"'),
    _LINE.replace('"op":"sum",', ""),
    _LINE.replace('"stream":0', '"stream":null'),
    _LINE.replace('"stream":0', '"stream":0,"seq":5'),
    _LINE.replace('"stream":0', '"stream":0,"seq":null'),
    _LINE.replace('"stream":0', '"stream":0,"seq":5,"group":9,"gpos":0'),
    _LINE.replace('"stream":0', '"stream":0,"group":null'),
    _LINE.replace(f'"t":{MONO}', '"t":-1'),
    _LINE.replace(f'"t":{MONO}', f'"t":{2**62}'),
    _LINE.replace(f'"t":{MONO}', f'"t":{2**63 - 1}'),
    _LINE.replace("ncclAllReduce", "ncclAllReducf"),
    _LINE.replace("ncclAllReduce", "ncclCommDestroy"),
    _LINE.replace("ncclAllReduce", "ncclSend"),
    _LINE.replace("ncclAllReduce", "ncclBcast"),
    _LINE.replace("ncclAllReduce", "ncclGroupStart"),
    _LINE.replace("ncclAllReduce", "ncclGroupEnd").replace('"op"', '"group":3,"op"'),
    _LINE.replace("ncclAllReduce", "ncclGroupEnd").replace('"op"', '"group":3,"gdepth":2,"op"'),
    _LINE.replace("ncclAllReduce", "ncclGroupEnd").replace('"op"', '"group":3,"gdepth":null,"op"'),
    _LINE.replace("ncclAllReduce", "ncclGroupSimulateEnd").replace('"op"', '"group":3,"op"'),
    _LINE.replace("ncclAllReduce", "ncclSend").replace('"op"', '"peer":1,"op"'),
    _LINE.replace("ncclAllReduce", "ncclSend").replace('"op"', f'"peer":{2**30},"op"'),
    _LINE.replace("ncclAllReduce", "ncclRecv").replace('"op"', '"peer":-1,"op"'),
    _LINE.replace("ncclAllReduce", "ncclBroadcast").replace('"op"', '"root":-1,"op"'),
    _LINE.replace("ncclAllReduce", "ncclBroadcast").replace('"op"', '"root":null,"op"'),
    _LINE.replace("}\n", "} \n"),
    _LINE.replace("}\n", ",}\n"),
    _LINE.replace("}\n", "\n"),
    _LINE.replace("}\n", "}}\n"),
    _LINE.replace("}\n", "}\r\n"),
    _LINE.replace("{", "{ ", 1),
    "\n",
    "{\n",
    '{"kind":"call",\n',
    '{"kind":"call",}\n',
    '{"kind":"call"}\n',
    '{"kind":"call","\n',
    '{"kind":"call","api\n',
    '{"kind":"call","api"\n',
    '{"kind":"call","api":\n',
    '{"kind":"call","api":"ncclAllReduce\n',
]


@pytest.mark.parametrize("odd", _ODD)
def test_odd_lines(native: ctypes.CDLL, odd: str) -> None:
    good = [_CALL % (MONO + i * S, i, i) for i in range(1, 5)]
    line = odd.encode()
    _same(b"".join([*good[:2], line, *good[2:]]), native)
    _same(line, native)
    _same(good[0] + line * 3, native)


def test_lines_that_are_whole_only_together(native: ctypes.CDLL) -> None:
    """A call between two halves of a line is a call, and each half a bad line."""
    call = _CALL % (MONO, 0, 0)
    other = b'{"kind":"zz"}'
    for tail in (b"3]},%s,%s", b"3]},0,%s,0,%s"):
        data = b'{"kind":"zz","a":[1\n' + call + tail % (other, other) + b"\n"
        _same(data, native)
        _, counts, _ = _decoded([data], None)
        assert (counts.calls, counts.bad_lines) == (1, 2)


def test_fields_of_a_later_version_do_not_slow_it(native: ctypes.CDLL) -> None:
    new = '"rc":0,"new":"x","newer":null'
    odd = [_LINE.replace('"rc":0', new), _LINE, _LINE.replace('"rc":0', new + ',"new":3')]
    data = "".join(odd).encode()
    _same(data * 5, native, 3)
    fast = FastCalls(SignatureTable(), native)
    before = fast.read(data)
    fast.learn(["new", "newer", "n\0", "", "x" * 70])
    found = fast.read(data)
    assert (before.calls.shape[1], dict(before.learnt)) == (1, {})
    assert (found.calls.shape[1], found.learnt) == (2, {"new": 1, "newer": 1})


def test_more_new_fields_than_are_kept(native: ctypes.CDLL) -> None:
    lines = [_LINE.replace('"rc":0', f'"rc":0,"new{i % 90}":{i}') for i in range(2000)]
    _same("".join(lines).encode(), native, 50)


def test_every_cut_of_a_line(native: ctypes.CDLL) -> None:
    line = _LINE.replace('"rc":0', '"rc":0,"new":"x","other":null,"yes":true,"n":-5').encode()
    for i in range(len(line) - 1):
        _same(line[:i] + b"\n" + line, native)
        assert _fast(native, line[:i]).lines == 0  # without a newline it is no line


def test_more_signatures_and_texts_than_are_kept(native: ctypes.CDLL) -> None:
    lines = [
        _LINE.replace('"count":4', f'"count":{i % 20_000}').replace("float32", f"type{i % 90}")
        for i in range(30_000)
    ]
    _same("".join(lines).encode(), native, 5000)
    _same("".join(lines).encode(), native)


def test_without_the_native_part_python_reads_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "LINES", "libnothing.so")
    assert scanner.load() is None
    monkeypatch.setattr(resources, "LINES", "libsimcuda.so")  # another library
    assert scanner.load() is None
    items = Decoder(SignatureTable(), None).decode(0, "x", 1, _LINE.encode(), True)
    assert [len(i) for i in items if isinstance(i, m.Batch)] == [1]
    assert orjson.loads(_LINE)["kind"] == "call"
