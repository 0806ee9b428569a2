"""What an analysis has read, for the end of its report."""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterator

from nccluprobe import procinfo
from nccluprobe.cli.collisions import collision_notes
from nccluprobe.cli.ends import end_notes, without_end
from nccluprobe.importers.run import Imported
from nccluprobe.match import tense
from nccluprobe.match.endpoint import Endpoint
from nccluprobe.match.lessons import ROOTED_FROM
from nccluprobe.match.matcher import Matcher
from nccluprobe.match.names import named, numbers
from nccluprobe.match.pipeline import Analysis
from nccluprobe.match.process import Process, Who
from nccluprobe.match.status import is_silent, left_at
from nccluprobe.match.untraced import untraced
from nccluprobe.match.waits import Wait
from nccluprobe.nccl.api import BY_NAME
from nccluprobe.plural import counted, plural, verb
from nccluprobe.report.text import Looked, Summary
from nccluprobe.trace.heartbeats import HeartbeatReader
from nccluprobe.trace.reader import TraceReader

_LISTED = 5
#: What is advised for a limit, as a part of what was waited.
_SOME_LESS = 0.9
#: A shorter limit is of no use, s.
_LEAST_ADVISED = 1.0
_TRY = "try --missing-after"


def _open_waits(matcher: Matcher) -> Iterator[tuple[Wait, float]]:
    """Waits without a finding, and since how many seconds; oldest first."""
    for w in sorted(matcher.waits, key=lambda w: w.order):
        until = max((_waits_until(matcher, e) for e in w.entered), default=0)
        waited = (until - w.first) / 1e9
        unseen = all(e.process.found_gone for e in w.entered)
        if all(e.end is not None for e in (*w.entered, *w.absent)):
            continue  # all have ended the communicator: as they agreed to
        if w.finding is None and w.cause is None and w.absent and (waited >= 1 or unseen):
            yield w, waited


def _waits_until(matcher: Matcher, e: Endpoint) -> int:
    """Until when a member can have waited, unix ns: as its process, or till it ended this one."""
    there = _there_until(matcher, e.process)
    return there if e.end is None else min(there, e.end.t)


def _there_until(matcher: Matcher, p: Process) -> int:
    """Until when a process can have waited, unix ns: now, or its end."""
    now = matcher.now_of(p.source)
    return now if p.end is None else min(now, p.end.t)


def waiting_notes(matcher: Matcher) -> list[str]:
    """Who waits now without a finding: below the limit, or for what is not decidable."""
    found = []
    lasting: list[tuple[float, bool]] = []
    limit = matcher.options.missing_after / 1e9
    for w, waited in _open_waits(matcher):
        away, where = named(w.absent), f"communicator {w.comm.label}"
        they = tense.of(w.entered)
        if set(w.absent) & set(w.entered):  # a call that all have made
            found.append(
                f"not complete for {waited:.0f} s{they.until}, no finding: {w.label}, of {where}; "
                f"it {they.one.wait} for {away}, held up in an earlier call"
            )
            continue
        counts = _missed_for(matcher, w)
        declared = _is_for_one(w) and matcher.options.idle_declared(w.comm.name, w.comm.key.hash)
        excused = declared or any(e.process.in_phase for e in w.absent)
        if counts < limit and not excused:
            lasting.append((counts, they.fate is not None))
        least = " or more" if all(e.process.found_gone for e in w.entered) else ""
        over = all(e.end is not None for e in w.entered)
        then = " before they ended the communicator" if over else they.until
        what = "waiting" if they.fate is None else "waited"
        free = f", missed for {counts:.1f} s of it" if counts < limit <= waited else ""
        why = ", declared as idle (--idle-ok)" if declared else "" if excused else free
        found.append(
            f"{what} for {waited:.0f} s{least}{then}, no finding: {named(w.entered, where)} in "
            f"{w.label}; not there: {away}{why}"
        )
    inside, lasted = _inside_notes(matcher, limit)
    found = _first(found, "more wait", " without a finding")
    return found + inside + _shorter_limit(lasting + lasted, limit)


def _is_for_one(w: Wait) -> bool:
    """Whether it may be a wait for work of one rank, which is normal where that was declared."""
    return len(w.absent) == 1 and (w.api in ROOTED_FROM or w.p2p)


