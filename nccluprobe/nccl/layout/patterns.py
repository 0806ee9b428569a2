"""Fields that show in the code by an instruction of their own.

Instructions are searched for as bytes and then read by the disassembler: a
whole disassembly would take seconds.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from typing import Any

from capstone import x86

from nccluprobe.nccl.layout.accessors import disassembler
from nccluprobe.nccl.layout.model import MAGIC, LayoutError, Reason
from nccluprobe.nccl.layout.symbols import Elf

_MAX_CODE = 512 << 20
_STEP = 16 << 20
_OVERLAP = 256
#: seqNumber lies behind rank, within this.
_SEQ_WITHIN = 64 << 10
_MAX_STRUCT = 64 << 20
_EXECUTABLE = 4

# Additions of 1 to a 64-bit word at base + index * 8, with and without displacement,
# atomic or not.  add $1: 83 /0 01; inc: ff /0.
_COUNT = re.compile(
    rb"[\x48-\x4b](?:\x83[\x04\x44\x84][\xc0-\xff]|\xff[\x04\x44\x84][\xc0-\xff])", re.S
)
_MAGIC = re.compile(rb"[\x48\x49][\xb8-\xbf]" + re.escape(struct.pack("<Q", MAGIC)))
_BEFORE = 48
_AFTER = 96


def code_pieces(elf: Elf) -> Iterator[tuple[int, bytes]]:
    """(address, bytes) of the instructions, in overlapping pieces."""
    sections = [s for s in elf.sections.values() if s.flags & _EXECUTABLE and s.size]
    places = [(s.offset, s.size) for s in sections if s.type == "SHT_PROGBITS"]
    if not places:
        places = [(offset, size) for _, offset, size in elf.text()]
    left = _MAX_CODE
    for offset, size in places:
        base = _vaddr(elf, offset)
        if base is None:
            continue
        end = min(size, left)
        left -= end
        for at in range(0, end, _STEP):
            yield base + at, elf.at(offset + at, min(_STEP + _OVERLAP, end - at))


def _vaddr(elf: Elf, offset: int) -> int | None:
    for vaddr, start, size in elf.text():
        if start <= offset < start + size:
            return vaddr + offset - start
    return None


class Code:
    """What the instructions show, gathered in one pass."""

    def __init__(self, elf: Elf, rank: int) -> None:
        self._made = disassembler()
        self._rank = rank
        self._hash = struct.pack("<I", rank - 8) if rank >= 8 else b""
        #: Offsets of arrays of counters -> where the instruction stands.
        self.seq: dict[int, int] = {}
        #: Offsets compared with the magic in one go with offset 0.
        self.magic: set[int] = set()
        self.magic_seen = 0
        self.hash_loads = 0
        for vaddr, piece in code_pieces(elf):
            self._seq(vaddr, piece)
            self._magic(vaddr, piece)
            self._hashes(piece)

    def _seq(self, vaddr: int, piece: bytes) -> None:
        for match in _COUNT.finditer(piece):
            at = match.start()
            if at and piece[at - 1] == 0xF0:
                at -= 1
            insn = next(self._made.disasm(piece[at : at + 16], vaddr + at), None)
            if insn is None or not self._counts(insn):
                continue
            memory = insn.operands[0].mem
            offset = memory.disp
            if offset == 0:
                offset = self._added(piece, at, vaddr, memory.index) * 8
            if offset % 8 == 0 and self._rank < offset < self._rank + _SEQ_WITHIN:
                self.seq.setdefault(offset, vaddr + at)

    @staticmethod
    def _counts(insn: Any) -> bool:
        """Whether it adds 1 to a 64-bit word of an array."""
        operands = insn.operands
        kind = insn.id
        if not operands or operands[0].type != x86.X86_OP_MEM or operands[0].size != 8:
            return False
        memory = operands[0].mem
        if memory.scale != 8 or not memory.base or not memory.index:
            return False
        if kind == x86.X86_INS_INC:
            return True
        return bool(
            kind == x86.X86_INS_ADD and operands[1].type == x86.X86_OP_IMM and operands[1].imm == 1
        )

    def _added(self, piece: bytes, at: int, vaddr: int, index: int) -> int:
        """The constant that was added to the index just before, 0 when none was."""
        # Instructions have no fixed length: the readings that end here are tried.
        for back in range(4, _BEFORE):
            start = at - back
            if start < 0 or piece[start] & 0xF8 != 0x48:
                continue
            reached = vaddr + start
            added = 0
            for number, insn in enumerate(self._made.disasm(piece[start:at], vaddr + start)):
                reached = insn.address + insn.size
                if number == 0:
                    operands = insn.operands
                    if (
                        insn.id != x86.X86_INS_ADD
                        or operands[0].type != x86.X86_OP_REG
                        or operands[0].reg != index
                        or operands[1].type != x86.X86_OP_IMM
                    ):
                        break
                    added = operands[1].imm
                elif index in insn.regs_access()[1]:
                    added = 0
                    break
            if added > 0 and reached == vaddr + at:
                return int(added)
        return 0

    def _magic(self, vaddr: int, piece: bytes) -> None:
        for match in _MAGIC.finditer(piece):
            self.magic_seen += 1
            at = match.start()
            register = None
            compared: dict[int, set[int]] = {}
            for insn in self._made.disasm(piece[at : at + _AFTER], vaddr + at):
                operands = insn.operands
                if register is None:
                    register = operands[0].reg
                    continue
                if insn.id == x86.X86_INS_CMP and operands[0].type == x86.X86_OP_MEM:
                    memory = operands[0].mem
                    against = operands[1]
                    whole = against.type == x86.X86_OP_REG and against.reg == register
                    if whole and memory.base and not memory.index:
                        compared.setdefault(memory.base, set()).add(memory.disp)
                elif register in insn.regs_access()[1] or insn.id == x86.X86_INS_RET:
                    break
            for places in compared.values():
                if 0 in places:
                    self.magic |= {p for p in places if self._rank < p < _MAX_STRUCT}

    def _hashes(self, piece: bytes) -> None:
        if not self._hash:
            return
        at = -1
        while (at := piece.find(self._hash, at + 1)) >= 0:
            # mov disp32(reg), r64: REX.W 8b modrm, with or without a SIB byte for r12.
            plain = piece[at - 3 : at]
            with_sib = piece[at - 4 : at]
            if len(with_sib) < 4:
                continue
            direct = _is_load(plain) and plain[2] & 7 != 4
            by_r12 = _is_load(with_sib) and with_sib[2] & 7 == 4 and with_sib[3] == 0x24
            self.hash_loads += direct or by_r12

    def seq_number(self) -> int:
        """Offset of seqNumber[]; LayoutError when the code does not tell one."""
        return _only(self.seq, "seqNumber")

    def end_magic(self) -> int:
        """Offset of endMagic; LayoutError when the code does not tell one."""
        return _only(self.magic, "endMagic")


def _is_load(code: bytes) -> bool:
    return code[0] & 0xF8 == 0x48 and code[1] == 0x8B and code[2] & 0xC0 == 0x80


def _only(found: dict[int, int] | set[int], name: str) -> int:
    if not found:
        raise LayoutError(Reason.NOT_FOUND, f"no instruction shows {name}")
    if len(found) > 1:
        raise LayoutError(Reason.AMBIGUOUS, f"{name} may be at any of {sorted(found)[:8]}")
    return next(iter(found))
