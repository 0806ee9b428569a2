"""``nccluprobe preload``: run a command under the preload library, and collect for it."""

from __future__ import annotations

import contextlib
import os
import resource
import shlex
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from nccluprobe.capture import preload_env
from nccluprobe.cli.collect import PERIOD_S, command_for, make
from nccluprobe.cli.numbers import MAX_BYTES, MaxBytes, whole
from nccluprobe.cli.output import say
from nccluprobe.errors import ExitCode, NccluprobeError
from nccluprobe.plural import counted

if TYPE_CHECKING:
    from nccluprobe.capture.preload_source import PreloadSource
    from nccluprobe.collect.collector import Collector

#: Processes that outlive the command are followed this long.
_LINGER_S = 2.0
_SI_KERNEL = 0x80
_FORWARDED = {
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGTERM,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGALRM,
}
#: Python ignores these; a program starts with the default.
_RESTORED = (signal.SIGPIPE, signal.SIGXFSZ)


def preload(
    command: Annotated[
        list[str] | None, typer.Argument(metavar="CMD", help="The command, after `--`.")
    ] = None,
    out: Annotated[
        Path, typer.Option("--out", help="Folder for the traces (made when it is not there).")
    ] = Path("nccluprobe-out"),
    run_id: Annotated[
        str | None, typer.Option("--run-id", help="Label of the run. Default: the launcher's id.")
    ] = None,
    print_env: Annotated[
        bool,
        typer.Option("--print-env", help="Print the variables for launchers, and exit."),
    ] = False,
    directory: Annotated[
        Path | None,
        typer.Option("--dir", help="Folder for the rings. Default: one in /dev/shm."),
    ] = None,
    ring_kb: Annotated[
        int,
        typer.Option(
            "--ring-kb", parser=whole(64, 65536), metavar="KIB", help="Size of a thread's ring."
        ),
    ] = 1024,
    max_bytes: MaxBytes = MAX_BYTES,
    lib: Annotated[
        list[Path] | None,
        typer.Option("--lib", help="Look at this copy of NCCL before the command starts."),
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Say what is being traced.")] = False,
) -> int:
    """Run CMD with its NCCL calls traced, without root; its exit status is passed on."""
    library = preload_env.library()
    if directory is not None:
        directory = directory.absolute()  # the library takes no other, as programs go elsewhere
    if print_env:
        folder = directory if directory is not None else preload_env.default_folder()
        for name, value in preload_env.variables(library, folder, ring_kb, os.environ).items():
            print(f"export {name}={shlex.quote(value)}")
        return ExitCode.OK
    if not command:
        raise NccluprobeError("no command: nccluprobe preload [options] -- CMD...", ExitCode.USAGE)
    found = shutil.which(command[0])
    if found is None:
        exists = Path(command[0]).exists()
        say(f"{command[0]}: {'not executable' if exists else 'no such command'}")
        return 126 if exists else 127
    preload_env.refuse_unfit(Path(found))
    given = preload_env.run_folder() if directory is None else contextlib.nullcontext(directory)
    with given as folder:
        # SIGCHLD too: it ends the sleep between two steps.  Before numpy is imported,
        # as it starts threads, to which a signal would else be delivered.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED | {signal.SIGCHLD})
        from nccluprobe.capture.preload_library import prepare

        source, collector = make(
            folder, out, run_id=run_id, owner=None, keep=False, max_bytes=max_bytes,
            say=say if verbose else _only_problems,
        )  # fmt: skip
        for path in lib or ():
            if not prepare(folder, path):
                raise NccluprobeError(f"--lib {path}: not a copy of NCCL", ExitCode.NOT_NCCL)
        variables = preload_env.variables(library, folder, ring_kb, os.environ)
        status = _run(found, command, {**os.environ, **variables}, mask, source, collector, out)
    return _pass_on(status)


def _only_problems(text: str) -> None:
    if text.startswith("problem"):
        say(text)


def _run(
    program: str,
    command: list[str],
    environ: dict[str, str],
    mask: set[int | signal.Signals],
    source: PreloadSource,
    collector: Collector,
    out: Path,
) -> int:
    """The command from its start to its end; its wait status."""
    child = os.posix_spawn(program, command, environ, setsigmask=mask, setsigdef=_RESTORED)
    ended = threading.Event()
    forwarder = threading.Thread(target=_forward, args=(child, ended), daemon=True)
    forwarder.start()
    while True:
        collector.step()
        signal.sigtimedwait({signal.SIGCHLD}, PERIOD_S)
        # Left unreaped: the collector asks it how it ended.
        found = os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is not None:
            break
    ended.set()
    _finish(source, collector, out)
    _, status = os.waitpid(child, 0)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return status


def _forward(child: int, ended: threading.Event) -> None:
    """Passes signals on.  One from the terminal has reached the child already."""
    while not ended.is_set():
        got = signal.sigtimedwait(_FORWARDED, 0.2)
        if got is not None and got.si_code != _SI_KERNEL and not ended.is_set():
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, got.si_signo)


def _finish(source: PreloadSource, collector: Collector, out: Path) -> None:
    """Reads the rest; says so when processes of the job live on."""
    deadline = time.monotonic() + _LINGER_S
    source.look_again()
    while True:
        collector.step()
        if not source.unfinished() and not source.living():
            break
        if time.monotonic() > deadline:
            break
        time.sleep(PERIOD_S)
    from nccluprobe.cli.unwritten import say_unwritten

    left = source.living()
    collector.close()
    losses = source.losses()
    source.close()
    lost = sum(losses.overwritten.values()) + sum(losses.by_process.values())
    if lost:
        say(f"records lost or overwritten before they were read: {lost}; raise --ring-kb")
    if not collector.stats.traced:
        say(
            "no call that makes or uses a communicator was seen, so there is no trace: if one was "
            "made, LD_PRELOAD did not reach it (`nccluprobe doctor PID` says of a process)"
        )
    say_unwritten(collector.stats, say)
    if left:
        say(
            f"{counted(left, 'traced process', 'outlives')} the command; "
            f"`{command_for(source.folder, out)}` goes on with {'it' if left == 1 else 'them'}"
        )


def _pass_on(status: int) -> int:
    if not os.WIFSIGNALED(status):
        return os.waitstatus_to_exitcode(status)
    _die_by(os.WTERMSIG(status))


def _die_by(number: int) -> NoReturn:
    """End as the command did: by the same signal, without a core of our own."""
    sys.stdout.flush()
    sys.stderr.flush()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError, ValueError):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)
    time.sleep(1)
    os._exit(128 + number)
