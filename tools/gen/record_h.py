"""ebpf/include/ncp_record.h: the record in C."""

from __future__ import annotations

from gen.text import c_header
from nccluprobe import record

_TYPES = {
    "u64": "unsigned long long",
    "u32": "unsigned int",
    "i32": "int",
    "u16": "unsigned short",
    "u8": "unsigned char",
}


def render() -> str:
    """The struct, its constants, and an assertion on every offset."""
    lines = [f"#define NCP_RECORD_VERSION {record.RECORD_VERSION}"]
    lines.append(f"#define NCP_RECORD_SIZE {record.SIZE}")
    lines += [f"#define NCP_KIND_{name} {value}" for name, value in record.KINDS.items()]
    lines += [f"#define NCP_FLAG_{name} {value}" for name, value in record.FLAGS.items()]
    lines.append(f"#define NCP_NAME_OFFSET {record.NAME_OFFSET}")
    lines.append(f"#define NCP_NAME_SIZE {record.NAME_SIZE}")
    lines.append(f"#define NCP_UNKNOWN_SEQ 0x{record.UNKNOWN_SEQ:x}ULL")
    lines += ["", "struct ncp_record {"]
    for field in record.FIELDS:
        lines.append(f"  {_TYPES[field.ctype]} {field.name}; /* {field.doc} */")
    lines += ["};", ""]
    for name, offset in record.OFFSETS.items():
        lines.append(
            f'_Static_assert(__builtin_offsetof(struct ncp_record, {name}) == {offset}, "{name}");'
        )
    lines.append(f'_Static_assert(sizeof(struct ncp_record) == {record.SIZE}, "size");')
    return c_header(
        "NCP_RECORD_H",
        "The record that both capture fronts write; for BPF and for plain C.",
        "\n".join(lines),
    )
