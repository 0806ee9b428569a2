"""Which communicator is meant, through the whole collector."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.collecting import MS, T0, Bench, Info, Ranks, init, name_record, rec

from nccluprobe.nccl import commhash
from nccluprobe.record import (
    FLAG_BLIND,
    FLAG_COMM_LATE,
    FLAG_NO_RETURN,
    FLAG_NONBLOCKING,
    KIND_NEW_COMM,
)

PARENT = 0x6AFE1CC17717E1F4


def _comms(bench: Bench) -> list[dict[str, Any]]:
    """The last comm line of each communicator."""
    return list({line["id"]: line for line in bench.of_kind("comm")}.values())


def _split(gen: int, new_gen: int, child: int, color: int = 3, **fields: Any) -> Any:
    fields = {"rc": 0, "new_comm": 0x99 if new_gen else 0, **fields}
    return rec(
        "ncclCommSplit", comm=0x1, comm_gen=gen, new_gen=new_gen, order_idx=child, color=color,
        **fields,
    )  # fmt: skip


def test_init_tells_hash_rank_and_size(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.step(init(7, rank=3, nranks=8, uid_hash=PARENT, log_hash=5))
    (comm,) = _comms(bench)
    assert comm["id"] == 0 and comm["learnt"] == "init"
    assert comm["hash"] == "6afe1cc17717e1f4" and comm["log_id"] == "0000000000000005"
    assert (comm["comm_rank"], comm["nranks"], comm["instance"]) == (3, 8, 0)
    (call,) = bench.of_kind("call")
    assert call["new_comm"] == 0 and call["rank"] == 3 and call["nranks"] == 8


def test_a_pointer_used_again_is_another_communicator(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.step(
        init(1, uid_hash=1, new_comm=0x500),
        rec(comm=0x500, comm_gen=1),
        rec("ncclCommDestroy", comm=0x500, comm_gen=1, t_enter=T0 + 5000),
        init(2, uid_hash=2, new_comm=0x500),
        rec(comm=0x500, comm_gen=2),
    )
    calls = [c["comm"] for c in bench.of_kind("call") if c["api"] == "ncclAllReduce"]
    assert calls == [0, 1]
    (end,) = bench.of_kind("comm_end")
    assert (end["comm"], end["how"], end["t"]) == (0, "destroy", T0 + 5000)


def test_finalize_then_destroy_are_two_ends(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.step(init(1))
    for i, api in enumerate(("ncclCommRevoke", "ncclCommFinalize", "ncclCommDestroy")):
        bench.step(rec(api, comm_gen=1, t_enter=T0 + i))
    assert [e["how"] for e in bench.of_kind("comm_end")] == ["revoke", "finalize", "destroy"]


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("2.21.5", commhash.djb2a(b"6afe1cc17717e1f4-3".ljust(128, b"\0"))),
        ("2.24.3", commhash.djb2a(b"6afe1cc17717e1f4-1-3".ljust(128, b"\0"))),
        ("2.28.9", 0x221160334D3DEF2E),
        ("strange", None),
    ],
)
def test_split_hash_by_version(tmp_path: Path, version: str, expected: int | None) -> None:
    bench = Bench(tmp_path, version=version)
    bench.step(init(1, uid_hash=PARENT), _split(1, 2, child=1))
    child = _comms(bench)[1]
    assert child["hash"] == (None if expected is None else f"{expected:016x}")
    assert (child["parent"], child["child"], child["color"]) == (0, 1, 3)
    assert child["learnt"] == "split" and child["comm_rank"] is None and child["nranks"] is None


def test_split_in_a_group_is_bound_later(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    later = rec(
        "ncclCommSplit", kind=KIND_NEW_COMM, comm_gen=1, new_comm=0x99, new_gen=2, order_idx=1,
        color=3,
    )  # fmt: skip
    bench.step(init(1, uid_hash=PARENT), _split(1, 0, child=1))
    bench.step(later, rec(comm_gen=2))
    split = next(c for c in bench.of_kind("call") if c["api"] == "ncclCommSplit")
    assert split["new_comm"] is None and split["ord"] == 1
    child = _comms(bench)[1]
    assert child["hash"] == "221160334d3def2e" and child["parent"] == 0
    assert bench.of_kind("call")[-1]["comm"] == child["id"]


def test_a_rank_without_colour_makes_nothing(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.step(init(1, uid_hash=PARENT), _split(1, 0, child=1, color=-1), _split(1, 2, child=2))
    child = _comms(bench)[1]
    assert child["hash"] == f"{commhash.child_226(PARENT, 2, 3):016x}"


def test_child_of_a_child(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.step(init(1, uid_hash=PARENT), _split(1, 2, child=1), _split(2, 3, child=1, color=0))
    grandchild = _comms(bench)[2]
    assert grandchild["hash"] == f"{commhash.child_226(0x221160334D3DEF2E, 1, 0):016x}"
    assert grandchild["parent"] == 1


def test_shrinks_of_one_parent_are_instances(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    shrink = {"comm_gen": 1, "new_comm": 9, "nranks": 2}
    bench.step(init(1, rank=0, nranks=8, uid_hash=PARENT))
    bench.step(rec("ncclCommShrink", new_gen=2, order_idx=1, **shrink))
    bench.step(rec("ncclCommDestroy", comm_gen=2))
    bench.steps(15, ms=100)
    bench.step(rec("ncclCommShrink", new_gen=3, order_idx=2, **shrink))
    first, second = _comms(bench)[1:]
    assert first["hash"] == second["hash"] == f"{commhash.child_226(PARENT, 0, 0):016x}"
    assert (first["instance"], second["instance"]) == (0, 1)
    assert first["nranks"] == 6 and first["learnt"] == "shrink"


def test_init_all_makes_one_endpoint_per_device(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.step(rec("ncclCommInitAll", new_comm=5, new_gen=10, nranks=4, uid_hash=PARENT))
    comms = _comms(bench)
    assert [c["comm_rank"] for c in comms] == [0, 1, 2, 3]
    assert {c["hash"] for c in comms} == {f"{PARENT:016x}"}
    assert {c["instance"] for c in comms} == {0} and {c["nranks"] for c in comms} == {4}
    assert all(c["in_group"] and c["learnt"] == "init_all" for c in comms)
    bench.step(rec(comm_gen=12))
    assert bench.of_kind("call")[-1]["comm"] == 2


def test_several_ranks_of_one_process_are_one_instance(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.step(init(1, rank=0, tid=101), init(2, rank=1, tid=102))
    bench.step(_split(1, 3, child=1, tid=101), _split(2, 4, child=1, tid=102))
    comms = _comms(bench)
    assert [c["instance"] for c in comms] == [0, 0, 0, 0]
    assert comms[2]["hash"] == comms[3]["hash"]


def test_late_communicator_is_unknown_and_so_are_its_children(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.step(rec(comm_gen=5, call_idx=0, flags=FLAG_COMM_LATE), _split(5, 6, child=1))
    late, child = _comms(bench)
    assert late["learnt"] == "unknown" and late["hash"] is None
    assert child["parent"] == late["id"] and child["hash"] is None


def test_parent_seen_first_through_its_child_comes_first(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.step(_split(5, 6, child=1))
    kinds = [(x["kind"], x.get("id")) for x in bench.lines() if x["kind"] in ("comm", "call")]
    assert kinds[:2] == [("comm", 0), ("comm", 1)]


def test_call_before_the_record_of_its_init(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.step(rec(comm_gen=1, flags=FLAG_COMM_LATE), init(1, uid_hash=PARENT))
    assert [c["hash"] for c in bench.of_kind("comm")] == [None, f"{PARENT:016x}"]
    assert {c["id"] for c in bench.of_kind("comm")} == {0}


@pytest.mark.parametrize(
    "fields",
    [{"rc": 1}, {"rc": 5, "new_gen": 0}, {"flags": FLAG_NO_RETURN}, {"new_gen": 0, "new_comm": 0}],
)
def test_failed_init_makes_nothing(tmp_path: Path, fields: dict[str, Any]) -> None:
    bench = Bench(tmp_path)
    bench.step(init(1, **{"new_gen": 1, **fields}) if "new_gen" not in fields else rec(
        "ncclCommInitRank", peer=0, nranks=2, **fields
    ))  # fmt: skip
    assert _comms(bench) == []
    assert bench.of_kind("call")[0]["new_comm"] is None


def test_nonblocking_init_makes_one(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.step(init(1, rc=7, flags=FLAG_NONBLOCKING))
    assert len(_comms(bench)) == 1
    assert bench.of_kind("call")[0]["nonblocking"] is True


def test_names_before_and_after(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.step(init(1), name_record(1, "tp"), name_record(2, 'p"p\nü'), init(2, uid_hash=2))
    assert [c["name"] for c in _comms(bench)] == ["tp", 'p"p\nü']


def test_name_that_is_no_text(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    broken = name_record(1, "x")._replace(count=0xFF_FE_41)
    bench.step(init(1), broken)
    assert _comms(bench)[0]["name"].startswith("A")


def test_grow(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    fields = {"nranks": 4, "new_comm": 9, "uid_hash": 5}
    bench.step(init(1), rec("ncclCommGrow", comm_gen=1, new_gen=2, peer=-1, order_idx=1, **fields))
    bench.step(rec("ncclCommGrow", comm_gen=0, new_gen=3, peer=3, **fields))
    old, new = _comms(bench)[1:]
    assert old["learnt"] == new["learnt"] == "grow"
    assert (old["parent"], old["comm_rank"], old["nranks"]) == (0, None, 4)
    assert (new["parent"], new["comm_rank"], new["nranks"]) == (None, 3, 4)
    assert old["hash"] is None


def test_blind_calls_name_nobody(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.step(rec(comm_gen=3, flags=FLAG_BLIND), rec(comm_gen=3, flags=FLAG_BLIND))
    assert _comms(bench) == []
    assert [c["comm"] for c in bench.of_kind("call")] == [None, None]


def test_streams_are_small_ids(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.step(init(1), *(rec(comm_gen=1, stream=s) for s in (0x7F00, 0, 0x7F00, 0x9)))
    assert [c["stream"] for c in bench.of_kind("call")[1:]] == [0, 1, 0, 2]


def test_a_comm_in_use_outlives_its_abort(tmp_path: Path) -> None:
    """A watchdog aborts; the stuck call returns a minute later and still has its name."""
    bench = Bench(tmp_path)
    bench.step(init(1))
    stuck = rec(comm_gen=1, t_enter=bench.clock.now, t_exit=0)
    bench.source.inside = [stuck]
    bench.steps(1)
    bench.step(rec("ncclCommAbort", comm_gen=1, tid=101, t_enter=bench.clock.now))
    bench.steps(60, ms=100)
    bench.source.inside = []
    bench.step(stuck._replace(t_exit=bench.clock.now))
    assert len(_comms(bench)) == 1
    assert bench.of_kind("call")[-1]["comm"] == 0


def test_ids_are_not_used_again(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    for gen in range(1, 5):
        bench.step(init(gen, uid_hash=gen), rec("ncclCommDestroy", comm_gen=gen))
        bench.steps(12, ms=500)
    assert [c["id"] for c in bench.of_kind("comm")] == [0, 1, 2, 3]
    (process,) = bench.collector.processes
    assert len(process.ids.live) <= 1


# -- the rank


def _process(bench: Bench) -> dict[str, Any]:
    return bench.of_kind("process")[-1]


def test_rank_from_the_launcher_stays(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.procs.infos[100] = Info(ranks=Ranks(5, 16, 1, "torchrun", "job7"))
    bench.step(init(1, rank=0, nranks=8))
    line = _process(bench)
    assert (line["rank"], line["rank_source"], line["world_size"]) == (5, "torchrun", 16)
    assert line["job"] == "job7" and line["local_rank"] == 1
    assert bench.files()[0].name == "rank_5_pid_100.jsonl"


def test_rank_from_the_world_communicator(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.step(init(1, rank=0, nranks=1, uid_hash=1))
    assert _process(bench)["rank"] is None
    bench.step(init(2, rank=1, nranks=4, uid_hash=2))
    bench.step(init(3, rank=6, nranks=8, uid_hash=3))
    bench.step(init(4, rank=7, nranks=8, uid_hash=4))
    bench.step(_split(3, 5, child=1))
    line = _process(bench)
    assert (line["rank"], line["rank_source"], line["world_size"]) == (6, "world_communicator", 8)
    assert bench.files()[0].name == "rank_unknown_pid_100.jsonl"


def test_a_process_of_several_ranks_has_none(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.step(init(1, rank=0, tid=101), init(2, rank=1, tid=102))
    assert _process(bench)["rank"] is None
    assert _process(bench)["rank_source"] == "unknown"
    bench.step(rec("ncclCommInitAll", new_gen=5, new_comm=1, nranks=8, t_enter=T0 + MS))
    assert _process(bench)["rank"] is None


def test_libraries_are_listed_as_they_appear(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.step(init(1), rec(comm_gen=1, lib=2))
    assert [x["lib"] for x in _process(bench)["libs"]] == [0, 2]
    assert [k for k, _ in bench.messages].count("library") == 2
