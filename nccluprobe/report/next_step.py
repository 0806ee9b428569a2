"""What to look at next: the process, the host or the code of who is to blame."""

from __future__ import annotations

from typing import Any

from nccluprobe.match.finding import Finding
from nccluprobe.match.names import numbers
from nccluprobe.report.ranks import blamed
from nccluprobe.report.words import escape

#: What a process that was there is blamed for: whoever killed it, it did not come before.
_OF_THE_LIVING = ("rank_alive_but_not_entered", "rank_inside_other_call")
#: Kinds of which the calls tell more than a process does.
_ORDERS = ("cross_comm_order_inversion", "p2p_order_inversion")


def next_step(f: Finding) -> str | None:
    """What to look at next; None: nothing stands out."""
    reason = f.details.get("reason")
    statuses: list[dict[str, Any]] = []
    for key in ("missing_rank_status", "minority_rank_status", "late_rank_status"):
        statuses += f.details.get(key) or []
    known = blamed(f, statuses) or [s for s in statuses if s.get("pid") is not None]
    # Of several ranks the one that the finding is about, not one that waits itself.
    where = next((s for s in known if s.get("reason") == reason), None) or next(iter(known), None)
    if f.named and f.role == "root_cause" and not blamed(f, statuses):
        where = f.named[0]  # the statuses are those of others
    if where is None or not where.get("pid"):  # 0: a source that does not tell
        return _of_ranks(f, statuses) or _general_step(f)
    pid, host = where["pid"], escape(where.get("host"))
    ended = (where.get("host"), pid) in f.gone or any(
        s.get("pid") == pid
        and (
            s.get("process_end") not in (None, "detached")  # only tracing it has ended
            or s.get("heartbeat") == "absent"
        )
        for s in (*statuses, where)
    )
    if ended and reason in _OF_THE_LIVING:
        return (
            f"pid {pid} on {host} has ended since: look at the end of its log, and next time at "
            "its stack (py-spy dump) before it is killed"
        )
    if reason in _OF_THE_LIVING and where.get("main_thread") == "stopped":
        return (
            f"find out who stopped pid {pid} on {host} (Ctrl-Z, kill -STOP, a debugger); "
            f"kill -CONT {pid} lets it go on, unless a debugger holds it"
        )
    if reason in _OF_THE_LIVING:
        return f"look at the stack of pid {pid} on {host} (py-spy dump --pid {pid})"
    if reason in ("rank_exit_or_crash_suspected", "rank_exited"):
        text = f"look at the end of the log of pid {pid} on {host}"
        return text + (", and at dmesg for an OOM kill" if where.get("exit_code") is None else "")
    if reason == "rank_not_observed":
        return f"see whether the collector on {host} runs"
    if reason == "probe_event_loss_possible":
        at = "the end of the log" if ended else "the stack"
        return f"look at {at} of pid {pid} on {host}; enlarge the ring buffer"
    if reason in ("arguments_differ", "call_skipped", "call_extra"):
        return f"compare the code path of pid {pid} on {host} with that of another rank"
    if f.hang_type == "nccl_error_exit":
        return f"look at NCCL's warnings of pid {pid} on {host} (NCCL_DEBUG=WARN)"
    if f.hang_type == "collective_missing_exit":
        return f"look at the GPU of pid {pid} on {host} (dmesg for Xid, nvidia-smi)"
    if f.hang_type in _ORDERS:
        return _general_step(f)
    if f.hang_type == "comm_init_rank_conflict":
        return f"see which rank pid {pid} on {host} gives to the initialisation, and why"
    if ended:
        return f"pid {pid} on {host} has ended since: look at the end of its log"
    return f"look at pid {pid} on {host} (py-spy dump --pid {pid})"


def _of_ranks(f: Finding, statuses: list[dict[str, Any]]) -> str | None:
    """What to do about those to blame, of whom only ranks are known; None: nobody is to blame."""
    ranks = [x["rank"] for x in f.named if x["rank"] is not None and not x["pid"]]
    if f.role != "root_cause" or not ranks:
        return None
    several = len(set(ranks)) > 1
    who = f"{numbers(ranks)} of the job"
    process = "processes" if several else "process"
    node = "nodes" if several else "node"
    reason = f.details.get("reason")
    if f.hang_type == "collective_missing_exit":
        return f"look at the GPU of {who}, on its node (dmesg for Xid, nvidia-smi)"
    if reason in ("arguments_differ", "call_skipped", "call_extra", "calls_swapped"):
        return (
            f"compare the code path of {who} with that of another rank; nccluprobe explain RUN "
            f"{f.id} shows the calls rank by rank"
        )
    if f.hang_type == "nccl_error_exit":
        return f"look at NCCL's warnings of {who} (NCCL_DEBUG=WARN)"
    if reason == "rank_device_not_begun":
        return f"look at the GPU of {who}, and at what its streams wait for (nvidia-smi, dmesg)"
    text = (
        f"look at the stack of the {process} of {who} (on {'their' if several else 'its'} {node}: "
        f"py-spy dump --pid PID), or, where {'they have' if several else 'it has'} ended, at the "
        "end of the log"
    )
    if any(s.get("last_entered_unix_ns") for s in blamed(f, statuses)):
        text += "; where dumps hold frames, the newest entry shows where it was last"
    return text


def _general_step(f: Finding) -> str | None:
    """What to do next where no process stands out."""
    if f.hang_type in ("collective_mismatch", "skipped_or_extra_call", "p2p_mismatch"):
        return f"nccluprobe explain RUN {f.id} shows the calls rank by rank"
    if f.hang_type in ("collective_all_ranks_stuck", "comm_init_stuck"):
        return "look at the GPUs and the network of these ranks (dmesg for Xid, NIC counters)"
    if f.hang_type in _ORDERS:
        return (
            f"make these calls in one order on all ranks; nccluprobe explain RUN {f.id} shows them"
        )
    if f.hang_type == "comm_init_missing_enter":
        return "see that a process with each missing rank runs, and which unique id it got"
    if f.hang_type == "waiting_for_unobserved":
        return "trace the nodes of the other ranks too"
    if f.role == "root_cause" and f.comm_uid_hash is not None:
        return f"nccluprobe explain RUN {f.id} shows the calls rank by rank"
    return None
