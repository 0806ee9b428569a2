"""Sections and the accessors' addresses of an ELF file."""

from __future__ import annotations

import os
import re

import numpy as np

from nccluprobe.elf_file import Headers, Section, chunks, read_exactly, read_headers
from nccluprobe.nccl.layout.model import LayoutError, Reason

_MAX_TABLE = 512 << 20
_MAX_STRINGS = 2 << 30

#: The functions that read the struct for the program, and what each gives.
ACCESSORS = {
    "ncclCommUserRank": "rank",
    "ncclCommCount": "nranks",
    "ncclCommCuDevice": "cuda_dev",
    "ncclCommGetAsyncError": "async_result",
}
_NAMES = re.compile(rb"nccl(?:CommUserRank|CommCount|CommCuDevice|CommGetAsyncError)\0")
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


class Elf:
    """An open file's headers and named sections."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        try:
            self.headers: Headers = read_headers(fd, os.fstat(fd).st_size)
            self.sections = self._named()
        except Exception as err:  # a damaged file can break pyelftools anywhere
            raise LayoutError(Reason.DAMAGED, f"damaged ELF file: {type(err).__name__}") from err

    def _named(self) -> dict[str, Section]:
        (index,) = np.frombuffer(os.pread(self.fd, 2, 62), "<u2")
        sections = self.headers.sections
        if index >= len(sections):
            return {}
        table = sections[int(index)]
        names = read_exactly(self.fd, table.offset, table.size, 1 << 20)
        found: dict[str, Section] = {}
        for section in sections:
            name = names[section.name :].split(b"\0", 1)[0].decode("ascii", "replace")
            found.setdefault(name, section)
        return found

    def code(self, vaddr: int, size: int) -> bytes:
        """Instructions at an address; fewer when the segment ends."""
        at = self.headers.file_offset(vaddr)
        if at is None:
            return b""
        return os.pread(self.fd, size, at)

    def at(self, offset: int, size: int) -> bytes:
        """Bytes at a place in the file; fewer at its end."""
        return os.pread(self.fd, size, offset)

    def text(self) -> list[tuple[int, int, int]]:
        """(address, file offset, size) of executable segments."""
        return [
            (s.vaddr, s.offset, s.filesz)
            for s in self.headers.segments
            if s.type == "PT_LOAD" and s.flags & 1
        ]

    def accessors(self) -> dict[str, tuple[int, int]]:
        """Field -> (address, size) of its accessor; those of .dynsym before .symtab's."""
        found: dict[str, tuple[int, int]] = {}
        for kind in ("SHT_DYNSYM", "SHT_SYMTAB"):
            for section in self.headers.sections:
                if section.type == kind and len(found) < len(ACCESSORS):
                    for name, place in self._symbols(section).items():
                        found.setdefault(ACCESSORS[name], place)
        return found

    def _symbols(self, symtab: Section) -> dict[str, tuple[int, int]]:
        if not 0 < symtab.link < len(self.headers.sections):
            return {}
        strtab = self.headers.sections[symtab.link]
        offsets: dict[int, str] = {}
        for base, chunk in chunks(self.fd, strtab, _MAX_STRINGS):
            for match in _NAMES.finditer(chunk):
                offsets[base + match.start()] = match[0][:-1].decode()
        if not offsets:
            return {}
        raw = read_exactly(self.fd, symtab.offset, symtab.size // 24 * 24, _MAX_TABLE)
        table = np.frombuffer(raw, dtype=_SYMBOL)
        hits = table[np.isin(table["name"], np.array(list(offsets), dtype=np.uint32))]
        found: dict[str, tuple[int, int]] = {}
        for name, info, _, shndx, value, size in hits.tolist():
            if info & 15 == 2 and shndx != 0 and value != 0:
                found.setdefault(offsets[name], (value, size))
        return found
