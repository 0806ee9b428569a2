"""What operations at the heads of streams lack."""

from __future__ import annotations

from dataclasses import dataclass, field

from nccluprobe.match.device_ops import Node, Part
from nccluprobe.match.endpoint import Endpoint
from nccluprobe.match.finding import Finding
from nccluprobe.match.p2p_pair import At


@dataclass
class Lack:
    """What an operation at the head of its streams lacks."""

    #: Endpoints that have not made it.
    missing: list[Endpoint] = field(default_factory=list)
    #: Endpoints that ended before it could run.
    gone: list[Endpoint] = field(default_factory=list)
    #: Endpoints whose thread is still inside the call, and waits for others there.
    held: list[Endpoint] = field(default_factory=list)
    #: Parts of others that stand behind something else in their streams.
    behind: list[Node] = field(default_factory=list)
    #: Something is wrong with it, which explains that it does not end.
    fault: Finding | None = None

    def __bool__(self) -> bool:
        return bool(self.missing or self.gone or self.held or self.behind or self.fault)

    def add(self, other: Lack) -> None:
        """Take what another part of the same operation lacks."""
        for mine, more in (
            (self.missing, other.missing),
            (self.gone, other.gone),
            (self.held, other.held),
        ):
            mine += [e for e in more if all(e is not x for x in mine)]
        self.behind += [n for n in other.behind if all(n is not x for x in self.behind)]
        self.fault = self.fault or other.fault


@dataclass
class Stall:
    """What keeps an endpoint's operations at the head of a stream."""

    endpoint: Endpoint
    node: Node
    parts: list[Part]
    lack: Lack

    @property
    def side_key(self) -> At:
        """Source and communicator's id."""
        info = self.endpoint.info
        return (info.source, info.id)
