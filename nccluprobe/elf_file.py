"""Reading 64-bit ELF files that may hold anything: headers and bounded tables.

Reads are ``pread`` and not ``mmap``: a file that shrinks under a mapping would
end the tracer with SIGBUS.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from elftools.common.utils import struct_parse
from elftools.elf.elffile import ELFFile

#: Bytes that pyelftools may read in all; headers of real libraries need 100 KB.
_HEADER_BUDGET = 16 << 20
_MAX_SECTIONS = 4096
_MAX_SEGMENTS = 1024
_CHUNK = 4 << 20
_OVERLAP = 64
_BLOCK = 16 << 10


class ElfError(Exception):
    """The file cannot be read as a 64-bit ELF file; the text says why."""


class _FdFile(io.RawIOBase):
    """A seekable file over ``pread`` for pyelftools, with a budget against endless reads."""

    def __init__(self, fd: int, size: int) -> None:
        super().__init__()
        self._fd, self._size, self._at = fd, size, 0
        self._left = _HEADER_BUDGET
        self._blocks: dict[int, bytes] = {}

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        if self._at < 0:
            raise ElfError("offset outside the file")
        return self._at

    def read(self, size: int | None = -1, /) -> bytes:
        end = self._size if size is None or size < 0 else min(self._at + size, self._size)
        if end - self._at > self._left:
            raise ElfError("headers are implausibly large")
        parts = []
        while self._at < end:
            number, skip = divmod(self._at, _BLOCK)
            block = self._blocks.get(number)
            if block is None:
                block = self._blocks[number] = os.pread(self._fd, _BLOCK, number * _BLOCK)
                self._left -= _BLOCK
            part = block[skip : skip + end - self._at]
            if not part:
                break
            parts.append(part)
            self._at += len(part)
            self._left -= 16
        return b"".join(parts)


@dataclass(frozen=True)
class Section:
    """What matters of a section header; ``name`` is an offset in the name table."""

    name: int
    type: str
    flags: int
    offset: int
    size: int
    link: int


@dataclass(frozen=True)
class Segment:
    """What matters of a program header."""

    type: str
    flags: int
    offset: int
    vaddr: int
    filesz: int


@dataclass(frozen=True)
class Headers:
    """A file's headers; ``machine`` is "x86_64", "aarch64" or "other"."""

    machine: str
    sections: list[Section]
    segments: list[Segment]

    def file_offset(self, vaddr: int) -> int | None:
        """File offset of a code address, None when no executable segment holds it."""
        for seg in self.segments:
            if seg.type == "PT_LOAD" and seg.flags & 1 and 0 <= vaddr - seg.vaddr < seg.filesz:
                return vaddr - seg.vaddr + seg.offset
        return None


def read_headers(fd: int, size: int) -> Headers:
    """Parse the headers of an open file; any exception means that it is damaged."""
    stream: Any = _FdFile(fd, size)
    elf = ELFFile(stream)
    if elf.elfclass != 64 or not elf.little_endian:
        raise ElfError("not a 64-bit little-endian ELF file")
    counts = elf.num_sections(), elf.num_segments()
    if counts[0] > _MAX_SECTIONS or counts[1] > _MAX_SEGMENTS:
        raise ElfError("too many sections or segments")
    # Headers only: elf.get_section() would parse a whole hash table.
    sections = []
    for at in _positions(elf["e_shoff"], elf["e_shentsize"], counts[0]):
        head = struct_parse(elf.structs.Elf_Shdr, stream, at)
        sections.append(
            Section(
                head["sh_name"],
                str(head["sh_type"]),
                head["sh_flags"],
                head["sh_offset"],
                head["sh_size"],
                head["sh_link"],
            )
        )
    segments = []
    for at in _positions(elf["e_phoff"], elf["e_phentsize"], counts[1]):
        head = struct_parse(elf.structs.Elf_Phdr, stream, at)
        segments.append(
            Segment(
                str(head["p_type"]),
                head["p_flags"],
                head["p_offset"],
                head["p_vaddr"],
                head["p_filesz"],
            )
        )
    machine = {"EM_X86_64": "x86_64", "EM_AARCH64": "aarch64"}.get(str(elf["e_machine"]), "other")
    return Headers(machine, sections, segments)


def _positions(start: int, size: int, count: int) -> range:
    if count and size < 32:
        raise ElfError("header entries are implausibly small")
    return range(start, start + count * size, size) if count else range(0)


def read_exactly(fd: int, offset: int, size: int, limit: int) -> bytes:
    """Bytes of a table, all of them; ElfError when there are fewer or it is above the limit."""
    if size > limit:
        raise ElfError(f"a table of {size} bytes is implausibly large")
    parts = []
    while size > 0:
        part = os.pread(fd, min(size, 1 << 30), offset)
        if not part:
            raise ElfError("file ends inside a table")
        parts.append(part)
        offset += len(part)
        size -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def chunks(fd: int, section: Section, limit: int) -> Iterator[tuple[int, bytes]]:
    """(position in the section, bytes) with an overlap, so that no name is cut."""
    at, end = 0, min(section.size, limit)
    while at < end:
        want = min(_CHUNK + _OVERLAP, end - at)
        chunk = os.pread(fd, want, section.offset + at)
        if not chunk:
            return
        yield at, chunk
        at += min(_CHUNK, len(chunk))
