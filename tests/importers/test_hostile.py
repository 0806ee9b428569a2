"""Files that are broken, or made to do harm: named, and never a crash."""

from __future__ import annotations

import json
import os
import pickle
import struct
from dataclasses import replace
from pathlib import Path

import pytest

from importers.frgen import one_group
from importers.reading import Result
from nccluprobe.importers.fr_dump import parse_dump, read_dump
from nccluprobe.importers.fr_groups import status_by_name
from nccluprobe.importers.guard import read_guarded


class Runs:
    """A pickle that creates a file when it is loaded."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (open, (self.path, "w"))


def good() -> dict[str, object]:
    job = one_group()
    job.all("0", 1.0)
    return job.ranks[0].dump()


def guarded(tmp_path: Path, data: bytes) -> str:
    path = tmp_path / "_dump_0"
    path.write_bytes(data)
    read = next(iter(read_guarded(read_dump, [(str(path), len(data))])))
    assert read.value is None
    return read.error or ""


@pytest.mark.parametrize("protocol", range(6))
def test_a_pickle_that_runs_code(tmp_path: Path, protocol: int) -> None:
    mark = tmp_path / "ran"
    dump = good()
    dump["extra"] = Runs(str(mark))
    error = guarded(tmp_path, pickle.dumps(dump, protocol))
    assert "plain types only" in error
    assert not mark.exists()


def test_a_pickle_of_a_class(tmp_path: Path) -> None:
    assert "plain types only" in guarded(tmp_path, b"cos\nsystem\n(S'true'\ntR.")


def test_a_persistent_id(tmp_path: Path) -> None:
    assert "plain types only" in guarded(tmp_path, b"\x80\x02Pname\n.")


def test_a_memo_index_that_asks_for_all_memory(tmp_path: Path) -> None:
    data = b"\x80\x02}r" + struct.pack("<I", 0x7FFFFFFF) + b"."
    assert "memory" in guarded(tmp_path, data)


def test_a_key_whose_hash_takes_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nested tuples of memo references: 2^60 steps to hash the outermost."""
    monkeypatch.setattr("nccluprobe.importers.guard._CPU_LEAST", 1)
    tuples = b"".join(
        b"h" + bytes([i]) + b"h" + bytes([i]) + b"\x86q" + bytes([i + 1]) for i in range(60)
    )
    data = b"\x80\x02}(K\x01q\x00" + tuples + b"K\x02u."
    error = guarded(tmp_path, data)
    assert "memory or time" in error


def test_a_bad_file_does_not_spoil_its_neighbours(tmp_path: Path) -> None:
    job = one_group()
    for i in range(5):
        job.all("0", i * 0.1)
    job.all("0", 1.0, 2, done=False)
    job.write(tmp_path)
    (tmp_path / "nccl_trace_rank_9").write_bytes(b"\x80\x02}r" + struct.pack("<I", 0x7FFFFFFF))
    result = Result(tmp_path)
    assert result.blamed == {2}
    assert any("rank_9" in p for p in result.imported.told.problems)


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x02]" + b"(l" * 100_000 + b".",
        b"\x80\x02" + b"]" * 200_000 + b"a" * 199_999 + b".",
        b"(" * 1_000_000 + b".",
        b"[" * 100_000,
        b'{"entries":' + b"[" * 100_000,
    ],
)
def test_deep_nesting(tmp_path: Path, data: bytes) -> None:
    assert guarded(tmp_path, data)


def test_every_cut(tmp_path: Path) -> None:
    whole = pickle.dumps(good(), 2)
    for n in range(0, len(whole) - 1, 7):
        with pytest.raises(ValueError, match=r"\w"):
            parse_dump(whole[:n])


def test_every_flipped_byte(tmp_path: Path) -> None:
    whole = pickle.dumps(good(), 2)
    files = []
    for n in range(0, len(whole), 5):
        data = bytearray(whole)
        data[n] ^= 0x5A
        path = tmp_path / f"_dump_{n}"
        path.write_bytes(data)
        files.append((str(path), len(data)))
    reads = list(read_guarded(read_dump, files))
    assert [r.path for r in reads] == [p for p, _ in files]
    assert all((r.value is None) == bool(r.error) for r in reads)


@pytest.mark.parametrize(
    "change",
    [
        {"entries": 5},
        {"entries": [5]},
        {"entries": ["x"]},
        {"entries": [{}]},
        {"pg_config": 5, "entries": None, "pg_status": 5},
        {"pg_config": {"0": {"name": [], "ranks": {}}}},
        {"pg_status": {"0": {"last_enqueued_collective": "x", "last_completed_collective": 2**80}}},
    ],
)
def test_wrong_shapes(change: dict[str, object]) -> None:
    try:
        parse_dump(pickle.dumps({**good(), **change}))
    except ValueError:
        return


