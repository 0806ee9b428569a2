"""The details that every finding on a communicator has."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from nccluprobe.match.communicator import Communicator
from nccluprobe.match.endpoint import Endpoint
from nccluprobe.match.finding import required


def on_communicator(
    comm: Communicator,
    api: str | None,
    entered: Sequence[int | None],
    reason: str,
    confidence: str,
    *,
    waited_s: float,
    lossy: bool,
) -> dict[str, Any]:
    """As ``required``, and which communicator it is."""
    details = required(
        api, comm.key.nranks, entered, reason, confidence, waited_s=waited_s, lossy=lossy
    )
    return {**details, "comm_name": comm.name, "instance": comm.key.instance}


def lost_any(members: Iterable[Endpoint]) -> bool:
    """Whether events of any of them were lost, on the communicator or of the process."""
    return any(e.lost or e.process.lost for e in members)
