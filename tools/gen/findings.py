"""docs/findings.md."""

from __future__ import annotations

from gen.text import md_page, md_table
from nccluprobe.match import finding as f
from nccluprobe.match.options import SECOND, Options

_FIELDS = (
    ("hang_type", "what happened, see below"),
    ("run_id", "label of the run"),
    ("comm_uid_hash", "NCCL's commHash, 16 hex digits; null: the call has no communicator"),
    (
        "comm_seq",
        "number of the collective on its communicator, from 0; of flight recorder dumps PyTorch's, "
        "from 1; null: not a collective",
    ),
    ("detected_at_unix_ns", "when it was first seen"),
    ("details.api", "full name of the C function"),
    ("details.expected_nranks", "size of the communicator"),
    ("details.entered_comm_ranks", "ranks of the communicator that came"),
    ("details.missing_comm_ranks", "ranks that did not; empty where nobody is missing"),
    ("details.missing_rank_status", "one object per missing rank: see below"),
    ("details.waited_s", "how long the first one has waited"),
    ("details.reason", "why: the strongest reason of all missing ranks"),
    ("details.confidence", "observed, inferred, reduced or none: see Confidence"),
    ("details.trace_event_loss_possible", "whether events that matter may be lost"),
    (
        "id",
        "stable: the same fault in the same traces has the same id; the last line with it holds",
    ),
    ("state", "open or resolved"),
    ("severity", "notice or error"),
    ("role", "root_cause, downstream (of `downstream_of`) or unknown"),
    (
        "culprits",
        "the processes it points at: host, pid, rank (null: nobody told); blamed only where the "
        "role is root_cause; empty: no process is named",
    ),
    ("job", "hash of the job's first communicator: tells two jobs in one folder apart"),
    ("coverage", "what the verdict rests on: see Coverage"),
    (
        "limits",
        "missing_after_s, late_after_s, error_after_s of the analysis that wrote the line: a "
        "later one with others leaves it there",
    ),
)

_STATUS_FIELDS = (
    ("comm_rank", "rank in the communicator"),
    ("global_rank", "rank in the job; null: nobody told"),
    ("heartbeat", "alive, stale (collector silent), absent (process ended), unavailable"),
    ("heartbeat_age_s", "age of what that rests on"),
    (
        "probe_dropped_events",
        "events of this rank lost since its last call here; null: not observed",
    ),
    ("reason", "why this rank did not come"),
    ("call_idx", "its last call on this communicator, to find the line in its trace"),
    ("behind", "evidence inspect: function -> calls that the furthest rank is ahead"),
)

_MORE_STATUS_FIELDS = (
    ("host, pid", "where the process is; absent: the source does not tell"),
    ("main_thread, syscall", "what the main thread does: running, syscall (which), stopped, ..."),
    ("process_end, exit_code, signal, ended_unix_ns", "how and when the process ended"),
    ("last_comm_seq, last_entered_unix_ns", "its last collective on this communicator"),
    ("inside, inside_s", "the NCCL call that it is inside, and for how long"),
    ("phase, phase_s", "the phase that it has declared, and since how long: see heartbeat.md"),
    ("queued_in_open_group", "it made the call in a group that it has not ended"),
    ("comm_end", "how it ended the communicator: finalize, destroy, abort, revoke"),
    (
        "waits_in, waits_in_comm, waits_in_comm_seq",
        "reason rank_waiting_elsewhere: the call that it waits in itself",
    ),
)

