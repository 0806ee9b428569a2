"""``nccluprobe collect``: the collector for processes under the preload library."""

from __future__ import annotations

import os
import shlex
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from nccluprobe.cli.numbers import MAX_BYTES, MaxBytes
from nccluprobe.cli.output import say
from nccluprobe.errors import ExitCode, NccluprobeError, remedy
from nccluprobe.plural import counted, verb

if TYPE_CHECKING:
    from nccluprobe.capture.preload_source import PreloadSource
    from nccluprobe.collect.admission import Stats
    from nccluprobe.collect.collector import Collector

#: As in attach: nothing wakes the collector.
PERIOD_S = 0.008
#: Rings of dead processes are read within this, of however many.
_ONCE_S = 120.0
_SETTLED_S = 1.0
RINGS = ".ring"


def collect(
    folder: Annotated[
        Path | None,
        typer.Argument(
            metavar="DIR", help="Folder of the rings. Default: this user's.", readable=False
        ),
    ] = None,
    once: Annotated[
        bool,
        typer.Option("--once", help="Read what is there, also of dead processes, and exit."),
    ] = False,
    out: Annotated[
        Path, typer.Option("--out", help="Folder for the traces (made when it is not there).")
    ] = Path("nccluprobe-out"),
    run_id: Annotated[
        str | None, typer.Option("--run-id", help="Label of the run. Default: the launcher's id.")
    ] = None,
    owner: Annotated[
        str | None, typer.Option("--owner", help="USER[:GROUP] that gets the files (root only).")
    ] = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="Leave the rings of dead processes where they are.")
    ] = False,
    max_bytes: MaxBytes = MAX_BYTES,
) -> None:
    """Write the traces of processes that run under `nccluprobe preload --print-env`."""
    from nccluprobe.capture import preload_env
    from nccluprobe.cli.unwritten import refuse_unclosed
    from nccluprobe.collect.safedir import check_out

    check_out(out)
    where = folder if folder is not None else preload_env.default_folder()
    found: list[Stats] = []
    for one in _left(where) if once and folder is None else [where]:
        found.append(
            _collect(one, out, once, run_id=run_id, owner=owner, keep=keep, max_bytes=max_bytes)
        )
        if one != where:
            preload_env.tidy(one)
    refuse_unclosed(found)


def _collect(
    where: Path,
    out: Path,
    once: bool,
    *,
    run_id: str | None,
    owner: str | None,
    keep: bool,
    max_bytes: int,
) -> Stats:
    if once:
        _refuse_nothing(where)
    elif where.is_dir() and not os.access(where, os.R_OK | os.X_OK, effective_ids=True):
        raise NccluprobeError(
            f"{where} cannot be read: "
            + remedy("the records belong to who runs the job, others need sudo"),
            ExitCode.NOT_PERMITTED,
        )
    source, collector = make(
        where, out, run_id=run_id, owner=owner, keep=keep, max_bytes=max_bytes, say=say
    )
    if once:
        drain_once(source, collector)
    else:
        stop = threading.Event()

        def on_signal(number: int, frame: FrameType | None) -> None:
            stop.set()

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, on_signal)
        say(f"ready: reading {where}; Ctrl-C ends")
        while not stop.is_set():
            collector.step()
            stop.wait(PERIOD_S)
    from nccluprobe.cli.unwritten import say_unwritten

    left = source.living()
    collector.close()
    losses = source.losses()
    source.close()
    where_to = f"traces are in {out}" if collector.stats.traced else "no call was seen: no trace"
    say(
        f"{where_to}; records overwritten unread: {sum(losses.overwritten.values())}, "
        f"lost: {sum(losses.by_process.values())}"
    )
    if left:
        say(
            f"{counted(left, 'process')} of the job still {verb(left, 'runs')}: "
            f"`{command_for(source.folder, out)}` stays with "
            f"{'it' if left == 1 else 'them'}"
        )
    say_unwritten(collector.stats, say)
    return collector.stats


def command_for(folder: str, out: Path) -> str:
    """What goes on with the processes of a folder, into the same traces."""
    return shlex.join(["nccluprobe", "collect", folder, "--out", str(out.absolute())])


def _left(common: Path) -> list[Path]:
    """Folders with records of this user that no ``preload`` reads, at least one."""
    from nccluprobe.capture import preload_env

    single = [p for p in preload_env.private_folders() if _has_rings(p)]
    left = [p for p in single if preload_env.hold(p) is not None]
    return [common, *left] if not left or _has_rings(common) else left


def _has_rings(folder: Path) -> bool:
    try:
        return any(entry.name.endswith(RINGS) for entry in folder.iterdir())
    except OSError:
        return False


def _refuse_nothing(folder: Path) -> None:
    """One line where there is nothing to read, as in a wrong folder."""
    hint = "give the folder that `nccluprobe preload --print-env` names (NCCLUPROBE_PRELOAD_DIR)"
    try:
        names = [entry.name for entry in folder.iterdir()]
    except OSError as error:
        why = "no such folder" if isinstance(error, FileNotFoundError) else error.strerror
        raise NccluprobeError(f"{folder}: {why}; {hint}", ExitCode.NO_TRACE) from error
    if not any(name.endswith(RINGS) for name in names):
        raise NccluprobeError(
            f"{folder}: no process has left records there; {hint}", ExitCode.NO_TRACE
        )


def make(
    folder: Path,
    out: Path,
    *,
    run_id: str | None,
    owner: str | None,
    keep: bool,
    max_bytes: int,
    say: Callable[[str], None],
) -> tuple[PreloadSource, Collector]:
    """The front and its collector."""
    from nccluprobe.capture.preload_processes import RecordedProcs
    from nccluprobe.capture.preload_source import PreloadSource
    from nccluprobe.collect.collector import Collector
    from nccluprobe.collect.exits import ExitWatcher
    from nccluprobe.collect.safedir import parse_owner
    from nccluprobe.collect.writer import Limits

    source = PreloadSource(folder, keep=keep, say=say)
    collector = Collector(
        source,
        out,
        wanted=lambda pid: True,
        watcher=ExitWatcher(),
        procs=RecordedProcs(source),
        run_id=run_id,
        owner=parse_owner(owner) if owner else None,
        limits=Limits(max_bytes=max_bytes),
        notify=lambda kind, text: say(f"{kind} {text}"),
    )
    return source, collector


def drain_once(source: PreloadSource, collector: Collector) -> None:
    """Until everything is read and no dead process's trace is open."""
    began = time.monotonic()
    while time.monotonic() - began < _ONCE_S:
        collector.step()
        time.sleep(PERIOD_S)
        settled = time.monotonic() - began > _SETTLED_S
        if settled and not source.unfinished():
            return
