"""What a probe on an instruction costs: does the kernel emulate or single-step it?

The class of a function's first instruction decides the price of a probe hit:
about 0.5 us when the kernel emulates the instruction, two to twenty times that
when it has to let the processor step over a copy of it.
"""

from __future__ import annotations

EMULATED = "emulated"
SINGLE_STEP = "single-step"
UNKNOWN = "unknown"

_ENDBR64 = b"\xf3\x0f\x1e\xfa"


def classify(code: bytes, machine: str) -> tuple[str, str]:
    """(class, cost) of the first instruction: class is push, nop, endbr64 or other.

    Multi-byte nops count as emulated: older kernels step over them, but
    compilers put one at a function's start only when asked for patching room.
    """
    if machine != "x86_64" or not code:
        return "other", UNKNOWN
    if code.startswith(_ENDBR64):
        return "endbr64", SINGLE_STEP
    if _is_push(code):
        return "push", EMULATED
    if _is_nop(code):
        return "nop", EMULATED
    # jmp rel8/rel32 and call rel32 are emulated too (thunks, patched functions)
    return "other", EMULATED if code[0] in (0xE8, 0xE9, 0xEB) else SINGLE_STEP


def probe_shift(code: bytes, machine: str) -> int:
    """Bytes to skip so that the probe lands on an emulated instruction.

    Only endbr64 is skipped: it touches neither the stack pointer nor an
    argument, so both ends of the call still look the same from behind it.
    """
    if machine == "x86_64" and code.startswith(_ENDBR64):
        rest = code[len(_ENDBR64) :]
        if rest and (_is_push(rest) or _is_nop(rest)):
            return len(_ENDBR64)
    return 0


def _is_push(code: bytes) -> bool:
    """push of a 64-bit register, with or without the prefix for r8 - r15."""
    if code[0] in (0x41, 0x48, 0x49) and len(code) > 1:
        code = code[1:]
    return 0x50 <= code[0] <= 0x57


def _is_nop(code: bytes) -> bool:
    body = code.lstrip(b"\x66")
    return body[:1] == b"\x90" or body[:2] == b"\x0f\x1f"