#: Keys of details that only some findings have.
_DETAILS_OF = (
    (
        "most",
        "summary",
        "the finding in one sentence; where it is absent the report makes the sentence",
    ),
    ("most", "signature", "the call with its arguments"),
    ("most", "comm_name, instance", "name of the communicator; which of several with one hash"),
    ("most", "first_entered_unix_ns", "since when"),
    ("some", "perhaps_of", "id of the cause of which it may be a consequence; role unknown"),
    ("some", "note, explanation", "what weakens the verdict; what may lie behind it"),
    (
        "some",
        "assumed, assumed_by",
        "fields whose times are not in what was read: waited_s, first_entered_unix_ns; timeout: "
        "PyTorch's stands for them",
    ),
    ("an absence", "queued_behind", "later calls on the communicator that somebody entered"),
    ("an absence", "not_observed_comm_ranks", "of those behind, the ones nobody watches"),
    ("an absence", "unobserved_comm_ranks", "how many members are not traced at all"),
    ("an absence", "idle", "undecided: see Idle waits"),
    (
        "an absence",
        "hypotheses",
        "texts: what each side of a cycle would have to have done, when the trace does not decide "
        "whether it is a deadlock",
    ),
    ("an absence", "sites, site_splits", "call sites: see Who is wrong"),
    (
        "a deadlock",
        "cycle",
        "the calls that wait for each other: comm_uid_hash, instance, comm_seq, call, "
        "entered_comm_ranks, missing_comm_ranks of each",
    ),
    (
        "a deadlock",
        "other_comm_uid_hash, other_comm_seq, other_instance",
        "the second communicator",
    ),
    (
        "a disagreement",
        "calls",
        "one object per side: signature, comm_ranks, call_idx per rank, sites if known",
    ),
    ("a disagreement", "differs_in", "api, count, datatype, op, root, nranks, bytes"),
    (
        "a disagreement",
        "majority_comm_ranks, minority_comm_ranks",
        "who is right and who is not; empty: not known",
    ),
    ("a disagreement", "minority_rank_status", "one object per rank of the minority, as above"),
    ("a disagreement", "provisional", "not decided so far; it may change its kind and role"),
    (
        "a disagreement",
        "call, shifted_by",
        "the call that was left out or made too much; by how many calls what follows is shifted",
    ),
    ("a disagreement", "swapped_by", "two calls this far apart have changed places"),
    ("a disagreement", "several_shifts_fit", "the calls repeat: other shifts explain as much"),
    ("a disagreement", "repeated", "how often the same was seen again"),
    ("a disagreement", "singled_out_by", "the finding on another communicator that tells who"),
    ("a disagreement", "other_communicator", "where the call that was left out here was made"),
    ("a disagreement", "hangs_at_comm_seq", "the later collective that hangs because of it"),
    ("a delay", "late_comm_ranks, late_rank_status", "who was late, and its state"),
    (
        "a delay",
        "spread_s, worst_spread_s, late_slots, clock_bound_s",
        "how late at first and at worst, in how many collectives; error of the clocks",
    ),
    (
        "p2p",
        "unmatched",
        "the sends and receives in question: ranks, count, datatype, bytes, call_idx, time",
    ),
    ("p2p", "position", "number among those of one direction and peer, from 0"),
    ("p2p", "inside", "whether the thread is inside the call"),
    ("p2p", "awaited_on_comm", "reason wrong_communicator: where the partner waits"),
    (
        "comm_ended_under_waiters",
        "left_comm_ranks, left_rank_status",
        "members that entered the call and left",
    ),
    ("a call that does not end", "inside_comm_ranks, returned_comm_ranks", "who is inside still"),
    (
        "a call that does not end",
        "complete_comm_ranks, not_complete_comm_ranks, not_complete_rank_status, calls_behind",
        "where completion is seen: who has completed, who has not, by how many calls",
    ),
    ("nccl_error_exit", "rc, result, times", "the code, its name, how often"),
    ("nccl_error_exit", "error_comm_ranks, returned_unix_ns", "who got it, and when first"),
    ("nccl_error_exit", "after_end_of", "the rank whose end was the cause"),
    ("initialisation", "candidates, claimed_by", "see Initialisation"),
    (
        "initialisation",
        "child, missing_new_ranks, left_out",
        "which split, shrink or grow; whom a grow lacks; how many a shrink leaves out",
    ),
    ("inspect", "evidence, positions", "see Positions without events"),
)

_COVERAGE_FIELDS = (
    ("observed_ranks, expected_nranks", "members with a trace, and all"),
    ("unobserved_comm_ranks", 'ranks without a trace, as text such as "4-7"'),
    ("collector_silent_comm_ranks", "ranks of which the collector tells nothing new"),
    ("through_unix_ns", "every call before this time is known or counted as lost"),
    ("lost_events", "events lost by the processes of this communicator"),
    ("base, alignment, numbers", "see Late attach"),
    ("cannot_see", "what this tracer cannot see, such as graph_replay"),
    ("notes", "the same in words, where it weakens the verdict"),
)

_CONFIDENCES = (
    ("observed", "what is said was seen: nothing that matters is lost, all numbers are exact"),
    ("inferred", "worked out: by majority, habit, order on a stream, or as nothing else explains"),
    ("reduced", "events were lost, ranks are not observed, or numbers are not exact"),
    ("none", "it is seen that ranks wait; the cause is not known"),
)

_ALIGNMENT_FIELDS = (
    ("comm_rank", "rank in the communicator"),
    ("base", "exact, aligned, ambiguous or unknown, see above"),
    ("shift", "number of the first call seen of it; null: not known"),
    ("why", "what it was placed by"),
    ("other_shifts", "how many other places fit as well"),
)


