"""``nccluprobe attach``: trace the NCCL of running and coming processes by eBPF."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from nccluprobe.cli.numbers import MAX_BYTES, MaxBytes, seconds, whole
from nccluprobe.cli.output import say
from nccluprobe.errors import ExitCode, NccluprobeError

#: The ring is drained this often: no wake-up per event, so the traced job never
#: pays an interrupt for us (measured: 14.7 us a call with wake-ups, 1.1 without).
DRAIN_PERIOD_S = 0.008
#: New processes and mappings are looked for this often: a program may call NCCL
#: milliseconds after mapping it.
DISCOVER_PERIOD_S = 0.008
#: And so often whether all processes of --pid have ended.
_LOOK_S = 0.5


def attach(
    pid_glob: Annotated[
        list[str] | None,
        typer.Option(
            "--pid-glob",
            help="Trace processes whose name, executable or script matches; a word "
            "without wildcards is a prefix. May be repeated.",
        ),
    ] = None,
    pid: Annotated[
        list[int] | None,
        typer.Option(
            "--pid",
            parser=whole(1),
            metavar="PID",
            help="Trace this process, until it ends. May be repeated.",
        ),
    ] = None,
    lib: Annotated[
        list[Path] | None,
        typer.Option("--lib", help="Probe this copy of NCCL too, mapped or not yet."),
    ] = None,
    out: Annotated[
        Path, typer.Option("--out", help="Folder for the traces (made when it is not there).")
    ] = Path("nccluprobe-out"),
    run_id: Annotated[
        str | None, typer.Option("--run-id", help="Label of the run. Default: the launcher's id.")
    ] = None,
    owner: Annotated[
        str | None,
        typer.Option(
            "--owner", help="USER[:GROUP] that gets the files. Default: the traced process's user."
        ),
    ] = None,
    duration: Annotated[
        float | None,
        typer.Option(
            "--duration", parser=seconds(), metavar="SECONDS", help="Stop after this long."
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be attached, and exit.")
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="With --dry-run: name every function.")
    ] = False,
    exit_if_none: Annotated[
        bool, typer.Option("--exit-if-none", help="Do not wait when no process matches.")
    ] = False,
    no_exit: Annotated[
        bool, typer.Option("--no-exit", help="Probe entries only: cheaper, and full native stacks.")
    ] = False,
    link: Annotated[
        str, typer.Option("--link", help="Kind of kernel link: auto, multi or perf.")
    ] = "auto",
    ring_mb: Annotated[
        int,
        typer.Option(
            "--ring-mb", parser=whole(1, 1024), metavar="MIB", help="Size of the event ring."
        ),
    ] = 32,
    max_bytes: MaxBytes = MAX_BYTES,
    debug: Annotated[bool, typer.Option("--debug", hidden=True)] = False,
) -> None:
    """Put probes on the NCCL functions of matching processes and write their traces."""
    if not pid_glob and not pid and not lib:
        raise NccluprobeError(
            "nothing to attach to: give --pid-glob PATTERN, --pid PID or --lib FILE",
            ExitCode.USAGE,
        )
    if pid_glob and not all(pid_glob):
        raise NccluprobeError(
            "--pid-glob is empty, so no process would ever match; give a name", ExitCode.USAGE
        )
    if link not in ("auto", "multi", "perf"):
        raise NccluprobeError(f"--link is auto, multi or perf, not {link!r}", ExitCode.USAGE)

    # Imported late: --help and usage errors must not need BCC.
    from nccluprobe.cli.session import Session, SessionConfig

    session = Session(
        SessionConfig(
            pid_globs=tuple(pid_glob or ()),
            pids=tuple(pid or ()),
            libs=tuple(lib or ()),
            out=out,
            run_id=run_id,
            owner=owner,
            exits=not no_exit,
            link=link,
            ring_bytes=ring_mb << 20,
            max_bytes=max_bytes,
            debug=debug,
        ),
        say=say,
    )
    if dry_run:
        session.dry_run(exit_if_none, verbose)
        return
    stop = _Stop()
    session.start(exit_if_none=exit_if_none)
    say("ready: probes are on; Ctrl-C ends")
    deadline = None if duration is None else time.monotonic() + duration
    next_discovery = next_look = 0.0
    while not stop.asked:
        now = time.monotonic()
        if deadline is not None and now >= deadline:
            break
        if now >= next_look:
            if session.over():
                break
            next_look = now + _LOOK_S
        if now >= next_discovery:
            session.discover()
            next_discovery = now + DISCOVER_PERIOD_S
        session.drain()
        stop.wait(DRAIN_PERIOD_S)
    session.stop()


class _Stop:
    """First signal: end in order. Second: leave at once (the kernel removes the probes)."""

    def __init__(self) -> None:
        self.asked = False
        self._event = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            os._exit(ExitCode.INTERRUPTED)
        self.asked = True
        self._event.set()

    def wait(self, seconds: float) -> None:
        self._event.wait(seconds)
