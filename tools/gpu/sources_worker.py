"""One rank of a two-rank PyTorch job in which one thing goes wrong.

sources_worker.py FAULT [KIND]. Each step: an all_reduce on the default group, a broadcast on a
second one, and an exchange by batch_isend_irecv; kind "plain": by isend and irecv, "coalesced":
beside two all_gathers put together. Rank 1 does the wrong thing at one step. What the fault
is called says what it does; TRUTH in sources.py says who is to blame.
"""

from __future__ import annotations

import datetime
import os
import signal
import sys
import threading
import time

import torch
import torch.distributed as dist

STEPS = 60
AT = 25
LARGE = 4 << 20


def exchange(rank: int, large: bool, plain: bool, send: bool = True, receive: bool = True) -> None:
    """Both ranks send and receive, in one batch or one by one."""
    data = torch.ones(LARGE if large else 1024, device="cuda")
    other = torch.empty_like(data)
    operations = []
    if plain:
        if rank == 0 and send:
            dist.isend(data, 1).wait()
        if receive:
            dist.irecv(other, 1 - rank).wait()
        if rank == 1 and send:
            dist.isend(data, 0).wait()
        return
    if send:
        operations.append(dist.P2POp(dist.isend, data, 1 - rank))
    if receive:
        operations.append(dist.P2POp(dist.irecv, other, 1 - rank))
    for work in dist.batch_isend_irecv(operations) if operations else []:
        work.wait()


def gather(wrong: str) -> None:
    """Two all_gathers put together."""
    size = 2048 if wrong == "size" else 1024
    outs = [torch.empty(2 * size, device="cuda") for _ in range(2)]
    with dist._coalescing_manager(device=torch.device("cuda"), async_ops=True) as works:
        for out in outs:
            dist.all_gather_into_tensor(out, torch.ones(size, device="cuda"))
    works.wait()


def main() -> None:
    fault = sys.argv[1]
    kind = sys.argv[2] if len(sys.argv) > 2 else ""
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    patience = datetime.timedelta(seconds=float(os.environ.get("PATIENCE_S", "15")))
    threading.Timer(float(os.environ.get("HOLD_S", "60")), lambda: os._exit(3)).start()
    dist.init_process_group(
        "nccl", rank=rank, world_size=2, timeout=patience, device_id=torch.device("cuda", rank)
    )
    second = dist.new_group([0, 1], timeout=patience)
    data = torch.ones(4096, device="cuda")
    for step in range(STEPS):
        wrong = fault if rank == 1 and step == AT else ""
        if wrong == "stall":
            time.sleep(1000)
        if wrong == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if wrong == "exit":
            os._exit(1)
        if wrong == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if wrong == "gpu":  # a kernel that does not end, before the next collective
            torch.cuda._sleep(1 << 40)
        if wrong == "api":
            dist.all_gather_into_tensor(torch.empty(2 * len(data), device="cuda"), data)
        elif wrong == "size":
            dist.all_reduce(torch.ones(LARGE, device="cuda"))
        elif wrong == "dtype":
            dist.all_reduce(data.double())
        elif wrong == "order":
            dist.broadcast(data, 0, group=second)
            torch.cuda.synchronize()
            dist.all_reduce(data)
        elif wrong != "skip":
            dist.all_reduce(data)
        if step == AT and fault == "order":
            torch.cuda.synchronize()
        if wrong != "order":
            dist.broadcast(data, 0, group=second)
        # From here on large: a small send would be buffered.
        exchange(rank, step >= AT, kind == "plain", wrong != "no_send", wrong != "no_receive")
        if kind == "coalesced":
            gather(wrong)
        if step % 8 == 0:
            torch.cuda.synchronize()
        if step == 0:
            print(f"rank {rank}: first step done", flush=True)
        time.sleep(0.05)
    torch.cuda.synchronize()
    print(f"rank {rank}: done", flush=True)
    # As a training that waits for its last checkpoint to be written.
    time.sleep(float(os.environ.get("HOLD_S", "60")) if fault == "healthy" else 0)
    os._exit(0)


if __name__ == "__main__":
    main()
