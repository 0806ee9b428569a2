"""One of two ranks that does what it is told on standard input, one JSON line per answer.

RANK and WORLD_SIZE and NCCLUPROBE_CANARY_ADDRESS are in the environment, and in
CANARY_CORE the core that its main thread is to stay on, if any. Commands: "calls N" (host
time of N ncclAllReduce of 8 bytes, on a communicator of one rank and on that of both),
"rate N" (calls per second, queued), "pair N" (the two-rank all-reduce against
ncclAllReduce), "quit". "calls N OFFSET" and "rate N OFFSET" call the function at that
offset of the library in place of the one that the loader gives: under the preload library
that is NCCL's own, and not the wrapper.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from _shared import SIM

from nccluprobe.canary import DeviceBuffer, NcclBackend
from nccluprobe.canary.datatypes import decode
from nccluprobe.canary.libraries import simulated

#: Calls between two waits for the stream: far below what NCCL lets a host run ahead.
_BATCH = 64


def library_at(backend: NcclBackend) -> tuple[ctypes.CDLL, int]:
    """NCCL, and where it is loaded: the first word of what dlopen gives (struct link_map)."""
    library = ctypes.CDLL(backend.nccl.path)
    return library, int(ctypes.c_size_t.from_address(library._handle).value)


def offset_of(backend: NcclBackend) -> int:
    """ncclAllReduce's place in the library, where nothing is preloaded."""
    library, base = library_at(backend)
    return (ctypes.cast(library.ncclAllReduce, ctypes.c_void_p).value or 0) - base


def all_reduce_of(backend: NcclBackend, offset: int | None) -> Callable[[], int]:
    """ncclAllReduce of two floats, called with as little Python around it as there can be."""
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    types = [pointer, pointer, size, number, number, pointer, pointer]
    library, base = library_at(backend)
    if offset is None:
        function: Callable[..., int] = library.ncclAllReduce
    else:
        function = ctypes.CFUNCTYPE(number, *types)(base + offset)
    function.argtypes = types  # type: ignore[attr-defined]
    buffer = backend.alloc(64)
    buffer.fill(0)
    arguments = (
        ctypes.c_void_p(buffer.pointer), ctypes.c_void_p(buffer.pointer), ctypes.c_size_t(2),
        ctypes.c_int(7), ctypes.c_int(0), ctypes.c_void_p(backend.comm),
        ctypes.c_void_p(backend.stream),
    )  # fmt: skip
    return lambda: int(function(*arguments))


def calls(backend: NcclBackend, call: Callable[[], int], n: int) -> dict[str, float]:
    """Host time of single calls, microseconds."""
    clock = time.perf_counter_ns
    spent = np.empty(n)
    backend.barrier()
    for i in range(n):
        start = clock()
        call()
        spent[i] = clock() - start
        if i % _BATCH == _BATCH - 1:
            backend.synchronize()
    backend.synchronize()
    p50, p99 = np.quantile(spent, [0.5, 0.99]) / 1000
    return {"p50": float(p50), "p99": float(p99), "mean": float(spent.mean() / 1000)}


def rate(backend: NcclBackend, call: Callable[[], int], n: int) -> float:
    """Calls per second, queued and completed."""
    backend.barrier()
    start = time.perf_counter()
    for i in range(n):
        call()
        if i % 256 == 255:
            backend.synchronize()
    backend.synchronize()
    return n / (time.perf_counter() - start)


def pair(backend: NcclBackend, dtype: str, n: int) -> dict[str, Any]:
    """Differences between the two-rank path and ncclAllReduce on values of all magnitudes."""
    width = 2 if dtype == "bfloat16" else 4
    rng = np.random.default_rng(7 + backend.rank)
    values = (rng.standard_normal(n) * 2.0 ** rng.integers(-20, 20, n)).astype("<f4")
    bits = values.view("<u4")
    data = (bits >> 16).astype("<u2").tobytes() if dtype == "bfloat16" else values.tobytes()
    results = []
    for grouped in (False, True):
        send, recv = backend.alloc(n * width), backend.alloc(n * width)
        send.write(data)
        run(backend, send, recv, n, dtype, grouped)
        results.append(recv.read())
        send.free()
        recv.free()
    a, b = (np.frombuffer(r, f"<i{width}").astype(np.int64) for r in results)
    differ = a != b
    apart = np.abs(decode(results[0], dtype) - decode(results[1], dtype))
    scale = np.abs(decode(results[1], dtype)) * 2.0 ** -(7 if width == 2 else 23)
    return {
        "elements": n,
        "differ": int(differ.sum()),
        "max_ulp": float(np.max(apart / np.maximum(scale, 1e-38))),
    }


def run(
    backend: NcclBackend, send: DeviceBuffer, recv: DeviceBuffer, n: int, dtype: str, grouped: bool
) -> None:
    if grouped:  # inside a group it is ncclAllReduce
        with backend.group():
            backend.all_reduce(send, n, dtype, out=recv)
    else:
        backend.all_reduce(send, n, dtype, out=recv)
    backend.synchronize(30)


def main() -> None:
    nccl, cuda = simulated() if SIM else (None, None)
    with NcclBackend.from_environment(nccl=nccl, cuda=cuda) as both:
        alone = both.split(both.rank)
        assert alone is not None
        backends = {"1 rank": alone, "2 ranks": both}
        made: dict[tuple[str, int | None], Callable[[], int]] = {}
        if core := os.environ.get("CANARY_CORE"):
            # Now, and only this thread: NCCL's own stay where they were started.
            os.sched_setaffinity(0, {int(core)})
        hello = {"pid": os.getpid(), "nccl": both.nccl.version_text(), "offset": offset_of(both)}
        print(json.dumps(hello), flush=True)
        for line in sys.stdin:
            word, *numbers = line.split()
            n = numbers[0] if numbers else "0"
            offset = int(numbers[1]) if len(numbers) > 1 else None
            answer: dict[str, Any] = {}
            if word == "quit":
                break
            if word == "pair":
                answer = {d: pair(both, d, int(n)) for d in ("bfloat16", "float32")}
            for name, backend in backends.items():
                call = made.get((name, offset)) or all_reduce_of(backend, offset)
                made[name, offset] = call
                if word == "calls":
                    answer[name] = calls(backend, call, int(n))
                elif word == "rate":
                    answer[name] = rate(backend, call, int(n))
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
