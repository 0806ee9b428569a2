"""Freeing what the BPF program's maps hold of things that are gone.

The program frees threads and processes itself.  What belongs to an epoch (its
communicators, counters, tallies) stays until user space has read it.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

import numpy as np

from nccluprobe.capture import state
from nccluprobe.capture.sysbpf import Map

_U32 = struct.Struct("=I")


def _keys(table: Map, key_type: np.dtype) -> np.ndarray:
    found = [np.frombuffer(keys, key_type) for keys, _ in table.batches()]
    return np.concatenate(found) if found else np.empty(0, key_type)


def _values(table: Map, value_type: np.dtype) -> np.ndarray:
    found = [np.frombuffer(values, value_type) for _, values in table.batches()]
    return np.concatenate(found) if found else np.empty(0, value_type)


def forget(maps: Mapping[str, Map], pid: int, epoch: int) -> None:
    """Free all of one epoch, whose process is gone."""
    for name, key_type in (("comms", state.COMM_KEY), ("p2p", state.P2P_KEY)):
        keys = _keys(maps[name], key_type)
        maps[name].drop_all(keys[keys["epoch"] == epoch].tobytes())
    for keys_of, values in maps["threads"].batches():
        mine = np.frombuffer(values, state.THREAD)["epoch"] == epoch
        maps["threads"].drop_all(np.frombuffer(keys_of, "<u8")[mine].tobytes())
    proc = maps["procs"].get(_U32.pack(pid))
    if proc and state.PROC.unpack(proc)[0] == epoch:
        maps["procs"].drop(_U32.pack(pid))
    maps["tallies"].drop(_U32.pack(epoch))
    maps["denied"].drop(_U32.pack(epoch))


def sweep(maps: Mapping[str, Map]) -> None:
    """Free what nobody will ask for.

    That is: p2p counters of ended communicators, everything of denied
    processes that are gone, and of processes that were gone without a record.
    Each list is read before the list of what is alive: whatever is made
    meanwhile is in the second one.
    """
    p2p = _keys(maps["p2p"], state.P2P_KEY)
    comms = _keys(maps["comms"], state.COMM_KEY)
    denied = _keys(maps["denied"], np.dtype("<u4"))
    quiet = [
        np.frombuffer(keys, "<u4")[_is_quiet(np.frombuffer(values, state.TALLY))]
        for keys, values in maps["tallies"].batches()
    ]
    generations = _values(maps["comms"], state.COMM)["gen"]
    live = _values(maps["procs"], state.PROC_VALUE)["epoch"]

    maps["p2p"].drop_all(p2p[~np.isin(p2p["gen"], generations)].tobytes())
    unwanted = np.concatenate([denied, *quiet])
    gone = unwanted[~np.isin(unwanted, live)]
    maps["comms"].drop_all(comms[np.isin(comms["epoch"], gone)].tobytes())
    maps["p2p"].drop_all(p2p[np.isin(p2p["epoch"], gone)].tobytes())
    maps["tallies"].drop_all(gone.tobytes())
    maps["denied"].drop_all(denied[~np.isin(denied, live)].tobytes())


def _is_quiet(tallies: np.ndarray) -> np.ndarray:
    return np.asarray((tallies["captured"] | tallies["lost"] | tallies["blind"]) == 0)