def _missed_for(matcher: Matcher, w: Wait) -> float:
    """For how many seconds all who are absent were missed, as a finding counts it.

    Who called something else meanwhile, or was held up itself, is missed since then, but for the
    making of a communicator: that is waited for from the first one on.
    """
    until = max((_waits_until(matcher, e) for e in w.entered), default=0)
    if (api := BY_NAME.get(w.api or "")) is not None and api.makes_comm:
        return max(0, until - w.first) / 1e9
    missed = []
    for e in w.absent:
        since = max(w.first, e.last_t, e.process.held_until(w.first))
        known = e.process.heard_until(matcher.now_of(e.process.source))
        left = left_at(e)
        missed.append(min(until, known if left is None else left) - since)
    return max(0, min(missed, default=0)) / 1e9


def _inside_notes(matcher: Matcher, limit: float) -> tuple[list[str], list[tuple[float, bool]]]:
    """Who is inside a call for long, and in no wait or finding that tells of it.

    Beside it how long, where that is below the limit, s, and whether the process has ended.
    """
    told: set[Hashable] = set()
    for w in matcher.waits:
        told.update(e.process.who for e in (*w.entered, *w.absent))
    for f in matcher.book.all():
        told.update((*f.waiters, *f.culprits))
    calls: dict[str, list[tuple[float, Process]]] = {}
    for p in matcher.processes.values():
        call = min((*p.all_inside(), *p.cut.values()), key=lambda c: c.t, default=None)
        lasted = 0.0 if call is None else (_there_until(matcher, p) - call.t) / 1e9
        if call is not None and lasted >= 1 and p.who not in told:
            calls.setdefault(call.api, []).append((lasted, p))
    notes = [
        f"inside {api} for {max(lasted for lasted, _ in some):.0f} s, no finding: "
        + _several([p for _, p in some])
        for api, some in sorted(calls.items())
    ]
    every = [(lasted, p.ended) for some in calls.values() for lasted, p in some]
    return notes[:_LISTED], [x for x in every if x[0] < limit]


def _several(processes: list[Process]) -> str:
    """Processes by their ranks in the job, or, where those are not known, the first ones."""
    ranks = sorted(p.rank for p in processes if p.rank is not None)
    if len(set(ranks)) == len(processes):
        return f"{numbers(ranks)} of the job"
    more = len(processes) - _LISTED
    shown = "; ".join(p.label() for p in processes[:_LISTED])
    return shown + (f"; and {more} more" if more > 0 else "")


def _shorter_limit(short: list[tuple[float, bool]], limit: float) -> list[str]:
    """What to do about waits that are no finding only because they are short so far.

    ``short``: seconds, and whether who waited has ended.  What is advised is a limit that the
    longest, and those that are about as long, are over.
    """
    if not short:
        return []
    longest = max(waited for waited, _ in short)
    why = f"a wait is a finding from {limit:g} s on (--missing-after)"
    if longest < _LEAST_ADVISED and not all(ended for _, ended in short):
        return [f"{why}, counted from when those who are not there were held up by nothing seen"]
    # Some less than they have lasted: who came later is to be found waiting, too.
    least = min(waited for waited, _ in short if waited >= longest / 2)
    after = max(int(least * _SOME_LESS), min(1, int(least)))
    what = f"{_TRY} {after}, by which one of {after} s or more is a finding"
    if all(ended for _, ended in short):
        return [f"{why}; who waited has ended, so none of these becomes one: {what}"]
    return [f"{why}: wait until then if the job still runs, or {what}"]


def phase_notes(matcher: Matcher) -> list[str]:
    """Who is in a phase by its own word."""
    found = []
    for p in matcher.processes.values():
        now = matcher.now_of(p.source)
        phase = None if p.ended else p.phases.now(now)
        if phase is not None:
            lasts = now - phase.since
            limit = matcher.options.phase_limit(phase.name, phase.limit)
            over = ", longer than allowed" if lasts > limit else ""
            found.append(
                f"{p.label()} has declared the phase {phase.name} for {lasts / 1e9:.0f} s of "
                f"{limit / 1e9:.0f} s{over}"
            )
    return _first(found, "more rank", " in a phase")


