"""The ``nccluprobe`` command: one thin module per sub-command, loaded when used."""

from __future__ import annotations

import functools
import importlib
import os
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperGroup

from nccluprobe import __version__
from nccluprobe.cli import output
from nccluprobe.errors import ExitCode, NccluprobeError, remedy

HELP = "Trace NVIDIA NCCL from outside and find the rank that never came."


class Command(NamedTuple):
    """A sub-command: where its function is, and a line of help that needs no import."""

    module: str
    function: str
    help: str


#: What typer raises for wrong usage; the name is its own, its one public kind derives from it.
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]


class OneLineGroup(TyperGroup):
    """Commands whose wrong usage is one line on standard error, as all their errors are."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        words = tuple(sys.argv[1:] if args is None else args)
        try:
            with self.make_context(prog_name, list(words or ("--help",)), **extra) as context:
                self.invoke(context)
            code: int = ExitCode.OK
        except typer.Exit as end:
            code = end.exit_code if words else ExitCode.USAGE
        except _UsageError as error:
            code = _say_usage(error)
        except OSError as error:  # of the help, say: commands catch theirs
            code = _unwritten(error)
        try:
            sys.stdout.flush()
        except OSError as error:
            code = code or _unwritten(error)
        sys.exit(int(code))


def _say_usage(error: Any) -> int:
    path = error.ctx.command_path if error.ctx else "nccluprobe"
    line = " ".join(error.format_message().split()).rstrip(".")
    output.say(f"{line} (see `{path} --help`)")
    return int(ExitCode.USAGE)


#: All sub-commands.  Adding one is adding a line.
COMMANDS: dict[str, Command] = {
    "analyze": Command(
        "nccluprobe.cli.analyze",
        "analyze",
        "Read traces and name the rank that broke a collective.",
    ),
    "attach": Command(
        "nccluprobe.cli.attach",
        "attach",
        "Trace the NCCL of running and coming processes by eBPF.",
    ),
    "doctor": Command(
        "nccluprobe.cli.doctor",
        "doctor",
        "Say what can be traced and read here, and why not.",
    ),
    "explain": Command(
        "nccluprobe.cli.explain",
        "explain",
        "Show the calls that a finding rests on, rank by rank.",
    ),
    "inspect": Command(
        "nccluprobe.cli.inspect",
        "inspect",
        "Read from running processes' memory which rank stands where, without probes.",
    ),
    "preload": Command(
        "nccluprobe.cli.preload",
        "preload",
        "Run a command with its NCCL traced by LD_PRELOAD, without root.",
    ),
    "collect": Command(
        "nccluprobe.cli.collect",
        "collect",
        "Write the traces of processes under the preload library.",
    ),
    "canary": Command(
        "nccluprobe.cli.canary",
        "canary",
        "Exercise NCCL between these GPUs: check results, time them, plant faults.",
    ),
    "build": Command(
        "nccluprobe.cli.build",
        "build",
        "Compile the native parts anew, in place.",
    ),
}


def guarded(function: Callable[..., Any]) -> Callable[..., None]:
    """A command whose errors are one line on stderr and an exit code."""

    @functools.wraps(function)
    def command(*args: Any, **kwargs: Any) -> None:
        try:
            code = function(*args, **kwargs)
        except NccluprobeError as error:
            output.say(str(error))
            code = error.code
        except KeyboardInterrupt:
            code = ExitCode.INTERRUPTED
        except OSError as error:
            code = _unwritten(error)
        raise typer.Exit(int(code) if isinstance(code, int) else 0)

    return command


def _unwritten(error: OSError) -> ExitCode:
    """Standard output could not be written; other errors are raised on."""
    if isinstance(error, BrokenPipeError):
        # The reader of our output went away, as ``| head`` does.
        output.drop()
        return ExitCode.OK
    if isinstance(error, PermissionError) and error.filename is not None:
        do = remedy("run it as its owner, or with sudo")
        output.say(f"{os.fsdecode(error.filename)}: {error.strerror}; {do}")
        return ExitCode.NOT_PERMITTED
    if error.errno not in output.FULL or error.filename is not None:
        raise error
    output.drop()
    output.say(f"the output cannot be written: {error.strerror}")
    return ExitCode.OUTPUT


def _stub() -> None:
    """Stands in the list of commands for one that is not being run."""


def _version(wanted: bool) -> None:
    if wanted:
        print(f"nccluprobe {__version__}")
        raise typer.Exit


def build(argv: Sequence[str]) -> typer.Typer:
    """The application; only the command that ``argv`` names is imported."""
    app = typer.Typer(
        name="nccluprobe",
        cls=OneLineGroup,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )

    @app.callback(help=HELP)
    def main(
        version: Annotated[
            bool,
            typer.Option(
                "--version", callback=_version, is_eager=True, help="Print the version and exit."
            ),
        ] = False,
    ) -> None: ...

    named = next((word for word in argv if not word.startswith("-")), None)
    for name, entry in COMMANDS.items():
        function: Callable[..., Any] = _stub
        if name == named:
            function = getattr(importlib.import_module(entry.module), entry.function)
        app.command(name=name, help=entry.help)(guarded(function))
    return app


def run(mask: Iterable[int] = ()) -> None:
    """Entry point of the command; ``mask``: the signals to block, after the imports."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    output.prepare()
    try:
        app = build(sys.argv[1:])
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        app(prog_name="nccluprobe")
    except KeyboardInterrupt:  # while the command was still being imported
        sys.exit(int(ExitCode.INTERRUPTED))


if __name__ == "__main__":
    run()
