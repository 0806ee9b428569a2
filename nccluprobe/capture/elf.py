"""Is this file a copy of NCCL, and where are its functions?

Works on an open file descriptor, never on a path, so that what was examined
and what is probed are one file.  The file may be anything that a traced process
maps, so nothing in it is trusted: every size is bounded, and any trouble ends in
``ElfError``.

A library of 500 MB is examined by reading its headers and symbol names only.
"""

from __future__ import annotations

import os
import re
import stat
import struct
from dataclasses import dataclass, field

import numpy as np

from nccluprobe.capture.insn import EMULATED, classify, probe_shift
from nccluprobe.elf_file import (
    ElfError,
    Headers,
    Section,
    chunks,
    read_exactly,
    read_headers,
)
from nccluprobe.nccl.api import API_TABLE, SIGNATURE_SYMBOLS

__all__ = ["ElfError", "Function", "NcclImage", "hash_form", "scan"]

_MAX_SYMTAB = 512 << 20
_MAX_STRTAB = 2 << 30
_MAX_RODATA = 256 << 20

_SYMBOL = np.dtype(
    [
        ("name", "<u4"),
        ("info", "u1"),
        ("other", "u1"),
        ("shndx", "<u2"),
        ("value", "<u8"),
        ("size", "<u8"),
    ]
)
_PROBE = b"ncclAllReduce"
_NAMES = re.compile(rb"nccl[A-Z][A-Za-z0-9]{2,40}\0")
_VERSION = re.compile(rb"NCCL version (\d{1,2}\.\d{1,3}\.\d{1,3})")
_FUNC, _GNU_BUILD_ID, _DT_SONAME = 2, 3, 14


@dataclass(frozen=True)
class Function:
    """A traced function in a file.

    ``offset`` is the file offset of the probe, ``entry`` that of the function's
    first instruction (they differ by 4 after a skipped endbr64), ``vaddr`` the
    function's address in the file.  ``insn`` is the class of the first
    instruction; ``cost`` is "emulated" (about 0.5 us per probe hit),
    "single-step" (about 1 us on metal, 10 us in a virtual machine) or "unknown".
    """

    name: str
    offset: int
    entry: int
    vaddr: int
    size: int
    insn: str
    cost: str


@dataclass(frozen=True)
class NcclImage:
    """A file that defines NCCL's functions.

    ``functions`` holds those of the API table, by name.  ``folded`` are names
    whose code shares the address of another traced function, so that a probe
    could not tell them apart: they are left out.  ``table`` says whether the
    names came from .dynsym or, as for a copy linked statically into another
    library, from .symtab.
    """

    functions: dict[str, Function]
    version: str | None
    build_id: str | None
    machine: str
    soname: str | None
    table: str
    folded: tuple[str, ...] = field(default=())

    @property
    def hash_form(self) -> int:
        """Which form of the communicator hash this copy computes."""
        return hash_form(self.version)


def hash_form(version: str | None) -> int:
    """Form of commHash: 1 up to NCCL 2.17, 2 for 2.18 - 2.25, 3 from 2.26 and for unknown."""
    found = re.match(r"(\d+)\.(\d+)", version or "")
    if found is None:
        return 3
    release = (int(found[1]), int(found[2]))
    return 1 if release < (2, 18) else 2 if release < (2, 26) else 3


def scan(fd: int) -> NcclImage | None:
    """Examine an open file: its NCCL functions, or None when it defines none.

    Raises ``ElfError`` when the file is not a sound 64-bit little-endian ELF
    file.  The descriptor's position is not used and not moved.
    """
    try:
        return _scan(fd)
    except ElfError:
        raise
    except MemoryError as err:
        raise ElfError("too large to examine") from err
    except Exception as err:  # a damaged file can break pyelftools anywhere
        raise ElfError("damaged ELF file: its tables are not what they say") from err


def _contains(fd: int, section: Section, word: bytes) -> bool:
    return any(word in chunk for _, chunk in chunks(fd, section, _MAX_STRTAB))


def _name_offsets(fd: int, strtab: Section) -> dict[int, str]:
    """String table offset -> name, for "ncclX" anywhere.

    Linkers merge tails: the table may hold "pncclX" only, and "ncclX" begin
    at its second byte.  So names are searched for, whatever stands before them.
    """
    wanted = {api.name for api in API_TABLE} | SIGNATURE_SYMBOLS
    found: dict[int, str] = {}
    for base, chunk in chunks(fd, strtab, _MAX_STRTAB):
        for match in _NAMES.finditer(chunk):
            name = match[0][:-1].decode()
            if name in wanted:
                found[base + match.start()] = name
    return found


