"""Errors that a user sees, and the exit codes that a script sees.

Each command catches ``NccluprobeError`` once, prints its one line (what, why,
what to do) and exits with its code.  docs/exit-codes.md is generated from
``EXIT_CODES``.
"""

from __future__ import annotations

import os
from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of all commands; a number never changes its meaning."""

    OK = 0
    INTERNAL = 1
    USAGE = 2
    NOT_PERMITTED = 3
    BPF_REFUSED = 4
    NO_BCC = 5
    NO_PROCESS = 6
    NOT_NCCL = 7
    OUTPUT = 8
    FINDINGS = 10
    NOTICES = 11
    NO_TRACE = 12
    CANARY_WRONG = 20
    CANARY_FAILED = 21
    CANARY_HELD = 22
    INTERRUPTED = 130


EXIT_CODES: dict[ExitCode, str] = {
    ExitCode.OK: "done; analyze: no finding",
    ExitCode.INTERNAL: "a fault of nccluprobe itself: please report it",
    ExitCode.USAGE: "an option or argument is wrong",
    ExitCode.NOT_PERMITTED: "a privilege is missing (attach needs root or capabilities), or a "
    "folder is another user's",
    ExitCode.BPF_REFUSED: "the kernel refused the BPF program, a map or a probe",
    ExitCode.NO_BCC: "the BPF Compiler Collection's Python module is not installed",
    ExitCode.NO_PROCESS: "attach --exit-if-none or --pid, doctor, inspect: no such process",
    ExitCode.NOT_NCCL: "the file given with --lib is not there, or not a copy of NCCL",
    ExitCode.OUTPUT: "the output folder or standard output cannot be written; analyze shows its "
    "verdict first, and exits with 10 where that holds an error; attach and collect: a trace could "
    "not be closed, so that it does not tell what it lacks",
    ExitCode.FINDINGS: "analyze: at least one finding of severity error",
    ExitCode.NOTICES: "analyze: findings, all of severity notice",
    ExitCode.NO_TRACE: "analyze, explain, collect --once: nothing to read in what was given",
    ExitCode.CANARY_WRONG: "canary: a rank got a wrong result",
    ExitCode.CANARY_FAILED: "canary: NCCL, driver, bootstrap or a deadline failed on a rank",
    ExitCode.CANARY_HELD: "canary --nproc: --hold ended ranks that still ran",
    ExitCode.INTERRUPTED: "ended by Ctrl-C: by the first one where nothing is to be cleaned up, "
    "else by the second",
}


def remedy(what: str = "run it with sudo") -> str:
    """What to do where a privilege is missing: to root, sudo gives nothing more."""
    if os.geteuid() != 0:
        return what
    return (
        "root is not enough here: a container, a user namespace, a security module or a file "
        "server withholds it"
    )


class NccluprobeError(Exception):
    """One line for the user: what, why, what to do; and an exit code."""

    def __init__(self, message: str, code: ExitCode = ExitCode.INTERNAL) -> None:
        super().__init__(message)
        self.code = code
