"""Does the faults: what a rank does wrong, after it has told the truth about it."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections.abc import Sequence

from nccluprobe.canary import bootstrap
from nccluprobe.canary.backend import NcclBackend
from nccluprobe.canary.cases import REDUCTIONS, ROOTED, Case
from nccluprobe.canary.errors import ArgumentError, CanaryError
from nccluprobe.canary.faults import Fault, parse_all
from nccluprobe.canary.launch import job_name
from nccluprobe.canary.measure import cases_of
from nccluprobe.canary.settings import Settings
from nccluprobe.canary.truth import say, truth_of
from nccluprobe.nccl.commhash import init_hash, parse_version
from nccluprobe.nccl.enums import DATATYPE_BYTES

logger = logging.getLogger("nccluprobe.canary")

#: After these the job goes on.
_PASSING = frozenset({"late", "reconnect"})
#: Beyond what NCCL buffers, so that a send waits for its receive.
_SEND_BYTES = 1 << 20
_ABORTING = ("reconnect", "no_reconnect")
#: What shows on another communicator than the run's own.
_ELSEWHERE = frozenset({"order", "subset_split", "no_reconnect", "wrong_rank"})


def sleep_for_ever() -> None:
    """Until a signal ends the process."""
    while True:
        time.sleep(3600)


def target_of(fault: Fault, cases: Sequence[Case], world: int) -> int:
    """The case that the fault is planted into; ArgumentError when none fits."""
    for number, case in enumerate(cases):
        fits = case.op != "barrier" and not case.paired(world)
        if fault.target == "rooted":
            fits = case.op in ROOTED
        elif fault.target == "reduction":
            fits = fits and case.op in REDUCTIONS
        if fits or fault.target is None:
            return number
    what = "a single collective: --ops all_gather, or with two ranks --dtypes int32"
    if fault.target == "rooted":
        what = "an operation with a root: --ops broadcast or reduce"
    raise ArgumentError(f"--inject {fault.kind}: none of the operations fits; give {what}")


def check_plan(settings: Settings, world: int) -> tuple[Fault, ...]:
    """The faults of a run; ArgumentError for one that can never be planted.

    Also for a service that has nobody to serve.
    """
    if settings.serve and world < 2:
        raise ArgumentError("--serve needs two ranks: one that sends commands, one that waits")
    faults = parse_all(settings.inject, world)
    cases = cases_of(settings)
    for fault in faults:
        target_of(fault, cases, world)
        if settings.steps is not None and not settings.serve and fault.at >= settings.steps:
            raise ArgumentError(
                f"--inject {fault.kind}: at={fault.at}, but there are {settings.steps} steps"
            )
    return faults


def comm_hash(backend: NcclBackend) -> str | None:
    """The hash that NCCL's log and the traces name the communicator by."""
    version = parse_version(backend.nccl.version_text())
    if version is None or not backend.unique_id:
        return None
    return f"{init_hash(version, backend.unique_id):016x}"