@pytest.mark.parametrize("name", sorted(good()["entries"][0]))  # type: ignore[index]
@pytest.mark.parametrize("value", [None, -1, 2**70, 1.5, True, "x", b"\xff", [], {}, [["x"]], ()])
def test_wrong_types(name: str, value: object, tmp_path: Path) -> None:
    job = one_group(2)
    for i in range(3):
        job.all("0", i * 0.1)
    job.write(tmp_path)
    dump = job.ranks[0].dump()
    entries = dump["entries"]
    assert isinstance(entries, list)
    entries[1][name] = value
    (tmp_path / "nccl_trace_rank_0").write_bytes(pickle.dumps(dump, 2))
    Result(tmp_path)


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "nccl_trace_rank_0.json").write_bytes(
        json.dumps(good()).replace("default_pg", "\ufffd\ufffd").encode("utf-16")
    )
    (tmp_path / "nccl_trace_rank_1.json").write_bytes(
        json.dumps(good()).encode().replace(b"default_pg", b"\xff\xfe\x80")
    )
    result = Result(tmp_path, kind="fr")
    assert any("rank_0.json" in p for p in result.imported.told.problems)
    assert not any("rank_1.json" in p for p in result.imported.told.problems)


def test_link_loops(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    (folder / "loop").symlink_to(tmp_path)
    (folder / "_dump_0").symlink_to(folder / "_dump_0")
    os.mkfifo(folder / "pipe")
    job = one_group()
    job.all("0", 1.0)
    job.write(folder)
    assert Result(tmp_path).findings == []


def test_enormous_lines(tmp_path: Path) -> None:
    path = tmp_path / "nccl.log"
    with path.open("wb") as f:
        f.write(b"host:1:1 [0] NCCL INFO AllReduce: " + b"x" * 5_000_000 + b"\n")
        f.write(b"h:1:1 [0] NCCL INFO " + b"(" * 500_000 + b"\n")
    result = Result(path)
    assert any("longer than" in p for p in result.imported.told.problems)


def test_numbers_that_are_too_large(tmp_path: Path) -> None:
    path = tmp_path / "nccl.log"
    path.write_text(
        "h:1:1 [0] NCCL INFO AllReduce: opCount 1 sendbuff 0x1 recvbuff 0x1 count "
        "9999999999999999999 datatype 7 op 0 root 0 comm 0x1 [nranks=2] stream 0x1\n"
    )
    Result(path)
    path.write_text(
        "h:1:1 [0] NCCL INFO ncclCommInitRank comm 0x1 rank 9 nranks 999999999 cudaDev 0 "
        "commId 0x5 - Init COMPLETE\n"
    )
    assert Result(path).findings == []


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"# notes\n", "neither a pickle nor JSON"),
        (b"\x7fELF\x02\x01", "neither a pickle nor JSON"),
        (pickle.dumps(good(), 2)[:-9], "was cut"),
        (b"\x80\x02\xff\xff", "its pickle is broken"),
        (b'{"entries": [', "no JSON, or was cut"),
        (b'{"a": 1}', "neither entries nor pg_config"),
        (b'{"entries": [{"pg_id": 0}]}', "they lack"),
        (b'{"entries": [7]}', "a value has a wrong type"),
    ],
)
def test_what_is_no_dump_is_told_in_plain_words(tmp_path: Path, data: bytes, said: str) -> None:
    error = guarded(tmp_path, data)
    assert said in error
    for raw in ("object", "NoneType", "opcode", "MARK", "Ran out", "invalid load key", "argument"):
        assert raw not in error, error


@pytest.mark.parametrize("names", [("n", "0"), ("²", "0"), ("0", "01"), ("9" * 5000, "0")])
def test_groups_whose_names_are_no_numbers(names: tuple[str, str]) -> None:
    """Names and ids are laid beside each other only where both are numbers."""
    status = {"last_enqueued_collective": 3, "last_completed_collective": 2}
    content = good()
    for key in names:
        content["pg_config"] = {n: {"name": n, "desc": "", "ranks": "[0, 1]"} for n in names}
        content["pg_status"] = {key: status, "7": status}
        entries = content["entries"]
        assert isinstance(entries, list)
        entries[0]["process_group"], entries[0]["pg_id"] = (names[0], ""), 7
        dump = parse_dump(pickle.dumps(content))
        assert {n[:9] for n in status_by_name(dump)} <= {*(n[:9] for n in names), "7"}


def test_a_hundred_thousand_groups_take_no_time() -> None:
    dump = parse_dump(pickle.dumps(good()))
    dump.status = {str(i): (1, 1) for i in range(100_000)}
    dump.groups = {str(i): replace(dump.groups["0"], name=str(i)) for i in range(100_000)}
    dump.pg_ids = [str(i) for i in range(0, 100_000, 2)]
    dump.groups_seen = [(str(i), "") for i in range(0, 100_000, 2)]
    assert len(status_by_name(dump)) == 100_000


@pytest.mark.parametrize("field", ["record_id", "collective_seq_id", "time_created_ns", "op_id"])
@pytest.mark.parametrize("value", [[7], [1, 2], [[]], "7"])
def test_numbers_that_are_lists(tmp_path: Path, field: str, value: object) -> None:
    """In all entries alike, or in one: the file is none, and the others are judged."""
    for odd in (slice(None), slice(1)):
        job = one_group()
        for i in range(3):
            job.all("0", float(i))
        folder = job.write(tmp_path / f"{odd.stop}")
        content = job.ranks[0].dump()
        for entry in content["entries"][odd]:
            entry[field] = value
        (folder / "nccl_trace_rank_0").write_bytes(pickle.dumps(content))
        error = guarded(tmp_path, pickle.dumps(content))
        assert error.startswith("its contents are not those of a flight recorder dump: a number")
        assert Result(folder).blamed <= {0}
