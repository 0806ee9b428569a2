"""nccluprobe/trace/trace.schema.json: the JSON Schema of a trace line."""

from __future__ import annotations

import json

from nccluprobe.trace.schema import json_schema


def render() -> str:
    """The schema, as nccluprobe.trace.schema gives it; one rule a line."""
    schema = json_schema()
    rules = ",\n  ".join(json.dumps(rule) for rule in schema.pop("allOf"))
    head = json.dumps(schema, indent=1).removesuffix("\n}")
    return f'{head},\n "allOf": [\n  {rules}\n ]\n}}\n'
