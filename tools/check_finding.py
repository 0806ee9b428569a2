#!/usr/bin/env python3
"""Says whether the demo's finding names what was planted; for tools/quickstart.

check_finding.py FINDINGS.json JOB.log           the hung job
check_finding.py --counts TRACE_DIR CALLS.log    calls on NVIDIA's libnccl
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nccluprobe.canary.truth import compare, truths


def objects(path: Path) -> Iterator[dict[str, Any]]:
    """All JSON objects in a file of lines, whatever else stands between them."""
    for line in path.read_text().splitlines():
        if line.startswith("{"):
            yield json.loads(line)


def findings(path: Path) -> list[dict[str, Any]]:
    text = path.read_text()
    try:
        found = json.loads(text)
    except ValueError:
        return [item for item in objects(path) if "hang_type" in item]
    if isinstance(found, dict):
        found = found.get("findings", [found])
    return [item for item in found if "hang_type" in item]


def check_job(path: Path, log: Path) -> int:
    (planted,) = truths(log.read_text().splitlines())
    right, text = compare(planted, findings(path))
    if not right:
        print(f"check_finding: {text}", file=sys.stderr)
        return 1
    (cause,) = [f for f in findings(path) if f["role"] == "root_cause"]
    print(
        f"quickstart: {text} as the one that never entered {cause['details']['api']}, "
        f"number {cause['comm_seq']} on communicator {cause['comm_uid_hash']}"
    )
    return 0


def check_counts(folder: Path, log: Path) -> int:
    said: dict[str, Any] = {}
    for item in objects(log):
        said.update(item)
    files = list(folder.glob(f"tracing/*/rank_*_pid_{said['pid']}*.jsonl"))
    seen: Counter[str] = Counter()
    lost = 0
    for file in files:
        for line in objects(file):
            if line["kind"] == "call":
                seen[line["api"]] += 1
            elif line["kind"] == "coverage":
                lost = line["lost_kernel"] + line["lost_queue"]
    print(f"    {'function':20} {'called':>8} {'traced':>8}")
    for api, number in said["called"].items():
        print(f"    {api:20} {number:8} {seen[api]:8}")
    if lost:
        print(f"    lost: {lost}")
    return 0 if dict(seen) == said["called"] else 1


def main() -> int:
    parser = argparse.ArgumentParser(description="checks what the demo showed")
    parser.add_argument("--counts", action="store_true")
    parser.add_argument("result", type=Path)
    parser.add_argument("log", type=Path)
    args = parser.parse_args()
    return (check_counts if args.counts else check_job)(args.result, args.log)


if __name__ == "__main__":
    sys.exit(main())
