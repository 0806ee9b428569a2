"""Call sites as evidence: who came from another place to a slot that all agree on.

All arguments may agree and the calls be different ones all the same: one rank
alone makes a barrier, and from then on is one call ahead of all others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nccluprobe.match import tense
from nccluprobe.match.absence import Context
from nccluprobe.match.communicator import CommKey
from nccluprobe.match.details import on_communicator
from nccluprobe.match.finding import Finding, seconds
from nccluprobe.match.names import capital, named, numbers
from nccluprobe.match.signature import SiteNames
from nccluprobe.match.sitelog import Parting, majority
from nccluprobe.match.status import coverage_of
from nccluprobe.match.waits import Wait

#: A difference explains a hang so many slots later ...
_RECENT = 64
#: ... and so many of them are told.
_TOLD = 4


def settle(
    waits: list[Wait], contexts: Mapping[CommKey, Context], current: list[Finding]
) -> list[Finding]:
    """Tell of call sites in absence findings; those that explain one.  After roles are set."""
    found = []
    stalls = {f.id: f for f in current if f.hang_type == "collective_all_ranks_stuck"}
    for w in waits:
        f = w.finding
        if f is None or w.seq is None or not w.at:
            continue
        ctx = contexts[w.comm.key]
        names = ctx.table.sites
        here = {e.comm_rank: e.site_at(w.at[0]) for e in w.entered if e.comm_rank is not None}
        if any(here.values()):
            f.details["sites"] = _groups(here, names)
        log = w.comm.sites
        if log is None:
            continue
        rare = log.rare(w.comm.closed - _RECENT)
        if rare:
            told = {p.slot: p for _, p in rare[-_TOLD:]}
            f.details["site_splits"] = [
                {"comm_seq": p.seq, "sites": _groups(p.sites, names)} for p in told.values()
            ]
        first = _one_more(w, here, log.last, rare)
        stall = stalls.get(f.downstream_of or "")
        if first is None or (f.role == "downstream" and stall is None):
            continue
        g = _finding(w, f, first, ctx)
        for one in (f, stall):
            if one is not None and one.comm_uid_hash == w.comm.key.hash:
                one.role, one.downstream_of = "downstream", g.id
        found.append(g)
    return found


def _one_more(
    w: Wait, here: dict[int, int], last: dict[int, int], rare: list[tuple[int, Parting]]
) -> Parting | None:
    """Where those who wait made a call that the greater part did not make.

    They stand one step behind: they are now where all others were in the slot before.
    """
    if not w.comm.complete_view or 2 * len(w.absent) <= w.comm.key.nranks:
        return None
    before = majority(last)
    if before is None or any(site != before for site in here.values()):
        return None
    firsts = [next((p for rank, p in rare if rank == r), None) for r in here]
    if not firsts or any(p is None for p in firsts):
        return None
    return min((p for p in firsts if p is not None), key=lambda p: p.slot)


def _groups(sites: dict[int, int], names: SiteNames) -> list[dict[str, Any]]:
    """[{site, comm_ranks}], the greatest group first; null: not known."""
    ranks: dict[int, list[int]] = {}
    for rank, site in sorted(sites.items()):
        ranks.setdefault(site, []).append(rank)
    order = sorted(ranks.items(), key=lambda x: (-len(x[1]), x[1]))
    return [{"site": names[s] or None, "comm_ranks": r} for s, r in order]


def _finding(w: Wait, f: Finding, p: Parting, ctx: Context) -> Finding:
    comm, names = w.comm, ctx.table.sites
    ranks = [e.comm_rank for e in w.entered if e.comm_rank is not None]
    others = [r for r in sorted(p.sites) if r not in ranks]
    most = majority(p.sites) or 0
    own = names[p.sites[ranks[0]]]
    they = "they" if len(ranks) > 1 else "it"
    t = tense.of(w.entered)
    have = "have" if t.fate is None else "had"
    api = f.details["api"]
    return Finding(
        key=("site", *comm.key, p.slot, tuple(ranks)),
        hang_type="skipped_or_extra_call",
        run_id=ctx.run_id,
        comm_uid_hash=comm.key.hash,
        comm_seq=p.seq,
        detected_at=ctx.now,
        details={
            **on_communicator(
                comm,
                api,
                sorted(p.sites),
                "call_extra",
                "inferred",
                waited_s=f.details["waited_s"],
                lossy=f.details["trace_event_loss_possible"],
            ),
            "differs_in": ["site"],
            "majority_comm_ranks": others,
            "minority_comm_ranks": ranks,
            "sites": _groups(p.sites, names),
            "hangs_at_comm_seq": w.seq,
            "first_entered_unix_ns": w.first,
            "summary": (
                f"{capital(named(w.entered))} came to #{p.seq} of communicator {comm.label} from "
                f"call site {own}, {numbers(others)} from call site {names[most]}: a call that "
                f"only {they} made. {'Now' if t.fate is None else 'Then'} {they} {t.wait} in "
                f"{w.label}, where the others {have} been already, for "
                f"{seconds(max(0, ctx.now - w.first)):.1f} s{t.until}."
            ),
        },
        severity=f.severity,
        role="root_cause",
        job=ctx.job,
        coverage=coverage_of(comm, ctx.now, ctx.options.silent_after),
        since=w.first,
        culprits=tuple(e.process.who for e in w.entered),
        waiters=tuple(e.process.who for e in w.entered),
    )
