"""What every rank waits for in the model, in words: the truth beside a verdict."""

from __future__ import annotations

from model.device import Item
from model.engine import Engine
from model.ops import Call, Group, Init, Op, Split
from model.process import Thread


def explain(engine: Engine, ranks: list[int] | None = None) -> list[str]:
    """One line per thread and per stream that does not go on."""
    lines = []
    for proc in engine.procs:
        if ranks is not None and proc.rank not in ranks:
            continue
        if proc.ended is not None:
            t, code, signal = proc.ended
            lines.append(f"rank {proc.rank}: ended at {t:.3f}, code {code}, signal {signal}")
            continue
        lines += [f"rank {proc.rank}: {_thread(t)}" for t in proc.threads if not t.done]
        for number, stream in sorted(proc.streams.items()):
            if stream.live:
                head = stream.live[0]
                more = f", {len(stream.live) - 1} queued behind"
                lines.append(f"rank {proc.rank}: stream {number}: {_item(head)}{more}")
    return lines


def _thread(thread: Thread) -> str:
    what = thread.at
    since = f" since {thread.inside.t:.3f}" if thread.inside is not None else ""
    inside = f"inside {thread.inside.api}{since}" if thread.inside is not None else "outside NCCL"
    if isinstance(what, Call):
        text = f"{what.op.api} on {what.op.comm}"
    elif isinstance(what, Group):
        text = f"group of {', '.join(op.api + ' on ' + op.comm for op in what.ops[:4])}"
    elif isinstance(what, (Init, Split)):
        text = type(what).__name__
    else:
        text = str(what)
    stopped = " (stopped)" if thread.proc.frozen else ""
    return f"thread {thread.index} {inside}, at {text}{stopped}"


def _item(item: Item) -> str:
    if item.endpoint is None:
        return f"a kernel ({item.state})"
    comm = item.endpoint.comm
    if item.state == "queued":
        return f"{item.ops[0].api} on {comm.name} waits for work of this communicator"
    waits = [_op(item, op, n) for op, n in zip(item.ops, item.numbers, strict=True)]
    return f"{comm.name} {comm.hash:016x}: " + "; ".join(w for w in waits if w)


def _op(item: Item, op: Op, number: int) -> str:
    assert item.endpoint is not None
    comm, rank = item.endpoint.comm, item.endpoint.rank
    if not op.p2p:
        slot = comm.slots[number]
        if rank in slot.over:
            return ""
        away = [r for i, r in enumerate(comm.members) if i not in slot.started]
        how = "hangs" if slot.broken else f"not running on {away}"
        return f"{op.api} number {number} {how}"
    assert op.peer is not None
    send = op.api == "ncclSend"
    channel = comm.channel(rank, op.peer) if send else comm.channel(op.peer, rank)
    mine = channel.sends if send else channel.recvs
    if number not in mine or (send and number in channel.sent):
        return ""
    partner = number in (channel.recvs if send else channel.sends)
    how = "hangs" if partner else f"lacks rank {comm.members[op.peer]}"
    return f"{op.api} number {number} {how}"