def untraced_notes(matcher: Matcher) -> list[str]:
    """Communicators of which some ranks have no trace: whether these came is not known."""
    open_ = (c for c in matcher.comms.values() if not c.over)
    sides = matcher.p2p.sides
    known = [u for c in open_ if (u := untraced(c, sides, matcher.now_of)) is not None]
    found: list[tuple[int, str]] = []
    for u in (*known, *matcher.untraced.values()):
        text = f"not traced: {numbers(u.ranks)} of communicator {u.label}"
        if u.quiet >= matcher.options.missing_after:
            text += f"; no other one has made a call on it for {u.quiet / 1e9:.0f} s"
        found.append((-u.nranks, text))
    found.sort()
    notes = [text for _, text in found[:_LISTED]]
    if len(found) > _LISTED:
        more = counted(len(found) - _LISTED, "more communicator")
        notes.append(f"and ranks of {more} are not traced")
    return notes


def _first(notes: list[str], noun: str, rest: str = "") -> list[str]:
    """The first of some notes, and of how many others there is one, too."""
    more = len(notes) - _LISTED
    return notes[:_LISTED] + ([f"and {counted(more, noun)}{rest}"] if more > 0 else [])


def skew_notes(matcher: Matcher, skews: dict[str, int]) -> list[str]:
    """Hosts whose clocks were set right, ``skews`` by boot id, ns."""
    hosts = {p.boot_id: p.info.host for p in matcher.processes.values() if p.info is not None}
    found = [
        f"the clock of {hosts.get(boot, boot)} is {abs(ahead) / 1e9:.0f} s "
        f"{'ahead of' if ahead > 0 else 'behind'} that of other hosts, by when communicators were "
        "made: its times are set right by that"
        for boot, ahead in sorted(skews.items())
    ]
    return _first(found, "more clock")


def clock_notes(matcher: Matcher) -> list[str]:
    """Whose clock is not that of this machine, as far as files tell that grow."""
    found = [
        f"the clock of {host} is {abs(offset) / 1e9:.0f} s "
        f"{'ahead of' if offset > 0 else 'behind'} this machine's"
        for host, offset in sorted(matcher.clocks.hosts.items())
    ]
    return _first(found, "more clock")