def _gnu_hash_has(fd: int, table: Section, symtab: Section, strtab: Section) -> bool:
    """Whether .gnu.hash, which lists defined symbols only, has ncclAllReduce."""
    head = read_exactly(fd, table.offset, 16, 16)
    nbuckets, symoffset, bloom, shift = struct.unpack("<4I", head)
    if nbuckets == 0 or bloom == 0 or bloom * 8 + nbuckets * 4 + 16 > table.size:
        raise ElfError("damaged .gnu.hash")
    h = 5381
    for byte in _PROBE:
        h = (h * 33 + byte) & 0xFFFFFFFF
    at = table.offset + 16
    (word,) = struct.unpack("<Q", read_exactly(fd, at + (h // 64 % bloom) * 8, 8, 8))
    if not (word >> (h % 64) & 1 and word >> ((h >> (shift & 31)) % 64) & 1):
        return False
    at += bloom * 8
    (first,) = struct.unpack("<I", read_exactly(fd, at + (h % nbuckets) * 4, 4, 4))
    at += nbuckets * 4
    for index in range(first, first + 10_000):
        if index < symoffset or at + (index - symoffset) * 4 + 4 > table.offset + table.size:
            return False
        (value,) = struct.unpack("<I", read_exactly(fd, at + (index - symoffset) * 4, 4, 4))
        if (value ^ h) < 2 and index * 24 + 24 <= symtab.size:
            (name,) = struct.unpack("<I", read_exactly(fd, symtab.offset + index * 24, 4, 4))
            if os.pread(fd, len(_PROBE) + 1, strtab.offset + name) == _PROBE + b"\0":
                return True
        if value & 1:
            return False
    return False


def _symbols(fd: int, symtab: Section, strtab: Section) -> dict[str, tuple[int, int]]:
    """Name -> (address, size) of the NCCL functions that a symbol table defines."""
    offsets = _name_offsets(fd, strtab)
    if "ncclAllReduce" not in offsets.values():
        return {}
    raw = read_exactly(fd, symtab.offset, symtab.size // 24 * 24, _MAX_SYMTAB)
    table = np.frombuffer(raw, dtype=_SYMBOL)
    hits = table[np.isin(table["name"], np.array(list(offsets), dtype=np.uint32))]
    found: dict[str, tuple[int, int]] = {}
    # A global definition is preferred to a local one of the same name.
    for row in sorted(hits.tolist(), key=lambda r: (r[1] >> 4 == 0, r[4])):
        name, info, _, shndx, value, size = row
        if info & 15 == _FUNC and shndx != 0 and value != 0:
            found.setdefault(offsets[name], (value, size))
    return found


def _find_symbols(fd: int, elf: Headers) -> tuple[str, dict[str, tuple[int, int]]] | None:
    for kind, label in (("SHT_DYNSYM", ".dynsym"), ("SHT_SYMTAB", ".symtab")):
        symtab = next((s for s in elf.sections if s.type == kind), None)
        if symtab is None or not 0 < symtab.link < len(elf.sections):
            continue
        strtab = elf.sections[symtab.link]
        gnu = next((s for s in elf.sections if s.type == "SHT_GNU_HASH"), None)
        if kind == "SHT_DYNSYM" and gnu is not None:
            if not _gnu_hash_has(fd, gnu, symtab, strtab):
                continue
        elif not _contains(fd, strtab, _PROBE + b"\0"):
            continue
        found = _symbols(fd, symtab, strtab)
        if found.keys() >= SIGNATURE_SYMBOLS:
            return label, found
    return None


def _build_id(fd: int, elf: Headers) -> str | None:
    for seg in elf.segments:
        if seg.type != "PT_NOTE":
            continue
        notes = os.pread(fd, min(seg.filesz, 64 << 10), seg.offset)
        at = 0
        while at + 12 <= len(notes):
            namesz, descsz, kind = struct.unpack_from("<3I", notes, at)
            desc = at + 12 + (namesz + 3 & ~3)
            if kind == _GNU_BUILD_ID and notes[at + 12 : at + 16] == b"GNU\0" and descsz <= 64:
                return notes[desc : desc + descsz].hex() or None
            at = desc + (descsz + 3 & ~3)
    return None


def _version(fd: int, elf: Headers) -> str | None:
    # Read-only data, the small sections first: a copy of NCCL also has hundreds
    # of megabytes of GPU code in sections of this kind.
    readonly = [s for s in elf.sections if s.flags & 7 == 2 and s.type == "SHT_PROGBITS"]
    left = _MAX_RODATA
    for section in sorted(readonly, key=lambda s: s.size):
        for _, chunk in chunks(fd, section, left):
            found = _VERSION.search(chunk)
            if found:
                return found[1].decode()
        left -= min(left, section.size)
    return None


def _soname(fd: int, elf: Headers) -> str | None:
    dynamic = next((s for s in elf.sections if s.type == "SHT_DYNAMIC"), None)
    if dynamic is None or not 0 < dynamic.link < len(elf.sections):
        return None
    names = elf.sections[dynamic.link]
    table = read_exactly(fd, dynamic.offset, dynamic.size & ~15, 1 << 20)
    for tag, value in struct.iter_unpack("<2Q", table):
        if tag == _DT_SONAME and value < names.size:
            text = os.pread(fd, 256, names.offset + value).split(b"\0")[0]
            return text.decode("utf-8", "replace") or None
    return None


def _scan(fd: int) -> NcclImage | None:
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise ElfError("not a regular file")
    if os.pread(fd, 4, 0) != b"\x7fELF":
        raise ElfError("not an ELF file")
    elf = read_headers(fd, status.st_size)
    symbols = _find_symbols(fd, elf)
    if symbols is None:
        return None
    label, addresses = symbols
    functions: dict[str, Function] = {}
    folded: list[str] = []
    seen: set[int] = set()
    for api in API_TABLE:
        if api.name not in addresses:
            continue
        vaddr, size = addresses[api.name]
        entry = elf.file_offset(vaddr)
        if entry is None:
            raise ElfError(f"{api.name} lies outside the code")
        if vaddr in seen:
            folded.append(api.name)
            continue
        seen.add(vaddr)
        code = os.pread(fd, 16, entry)
        insn, cost = classify(code, elf.machine)
        shift = probe_shift(code, elf.machine)
        if shift:
            cost = EMULATED
        functions[api.name] = Function(api.name, entry + shift, entry, vaddr, size, insn, cost)
    if not functions:
        return None
    return NcclImage(
        functions,
        _version(fd, elf),
        _build_id(fd, elf),
        elf.machine,
        _soname(fd, elf),
        label,
        tuple(folded),
    )
