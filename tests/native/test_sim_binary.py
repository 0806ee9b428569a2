"""The stand-in for libnccl: its symbols, other versions, the load generator, sanitizers."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import time
from pathlib import Path

import pytest

from .sim import (
    native_build,
)


def run(*command: object) -> str:
    words = [str(c) for c in command]
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


def test_symbols_come_in_pairs(built: dict[str, Path]) -> None:
    symbols = {}
    for line in run("nm", "-D", "--defined-only", built["libsimnccl.so"]).splitlines():
        address, kind, name = line.split()
        symbols[name] = (address, kind)
    names = [n for n in symbols if n.startswith("nccl")]
    assert len(names) > 50
    for name in names:
        assert symbols[name] == (symbols["p" + name][0], "W")
        assert symbols["p" + name][1] == "T"
    assert not [n for n in symbols if not n.startswith(("nccl", "pnccl", "sim"))]
    header = run("readelf", "-d", built["libsimnccl.so"])
    assert "libnccl.so.2" in header
    assert b"NCCL version 2.28.9+sim\0" in built["libsimnccl.so"].read_bytes()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="reads x86-64 code")
def test_entries_push_the_frame_and_bcast_goes_through_the_plt(built: dict[str, Path]) -> None:
    code = run("objdump", "-d", "--no-show-raw-insn", built["libsimnccl.so"])
    entries = re.findall(r"<p?(nccl\w+)>:\n\s*\w+:\s+(\S+ +\S+)", code)
    assert len(entries) > 50
    assert {first.split()[0] + first.split()[1] for _, first in entries} == {"push%rbp"}
    bcast = code[code.index("ncclBcast>:") :].split("\n\n")[0]
    assert "call" in bcast and "<ncclBroadcast@plt>" in bcast


@pytest.mark.parametrize("version", ["2.16.2", "2.18.1", "2.23.4", "2.26.2", "2.32.3"])
def test_other_versions_build(version: str, tmp_path: Path) -> None:
    path = native_build.build(tmp_path, ["libsimnccl.so"], sim_version=version)["libsimnccl.so"]
    assert f"NCCL version {version}+sim".encode() in path.read_bytes()


def load(built: dict[str, Path], tmp_path: Path, nranks: int, *options: str) -> list[dict]:
    env = {
        **os.environ,
        "TSAN_OPTIONS": "halt_on_error=1 exitcode=66",
        "ASAN_OPTIONS": "detect_leaks=1",
        "UBSAN_OPTIONS": "halt_on_error=1",
    }
    uid = tmp_path / f"uid-{time.monotonic_ns()}"
    processes = [
        subprocess.Popen(
            [
                built["nccl_load"],
                "--lib",
                built["libsimnccl.so"],
                "--rank",
                str(r),
                "--nranks",
                str(nranks),
                "--uid-file",
                uid,
                "--print-truth",
                *options,
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
        )
        for r in range(nranks)
    ]
    truths = []
    for process in processes:
        try:
            out, err = process.communicate(timeout=30)
        finally:
            process.kill()
        assert process.returncode == 0, err
        truths.append(json.loads(out.splitlines()[-1]))
    return truths


def test_load_tells_the_truth(built: dict[str, Path], tmp_path: Path) -> None:
    truths = load(built, tmp_path, 2, "--op", "all", "--calls", "400", "--sync-every", "20")
    assert all(t["errors"] == 0 for t in truths)
    assert truths[0]["calls"]["ncclAllReduce"] == truths[1]["calls"]["ncclAllReduce"] == 317
    null = run(
        built["nccl_load"],
        "--lib",
        built["libsimnccl.so"],
        "--null-comm",
        "--calls",
        "50",
        "--print-truth",
    )
    assert json.loads(null)["errors"] == 50
    bench = run(built["nccl_load"], "--lib", built["libsimnccl.so"], "--bench", "--calls", "1000")
    assert len(json.loads(bench)["ns_per_step"]) == 5


@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_sanitizers(sanitizer: str, tmp_path: Path) -> None:
    built = native_build.build(tmp_path, extra_cflags=(f"-fsanitize={sanitizer}",), strict=True)
    truths = load(
        built, tmp_path, 2, "--op", "all", "--threads", "3", "--calls", "300", "--sync-every", "5"
    )
    assert all(t["errors"] == 0 for t in truths)
    truth = load(built, tmp_path, 1, "--churn", "--threads", "4", "--calls", "100")[0]
    assert truth["errors"] == 0 and truth["calls"]["ncclCommDestroy"] == 400
