"""Why a verdict is worked out, or less sure: one clause for the line "how sure"."""

from __future__ import annotations

from nccluprobe.match.doubt import NOT_TOLD
from nccluprobe.match.finding import Finding
from nccluprobe.report.ranks import tense_of
from nccluprobe.report.words import doubts

_SHIFTED = "from the calls that the two made before and after"
#: Kind, and reason where that decides -> what an inferred verdict rests on.
_INFERRED: dict[tuple[str, str | None], str] = {
    ("collective_missing_enter", None): "it may wait itself, and nothing else explains the rest",
    ("collective_mismatch", None): "no clear majority: habit or another communicator tells who",
    ("skipped_or_extra_call", None): "the calls before and after fit best so",
    ("skipped_or_extra_call", "call_extra"): "the others went on, or ended, without this call",
    ("collective_all_ranks_stuck", None): "all came; what holds the device is not seen",
    ("nccl_missing_exit", None): "the call is seen, what it waits for is not",
    ("nccl_error_exit", None): "the other had ended before the error",
    ("comm_init_missing_enter", None): "who did not come is known by number only",
    ("comm_init_rank_conflict", None): "all others claim their rank in the job",
    ("comm_init_stuck", None): "all came; what holds them is not seen",
    ("comm_ended_under_waiters", None): "that it left is seen, that the others need it is not",
    ("p2p_mismatch", None): "what they do with other ranks tells who of the two",
    ("p2p_unmatched", None): "it may wait itself, and nothing else explains the rest",
    ("p2p_unmatched", "wrong_peer"): "the two calls would fit, but for the peer",
    ("p2p_unmatched", "wrong_communicator"): "the two calls would fit, but for the communicator",
    ("p2p_unmatched", "partner_gone_past"): "it made later calls that should come after this one",
    ("p2p_unmatched", "call_skipped"): _SHIFTED,
    ("p2p_unmatched", "call_extra"): _SHIFTED,
    ("p2p_order_inversion", None): "from the order of the calls; the device is not seen",
    ("cross_comm_order_inversion", None): "from the order of the calls; the device is not seen",
    ("collective_missing_exit", None): "from who has returned; the GPU is not seen",
    ("collective_missing_exit", "not_complete_here"): "its peers completed more; the GPU was not "
    "looked at",
}


#: What is said of ranks that are there, and of those that have ended.
_PAST = {
    "that the others wait for it": "that the others waited for it",
    "it may wait itself": "it may have waited itself",
    "what it waits for": "what it waited for",
    "what holds": "what held",
}


def grounds(f: Finding) -> str | None:
    """The clause; None: it was seen, or the doubts that are listed beside say it."""
    text = _grounds(f)
    d = f.details
    if text and tense_of(f, d.get("missing_comm_ranks") or d.get("entered_comm_ranks") or ()).fate:
        for now, then in _PAST.items():
            text = text.replace(now, then)
    return text


def _grounds(f: Finding) -> str | None:
    d = f.details
    if d.get("confidence") == "inferred":
        if d.get("evidence") == "inspect":
            return "by NCCL's counters, no call was seen"
        if f.hang_type == "comm_init_missing_enter" and f.named:
            return "that the others wait for it is not seen"
        if d.get("differs_in") == ["site"]:
            return "the calls agree but for their call sites"
        found = _INFERRED.get((f.hang_type, d.get("reason")))
        return found or _INFERRED.get((f.hang_type, None), "nothing else explains what is seen")
    if d.get("confidence") != "reduced":
        return None
    statuses = d.get("missing_rank_status") or ()
    reasons = {d.get("reason"), *(s["reason"] for s in statuses)}
    if "rank_left_no_dump" in reasons:
        return "where it was, no dump tells"
    if NOT_TOLD in (d.get("note") or ""):
        return "who the members are is assumed"
    if "probe_event_loss_possible" in reasons:
        return "events that were lost may hold its call"
    if d.get("trace_event_loss_possible"):
        return "events were lost that may matter"
    if f.supposes:
        return "it holds if what was lost were calls of others"
    if d.get("unobserved_comm_ranks") or d.get("not_observed_comm_ranks"):
        return "not all members are observed"
    listed = [x for x in doubts(f) if not x.startswith("not seen: ")]
    return None if listed else "calls of the job that nobody saw may stand behind it"
