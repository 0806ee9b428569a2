"""nccluprobe/trace/trace.schema.json: the JSON Schema of a trace line."""

from __future__ import annotations

import json

from nccluprobe.trace.schema import json_schema


def render() -> str:
    """The schema, as nccluprobe.trace.schema gives it."""
    return json.dumps(json_schema(), indent=1) + "\n"
