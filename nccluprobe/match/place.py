"""Where ranks that were attached late stand among the calls of the others.

The rank whose calls were all seen is the reference; where there is none, the
one that knows most.  Its numbers are the communicator's, and each other rank
that came late is placed by it, again and again while more is seen, until the
counters agree or too much would have to be held.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nccluprobe.match.align import (
    ALIGNED,
    BASES,
    EXACT,
    UNKNOWN,
    Alignment,
    align,
)
from nccluprobe.match.counters import Stream, origin, surplus
from nccluprobe.match.endpoint import Endpoint
from nccluprobe.match.signature import SignatureTable

if TYPE_CHECKING:
    from nccluprobe.match.communicator import Communicator

#: Calls that each side should have before a first try.
READY = 64
#: Calls that are held while a rank's place is not certain; a host can be about
#: a thousand calls ahead of the others.
HOLD = 2048
#: How many other ranks a rank is compared with.
_MODELS = 3
_GROWN = 1.5


def place(comm: Communicator, table: SignatureTable, force: bool) -> bool:
    """Place those who came late; returns whether closing slots should wait for more.

    ``force``: try with what there is.
    """
    late = [e for e in comm.endpoints.values() if e.late and not e.broken]
    if not late:
        return False
    if not any(e.slotted for e in comm.endpoints.values()) and not _begin(comm, late, table, force):
        return True
    models = _models(comm)
    streams: dict[int, Stream] = {}
    doubtful = [e for e in late if e is not comm.reference and not _certain(e)]
    # All before anyone is placed: it moves what others are placed by.
    for e in [*models[1:], *doubtful]:
        if models and e is not models[0] and (e.tried == 0 or force):
            _drop_surplus(comm, e, models[0], streams, table)
    for e in doubtful:
        size = len(e.rows) + max((len(x.rows) for x in models), default=0)
        if not _due(e, size, force):
            continue
        e.tried = size
        _place(comm, e, [x for x in models if x is not e][:_MODELS], streams, table)
        if _certain(e) and e not in models:
            models.append(e)
    if force:
        return False
    for e in doubtful:
        if not e.slotted:
            e.limit()
    held = max((len(e.rows) for e in comm.endpoints.values()), default=0)
    return any(held < (READY if _known(e) else HOLD) for e in doubtful if not _certain(e))


def _certain(e: Endpoint) -> bool:
    return e.placement is not None and e.placement.base == EXACT


def _known(e: Endpoint) -> bool:
    return e.placement is not None and e.placement.base == ALIGNED


def _due(e: Endpoint, size: int, force: bool) -> bool:
    if len(e.rows) == 0:
        return False
    if force:
        return size != e.tried
    return len(e.rows) >= READY and size >= e.tried * _GROWN


def _models(comm: Communicator) -> list[Endpoint]:
    """Ranks that others can be placed by, the best first."""
    sure = [
        e
        for e in comm.endpoints.values()
        if e.slotted and (not e.late or e is comm.reference or _certain(e) or _known(e))
    ]
    return sorted(
        sure, key=lambda e: (e.late, e is not comm.reference, -len(e.rows), e.comm_rank or 0)
    )


def _begin(comm: Communicator, late: list[Endpoint], table: SignatureTable, force: bool) -> bool:
    """Choose the reference: its numbers are the communicator's from now on."""
    if not force and max(len(e.rows) for e in late) < READY:
        return False
    streams = {id(e): stream_of(comm, e, table) for e in late if len(e.rows)}
    if not streams:
        return False
    able = [e for e in late if id(e) in streams]
    e = max(
        able,
        key=lambda e: (origin(streams[id(e)]) is not None, len(e.rows), -(e.comm_rank or 0)),
    )
    before = origin(streams[id(e)])
    why = "its own numbers, from the first call seen" if before is None else "its own counters"
    comm.reference = e
    comm.counters = None if before is None else list(before)
    comm.relative = before is None
    slot = 0 if before is None else sum(before)
    e.placed(slot, Alignment(0, ALIGNED, why))
    comm.closed = slot
    return True


def _place(
    comm: Communicator,
    e: Endpoint,
    models: list[Endpoint],
    streams: dict[int, Stream],
    table: SignatureTable,
) -> None:
    if not models:
        return
    for model in models[1:] if e.lost else ():
        _drop_surplus(comm, e, model, streams, table)
    mine = stream_of(comm, e, table)
    best: tuple[Alignment, Endpoint] | None = None
    for model in models:
        key = id(model)
        if key not in streams:
            streams[key] = stream_of(comm, model, table)
        found = align(streams[key], mine, None if comm.relative else -model.dropped)
        if best is None or BASES.index(found.base) > BASES.index(best[0].base):
            best = found, model
        if found.base == EXACT:
            break
    assert best is not None
    found, model = best
    before = e.placement
    if before is not None and BASES.index(found.base) < BASES.index(before.base):
        return
    if found.shift is None or found.base == UNKNOWN:
        if before is None:
            e.place_by(Alignment(None, UNKNOWN, found.why))
        return
    slot = model.dropped + found.shift
    if slot < 0:
        comm.renumber(-slot)
        slot = 0
    e.placed(slot, found)
    if found.base == EXACT and model is comm.reference:
        why = "counters agree with those of others"
        model.place_by(Alignment(0, EXACT, why))
    if not comm.begun and slot < comm.closed:
        # It came before the reference: its calls are compared with whom they can be.
        comm.closed = slot
        first = origin(mine)
        comm.counters = None if first is None else list(first)


def _drop_surplus(
    comm: Communicator,
    e: Endpoint,
    model: Endpoint,
    streams: dict[int, Stream],
    table: SignatureTable,
) -> None:
    """Rid both sides of lost calls that did not run."""
    if not (e.lost or model.lost):
        return
    mine = stream_of(comm, e, table)
    if id(model) not in streams:
        streams[id(model)] = stream_of(comm, model, table)
    too_many = surplus(streams[id(model)], mine)
    for own, row in too_many:
        (e if own else model).rows.delete(row)
    if too_many:
        streams[id(model)] = stream_of(comm, model, table)


def stream_of(comm: Communicator, e: Endpoint, table: SignatureTable) -> Stream:
    """The calls that an endpoint holds, as the alignment takes them."""
    rows = e.rows
    before: tuple[int, ...] | None = None
    sure = False
    clean = 0
    if not e.late or (e.slotted and comm.begun):
        if e.dropped == comm.closed and comm.counters is not None:
            before, sure, clean = tuple(comm.counters), True, comm.clean
    else:
        before, sure = e.before, e.before_sure
    return Stream(
        shape=table.shapes(rows.sig),
        function=table.functions(rows.sig),
        seq=rows.seq,
        t=rows.t,
        before=before,
        before_sure=sure,
        clean_before=clean,
    )
