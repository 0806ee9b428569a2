"""The published incidents, varied: other ranks are at fault, hosts stand elsewhere, a restart.

Ranks of one pipeline stage run one program, so what one of them left may stand for what
another one would have left: the verdict must follow.
"""

from __future__ import annotations

import copy
import json
import pickle
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

Dump = dict[str, Any]
#: By global rank.
Dumps = dict[int, Dump]

_P2P = re.compile(r"nccl:(send|recv) (\d+)(->|<-)(\d+)")


def load(folder: Path) -> Dumps:
    """The dumps of an incident."""
    paths = folder.glob("_dump_*")
    return {int(p.name.removeprefix("_dump_")): pickle.loads(p.read_bytes()) for p in paths}


def write(dumps: Mapping[int, Dump], folder: Path) -> Path:
    """Dumps as files."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank, dump in dumps.items():
        (folder / f"_dump_{rank}").write_bytes(pickle.dumps(dump, 2))
    return folder


def _groups(dumps: Dumps) -> dict[str, tuple[str, list[int]]]:
    """Name -> (description, global ranks)."""
    found = {}
    for dump in dumps.values():
        for g in dump["pg_config"].values():
            found[g["name"]] = (g["desc"], json.loads(g["ranks"]))
    return found


def _rename(entry: Dump, place: Callable[[int], int]) -> None:
    if told := _P2P.match(entry["profiling_name"]):
        kind, me, arrow, peer = told.groups()
        entry["profiling_name"] = f"nccl:{kind} {place(int(me))}{arrow}{place(int(peer))}"


def relabelled(dumps: Dumps, new: Mapping[int, int]) -> Dumps:
    """The same incident with other global ranks.  ``new``: by the rank that it was."""
    groups = _groups(dumps)
    members = {n: sorted(new[r] for r in ranks) for n, (_, ranks) in groups.items()}
    found = {}
    for rank, dump in dumps.items():
        dump = found[new[rank]] = copy.deepcopy(dump)
        for g in dump["pg_config"].values():
            g["ranks"] = str(members[g["name"]])
        for e in dump["entries"]:
            name = e["process_group"][0]
            was, now = groups[name][1], members[name]
            _rename(e, lambda x, was=was, now=now: now.index(new[was[x]]))  # type: ignore[misc]
    return found


def in_place_of(dumps: Dumps, source: int, rank: int) -> Dump:
    """What ``rank`` would have left had it fared as ``source``, of the same stage, did."""
    groups = _groups(dumps)
    dump = copy.deepcopy(dumps[source])
    mine: dict[str, str] = {}
    for g in dump["pg_config"].values():
        alike = {n for n, (desc, ranks) in groups.items() if desc == g["desc"] and rank in ranks}
        alike = {n for n in alike if len(groups[n][1]) == len(groups[g["name"]][1])}
        mine[g["name"]] = g["name"] if g["name"] in alike else alike.pop()
    dump["pg_config"] = copy.deepcopy(dumps[rank]["pg_config"])
    for e in dump["entries"]:
        name, desc = e["process_group"]
        e["process_group"] = (mine[name], desc)
        if mine[name] == name:  # in a group of all, its place in it is another one
            all_ = groups[name][1]
            _rename(e, lambda x, all_=all_: all_.index(all_[x] - source + rank))  # type: ignore[misc]
    return dump


def with_culprits(
    dumps: Dumps, stage: Iterable[int], culprits: set[int], of: Callable[[int, bool], int]
) -> Dumps:
    """The incident with these culprits in a stage.

    ``of(rank, is_culprit)``: the rank of the stage whose dump shows how it fared.
    """
    return dumps | {r: in_place_of(dumps, of(r, r in culprits), r) for r in stage}


def after_restart(dumps: Dumps, before: Dumps, seconds: float, names: int = 0) -> Dumps:
    """The incident in processes that another one had restarted so long before.

    ``names``: the names of groups go on with this number; 0: they begin anew.
    """
    found = {}
    for rank, dump in dumps.items():
        dump, old = copy.deepcopy(dump), copy.deepcopy(before[rank])
        ids = 1 + max(map(int, dump["pg_status"]))
        for e in dump["entries"]:
            e["pg_id"] += ids
            e["record_id"] += 1_000_000
            name, desc = e["process_group"]
            e["process_group"] = (str(int(name) + names), desc)
        now = [g | {"name": str(int(g["name"]) + names)} for g in dump["pg_config"].values()]
        dump["pg_config"] = old["pg_config"] | {g["name"]: g for g in now}
        for e in old["entries"]:
            e["time_created_ns"] -= int(seconds * 1e9)
        status = {str(int(i) + ids): s for i, s in dump["pg_status"].items()}
        dump["entries"] = old["entries"] + dump["entries"]
        dump["pg_status"] = {**old["pg_status"], **status}
        found[rank] = dump
    return found
