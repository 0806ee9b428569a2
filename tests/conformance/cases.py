"""All programs of the suite, made from the API table: a new function is covered by itself."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from conformance import faults, grids, pair_twins, pairs, twins
from conformance.truth import Case


def all_cases() -> Iterator[Case]:
    """Every operation, kind of fault and size, and the correct twins."""
    for n in faults.SIZES:
        for api in faults.COLLECTIVES:
            yield from faults.cases(api, n)
            yield from twins.twins(api, n)
            yield from grids.cases(api, n)
        for api in pairs.P2P:
            yield from pairs.cases(api, n)
            yield from pair_twins.twins(api, n)


@functools.cache
def by_id() -> dict[str, Case]:
    """Cases by their id, which is unique."""
    found: dict[str, Case] = {}
    for case in all_cases():
        assert case.id not in found, case.id
        found[case.id] = case
    return found
