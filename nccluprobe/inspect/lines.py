"""Whether an ``inspect`` line from a file can be used."""

from __future__ import annotations

from typing import Any


def sound(line: Any) -> bool:
    """Whether all that the grouping and the text need is there, of the right type."""
    try:
        return (
            line["kind"] == "inspect"
            and all(isinstance(line[k], str) for k in ("host", "boot_id", "main"))
            and all(type(line[k]) is int for k in ("pid", "start", "took", "searched"))
            and isinstance(line["alive"], bool)
            and all(isinstance(line[k], list) for k in ("threads", "libs", "notes"))
            and all(_comm(comm) for comm in line["comms"])
        )
    except (TypeError, KeyError):
        return False


def _comm(comm: Any) -> bool:
    seqs = comm["seqs"]
    return (
        (comm["hash"] is None or isinstance(comm["hash"], str))
        and all(type(comm[k]) is int for k in ("comm_rank", "nranks"))
        and 0 <= comm["comm_rank"] < comm["nranks"] < 1 << 24
        and (comm["name"] is None or isinstance(comm["name"], str))
        and (
            seqs is None
            or (isinstance(seqs, list) and len(seqs) == 5 and all(type(s) is int for s in seqs))
        )
    )