class Planter:
    """The faults of one run, at one rank."""

    def __init__(
        self, faults: Sequence[Fault], backend: NcclBackend, settings: Settings, paired: bool
    ) -> None:
        """``paired``: whether a step begins with a send and a receive."""
        self.paired = paired
        self.faults = faults
        self.backend = backend
        self.settings = settings
        #: A second communicator over the same ranks, where a fault needs one.
        self.second: NcclBackend | None = None
        if any(f.kind == "order" for f in faults):
            self.second = backend.split(0, backend.rank)
            # The first call of a communicator would block: later ones only queue.
            assert self.second is not None
            self.second.barrier()

    # ---- a step -----------------------------------------------------------------------------

    def before(self, step: int) -> None:
        """What happens before the first operation of a step."""
        for fault in self.faults:
            if fault.at != step:
                continue
            if fault.kind == "order":
                self._order(fault)
            elif fault.kind == "subset_split":
                self._split(fault)
            elif fault.kind in _ABORTING:
                self._reconnect(fault)
            elif fault.rank == self.backend.rank:
                self._do(fault)

    def call(self, step: int, number: int, cases: Sequence[Case]) -> None:
        """The operation `number` of a step, as this rank makes it."""
        case = cases[number]
        for fault in self.faults:
            planted = fault.target is not None and fault.hits(self.backend.rank, step)
            if planted and target_of(fault, cases, self.backend.world) == number:
                self._tell(fault, case.api)
                self._call_wrongly(fault, case)
                return
        case.call()

    # ---- what each does ---------------------------------------------------------------------

    def _tell(self, fault: Fault, api: str | None = None) -> None:
        comm = None if fault.kind in _ELSEWHERE else comm_hash(self.backend)
        paired = self.paired and api is None
        tell(fault, self.backend.world, comm, api, self.settings, paired)

    def _do(self, fault: Fault) -> None:
        if fault.target is not None or fault.kind == "wrong_rank":
            return  # in call(), or at the start
        self._tell(fault)
        kind = fault.kind
        if kind == "never":
            sleep_for_ever()
        elif kind == "late":
            time.sleep(float(fault.values["s"]))
        elif kind == "exit":
            os._exit(int(fault.values["code"]))
        elif kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif kind == "busy":
            while True:
                pass
        elif kind == "abort":
            self.backend.abort()
            sleep_for_ever()
        elif kind == "unmatched_send":
            self._send(int(fault.values["peer"]))

    def _call_wrongly(self, fault: Fault, case: Case) -> None:
        if fault.kind == "api":
            case.call(op=self._another(case.op))
        elif fault.kind == "count":
            case.call(count=2 * case.count)
        elif fault.kind == "dtype":
            width = DATATYPE_BYTES[case.dtype]
            others = (d for d, w in DATATYPE_BYTES.items() if w == width and d != case.dtype)
            case.call(dtype=next(others))
        elif fault.kind == "op":
            case.call(redop="min" if case.redop == "max" else "max")
        elif fault.kind == "root":
            case.call(root=(case.root + 1) % self.backend.world)
        elif fault.kind == "extra":
            case.call()
            case.call()
        # skip: no call at all

    def _another(self, op: str) -> str:
        """A collective that the run does not make, if there is one: else it looks like a skip."""
        fit = [o for o in ("reduce", "broadcast", "all_reduce") if o != op]
        return next((o for o in fit if o not in self.settings.ops), fit[0])

    def _send(self, peer: int) -> None:
        b = self.backend
        buffer = b.alloc(_SEND_BYTES)
        buffer.fill(0)
        b.send(buffer, _SEND_BYTES, "uint8", peer)

    def _order(self, fault: Fault) -> None:
        """A collective of each communicator, waited for inside the driver before the other."""
        assert self.second is not None
        both = [self.backend, self.second]
        if fault.rank == self.backend.rank:
            self._tell(fault, "ncclAllReduce")
            both.reverse()
        for backend in both:
            buffer = backend.alloc(8)
            buffer.fill(0)
            backend.all_reduce(buffer, 1, "int64", "max")
            backend.cuda.stream_synchronize(backend.stream)
            buffer.free()

    def _split(self, fault: Fault) -> None:
        if fault.rank == self.backend.rank:
            self._tell(fault, "ncclCommSplit")
        else:
            self.backend.split(0, self.backend.rank)

    def _reconnect(self, fault: Fault) -> None:
        b = self.backend
        mine = fault.rank == b.rank
        if mine:
            self._tell(fault)
        # Who aborts may end what a slower rank still waits for.  Who is through this
        # barrier knows that all are through with the step; who is not may fail in it.
        with contextlib.suppress(CanaryError):
            b.barrier(b.deadline)
        b.abort()
        if mine and fault.kind == "no_reconnect":
            host, port = b.address
            bootstrap.exchange(b.rank, b.world, b.nccl.unique_id, (host, port + 1), job=job_name())
            sleep_for_ever()
        b.attempt_reconnect()


def tell(
    fault: Fault,
    world: int,
    comm: str | None,
    api: str | None,
    settings: Settings,
    paired: bool = False,
) -> None:
    """Writes the truth of a fault that this process is about to plant."""
    say(truth_of(fault, world, comm, api, paired), settings.truth)
    if settings.endless and fault.kind not in _PASSING:
        logger.warning(
            "%s is planted: if the job hangs now, it does so until Ctrl-C; --deadline SECONDS, "
            "or --hold SECONDS with --nproc, ends it",
            fault.kind,
        )
