"""The generators, one per file.  Add yours to ``GENERATORS``."""

from __future__ import annotations

from collections.abc import Callable

from gen import (
    api_h,
    api_md,
    conformance,
    exit_codes_md,
    findings,
    findings_json,
    preload,
    record_h,
    trace_json,
    trace_md,
)

#: Path in the repository -> function that returns the file's whole text.
GENERATORS: dict[str, Callable[[], str]] = {
    "ebpf/include/ncp_record.h": record_h.render,
    "ebpf/include/ncp_api.h": api_h.render,
    "native/preload/ncp_wrappers.h": preload.render,
    "nccluprobe/trace/trace.schema.json": trace_json.render,
    "docs/api.md": api_md.render,
    "docs/trace.md": trace_md.render,
    "docs/exit-codes.md": exit_codes_md.render,
    "docs/findings.md": findings.page,
    "docs/conformance.md": conformance.render,
    "nccluprobe/match/finding.schema.json": findings_json.schema,
}
