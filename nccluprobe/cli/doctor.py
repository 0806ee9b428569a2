"""``nccluprobe doctor``: what can be traced and read here, and why not."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from nccluprobe.cli.numbers import whole
from nccluprobe.errors import ExitCode, NccluprobeError


def doctor(
    pids: Annotated[
        list[int] | None,
        typer.Argument(parser=whole(1), metavar="PID", help="Processes to look at."),
    ] = None,
    pid_glob: Annotated[
        list[str] | None,
        typer.Option("--pid-glob", help="Look at matching processes too. May be repeated."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Check this machine and, with PIDs, those processes; nothing is attached."""
    if pid_glob and not all(pid_glob):
        raise NccluprobeError(
            "--pid-glob is empty, so no process would ever match; give a name", ExitCode.USAGE
        )
    # Imported late: --help must not need them.
    from nccluprobe.inspect import doctor_text
    from nccluprobe.inspect.host import look_at_host
    from nccluprobe.inspect.target import look_at_target, matching

    chosen = list(pids or ())
    found = list(matching(list(pid_glob or ())))
    for pid in found:
        if pid not in chosen:
            chosen.append(pid)
    host = look_at_host()
    targets = []
    for pid in chosen:
        try:
            targets.append(look_at_target(pid, host))
        except ProcessLookupError as err:
            raise NccluprobeError(f"there is no process {pid}", ExitCode.NO_PROCESS) from err
    report = {"host": host, "processes": targets}
    if as_json:
        print(json.dumps(report, indent=1))
    else:
        print("\n".join(doctor_text.render(host, targets)))
    if pid_glob and not found:
        raise NccluprobeError(
            f"no process that maps NCCL matches {' '.join(pid_glob)}; is the job running, and has "
            "it loaded NCCL? `attach --dry-run` counts what matches without NCCL, too",
            ExitCode.NO_PROCESS,
        )
