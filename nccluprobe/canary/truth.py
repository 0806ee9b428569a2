"""The truth of a planted fault, and how findings are compared with it.

A truth is one JSON object in one line, written by the rank that plants the fault
just before it does. ``hang_types`` are the kinds of findings that describe it
(none: there is no fault), ``culprits`` the sets of global ranks of which one
must be blamed: two ranks that disagree may leave it open who is wrong.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from nccluprobe.canary.errors import ArgumentError
from nccluprobe.canary.faults import Fault

_LATE = "delayed_collective_enter"
_ABSENT = ("collective_missing_enter", "comm_ended_under_waiters")
#: Kinds of findings that describe a fault, the best one first.
HANG_TYPES: dict[str, tuple[str, ...]] = {
    "never": ("collective_missing_enter",),
    "late": (_LATE,),
    "api": ("collective_mismatch",),
    "count": ("collective_mismatch",),
    "dtype": ("collective_mismatch",),
    "op": ("collective_mismatch",),
    "root": ("collective_mismatch",),
    "skip": ("skipped_or_extra_call", "collective_mismatch"),
    "extra": ("skipped_or_extra_call", "collective_mismatch"),
    "unmatched_send": ("p2p_unmatched",),
    "order": ("cross_comm_order_inversion",),
    "exit": _ABSENT,
    "kill": _ABSENT,
    "stop": ("collective_missing_enter",),
    "busy": ("collective_missing_enter",),
    "abort": ("comm_ended_under_waiters", "nccl_error_exit", "collective_missing_enter"),
    "wrong_rank": ("comm_init_rank_conflict",),
    "subset_split": ("comm_init_missing_enter", "cross_comm_order_inversion"),
    "reconnect": (),
    "no_reconnect": ("comm_init_missing_enter",),
}
#: Kinds in which two ranks say different things: with two ranks nobody need be named.
_TIES = frozenset({"api", "count", "dtype", "op", "root", "skip", "extra", "order"})


def truth_of(
    fault: Fault, world: int, comm: str | None, api: str | None, paired: bool = False
) -> dict[str, Any]:
    """The truth of `fault`, planted by this process.

    comm: hash of the communicator that the finding is about; None where it is not
    known beforehand.  paired: what it does not come to is a send and a receive.
    """
    kinds = list(HANG_TYPES[fault.kind])
    if paired:
        kinds = ["p2p_unmatched" if k == "collective_missing_enter" else k for k in kinds]
    culprits: list[list[int]] = [[fault.rank]]
    if fault.kind == "reconnect":
        culprits = [[]]
    elif fault.kind == "wrong_rank":
        # Two claim one rank: whose it is, only the order of the others may tell.
        culprits = [[], [fault.rank]]
    elif fault.kind == "no_reconnect":
        # A new unique id says which rank is missing; which process should have brought
        # it is not known, so processes are candidates only.
        culprits = [[], [fault.rank]]
    elif fault.kind == "unmatched_send":
        culprits = [[fault.rank], [int(fault.values["peer"])], []]
    elif world == 2 and (fault.kind in _TIES or fault.kind == "subset_split"):
        culprits = [[fault.rank], []]
    return {
        "truth": fault.kind,
        "rank": fault.rank,
        "at": fault.at,
        "values": dict(fault.values),
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "run_id": os.environ.get("TORCHELASTIC_RUN_ID"),
        "world": world,
        "comm": comm,
        "api": api,
        "hang_types": kinds,
        "culprits": culprits,
        "missing_comm_ranks": [fault.rank] if fault.kind == "no_reconnect" else None,
    }


def say(truth: Mapping[str, Any], path: Path | None) -> None:
    """One write of one line, to `path` (appended) or standard output, before the fault.

    ArgumentError when the file cannot be written, OSError for standard output.
    """
    line = (json.dumps(truth) + "\n").encode()
    if path is None:
        os.write(1, line)
    else:
        _append(path, line)


def check_file(path: Path) -> None:
    """ArgumentError when nothing can be appended to `path`; makes the file."""
    _append(path, b"")


def _append(path: Path, line: bytes) -> None:
    try:
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            os.write(fd, line)
        finally:
            os.close(fd)
    except OSError as error:
        raise ArgumentError(f"--truth: {path} cannot be written: {error.strerror}") from error


def truths(lines: Iterable[str]) -> list[dict[str, Any]]:
    """The truths among lines of any text."""
    found = []
    for line in lines:
        if line.startswith("{") and '"truth"' in line:
            try:
                item = json.loads(line)
            except ValueError:
                continue
            if isinstance(item, dict) and "hang_types" in item:
                found.append(item)
    return found


class Verdict(NamedTuple):
    """Whether the findings are what was planted, and why in one line."""

    right: bool
    text: str


def last_lines(findings: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Of findings written again the last line, which holds."""
    return list({f["id"]: f for f in findings}.values())