def summary_of(
    analysis: Analysis,
    reader: TraceReader,
    imported: Imported | None,
    heartbeats: HeartbeatReader,
) -> Summary:
    """What was read and seen, for the coverage part of the report."""
    matcher, counts = analysis.matcher, analysis.decoder.counts
    processes = [p for p in matcher.processes.values() if not p.snapshot]
    limit = matcher.options.silent_after
    notes = [] if imported is None else imported.all_notes()
    if torn := reader.torn_lines():
        n = len(torn)
        writers = (
            f"{'a ' * (n == 1)}{plural(n, 'writer')} that died, or {verb(n, 'is')} still writing"
        )
        notes.append(f"{counted(n, 'torn last line')} ({writers}): {min(torn)}")
    files = reader.counts
    if files.unreadable_files or files.vanished_files:
        n = files.unreadable_files + files.vanished_files
        notes.append(f"{counted(n, 'file')} could not be read to the end: {files.examples[0]}")
    if files.replaced:
        n = len(files.replaced)
        notes.append(
            f"{counted(n, 'file', 'was')} replaced by another one and not read to the end: "
            f"{files.replaced[0]}"
        )
    if files.oversize_lines:
        notes.append(f"{counted(files.oversize_lines, 'line', 'was')} too long: {files.oversize}")
    for why in sorted(set(files.passed_over.values())):
        some = [path for path, other in files.passed_over.items() if other == why]
        more = f" and {len(some) - 1} more" if len(some) > 1 else ""
        notes.append(f"{min(some)}{more}: not read: {why}")
    if counts.bad_lines:
        notes.append(f"{counted(counts.bad_lines, 'line')} could not be read: {counts.examples[0]}")
    if n := counts.repeated:
        notes.append(f"lines that came before, and count once: {n}, in {counts.first_repeated}")
    if n := counts.out_of_order:
        notes.append(f"lines out of order, and put in order: {n}, in {counts.first_repeated}")
    if counts.unknown_kinds:
        notes.append(f"unknown kinds of lines: {', '.join(sorted(counts.unknown_kinds))}")
    if fields := sorted(counts.unknown_fields):
        more = f" and {len(fields) - _LISTED} more" if len(fields) > _LISTED else ""
        notes.append(f"unknown fields, passed over: {', '.join(fields[:_LISTED])}{more}")
    for why, n in sorted(matcher.not_judged().items()):
        of = "a communicator" if n == 1 else "communicators"
        notes.append(f"{counted(n, 'endpoint')} of {of} not judged, or not surely: {why}")
    collided = collision_notes(analysis)
    notes += collided
    looked = _looked(matcher)
    if looked is not None and processes:
        notes.append(
            f"looked at from outside, {looked.often()} (inspect, NCCL RAS): {looked.what()}"
        )
    if not matcher.orders.complete:
        notes.append(
            "too many communicators to compare the order of calls on each two of them: "
            f"{counted(matcher.orders.compared, 'pair', 'was')} compared, so a rank that uses two "
            "in another order than the others may not be found"
        )
    notes += _unread_notes(matcher)
    if n := matcher.orphans:
        notes.append(f"{counted(n, 'call')} on communicators without a line")
    if counts.captured:
        notes.append(
            f"{counted(counts.captured, 'call', 'was')} captured into a CUDA graph: its replays "
            "call no NCCL function and are not seen, so ranks may stand apart inside a graph"
        )
    notes += untraced_notes(matcher)
    notes += skew_notes(matcher, analysis.skews)
    notes += clock_notes(matcher)
    outs = {name.rpartition("/tracing/")[0] for _, name in reader.names()} - {""}
    out = outs.pop() if len(outs) == 1 else "DIR"
    notes += end_notes(processes, procinfo.boot_id(), time.time_ns(), out)
    notes += waiting_notes(matcher)
    notes += phase_notes(matcher)
    if refused := heartbeats.refused:
        path, why = next(iter(refused.items()))
        notes.append(f"{counted(len(refused), 'heartbeat file', 'is')} not used: {path}: {why}")
    if counts.blind_calls:
        notes.append(f"{counted(counts.blind_calls, 'call')} without identity")
    now_silent: dict[Who, str] = {}
    for p in processes:
        if is_silent(p, matcher.now_of(p.source), limit):
            now_silent[p.who] = p.label()
    # Several tracers may have seen one process: it is observed while one of them goes on.
    for p in processes:
        if not is_silent(p, matcher.now_of(p.source), limit):
            now_silent.pop(p.who, None)
    return Summary(
        jobs=len(matcher.jobs.labels()),
        processes=len({p.who for p in processes}),
        calls=counts.calls,
        communicators=matcher.comms_seen,
        lost=sum(p.lost for p in processes),
        collided=bool(collided),
        unclosed=without_end(processes, time.time_ns()),
        silent=list(now_silent.values()),
        looked=looked,
        notes=notes,
    )


def _unread_notes(matcher: Matcher) -> list[str]:
    """Ranks whose counters nobody read, of communicators that are known from looks alone."""
    traced = {comm.key.hash for comm in matcher.comms.values()}
    read: dict[tuple[str, int], set[int]] = {}
    for look in matcher.standing.looks.values():
        for c in look.comms:
            ranks = read.setdefault((c.hash, c.nranks), set())
            if c.seqs is not None:
                ranks.add(c.comm_rank)
    notes = []
    for (hash_, nranks), ranks in sorted(read.items(), key=lambda x: (-x[0][1], x[0])):
        if hash_ not in traced and (lacking := set(range(nranks)) - ranks):
            its = "its process" if len(lacking) == 1 else "their processes"
            notes.append(
                f"not read: {numbers(lacking)} of the {counted(nranks, 'rank')} of communicator "
                f"{hash_}: {its} may have ended, or {verb(len(lacking), 'was')} not looked at"
            )
    return _first(notes, "more communicator", " of which not all ranks were read")


def _looked(matcher: Matcher) -> Looked | None:
    """What was read of NCCL's counters; None: nothing."""
    looks = matcher.standing.looks
    if not looks:
        return None
    members = {(c.hash, c.nranks, c.comm_rank) for x in looks.values() for c in x.comms}
    return Looked(
        times=max(matcher.standing.times.values()),
        processes=sum(1 for key in looks if key.pid),
        ranks=len(members),
        communicators=len({(hash_, nranks) for hash_, nranks, _ in members}),
    )
