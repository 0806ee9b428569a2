"""Fields and kinds of lines: what the schema of the trace is written with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

#: Version of the trace's format.
SCHEMA_VERSION = 1

TIME = "ns of the initial namespace's CLOCK_MONOTONIC"

INT: dict[str, Any] = {"type": "integer"}
NAT: dict[str, Any] = {"type": "integer", "minimum": 0}
STR: dict[str, Any] = {"type": "string"}
BOOL: dict[str, Any] = {"type": "boolean"}
HASH: dict[str, Any] = {"type": "string", "pattern": "^[0-9a-f]{16}$"}


def enum(*values: str) -> dict[str, Any]:
    return {"type": "string", "enum": list(values)}


def nullable(schema: dict[str, Any]) -> dict[str, Any]:
    if "enum" in schema:
        return {"enum": [*schema["enum"], None]}
    return {**schema, "type": [schema["type"], "null"]}


@dataclass(frozen=True)
class Field:
    """A field of a line.  ``nullable``: the key is there, the value unknown."""

    name: str
    schema: dict[str, Any]
    doc: str
    required: bool = True
    nullable: bool = False

    @property
    def json(self) -> dict[str, Any]:
        return nullable(self.schema) if self.nullable else self.schema


@dataclass(frozen=True)
class LineKind:
    """A kind of line: its meaning and its fields, besides ``kind`` itself."""

    name: str
    doc: str
    fields: tuple[Field, ...] = field(default=())


def opt(name: str, schema: dict[str, Any], doc: str) -> Field:
    return Field(name, schema, doc, required=False)


def null(name: str, schema: dict[str, Any], doc: str) -> Field:
    return Field(name, schema, doc, nullable=True)
