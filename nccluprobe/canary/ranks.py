"""``--nproc``: local ranks as processes of their own, watched, ended, named when they die."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from nccluprobe import resources
from nccluprobe.canary.errors import CanaryError
from nccluprobe.canary.launch import ADDRESS_VARIABLE
from nccluprobe.canary.run import PARENT_VARIABLE
from nccluprobe.errors import ExitCode

_POLL_S = 0.02
#: From being asked to end until being killed.
_PATIENCE_S = 3.0
#: Below the range that the kernel takes the ports of clients from.
_FIRST_PORT, _PORTS = 20000, 12000
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def free_port() -> int:
    """A port that is free, and the next one too: a reconnect takes that."""
    start = os.getpid() * 2 % _PORTS
    for step in range(0, _PORTS, 2):
        port = _FIRST_PORT + (start + step) % _PORTS
        with contextlib.suppress(OSError), socket.socket() as a, socket.socket() as b:
            a.bind(("127.0.0.1", port))
            b.bind(("127.0.0.1", port + 1))
            return port
    raise CanaryError("no free port on 127.0.0.1; give --rank, --world and --address")


def command_of_ranks(arguments: Sequence[str]) -> list[str]:
    """This program again, as it was started."""
    program = Path(sys.argv[0])
    if program.is_relative_to(resources.PACKAGE) or not program.is_file():
        return [sys.executable, "-m", "nccluprobe", *arguments]
    return [sys.executable, str(program), *arguments]


class Ranks:
    """The local ranks of one job."""

    def __init__(self, world: int, arguments: Sequence[str]) -> None:
        self.world = world
        self.arguments = arguments
        self.processes: list[subprocess.Popen[bytes]] = []
        self.codes: dict[int, int] = {}
        self.run_id = os.environ.get("TORCHELASTIC_RUN_ID") or f"canary-{os.getpid()}"
        self._asked: list[int] = []
        self._ending = False

    # ---- life -------------------------------------------------------------------------------

    def run(self, hold: float | None, grace: float | None) -> int:
        """Starts all ranks and waits for them; the worst exit status.

        hold: seconds after which ranks that still run are ended.
        grace: seconds that the others get when one has failed; None: no end.
        """
        for number in _PASSED_ON:
            signal.signal(number, self._on_signal)
        held = False
        try:
            self._start()
            held = self._watch(hold, grace)
        finally:
            self._end()
        if self._asked:
            return 128 + self._asked[0]
        worst = max((_status(code) for code in self.codes.values()), default=0)
        return max(worst, int(ExitCode.CANARY_HELD)) if held else worst

    def _start(self) -> None:
        command = command_of_ranks(self.arguments)
        shared = {
            **os.environ,
            "WORLD_SIZE": str(self.world),
            "LOCAL_WORLD_SIZE": str(self.world),
            "TORCHELASTIC_RUN_ID": self.run_id,
            PARENT_VARIABLE: str(os.getpid()),
            ADDRESS_VARIABLE: f"127.0.0.1:{free_port()}",
        }
        # A terminal's Ctrl-C goes to every process: the ranks leave it to this one, so that
        # none ends with a traceback while Python starts.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            for rank in range(self.world):
                self.processes.append(
                    subprocess.Popen(
                        command,
                        env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                        stdin=None if rank == 0 else subprocess.DEVNULL,
                    )
                )
        except OSError as error:
            raise CanaryError(
                f"rank {len(self.processes)} cannot be started: {error.strerror}; "
                f"are {self.world} processes too many here?"
            ) from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _watch(self, hold: float | None, grace: float | None) -> bool:
        """Until all have ended, a signal came or time is up; whether --hold ended them."""
        end = None if hold is None else time.monotonic() + hold
        give_up: float | None = None
        while len(self.codes) < self.world and not self._asked:
            if self._collect() and grace is not None and give_up is None:
                give_up = time.monotonic() + grace
            now = time.monotonic()
            if end is not None and now > end:
                self._say(f"--hold {hold:g} s is over: {self._running()} still here")
                return True
            if give_up is not None and now > give_up:
                self._say(f"ended {grace:g} s later, still here: {self._running()}")
                return False
            time.sleep(_POLL_S)
        return False

    def _collect(self) -> bool:
        """Notes ranks that have ended, names those that failed; whether one did."""
        failed = False
        for rank, process in enumerate(self.processes):
            code = process.poll()
            if code is None or rank in self.codes:
                continue
            self.codes[rank] = code
            if code and not self._ending:
                failed = True
                how = f"was ended by {_signal_name(-code)}" if code < 0 else f"ended with {code}"
                self._say(f"rank {rank} (pid {process.pid}) {how}")
        return failed

    def _end(self) -> None:
        self._ending = True
        left = [p for p in self.processes if p.poll() is None]
        for process in left:
            process.send_signal(signal.SIGTERM)
            process.send_signal(signal.SIGCONT)  # one that is stopped could not end
        deadline = time.monotonic() + _PATIENCE_S
        for process in left:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    # ---- small things -----------------------------------------------------------------------

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._asked.append(number)

    def _running(self) -> str:
        ranks = [str(rank) for rank in range(self.world) if rank not in self.codes]
        return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}"

    @staticmethod
    def _say(message: str) -> None:
        print(f"nccluprobe: canary: {message}", file=sys.stderr, flush=True)


def _status(code: int) -> int:
    return code if code >= 0 else 128 - code


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
