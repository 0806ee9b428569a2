"""docs/trace.md: the trace format."""

from __future__ import annotations

import json
from typing import Any

from gen.text import md_page, md_table
from nccluprobe.nccl.api import TRACED, Role
from nccluprobe.trace.schema import (
    ARGUMENT_FIELDS,
    LINE_KINDS,
    RESERVED_KINDS,
    SCHEMA_VERSION,
    Field,
    LineKind,
    numbers_of,
)

_INTRO = f"""
Version {SCHEMA_VERSION}. One JSON object per line; `kind` says what a line is. A JSON Schema of a
line is in `nccluprobe/trace/trace.schema.json`.

## Layout of a run

```
<out>/tracing/<run_id>/
  rank_<rank>_pid_<pid>.jsonl      one per traced process
  heartbeat/rank_<rank>.json       what the job says of itself, when it does (heartbeat.md)
  evidence/                        evidence when taken
  findings.jsonl   analyzer.log
```

`run_id` is a label for the folder and for findings; it is never part of a match. A file is made
at a process's first NCCL call, not when it maps the library. If the name exists,
`_<host>_<start>` is added: readers trust the `process` line, not the name. The rank in the name is
`unknown` when it was not known when the file was made.

## Rules for readers

- **Whole lines.** Lines are appended in batches; a reader waits for the newline. The last line of
  a dead writer may be torn: count it, do not fail.
- **Times** are integers, nanoseconds of the initial namespace's CLOCK_MONOTONIC; a duration stands
  beside its start. `clock` lines tie them to unix time. Two hosts compare only through these, and
  one host's times compare only within one `boot_id`.
- **A call names its communicator** by the `id` of a `comm` line of the same part; `thread` and
  `stream` are numbers of this process only.
- **Order.** A `call` line is written when the call ends, so lines are not in order of entry: sort
  by `idx` on a communicator, or by `t`. A call that is inside for long has an `enter` line, and
  its `call` line follows with the same `t` and `thread`.
- **`idx` counts calls as they were seen**, from 0, before anything can be lost: a hole is a lost
  record. It is not NCCL's own sequence number.
- **Silence is not absence.** Only up to `through` of the latest `coverage` line may a reader say
  that a call did not happen, and only if nothing was lost. A coverage line older than 5 s means
  that the collector is silent, not that the process is.

## Rotation

The first part is `NAME.jsonl`; it is continued in `NAME.part1.jsonl`, `NAME.part2.jsonl` and so
on. Every part starts with the `process` line (its `part` is the number), a `clock` line and the
`comm` lines of all live communicators, so that each can be read alone. When all parts together
reach the bound, the oldest is removed and a `state` line says so.

## What a trace may lack

- With `--no-exit` (`exits` is false) there are no durations and return codes, and a communicator
  is known only from its first call on, with what its struct tells; NCCL's own calls inside
  lifecycle functions are recorded like the program's.
- A handle that NCCL writes after the call has returned (split, shrink, grow in a group or not
  blocking) leaves `new_comm` null; the `comm` line with `parent` and `child` follows.

## Compatibility

A file of version 1 is read by every later release. Fields and kinds may be added; none changes its
meaning. A reader keeps and counts kinds and fields that it does not know. Reserved for later:
{", ".join(f"`{kind}`" for kind in RESERVED_KINDS)}.

Text that comes from the traced process (names, paths) may hold anything that JSON can: escape it
before showing it.
"""


def _type(schema: dict[str, Any]) -> str:
    if "const" in schema:
        return json.dumps(schema["const"])
    if "enum" in schema and len(schema["enum"]) <= 12:
        return ", ".join("null" if v is None else f'"{v}"' for v in schema["enum"])
    if "enum" in schema:
        return "name"
    kind = schema["type"]
    text = " or ".join(kind) if isinstance(kind, list) else str(kind)
    if schema.get("pattern"):
        return text.replace("string", "16 hex digits")
    if schema.get("minimum") == 0:
        return text.replace("integer", "integer >= 0")
    return text


def _presence(field: Field) -> str:
    return ("always" if field.required else "may lack") + (
        ", may be null" if field.nullable else ""
    )


def _fields(fields: tuple[Field, ...]) -> str:
    return md_table(
        ("field", "type", "present", "meaning"),
        [(f"`{f.name}`", _type(f.schema), _presence(f), f.doc) for f in fields],
    )


def _kind(line: LineKind) -> str:
    return f"### `{line.name}`\n\n{line.doc}\n\n{_fields(line.fields)}"


def _per_api() -> str:
    rows = []
    for api in TRACED:
        names = [f"`{f.name}`" for f in numbers_of(api)]
        for role in api.args:
            for field in ARGUMENT_FIELDS.get(role, ()):
                mark = " (call only)" if role is Role.NEW_COMM else ""
                names.append(f"`{field.name}`{mark}")
        rows.append((f"`{api.name}`", ", ".join(names) or "none"))
    return md_table(("api", "further fields"), rows)


def render() -> str:
    """The introduction, every kind of line, and the fields that depend on the api."""
    arguments = tuple(f for fields in ARGUMENT_FIELDS.values() for f in fields)
    parts = [_INTRO.strip(), "## Kinds of lines"]
    parts += [_kind(line) for line in LINE_KINDS]
    parts.append("## Fields of `call` and `enter` that depend on the api\n\n" + _fields(arguments))
    parts.append(_per_api())
    return md_page("The trace", "\n\n".join(parts))
