"""ebpf/include/ncp_api.h: ids, attributes and argument readers.

Functions whose recorded arguments lie in the same places share a *shape*; the
reader is a switch over shapes, so the program stays small as the table grows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from gen.text import c_header, macro
from nccluprobe.nccl.api import API_TABLE, Api, Kind, Role

#: Role -> field of struct ncp_record, and the cast of a narrower argument.
_FIELDS: dict[Role, tuple[str, str]] = {
    Role.COUNT: ("r->count", ""),
    Role.SIZE: ("r->count", ""),
    Role.DATATYPE: ("r->datatype", "(unsigned char)"),
    Role.OP: ("r->op", "(unsigned int)"),
    Role.ROOT: ("r->peer", "(int)"),
    Role.PEER: ("r->peer", "(int)"),
    Role.RANK: ("r->peer", "(int)"),
    Role.KEY: ("r->peer", "(int)"),
    Role.COLOR: ("r->color", "(int)"),
    Role.NRANKS: ("r->nranks", "(int)"),
    Role.COMM: ("r->comm", ""),
    Role.STREAM: ("r->stream", ""),
    Role.NEW_COMM: ("a->out", ""),
    Role.COMM_ARRAY: ("a->out", ""),
    Role.UID_PTR: ("a->uid", ""),
    Role.CONFIG: ("a->config", ""),
}
_KINDS = {kind: i for i, kind in enumerate(Kind, start=1)}


def _cases(apis: Iterable[Api]) -> str:
    return "\n".join(f"  case NCP_API_{macro(api.name)}:" for api in apis)


def _reads(api: Api, arch: str) -> tuple[str, ...]:
    """The shape of an api, as the statements that read it."""
    shape = [(role, api.place(role, arch)) for role in api.args if role is not Role.OTHER]
    lines: list[str] = []
    words = [
        p.stack
        for role, p in shape
        if p.stack is not None and not (role is Role.UID and arch == "x86_64")
    ]
    if words:
        first = min(words)
        n = (max(words) - first) // 8 + 1
        lines.append(f"ncp_stack(s, {n}, ncp_sp(ctx) + {first});")
    for role, place in shape:
        if role is Role.UID:
            # By value: on the stack of x86-64, behind a pointer on aarch64.
            where = f"ncp_sp(ctx) + {place.stack}" if arch == "x86_64" else f"x{place.reg}"
            lines.append(f"a->uid = {where};")
            continue
        target, ctype = _FIELDS[role]
        if place.reg is not None:
            source = f"x{place.reg}"
        else:
            assert place.stack is not None
            source = f"s[{(place.stack - min(words)) // 8}]"
        lines.append(f"{target} = {ctype}{source};")
    return tuple(sorted(lines, key=lambda line: not line.startswith("ncp_stack")))


def _shapes(arch: str) -> dict[tuple[str, ...], list[Api]]:
    found: dict[tuple[str, ...], list[Api]] = {}
    for api in API_TABLE:
        found.setdefault(_reads(api, arch), []).append(api)
    return found


def _reader(arch: str) -> str:
    regs = {"x86_64": ("di", "si", "dx", "cx", "r8", "r9")}.get(arch)
    names = regs or tuple(f"regs[{i}]" for i in range(8))
    out = []
    for i, reg in enumerate(names):
        # The barrier keeps the compiler from choosing between two places in
        # ctx, which the verifier refuses.
        out.append(f"  unsigned long long x{i} = ctx->{reg};")
    out.append("  " + " ".join(f"ncp_keep(x{i});" for i in range(len(names))))
    out.append("  switch (api) {")
    for reads, apis in _shapes(arch).items():
        if reads:
            out.append(_cases(apis))
            out += [f"    {line}" for line in reads]
            out.append("    break;")
    out += ["  default:", "    break;", "  }"]
    return "\n".join(out)


def _predicate(name: str, doc: str, test: Callable[[Api], object]) -> str:
    chosen = [api for api in API_TABLE if test(api)]
    return (
        f"/* {doc} */\n"
        f"static __attribute__((always_inline)) inline int ncp_api_{name}(unsigned int api) {{\n"
        f"  switch (api) {{\n{_cases(chosen)}\n    return 1;\n"
        f"  default:\n    return 0;\n  }}\n}}"
    )


def _lookup(name: str, doc: str, value: Callable[[Api], int], default: int) -> str:
    groups: dict[int, list[Api]] = {}
    for api in API_TABLE:
        if value(api) != default:
            groups.setdefault(value(api), []).append(api)
    body = "".join(f"{_cases(apis)}\n    return {v};\n" for v, apis in sorted(groups.items()))
    return (
        f"/* {doc} */\n"
        f"static __attribute__((always_inline)) inline int ncp_api_{name}(unsigned int api) {{\n"
        f"  switch (api) {{\n{body}  default:\n    return {default};\n  }}\n}}"
    )


def _rows() -> str:
    by_name = {api.name: api for api in API_TABLE}
    lines = []
    for api in API_TABLE:
        fields = (
            macro(api.name),
            api.name,
            f"NCP_CLASS_{_KINDS_NAME[api.kind]}",
            by_name[api.canonical].id,
            -1 if api.seq_slot is None else api.seq_slot,
            int(bool(api.makes_comm)),
            int(bool(api.ends_comm)),
        )
        lines.append(f"  X({', '.join(map(str, fields))})")
    return " \\\n".join(lines)


_KINDS_NAME = {kind: kind.value.upper() for kind in Kind}

_BPF_HEAD = """
#ifdef NCP_BPF
/* What the reader finds besides the record's own fields. */
struct ncp_args {
  unsigned long long out;    /* where the new communicator(s) will be written */
  unsigned long long uid;    /* address of a unique id */
  unsigned long long config; /* ncclConfig_t * */
};