def _reserved() -> list[str]:
    if not f.RESERVED_HANG_TYPES:
        return []
    kinds = list(f.RESERVED_HANG_TYPES.items())
    return ["Reserved for later releases:", md_table(("hang_type", "meaning"), kinds)]


_RULES = (
    "## Idle waits",
    "The followers of an inference job wait in a broadcast until there is work, for hours. From "
    "outside an idle root\nand one that hangs outside NCCL look the same. A wait in ncclBroadcast, "
    "ncclBcast or ncclScatter that lacks\nonly its root is",
    "- nothing, when `--idle-ok PATTERN` was given: shell patterns of communicators by name or "
    "hash;\n"
    "- nothing, when the job itself has taught it: after three earlier waits of this "
    "communicator, function, root and\n"
    "  size (class of bytes by powers of two) that were longer than --missing-after and ended "
    "well;\n"
    "- else a notice with `details.idle` undecided: waiting, cause not decidable. Role unknown, "
    "nobody is named, however\n"
    "  long it lasts; the root's state is in `missing_rank_status`. It is an ordinary absence when "
    "the waiters have gone\n"
    "  on to anything but more data of this root.",
    "It is an ordinary absence, declared or not, when the root is stopped, in uninterruptible "
    "sleep, or inside another\nNCCL call past --missing-after; when it has ended, or ended the "
    "communicator, and others wait on; when an error,\na disagreement or another wait blocks "
    "ranks of this communicator elsewhere. A member that came and then left is\nnamed instead "
    "(`comm_ended_under_waiters`, `details.left_comm_ranks`). A root that comes after a declared "
    "or learned\nwait is not late. Waits for the root of a Reduce or Gather are never idle: the "
    "others do not need it.\nBefore that is known, a root that came late is told "
    "(`delayed_collective_enter`, `details.idle` undecided), and not\nnamed.",
    "Receives, outside a group, whose one sender is alive and outside NCCL are treated alike: "
    "declared, or after three earlier\nreceives from that rank that waited as long and were "
    "served, they give no finding; before that a notice, undecided.\nThey are an ordinary "
    "`p2p_unmatched` in the cases above, and when the sender has not received what it was sent, "
    "or has\nbeen sent more than it sent back (an answer is due), or is in a system call in which "
    "nobody waits for work (`read`,\n`write`, `wait4`, ...).",
    "## Who is wrong",
    "Where calls of one slot differ, the largest side is right; with half of the ranks or less, "
    "confidence inferred.\nWithout a largest side, as with two ranks, nobody is named, unless "
    "one side goes on in the period of all calls\nbefore and the other leaves it once and comes "
    "back (inferred), or another communicator singles a rank out\n(`details.singled_out_by`). "
    "Two calls in the other order are one mismatch (reason calls_swapped). A call that was\nleft "
    "out on one communicator and made on another is one fault: the second finding is downstream "
    "of the first.",
    "NCCL 2.20.5 and later discard calls of count 0: they wait for nobody and are not counted in "
    "comm_seq. One that the\nothers did not make is no fault; where the others wait instead, "
    "`details.explanation` tells of it. With older\nlibraries, when all of a process are known "
    "to be older, they are calls like all others.",
    "Where the trace carries call sites (neither front takes them so far), `details.sites` tells "
    "where the calls of\nthe slot came from, and `details.site_splits` the slots before in which "
    "ranks stood apart as never else. When the\ngreater part is absent and those who wait stand "
    "where all others were a call before, after such a slot, they made\none call more: that is "
    "the cause then.",
    "## Initialisation",
    "For a new unique id only ranks of the new communicator are known. Those that did not come "
    "are not named as processes;\n`details.candidates` lists processes of the job that are "
    "elsewhere. Split, shrink and grow are collective over\nthe parent, whose members are named; "
    "callers without a colour take part, and ranks that a shrink leaves out do\nnot (they are "
    "those that are gone; else who is missing is not known). Different sizes for one id are "
    "a\n`collective_mismatch` with `differs_in` nranks. Of two claims of one rank the wrong one "
    "is named when all others\nclaim their rank in the job.",
)


