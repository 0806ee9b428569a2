"""One rank of the canary: backend, work, report, exit code."""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import typer

from nccluprobe.canary.backend import DEFAULT_BOOTSTRAP_TIMEOUT, NcclBackend
from nccluprobe.canary.faults import Fault
from nccluprobe.canary.launch import Launch, nccl_settings
from nccluprobe.canary.measure import Tick, cases_of, measure
from nccluprobe.canary.plant import check_plan, tell
from nccluprobe.canary.serve import serve
from nccluprobe.canary.settings import Settings
from nccluprobe.canary.steps import run_steps
from nccluprobe.canary.table import text, wrong
from nccluprobe.errors import ExitCode

#: The communicator's name, where NCCL keeps one (from 2.27 on): for analyze --idle-ok.
COMM_NAME = "nccluprobe-canary"
PARENT_VARIABLE = "NCCLUPROBE_CANARY_PARENT"
#: A backend must have a deadline; this one is none.
_NO_DEADLINE = 1e9
_MIN_CAPACITY = 1 << 20
_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """A rank that ``--nproc`` started never outlives it, also when it is killed."""
    parent = os.environ.get(PARENT_VARIABLE)
    if parent is not None:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if parent != str(os.getppid()):
            os._exit(ExitCode.CANARY_FAILED)  # it ended before this line


def run_rank(launch: Launch, settings: Settings, nccl: str | None, cuda: str | None) -> ExitCode:
    """This rank's part; rank 0 prints the report. Errors are CanaryError."""
    end_with_parent()
    lines = logging.StreamHandler(sys.stderr)
    lines.setFormatter(_Lines(launch.rank))
    logging.basicConfig(
        handlers=[lines], level=logging.INFO if settings.verbose else logging.WARNING
    )
    faults = check_plan(settings, launch.world)
    backend = _backend(launch, settings, faults, nccl, cuda)
    with backend, _progress(settings, launch.rank) as tick:
        if settings.serve:
            found = serve(backend, settings, faults, _print_json if settings.as_json else _print)
        elif settings.steps is not None:
            found = run_steps(backend, settings, faults, tick)
        else:
            found = measure(backend, settings, tick)
        found = _head(backend) | found
    if launch.rank == 0:
        _print_json(found) if settings.as_json else print(text(found), end="", flush=True)
    return ExitCode.CANARY_WRONG if wrong(found) else ExitCode.OK


class _Lines(logging.Formatter):
    """One line, that says which rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = f"rank {rank}"

    def format(self, record: logging.LogRecord) -> str:
        text = " ".join(record.getMessage().split())
        return f"nccluprobe: {text if text.startswith('rank ') else f'{self._rank}: {text}'}"


def _backend(
    launch: Launch,
    settings: Settings,
    faults: tuple[Fault, ...],
    nccl: str | None,
    cuda: str | None,
) -> NcclBackend:
    init_rank = None
    for fault in faults:
        if fault.kind == "wrong_rank" and fault.rank == launch.rank:
            tell(fault, launch.world, None, "ncclCommInitRankConfig", settings)
            init_rank = int(fault.values["as"])
    return NcclBackend(
        launch.rank,
        launch.world,
        address=launch.address,
        device=launch.local_rank,
        nccl=nccl,
        cuda=cuda,
        capacity=max(_MIN_CAPACITY, 2 * max(settings.sizes)),
        deadline=settings.deadline or _NO_DEADLINE,
        bootstrap_timeout=settings.patience or DEFAULT_BOOTSTRAP_TIMEOUT,
        comm_name=COMM_NAME,
        init_rank=init_rank,
    )


def _head(backend: NcclBackend) -> dict[str, Any]:
    return {
        "canary": 1,
        "nccl": backend.nccl.version_text(),
        "simulated": backend.simulated,
        "device": backend.cuda.device_name(),
        "settings": nccl_settings(),
        "world": backend.world,
    }


@contextlib.contextmanager
def _progress(settings: Settings, rank: int) -> Iterator[Tick]:
    """A bar on a terminal, of rank 0; nothing elsewhere."""
    if rank or settings.serve or not settings.progress or not sys.stderr.isatty():
        yield lambda _: None
        return
    total = settings.steps if settings.steps is not None else len(cases_of(settings))
    with typer.progressbar(length=total, label="canary", file=sys.stderr, width=0) as bar:

        def tick(what: str) -> None:
            bar.label = what
            bar.update(1)

        yield tick


def _print_json(found: dict[str, Any]) -> None:
    print(json.dumps(found), flush=True)


def _print(found: dict[str, Any]) -> None:
    print(f"request {found['request']}: {found['us']:.0f} us, {found['wrong']} wrong", flush=True)