#define ncp_keep(x) asm volatile("" : "+r"(x))

static __always_inline void ncp_stack(u64 *words, u32 n, u64 at) {
  if (bpf_probe_read_user(words, n * 8, (void *)at)) __builtin_memset(words, 0, 32);
}

/* Fills the record and the rest from the registers at a function's entry. */
static __always_inline void ncp_read_args(struct pt_regs *ctx, u32 api, struct ncp_record *r,
                                          struct ncp_args *a) {
  u64 s[4] = {};
"""


def render() -> str:
    """Ids, a table for plain C, predicates, and the readers for BPF."""
    lines = [f"#define NCP_API_{macro(api.name)} {api.id}" for api in API_TABLE]
    lines.append(f"#define NCP_API_MAX {max(api.id for api in API_TABLE)}")
    lines += [f"#define NCP_CLASS_{_KINDS_NAME[kind]} {i}" for kind, i in _KINDS.items()]
    lines += [
        "",
        "/* X(ID, symbol, class, id of the canonical api, seqNumber[] slot or -1,",
        " *   makes a communicator, ends one) */",
        "#define NCP_API_TABLE(X) \\",
        _rows(),
        "",
        _lookup("class", "NCP_CLASS_* of an api; 0: unknown.", lambda a: _KINDS[a.kind], 0),
        _predicate("makes", "Makes a communicator.", lambda a: a.makes_comm),
        _predicate(
            "child",
            "Makes one out of a parent: takes an ordinal on it.",
            lambda a: a.makes_comm and a.has(Role.COMM),
        ),
        _predicate(
            "closes",
            "The handle is dead after it.",
            lambda a: a.ends_comm in ("destroy", "abort"),
        ),
        _lookup(
            "direction",
            "Point to point: 1 send, 2 recv; else 0.",
            lambda a: {"send": 1, "recv": 2}.get(a.direction or "", 0),
            0,
        ),
        _lookup(
            "seq_slot",
            "Index of its counter in ncclComm.seqNumber[]; -1: none.",
            lambda a: -1 if a.seq_slot is None else a.seq_slot,
            -1,
        ),
        _predicate(
            "init_uid",
            "The communicator's hash follows from the unique id passed.",
            lambda a: a.makes_comm == "init",
        ),
    ]
    readers = (
        "#if defined(__x86_64__)\n"
        + _reader("x86_64")
        + "\n#elif defined(__aarch64__)\n"
        + _reader("aarch64")
        + "\n#endif\n}\n#endif"
    )
    return c_header(
        "NCP_API_H",
        "The API table: ids, attributes, and the argument readers of the BPF program.",
        "\n".join(lines) + "\n" + _BPF_HEAD.rstrip() + "\n" + readers,
    )
