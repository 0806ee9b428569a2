"""Runs programs of the suite on the CPU stand-in, a process per rank, all at once.

    python runner.py SCRIPT LIBRARY FOLDER ID...

SCRIPT is the puppet's program, LIBRARY the stand-in.  Each program is a job of
its own, with the id as the launcher's label.  Says "started" when all have
their communicators.  The programs begin when the file FOLDER/go appears (no
rank ends before its tracer has met it), and are ended by FOLDER/done.
"""

from __future__ import annotations

import contextlib
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[n]) for n in (1, 2)]

from support.puppets import Puppet  # noqa: E402
from support.waiting import clean_env  # noqa: E402

from conformance.cases import by_id  # noqa: E402
from conformance.program import Call, End, Exit, Group, Program, Step, Stop, Sync  # noqa: E402
from nccluprobe.nccl.enums import DATATYPE_IDS, REDUCTION_OPS  # noqa: E402

_OPS = {name: number for number, name in REDUCTION_OPS.items()}
_NEVER = {"op": "hold", "path": "/nonexistent/never"}


def _call(c: Call) -> dict[str, Any]:
    args = dict(c.args)
    args["datatype"] = DATATYPE_IDS[args["datatype"]]
    if "op" in args:
        args["redop"] = _OPS[args.pop("op")]
    assert c.stream == 0, "the puppet has one stream"
    return {"op": "call", "fn": c.name, "comm": c.comm, **args}


def commands(step: Step) -> list[dict[str, Any]]:
    """A step as the puppet's commands."""
    if isinstance(step, Call):
        return [_call(step)]
    if isinstance(step, Group):
        end = [{"op": "call", "fn": "ncclGroupEnd"}] if step.ended else []
        return [{"op": "call", "fn": "ncclGroupStart"}, *map(_call, step.calls), *end]
    if isinstance(step, Sync):
        return [{"op": "sync"}]
    if isinstance(step, Stop):
        return [_NEVER]
    if isinstance(step, End):
        name = "ncclCommAbort" if step.how == "abort" else "ncclCommDestroy"
        return [{"op": "call", "fn": name, "comm": step.comm}]
    assert isinstance(step, Exit), f"the puppet cannot do {step}"
    if step.signal is not None:
        return [{"op": "kill", "signal": step.signal}]
    return [{"op": "exit", "code": step.code}]


def start(program: Program, job: str, script: Path, lib: Path, go: Path) -> list[Puppet]:
    """Processes that have initialised their communicators; the program comes with ``go``."""
    n = program.size
    env = {**clean_env(), "WORLD_SIZE": str(n), "TORCHELASTIC_RUN_ID": job}
    puppets = [Puppet(script, {**env, "RANK": str(r), "LOCAL_RANK": str(r)}) for r in range(n)]
    for p in puppets:
        p.load(lib)
    for name, members in program.comms.items():
        uid = puppets[members[0]].ask("uid")["uid"]
        for rank, member in enumerate(members):
            puppets[member].send(
                "init", comm=name, nranks=len(members), uid=uid, rank=rank, config="Config" in job
            )
        for member in members:
            assert puppets[member].reply()["rc"] == 0
    for p, steps in zip(puppets, program.ranks, strict=True):
        cmds = [c for step in steps for c in commands(step)]
        p.send("list", cmds=[{"op": "hold", "path": str(go)}, *cmds, _NEVER])
    return puppets


def main(script: Path, lib: Path, folder: Path, ids: list[str]) -> None:
    go, done = folder / "go", folder / "done"
    puppets: list[Puppet] = []
    try:
        with ThreadPoolExecutor(4) as pool:
            jobs = [pool.submit(start, by_id()[i].build(), i, script, lib, go) for i in ids]
            for job in jobs:
                puppets += job.result()
        print("started", flush=True)
        while not done.exists():
            time.sleep(0.05)
    finally:
        for p in puppets:
            with contextlib.suppress(OSError):
                p.process.kill()
        for p in puppets:
            p.process.wait()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
