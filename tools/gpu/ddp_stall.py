"""A small DistributedDataParallel training in which one rank stalls.

Run under torchrun. Each step: forward, backward (DDP's all-reduces), step.
Every tenth step a second process group broadcasts. With --stall-rank R
--stall-at N rank R sleeps before step N, as a slow data loader would, until
--hold seconds have passed; then every rank leaves without cleaning up.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--stall-rank", type=int, default=-1)
    parser.add_argument("--stall-at", type=int, default=30)
    parser.add_argument("--stall-after", type=float, default=0.0, help="seconds, not a step")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between steps")
    parser.add_argument("--hold", type=float, default=40.0)
    options = parser.parse_args()

    rank = int(os.environ["RANK"])
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    # A hung collective cannot be left in any other way.
    threading.Timer(options.hold, lambda: os._exit(3)).start()
    dist.init_process_group("nccl", device_id=torch.device("cuda", local))
    second = dist.new_group(list(range(dist.get_world_size())))

    model = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512)).cuda()
    model = DistributedDataParallel(model, device_ids=[local])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    started = time.monotonic()
    for step in range(options.steps):
        time.sleep(options.pause)
        due = step == options.stall_at
        if options.stall_after:
            due = time.monotonic() - started > options.stall_after
        if rank == options.stall_rank and due:
            print(f"rank {rank}: stalls before step {step}", flush=True)
            time.sleep(options.hold * 2)
        batch = torch.randn(64, 512, device="cuda")
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            dist.broadcast(torch.ones(16, device="cuda"), src=0, group=second)
        torch.cuda.synchronize()
        if rank == 0 and step == 0:
            print("first step done", flush=True)
    spent = time.monotonic() - started
    if rank == 0:
        print(f"{options.steps} steps in {spent:.3f} s, {spent / options.steps * 1e3:.3f} ms each")
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
