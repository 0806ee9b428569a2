#!/usr/bin/env python3
"""Calls NVIDIA's own libnccl a known number of times, with no GPU and no communicator.

    python tools/nccl_calls.py LIBNCCL [--go FILE] [--calls N]

Each function is entered with NULL in place of a communicator, so that NCCL
refuses the call before it would need a GPU.  tools/quickstart compares the
printed counts with what the probes saw.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import time
from pathlib import Path

#: Integer arguments before the communicator and after it, all 64 bits wide.
CALLS: dict[str, tuple[int | None, ...]] = {
    "ncclAllReduce": (None, None, 1024, 7, 0, None, None),
    "ncclBroadcast": (None, None, 1024, 7, 0, None, None),
    "ncclReduce": (None, None, 1024, 7, 0, 0, None, None),
    "ncclAllGather": (None, None, 1024, 7, None, None),
    "ncclReduceScatter": (None, None, 1024, 7, 0, None, None),
    "ncclSend": (None, 1024, 7, 1, None, None),
    "ncclRecv": (None, 1024, 7, 1, None, None),
    "ncclGroupStart": (),
    "ncclGroupEnd": (),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="calls NVIDIA's libnccl without a GPU")
    parser.add_argument("library", type=Path)
    parser.add_argument("--go", type=Path, help="begin when this file exists")
    parser.add_argument("--calls", type=int, default=1009, help="of each function")
    args = parser.parse_args()
    library = ctypes.CDLL(str(args.library))
    number = ctypes.c_int()
    library.ncclGetVersion(ctypes.byref(number))
    code = number.value
    print(json.dumps({"pid": os.getpid(), "version": code}), flush=True)
    deadline = time.monotonic() + 120
    while args.go and not args.go.exists():
        if time.monotonic() > deadline:
            raise SystemExit("nccl_calls: told to begin by nobody within 120 s")
        time.sleep(0.01)
    for name, values in CALLS.items():
        function = getattr(library, name)
        passed = [ctypes.c_void_p(value) for value in values]
        for _ in range(args.calls):
            function(*passed)
    print(json.dumps({"called": dict.fromkeys(CALLS, args.calls)}), flush=True)
    # What was called must be seen by a tracer that looks at living processes only.
    time.sleep(2)


if __name__ == "__main__":
    main()