def page() -> str:
    """The reference of findings."""
    o = Options()
    limits = (
        ("--missing-after", o.missing_after, "an absence is written, as a notice"),
        ("--late-after", o.late_after, "a rank that came last by more, and was silent, is late"),
        ("--error-after", o.error_after, "an absence becomes an error"),
        ("--phase-limit", o.phase_default, "a declared phase excuses nothing any more"),
        ("(fixed)", o.silent_after, "a collector that is further behind is silent"),
    )
    body = [
        "One finding is one line of `findings.jsonl`. It is written once while it lasts, again "
        "when its kind,\nseverity or role changes, and with state `resolved` when it ends; if it "
        "comes back it is written again.\nThe schema is `nccluprobe/match/finding.schema.json`. "
        "How a verdict is reached, and what it cannot tell:\n[matcher.md](matcher.md).",
        "## Fields",
        md_table(("field", "meaning"), _FIELDS),
        "More keys may be added to `details`; those here keep their meaning. "
        "`call_idx` is given per rank\n(`entered_call_idx`, `calls[].call_idx`).",
        "### missing_rank_status",
        md_table(("field", "meaning"), _STATUS_FIELDS),
        "Also, where known:",
        md_table(("field", "meaning"), _MORE_STATUS_FIELDS),
        "### More of details",
        md_table(("of", "key", "meaning"), _DETAILS_OF),
        "### Confidence",
        md_table(("confidence", "meaning"), _CONFIDENCES),
        "### Coverage",
        md_table(("field", "meaning"), _COVERAGE_FIELDS),
        "## Kinds",
        md_table(("hang_type", "meaning"), list(f.HANG_TYPES.items())),
        *_reserved(),
        "## Reasons",
        md_table(("reason", "meaning"), list(f.REASONS.items())),
        "## Thresholds",
        md_table(("option", "seconds", "what"), [(n, v // SECOND, d) for n, v, d in limits]),
        "With proof an absence is an error at once: the absent rank's process ended, or it ended "
        "the communicator,\nwhile others wait. A disagreement is written at once as a provisional "
        f"notice and decided after the next\n{o.decide_calls} calls or "
        f"{o.decide_after // SECOND} s.",
        "A delay is a notice, and an error where all that waited had aborted the communicator or "
        "crashed before\nthe late rank came.",
        "While a rank is in a phase that it has declared, neither it nor who waits for it gives a "
        "finding, up to the\nphase's limit: [heartbeat.md](heartbeat.md).",
        *_RULES,
        "## Late attach",
        "A rank that was attached in mid-life is placed among the calls of the others. "
        "`coverage.base` is the weakest\nbase of all members:",
        md_table(("base", "meaning"), list(f.BASE_MEANINGS.items())),
        "`coverage.alignment` tells it per rank that was attached late:",
        md_table(("field", "meaning"), _ALIGNMENT_FIELDS),
        "`coverage.numbers`: `NCCL's` when comm_seq is NCCL's own number (calls without a counter "
        "before the attach,\nsuch as AlltoAll, aside), else it counts from the first call seen. "
        "On an ambiguous base a verdict is a notice\nwith role unknown and names nobody as the "
        "cause; `details.note` says so.",
        "## Positions without events",
        "A rank that hangs makes no call that a tracer could see. What `nccluprobe inspect --json` "
        "writes, put in a\n`.jsonl` file in the folder given to `analyze`, tells where each rank "
        "stands. Such a finding has\n`details.evidence` inspect, confidence inferred, and "
        "`details.positions` (rank -> counters, source, time).\nOne look is a notice: a job that "
        "goes on shows small differences, too. It is a cause, and an error after\n--error-after, "
        "when a second look, or a trace of the processes, shows that nobody has moved.",
        "## The key",
        "A collective is (comm_uid_hash, instance, comm_seq, api). Without the api in the key the "
        "aggregation can be\nwrong: with ranks 0-2 in AllReduce #42 and rank 3 in Broadcast #42, "
        "all four ranks are present at number 42\nand the hang is missed. With the api the two "
        "groups do not complete; and as the matcher looks at the slot\n(communicator, number) "
        "first, it says one `collective_mismatch` with rank 3 in the minority, and not two\n"
        "absences. `tests/unit/match/test_disagreement.py` shows both "
        "(`test_can_the_aggregation_be_wrong_without_the_api_in_the_key`).",
        "## What is never said",
        "A rank is blamed only up to the time for which its own trace speaks (`through`). A rank "
        "whose collector is\nsilent, or that is not traced, is `rank_not_observed`: never alive, "
        "never a cause. A communicator of which only\na part is traced is judged on that part; if "
        "all of it waits, that is `waiting_for_unobserved`.",
    ]
    return md_page("Findings", "\n\n".join(body))
