"""native/preload/ncp_wrappers.h: a wrapper for each function of the API table.

All integer and pointer arguments are passed on as machine words, so that the
callee gets every register and stack slot as the caller left it.
"""

from __future__ import annotations

from gen.text import c_header, macro
from nccluprobe import procinfo
from nccluprobe.nccl.api import API_TABLE, Api, Kind, Role

#: Role -> field of struct ncp_record, and the cast of a narrower argument.
_FIELDS: dict[Role, tuple[str, str]] = {
    Role.COUNT: ("count", ""),
    Role.SIZE: ("count", ""),
    Role.DATATYPE: ("datatype", "(unsigned char)"),
    Role.OP: ("op", "(unsigned int)"),
    Role.ROOT: ("peer", "(int)"),
    Role.PEER: ("peer", "(int)"),
    Role.RANK: ("peer", "(int)"),
    Role.KEY: ("peer", "(int)"),
    Role.COLOR: ("color", "(int)"),
    Role.NRANKS: ("nranks", "(int)"),
    Role.COMM: ("comm", ""),
    Role.STREAM: ("stream", ""),
}
_OUT = (Role.NEW_COMM, Role.COMM_ARRAY)


def _type(role: Role) -> str:
    return "struct ncp_uid" if role is Role.UID else "unsigned long"


def _first(api: Api, roles: tuple[Role, ...], how: str = "a{}") -> str:
    found = next((i for i, role in enumerate(api.args) if role in roles), None)
    return "0" if found is None else how.format(found)


def _wrapper(api: Api) -> str:
    params = [f"{_type(role)} a{i}" for i, role in enumerate(api.args)]
    types = ", ".join(_type(role) for role in api.args) or "void"
    call = f"f({', '.join(f'a{i}' for i in range(len(api.args)))})"
    uid = _first(api, (Role.UID_PTR,))
    if api.has(Role.UID):
        uid = _first(api, (Role.UID,), "(u64)(uintptr_t)&a{}")
    name = f"NCP_API_{macro(api.name)}"
    head = ", ".join(["unsigned set", "uintptr_t from", "uintptr_t frame", *params])
    lines = [
        f"NCP_INLINE int ncp_w_{api.name}({head}) {{",
        "  struct ncp_call c;",
        f"  int (*f)({types});",
    ]
    if api.kind is Kind.HELPER:
        lines += [
            f"  ncp_look(&c, set, {name}, from, frame);",
            "  *(void **)(void *)&f = c.real;",
            f"  int rc = {call};",
            f"  if (unlikely(c.th) && rc == 0) ncp_uid_made(c.th, {uid});",
            "  return rc;",
            "}",
        ]
        return "\n".join(lines)
    lines += [
        f"  ncp_enter(&c, set, {name}, from, frame);",
        "  *(void **)(void *)&f = c.real;",
        f"  if (unlikely(!c.th)) return {call};",
    ]
    for i, role in enumerate(api.args):
        if role in _FIELDS:
            field, cast = _FIELDS[role]
            lines.append(f"  c.rec->{field} = {cast}a{i};")
    lines += [
        f"  ncp_begin(&c, {name}, {_first(api, _OUT)}, {uid}, {_first(api, (Role.CONFIG,))});",
        f"  int rc = {call};",
        f"  ncp_exit(&c, {name}, rc);",
        "  return rc;",
        "}",
    ]
    return "\n".join(lines)


def _macro(api: Api) -> str:
    params = ", ".join(f"{_type(role)} a{i}" for i, role in enumerate(api.args)) or "void"
    args = "".join(f", a{i}" for i in range(len(api.args)))
    return (
        f"#define NCP_DEFINE_{api.name}(linkage, symbol, set) \\\n"
        f"  linkage int symbol({params}) {{ \\\n"
        f"    return ncp_w_{api.name}(set, (uintptr_t)__builtin_return_address(0), \\\n"
        f"                            (uintptr_t)__builtin_frame_address(0){args}); \\\n"
        f"  }}"
    )


def render() -> str:
    """Bodies, the exported set, the sets for copies, and the tables of them."""
    copies = range(4)
    parts = [_wrapper(api) for api in API_TABLE]
    parts += [_macro(api) for api in API_TABLE]
    exported = [f"NCP_DEFINE_{a.name}(NCP_EXPORT, {a.name}, NCP_EXPORTED)" for a in API_TABLE]
    parts.append(
        '#define NCP_EXPORT __attribute__((visibility("default"), noinline))\n'
        "#define NCP_OF_COPY static __attribute__((noinline))\n"
        "#pragma GCC diagnostic push\n"
        '#pragma GCC diagnostic ignored "-Wmissing-prototypes"'
    )
    parts.append("\n".join(exported))
    for k in copies:
        parts.append(
            "\n".join(f"NCP_DEFINE_{a.name}(NCP_OF_COPY, copy{k}_{a.name}, {k})" for a in API_TABLE)
        )
    parts.append("#pragma GCC diagnostic pop")
    sets = ",\n".join(
        "    {" + ", ".join(f"[{a.id}] = FN(copy{k}_{a.name})" for a in API_TABLE) + "}"
        for k in copies
    )
    names = ", ".join(f'[{a.id}] = "{a.name}"' for a in API_TABLE)
    variables = ", ".join(f'"{name}"' for name in sorted(procinfo._READ))
    parts.append(
        f'_Static_assert(NCP_SHM_COPIES == {len(copies)}, "sets of wrappers");\n'
        "#define FN(f) (void *)(uintptr_t)(f)\n"
        f"void *const ncp_sets[NCP_SHM_COPIES][NCP_API_MAX + 1] = {{\n{sets},\n}};\n"
        f"const char *const ncp_names[NCP_API_MAX + 1] = {{{names}}};\n"
        f"const char *const ncp_launcher_names[] = {{{variables}, 0}};"
    )
    return c_header(
        "NCP_WRAPPERS_H",
        "A wrapper for each function of the API table; included once, by wrappers.c.",
        "\n\n".join(parts),
    )
