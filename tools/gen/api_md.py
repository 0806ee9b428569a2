"""docs/api.md: the traced functions and where their arguments lie."""

from __future__ import annotations

from gen.text import md_page, md_table
from nccluprobe.nccl.api import API_TABLE, Api, Kind, Place, Role

_X86 = ("rdi", "rsi", "rdx", "rcx", "r8", "r9")
_INTRO = """
The functions that nccluprobe traces, from the table in `nccluprobe/nccl/api.py`. Adding a row
there is the whole work of supporting a function: the BPF argument readers, the C headers, the
trace's JSON Schema and this page follow from it.

Prototypes are those of nccl.h 2.16 to 2.32. Only the name `ncclX` is probed: `pncclX` is the
same address. *since* is the first NCCL release that exports the function; one that a library
lacks is left out there. A call of a function with *compared as* is compared with other ranks'
calls under that name. A *helper* is probed for what it tells about other calls; it never appears
in a trace.
"""
_PLACES = """
Where each recorded argument lies at the function's first instruction, x86-64 / aarch64. An
argument in a register that is narrower than 64 bits has an undefined upper half. A unique id by
value lies on the stack on x86-64 (`[rsp+8]` to `[rsp+135]`, so the arguments behind it move up);
on aarch64 the register holds a pointer to the caller's copy.
"""
_MEANING = {
    Role.COUNT: "number of elements",
    Role.SIZE: "number of bytes, recorded as count",
    Role.COMM: "the communicator",
    Role.NEW_COMM: "address that the new communicator is written to",
    Role.COMM_ARRAY: "array that the new communicators are written to",
    Role.UID: "unique id by value; hashed, never recorded",
    Role.UID_PTR: "pointer to a unique id; hashed, never recorded",
    Role.NRANKS: "number of ranks (shrink: of those excluded)",
    Role.RANK: "the caller's rank in the new communicator",
    Role.CONFIG: "`ncclConfig_t *`; only `blocking` and `commName` are read",
}


def _x86(place: Place) -> str:
    return _X86[place.reg] if place.reg is not None else f"[rsp+{place.stack}]"


def _arm(place: Place, role: Role) -> str:
    text = f"x{place.reg}" if place.reg is not None else f"[sp+{place.stack}]"
    return f"*{text}" if role is Role.UID else text


def _places(api: Api) -> str:
    parts = [
        f"{role.value} {_x86(api.place(role, 'x86_64'))} / {_arm(api.place(role, 'aarch64'), role)}"
        for role in api.args
        if role is not Role.OTHER
    ]
    return "; ".join(parts) or "none"


def render() -> str:
    """Two tables: what the functions are, and where their arguments lie."""
    parts = [_INTRO.strip()]
    for kind in Kind:
        rows = [
            (
                api.id,
                f"`{api.name}`",
                api.since,
                f"`{api.same_as}`" if api.same_as else "",
                api.makes_comm or "",
                api.ends_comm or "",
            )
            for api in API_TABLE
            if api.kind is kind
        ]
        head = ("id", "function", "since", "compared as", "makes", "ends")
        parts.append(f"## {kind.value.replace('_', ' ').capitalize()}\n\n{md_table(head, rows)}")
    rows = [(f"`{api.name}`", _places(api)) for api in API_TABLE]
    parts.append(
        f"## Places of arguments\n\n{_PLACES.strip()}\n\n"
        + md_table(("function", "recorded arguments"), rows)
    )
    meaning = [(f"`{role.value}`", text) for role, text in _MEANING.items()]
    parts.append(md_table(("argument", "meaning"), meaning))
    return md_page("The traced functions", "\n\n".join(parts))
