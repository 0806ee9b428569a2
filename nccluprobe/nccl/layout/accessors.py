"""Which field an accessor reads, from its code.

``ncclCommUserRank(comm, out)`` ends in a load from ``comm`` and a store of what
was loaded to ``*out``.  The two arguments are followed through copies, linearly:
branches are not, so pops (an early return stands in the middle) are passed over.
All stores to ``*out`` of something loaded from ``comm`` must agree.
"""

from __future__ import annotations

from typing import Any

import capstone
from capstone import x86

from nccluprobe.nccl.layout.model import LayoutError, Reason

_MOST_CODE = 16384
_ARGS = ("rdi", "rsi")
_SCRATCH = ("rax", "rcx", "rdx", "rsi", "rdi", "r8", "r9", "r10", "r11")
#: Names of parts of registers, by the whole.
_WHOLE: dict[str, str] = {}
for _r in ("a", "b", "c", "d"):
    for _form in ("r{}x", "e{}x", "{}x", "{}l", "{}h"):
        _WHOLE[_form.format(_r)] = f"r{_r}x"
for _r in ("si", "di", "bp", "sp"):
    for _form in ("r{}", "e{}", "{}", "{}l"):
        _WHOLE[_form.format(_r)] = f"r{_r}"
for _n in range(8, 16):
    for _form in ("r{}", "r{}d", "r{}w", "r{}b"):
        _WHOLE[_form.format(_n)] = f"r{_n}"

#: ("comm" | "out", offset) or ("field", offset of what was loaded).
Value = tuple[str, int]


def disassembler() -> Any:
    """A disassembler of x86-64 that tells operands."""
    made = capstone.Cs(capstone.CS_ARCH_X86, capstone.CS_MODE_64)
    made.detail = True
    return made


class _Follower:
    def __init__(self, made: Any) -> None:
        self._made = made
        self.registers: dict[str, Value] = {_ARGS[0]: ("comm", 0), _ARGS[1]: ("out", 0)}
        self.slots: dict[tuple[str, int], Value] = {}
        self.stores: set[int] = set()

    def _base(self, operand: Any) -> tuple[str, int] | None:
        """(register, displacement) of a memory operand without an index."""
        memory = operand.mem
        if memory.index or memory.segment or not memory.base:
            return None
        name = self._made.reg_name(memory.base)
        return (_WHOLE[name], memory.disp) if name in _WHOLE else None

    def _load(self, operand: Any, size: int) -> Value | None:
        base = self._base(operand)
        if base is None:
            return None
        if base[0] in ("rsp", "rbp") and size == 8:
            return self.slots.get(base)
        value = self.registers.get(base[0])
        if value is not None and value[0] == "comm" and size == 4:
            return "field", value[1] + base[1]
        return None

    def step(self, insn: Any) -> None:
        operands = insn.operands
        if insn.id == x86.X86_INS_CALL:
            for name in _SCRATCH:
                self.registers.pop(name, None)
            return
        if insn.id in (x86.X86_INS_PUSH, x86.X86_INS_POP, x86.X86_INS_LEAVE, x86.X86_INS_RET):
            return
        if insn.id in (x86.X86_INS_MOV, x86.X86_INS_LEA) and len(operands) == 2:
            target, source = operands
            if target.type == x86.X86_OP_MEM:
                self._store(target, source)
                return
            name = _WHOLE.get(self._made.reg_name(target.reg), "")
            value = self._value(insn, target, source)
            if value is None:
                self.registers.pop(name, None)
            elif name:
                self.registers[name] = value
            return
        for register in insn.regs_access()[1]:
            self.registers.pop(_WHOLE.get(self._made.reg_name(register), ""), None)

    def _value(self, insn: Any, target: Any, source: Any) -> Value | None:
        if insn.id == x86.X86_INS_LEA:
            base = self._base(source)
            value = self.registers.get(base[0]) if base else None
            if value is None or base is None or value[0] == "field":
                return None
            return value[0], value[1] + base[1]
        if source.type == x86.X86_OP_REG:
            value = self.registers.get(_WHOLE.get(self._made.reg_name(source.reg), ""))
            whole = target.size == 8 or (value is not None and value[0] == "field")
            return value if whole and target.size >= 4 else None
        if source.type == x86.X86_OP_MEM:
            return self._load(source, target.size)
        return None

    def _store(self, target: Any, source: Any) -> None:
        base = self._base(target)
        if base is None:
            return
        value = None
        if source.type == x86.X86_OP_REG:
            value = self.registers.get(_WHOLE.get(self._made.reg_name(source.reg), ""))
        if base[0] in ("rsp", "rbp"):
            if value is not None and source.size == 8:
                self.slots[base] = value
            else:
                self.slots.pop(base, None)
            return
        to = self.registers.get(base[0])
        loaded = value is not None and value[0] == "field" and source.size == 4
        if loaded and value is not None and to == ("out", -base[1]):
            self.stores.add(value[1])


def field_of(code: bytes, vaddr: int, name: str) -> int:
    """The offset that the accessor's code reads; LayoutError when it does not tell one."""
    made = disassembler()
    follower = _Follower(made)
    for insn in made.disasm(code[:_MOST_CODE], vaddr):
        follower.step(insn)
    found = follower.stores
    if not found:
        raise LayoutError(Reason.NOT_FOUND, f"the accessor of {name} does not show its field")
    if len(found) > 1:
        raise LayoutError(Reason.AMBIGUOUS, f"the accessor of {name} reads {sorted(found)}")
    return found.pop()