def blamed(findings: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The culprits of the findings that are a root cause."""
    found = {}
    for f in findings:
        if f["role"] == "root_cause":
            for c in f["culprits"]:
                found[c["host"], c["pid"]] = c
    return list(found.values())


def compare(truth: Mapping[str, Any] | None, findings: Iterable[Mapping[str, Any]]) -> Verdict:
    """Compares findings (objects of findings.jsonl) with what was planted.

    Only findings of the truth's run id count. `truth` None: nothing was planted.
    """
    run_id = truth.get("run_id") if truth else None
    held = last_lines(f for f in findings if run_id is None or f["run_id"] == run_id)
    # Who was late has come: that finding may have ended already.
    late = truth is not None and truth["truth"] == "late"
    standing = [f for f in held if f["state"] == "open" or (late and f["hang_type"] == _LATE)]
    named = blamed(standing)
    if truth is None or not truth["hang_types"]:
        errors = [f for f in standing if f["severity"] == "error"]
        if not named and not errors:
            return Verdict(True, "right: no fault, none found")
        return Verdict(False, f"wrong: no fault was planted, found {_told(standing)}")
    what = f"{truth['truth']} of rank {truth['rank']}"
    causes = [f for f in standing if f["role"] == "root_cause"]
    fitting = [f for f in causes if f["hang_type"] in truth["hang_types"]]
    if not fitting:
        kinds = " or ".join(truth["hang_types"])
        return Verdict(False, f"wrong: {what} is {kinds}, found {_told(standing)}")
    if truth["comm"] and truth["comm"] not in {f["comm_uid_hash"] for f in fitting}:
        return Verdict(False, f"wrong: {what}: not on communicator {truth['comm']}")
    missing = truth.get("missing_comm_ranks")
    if missing is not None:
        fitting = [f for f in fitting if f["details"]["missing_comm_ranks"] == missing]
        if not fitting:
            return Verdict(False, f"wrong: {what}: missing are ranks {missing}: {_told(standing)}")
        pids = {c.get("pid") for f in fitting for c in f["details"].get("candidates") or ()}
        if truth["pid"] not in pids:
            return Verdict(False, f"wrong: {what}: pid {truth['pid']} is no candidate of {pids}")
    ranks = sorted(_rank(c, truth) for c in named)
    if ranks not in [list(allowed) for allowed in truth["culprits"]]:
        want = " or ".join(map(str, truth["culprits"]))
        return Verdict(False, f"wrong: {what}: blamed {ranks}, must be {want}: {_told(standing)}")
    who = f"names rank {', '.join(map(str, ranks))}" if ranks else "names nobody, as it may"
    if missing is not None:
        who = f"lacks rank {', '.join(map(str, missing))}, its process among the candidates"
    return Verdict(True, f"right: {what}: {fitting[0]['hang_type']} {who}")


def _rank(culprit: Mapping[str, Any], truth: Mapping[str, Any]) -> int:
    if culprit["rank"] is not None:
        return int(culprit["rank"])
    return int(truth["rank"]) if culprit["pid"] == truth["pid"] else -1


def _told(findings: Sequence[Mapping[str, Any]]) -> str:
    if not findings:
        return "nothing"
    return "; ".join(
        f"{f['hang_type']} ({f['severity']}, {f['role']}, {f['details'].get('reason')}, culprits "
        f"{[c['rank'] for c in f['culprits']]})"
        for f in findings
    )
