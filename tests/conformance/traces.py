"""The trace that a collector would have written of a program that the model has run."""

from __future__ import annotations

from typing import Any

from support.tracegen import Comm, Host, Job, Proc

from conformance.model import Model, Seen
from conformance.program import OTHER, STOPPED, WORLD
from nccluprobe.nccl.api import Role

#: How long the tracers look on after the last thing has happened, seconds.
HORIZON = 14.0

HASHES = {WORLD: "00000000000000aa", OTHER: "00000000000000bb"}

#: What a main thread looks like from outside while its host is there.  A host
#: that waits for the device polls it.
_MAIN = {"nccl": "nccl", "cuda": "running", "run": "running", STOPPED: "stopped"}


def comm_hash(name: str) -> str:
    """The hash of a communicator of this name."""
    return HASHES.get(name) or f"{int.from_bytes(name.encode()[:7], 'big'):016x}"


def write(model: Model, horizon: float = HORIZON) -> Job:
    """Traces of all ranks, half of them on each of two nodes when there are many."""
    job = Job()
    last = max(seen.left or seen.at for h in model.hosts for seen in h.calls)
    end = max(last, model.now) + horizon
    nodes = [Host("node0"), Host("node1", skew=0.0003, err=400_000, mono=9_000_000_000_000)]
    for rank in range(model.program.size):
        node = nodes[rank >= 8 or (model.program.size >= 8 and rank % 2 == 1)]
        _rank(job.proc(rank, node), model, rank, end)
    return job


def _rank(proc: Proc, model: Model, rank: int, end: float) -> None:
    host = model.hosts[rank]
    comms = {
        name: proc.comm(comm_hash(name), members.index(rank), len(members))
        for name, members in model.program.comms.items()
        if rank in members
    }
    for seen in host.calls:
        _call(proc, seen, comms)
    gone = host.exit[0] if host.exit else end
    t, cpu = 0.5, 0
    while t < gone:
        where = host.state(t)
        main = _MAIN.get(where, "syscall")
        cpu += 1_000_000_000 if main in ("nccl", "running") else 0
        more: dict[str, Any] = {"syscall": where} if main == "syscall" else {}
        ages = [int((t - s.at) * 1e9) for s in host.calls if s.at <= t]
        age = ages[-1] if ages else None
        proc.coverage(t, main=main, last_call_age=age, cpu=cpu, **more)
        t += 1.0
    if host.exit is None:
        return
    at, how = host.exit
    proc.coverage(at, main="dead", alive=False)
    if how.signal is not None:
        proc.end(at + 1e-4, "signaled", None, how.signal)
    else:
        proc.end(at + 1e-4, "exited", how.code)


def _call(proc: Proc, seen: Seen, comms: dict[str, Comm]) -> None:
    args = dict(seen.call.args) if seen.call else {}
    if seen.call is not None and seen.call.api.has(Role.STREAM):
        args["stream"] = seen.call.stream
    if seen.group is not None:
        args |= {"group": seen.group, "gpos": seen.gpos}
    comm = comms[seen.comm] if seen.comm else None
    if seen.how is not None and comm is not None:
        proc.comm_end(comm, seen.at, seen.how)
    if seen.left is None:
        proc.enter(comm, seen.name, seen.at, **args)
    else:
        proc.call(comm, seen.name, seen.at, seen.left - seen.at, **args)
