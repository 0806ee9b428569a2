"""``nccluprobe inspect``: which rank stands where, read from the processes' memory."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from nccluprobe.cli.numbers import seconds as time_in
from nccluprobe.cli.numbers import whole
from nccluprobe.cli.output import say
from nccluprobe.errors import ExitCode, NccluprobeError, remedy
from nccluprobe.plural import counted

_MAX_FILE = 256 << 20


def inspect(
    pids: Annotated[
        list[int] | None,
        typer.Argument(parser=whole(1), metavar="PID", help="Processes to look at."),
    ] = None,
    pid_glob: Annotated[
        list[str] | None,
        typer.Option(
            "--pid-glob",
            help="Look at processes that map NCCL and whose name, executable or script matches; "
            "a word without wildcards is a prefix. May be repeated.",
        ),
    ] = None,
    saved: Annotated[
        list[Path] | None,
        typer.Option(
            "--from",
            help="Put in what --json wrote, a file or a folder of them, of this or other nodes. "
            "May be repeated.",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON line per process, for other tools.")
    ] = False,
    seconds: Annotated[
        float,
        typer.Option(
            "--seconds",
            parser=time_in(0.05),
            metavar="SECONDS",
            help="Bound of the search per process.",
        ),
    ] = 3.0,
    max_mb: Annotated[
        int,
        typer.Option(
            "--max-mb",
            parser=whole(1, 1 << 30),
            metavar="MIB",
            help="Bound of memory searched per process.",
        ),
    ] = 16384,
) -> None:
    """Find all communicators of processes in their memory and say which ranks are behind.

    No probe and no wait; the processes are neither stopped nor changed.
    """
    if not pids and not pid_glob and not saved:
        raise NccluprobeError(
            "nothing to look at: give PIDs, --pid-glob PATTERN or --from FILE", ExitCode.USAGE
        )
    # Imported late: --help must not need them.
    from nccluprobe.inspect.search import Budget

    lines = [line for path in saved or () for line in read_saved(path)]
    fresh = look(list(pids or ()), list(pid_glob or ()), Budget(max_mb << 20, seconds))
    if as_json:
        for line in fresh:
            print(json.dumps(line, separators=(",", ":")))
        return
    show(fresh, lines + fresh)


def look(pids: list[int], globs: list[str], budget: Any) -> list[dict[str, Any]]:
    """``inspect`` lines of live processes."""
    from nccluprobe.capture.processes import glance
    from nccluprobe.inspect.process import Inspector

    inspector = Inspector(budget)
    looked = []
    for pid in pids:
        if glance(pid) is None:
            raise NccluprobeError(f"there is no process {pid}", ExitCode.NO_PROCESS)
        try:
            looked.append(inspector.look(pid))
        except PermissionError as err:
            raise NccluprobeError(
                f"the memory of process {pid} may not be read (CAP_SYS_PTRACE is needed): "
                + remedy(),
                ExitCode.NOT_PERMITTED,
            ) from err
        except OSError as err:
            raise NccluprobeError(
                f"process {pid} cannot be looked at, it may have ended: {err.strerror}",
                ExitCode.NO_PROCESS,
            ) from err
    refused = 0
    for pid in _matching(globs, set(pids)):
        try:
            if inspector.maps_nccl(pid):
                looked.append(inspector.look(pid))
        except PermissionError:
            refused += 1
        except OSError:
            continue  # ended in between
    if refused:
        say(f"{counted(refused, 'matching process')} may not be read: {remedy()}")
    inspector.finish()
    if globs and not looked:
        raise NccluprobeError(
            f"no process that maps NCCL matches {' '.join(globs)}", ExitCode.NO_PROCESS
        )
    return [one.line() for one in looked]


def _matching(globs: list[str], known: set[int]) -> Iterator[int]:
    from nccluprobe.capture.processes import ProcessMatcher, glance, is_running

    if not globs:
        return
    matcher = ProcessMatcher(globs)
    for pid in sorted(int(name) for name in os.listdir("/proc") if name.isdigit()):  # noqa: PTH208
        seen = glance(pid)
        if pid not in known and seen is not None and is_running(seen) and matcher.matches(seen):
            yield pid


def read_saved(path: Path) -> list[dict[str, Any]]:
    """``inspect`` lines of a file, or of all files of a folder; the last one of a process."""
    from nccluprobe.importers.common import read_whole

    many = path.is_dir()
    files = sorted(p for p in path.rglob("*") if p.is_file()) if many else [path]
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for file in files:
        try:
            text = read_whole(str(file), _MAX_FILE)[0].decode("utf-8", "replace")
        except OSError as err:
            raise NccluprobeError(f"{file}: {err.strerror}", ExitCode.NO_TRACE) from err
        except ValueError as err:  # too large, or a pipe or device, which may never end
            if many:
                continue
            raise NccluprobeError(f"{file}: {err}", ExitCode.NO_TRACE) from err
        for raw in text.splitlines():
            line = _parse(raw)
            if line is not None:
                found[line["host"], line["boot_id"], line["pid"], line["start"]] = line
    if not found:
        raise NccluprobeError(f"{path}: nothing that inspect --json wrote", ExitCode.NO_TRACE)
    return list(found.values())


def _parse(raw: str) -> dict[str, Any] | None:
    from nccluprobe.inspect.lines import sound

    if '"kind":"inspect"' not in raw:
        return None
    try:
        line = json.loads(raw)
    except ValueError:
        return None
    return line if sound(line) else None


def show(fresh: list[dict[str, Any]], every: list[dict[str, Any]]) -> None:
    """For people: each process looked at, then the communicators over all of them."""
    from nccluprobe.inspect import text
    from nccluprobe.inspect.groups import groups

    for line in fresh:
        print("\n".join(map(text.escape, text.process(line))))
    found = groups(every)
    if found and fresh:
        print()
    for group in found:
        print("\n".join(map(text.escape, text.group(group))))
