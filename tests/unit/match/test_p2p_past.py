"""What stands behind what in streams: told alike, in whatever order it is looked at."""

from __future__ import annotations

from itertools import permutations
from types import SimpleNamespace
from typing import Any, cast

import pytest

from nccluprobe.match.device_lack import Lack, Stall
from nccluprobe.match.device_ops import Node
from nccluprobe.match.p2p_past import Heads

#: call_idx of the send or receive that waits.
WAITS = 7


class Drawn(Heads):
    """What needs what as it is drawn: (stall, whether the rest behind it is needed) -> needs."""

    starts: tuple[Stall, ...] = ()
    needs: dict[tuple[int, bool], list[tuple[Stall, bool]]]

    def _before_next(self, e: Any) -> list[Stall]:
        return [*self.starts]

    def _needs(self, s: Stall, own: Any, whole: bool) -> list[tuple[Stall, bool]]:
        less = self.needs.get((id(s), False), [])
        return less + (self.needs.get((id(s), True), []) if whole else [])


def stall(idx: int, node: Node | None = None) -> Stall:
    end = cast(Any, SimpleNamespace(actor=(idx, 0)))
    part = cast(Any, SimpleNamespace(idx=idx))
    return Stall(end, node or Node(0, idx), [part], Lack())


@pytest.mark.parametrize("way", ["part of it, then all", "two at one node"])
def test_whether_a_half_can_come_in_time_does_not_hang_on_the_order_of_looking(way: str) -> None:
    """One start needs a part of what stands ahead, and the other all of it, which waits."""
    a, b, ahead, waits = stall(1), stall(2), stall(3), stall(WAITS)
    unit = cast(Any, SimpleNamespace(endpoint=waits.endpoint))
    unit.ops = [SimpleNamespace(op=SimpleNamespace(idx=WAITS))]
    for starts in permutations((a, b)):
        heads = Drawn([a, b, ahead, waits], {})
        heads.starts = starts
        if way == "two at one node":
            other = stall(4, ahead.node)
            heads.needs = {(id(a), False): [(ahead, False)], (id(b), False): [(other, False)]}
            heads.needs[id(other), False] = [(waits, False)]
        else:
            heads.needs = {(id(a), False): [(ahead, False)], (id(b), True): [(ahead, True)]}
            heads.needs[id(ahead), True] = [(waits, False)]
        assert heads.shut(unit, cast(Any, None))


def test_a_circle_that_the_half_is_not_in_ends() -> None:
    a, ahead, waits = stall(1), stall(3), stall(WAITS)
    unit = cast(Any, SimpleNamespace(endpoint=waits.endpoint))
    unit.ops = [SimpleNamespace(op=SimpleNamespace(idx=WAITS))]
    heads = Drawn([a, ahead, waits], {})
    heads.starts = (a,)
    heads.needs = {(id(a), False): [(ahead, False)], (id(ahead), False): [(a, True)]}
    heads.needs[id(a), True] = [(ahead, True)]
    assert not heads.shut(unit, cast(Any, None))
