"""The details that every finding on a communicator has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nccluprobe.match.communicator import Communicator
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
