"""nccluprobe/match/finding.schema.json."""

from __future__ import annotations

import json
from typing import Any

from gen.text import NOTICE
from nccluprobe.match import finding as f


def _enum(values: Any, null: bool = False) -> dict[str, Any]:
    return {"enum": [*values, *([None] if null else [])]}


_INT: dict[str, Any] = {"type": "integer"}
_NULL_INT: dict[str, Any] = {"type": ["integer", "null"]}
_RANKS: dict[str, Any] = {"type": "array", "items": _INT}

_STATUS: dict[str, Any] = {
    "type": "object",
    "required": [
        "comm_rank",
        "global_rank",
        "heartbeat",
        "heartbeat_age_s",
        "probe_dropped_events",
        "reason",
    ],
    "properties": {
        "comm_rank": _INT,
        "global_rank": _NULL_INT,
        "heartbeat": _enum(f.HEARTBEATS),
        "heartbeat_age_s": {"type": ["number", "null"]},
        "probe_dropped_events": _NULL_INT,
        "reason": _enum(f.REASONS),
        "call_idx": _NULL_INT,
    },
}

_DETAILS: dict[str, Any] = {
    "type": "object",
    "required": [
        "api",
        "expected_nranks",
        "entered_comm_ranks",
        "missing_comm_ranks",
        "missing_rank_status",
        "waited_s",
        "reason",
        "confidence",
        "trace_event_loss_possible",
    ],
    "properties": {
        "api": {"type": ["string", "null"]},
        "expected_nranks": _NULL_INT,
        "entered_comm_ranks": _RANKS,
        "missing_comm_ranks": _RANKS,
        "missing_rank_status": {"type": "array", "items": _STATUS},
        "waited_s": {"type": "number"},
        "reason": _enum(f.REASONS),
        "confidence": _enum(f.CONFIDENCES),
        "trace_event_loss_possible": {"type": "boolean"},
    },
}


def schema() -> str:
    """JSON Schema of one line of findings.jsonl."""
    whole = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$comment": NOTICE,
        "title": "nccluprobe finding, version 1",
        "type": "object",
        "required": [
            "hang_type",
            "run_id",
            "comm_uid_hash",
            "comm_seq",
            "detected_at_unix_ns",
            "details",
            "id",
            "state",
            "severity",
            "role",
            "downstream_of",
            "culprits",
            "job",
            "coverage",
            "limits",
        ],
        "properties": {
            "hang_type": _enum([*f.HANG_TYPES, *f.RESERVED_HANG_TYPES]),
            "run_id": {"type": "string"},
            "comm_uid_hash": {"type": ["string", "null"], "pattern": "^[0-9a-f]{16}$"},
            "comm_seq": _NULL_INT,
            "detected_at_unix_ns": _INT,
            "details": _DETAILS,
            "id": {"type": "string"},
            "state": _enum(f.STATES),
            "severity": _enum(f.SEVERITIES),
            "role": _enum(f.ROLES),
            "downstream_of": {"type": ["string", "null"]},
            "culprits": {
                "type": "array",
                "items": {
                    "type": "object",
                    "required": ["host", "pid", "rank"],
                    "properties": {
                        "host": {"type": ["string", "null"]},
                        "pid": _INT,
                        "rank": _NULL_INT,
                    },
                },
            },
            "job": {"type": ["string", "null"]},
            "coverage": {"type": "object"},
            "limits": {"type": "object", "additionalProperties": {"type": "number"}},
        },
    }
    return json.dumps(whole, indent=1) + "\n"
