"""The layout from debug information, without parsing it all.

The debug information of a library is tens of megabytes.  The name "ncclComm"
stands once in .debug_str; a structure with that name refers to it by its
position, four bytes that are searched for.  Only the structure found there is
parsed, by pyelftools.
"""

from __future__ import annotations

import inspect
import io
import re
import struct
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from elftools.dwarf.dwarfinfo import DebugSectionDescriptor, DwarfConfig, DWARFInfo

from nccluprobe.elf_file import Headers, Section, read_exactly
from nccluprobe.nccl.layout.model import LayoutError, Reason

_NAME = b"ncclComm\0"
_MAX = 1 << 30
_MOST_HITS = 20_000
_STEP = 1 << 20
_MOST_MEMBERS = 4_000
_COMPRESSED = 0x800
_SECTIONS = (".debug_info", ".debug_abbrev", ".debug_str", ".debug_line_str")
_STRUCTURES = ("DW_TAG_structure_type", "DW_TAG_class_type")
_STRIPPED = ("DW_TAG_typedef", "DW_TAG_const_type", "DW_TAG_volatile_type", "DW_TAG_atomic_type")


class Member:
    """A member of a structure: where, how large, and its type's entry."""

    def __init__(self, offset: int, size: int | None, count: int | None, die: Any) -> None:
        self.offset = offset
        #: Bytes of the type, or of one element of an array.
        self.size = size
        #: Elements of an array, None for anything else.
        self.count = count
        self.die = die


class Structure:
    """``struct ncclComm`` as the debug information has it."""

    def __init__(self, size: int, members: dict[str, Member]) -> None:
        self.size = size
        self.members = members


def read(fd: int, elf: Headers, names: dict[str, Section]) -> Structure:
    """The structure; LayoutError when there is none, or it makes no sense."""
    found = [names.get(name) for name in _SECTIONS[:3]]
    if any(s is None or s.type == "SHT_NOBITS" or not s.size for s in found):
        raise LayoutError(Reason.NO_DWARF, "no debug information")
    try:
        data = {n: _bytes(fd, names[n]) for n in _SECTIONS if n in names}
        machine = {"x86_64": "x64", "aarch64": "AArch64"}.get(elf.machine, elf.machine)
        dwarf = _dwarf(data, machine)
        for found_at in _structures(dwarf, data):
            structure = _structure(found_at)
            if structure is not None:
                return structure
    except LayoutError:
        raise
    except Exception as err:  # a damaged file can break pyelftools anywhere
        raise LayoutError(Reason.DAMAGED, f"debug information: {type(err).__name__}") from err
    raise LayoutError(Reason.NO_DWARF, "the debug information has no struct ncclComm")


def _structure(die: Any) -> Structure | None:
    """The structure of an entry; None when it is another, or no entry in truth."""
    try:
        members = _members(die)
        size = int(die.attributes["DW_AT_byte_size"].value)
    except Exception:  # bytes that look like an entry may lead anywhere
        return None
    if not {"rank", "nRanks", "cudaDev"} <= members.keys():
        return None
    inside = all(0 <= m.offset < size for m in members.values())
    return Structure(size, members) if inside else None


def _bytes(fd: int, section: Section) -> bytes:
    raw = read_exactly(fd, section.offset, section.size, _MAX)
    if not section.flags & _COMPRESSED:
        return raw
    kind, _, size, _ = struct.unpack_from("<IIQQ", raw)
    if kind != 1 or size > _MAX:
        raise LayoutError(Reason.NO_DWARF, "debug information is compressed in an unknown way")
    return zlib.decompressobj().decompress(raw[24:], size)


def _dwarf(data: dict[str, bytes], machine: str) -> Any:
    # The parameters differ from release to release of pyelftools: name the known ones.
    given: dict[str, Any] = {
        "config": DwarfConfig(little_endian=True, machine_arch=machine, default_address_size=8)
    }
    for name, content in data.items():
        given[f"{name[1:]}_sec"] = DebugSectionDescriptor(
            io.BytesIO(content), name, 0, len(content), 0
        )
    names = list(inspect.signature(DWARFInfo.__init__).parameters)[1:]
    made: Any = DWARFInfo
    return made(**{name: given.get(name) for name in names})


def _structures(dwarf: Any, data: dict[str, bytes]) -> Iterator[Any]:
    """Entries of structures named ncclComm that are no mere declarations."""
    info = data[".debug_info"]
    units = _units(info)
    for at in _places(info, data[".debug_str"]):
        unit = _unit_of(units, at)
        if unit is None:
            continue
        # The name is the first attribute: before it stands the abbreviation's code.
        for length in (1, 2, 3):
            die = _die_at(dwarf, unit, at - length, at)
            if die is not None:
                yield die


def _places(info: bytes, strings: bytes) -> Iterator[int]:
    """Where the debug information may refer to the name, in order."""
    # The name may be the tail of a longer string: all such are asked for.
    wanted: list[int] = []
    at = -1
    while (at := strings.find(_NAME, at + 1)) >= 0 and len(wanted) < _MOST_HITS:
        wanted.append(at)
    names = np.array(wanted, "<u4")
    hits = 0
    for start in range(0, len(info), _STEP):
        piece = info[start : start + _STEP + 3]
        found = [start + m.start() for m in re.finditer(re.escape(_NAME), piece)]
        for shift in range(4):
            words = np.frombuffer(piece, "<u4", (len(piece) - shift) // 4, shift)
            found += (np.flatnonzero(np.isin(words, names)) * 4 + start + shift).tolist()
        for place in sorted(found):
            hits += 1
            if hits > _MOST_HITS:
                return
            yield place


def _units(info: bytes) -> list[tuple[int, int]]:
    """(start, end) of all units."""
    found = []
    at = 0
    while at + 12 <= len(info):
        (length,) = struct.unpack_from("<I", info, at)
        head = 4
        if length == 0xFFFFFFFF:
            (length,) = struct.unpack_from("<Q", info, at + 4)
            head = 12
        end = at + head + length
        if length == 0 or end > len(info):
            break
        found.append((at, end))
        at = end
    return found


def _unit_of(units: list[tuple[int, int]], at: int) -> int | None:
    low, high = 0, len(units)
    while low < high:
        middle = (low + high) // 2
        if units[middle][1] <= at:
            low = middle + 1
        else:
            high = middle
    return units[low][0] if low < len(units) and units[low][0] <= at else None


def _die_at(dwarf: Any, unit: int, at: int, name_at: int) -> Any:
    try:
        cu = dwarf.get_CU_at(unit)
        if at < cu.cu_die_offset:
            return None
        die = cu.get_DIE_from_refaddr(at)
        fits = (
            die.tag in _STRUCTURES
            and die.attributes["DW_AT_name"].value == _NAME[:-1]
            and die.attributes["DW_AT_name"].offset == name_at
            and "DW_AT_declaration" not in die.attributes
            and "DW_AT_byte_size" in die.attributes
        )
    except Exception:  # not an entry at all: any bytes may look like the position
        return None
    return die if fits else None


def _members(die: Any) -> dict[str, Member]:
    found: dict[str, Member] = {}
    for count, child in enumerate(die.iter_children()):
        if count > _MOST_MEMBERS:
            raise LayoutError(Reason.DAMAGED, "struct ncclComm has too many members")
        if child.tag != "DW_TAG_member" or "DW_AT_name" not in child.attributes:
            continue
        place = child.attributes.get("DW_AT_data_member_location")
        if place is None or not isinstance(place.value, int):
            continue
        name = child.attributes["DW_AT_name"].value.decode("utf-8", "replace")
        kind = _strip(child)
        found[name] = Member(place.value, *_size(kind), kind)
    return found


def _strip(die: Any) -> Any:
    """The type of an entry, without typedefs and qualifiers; None for void."""
    for _ in range(32):
        if "DW_AT_type" not in die.attributes:
            return None
        die = die.get_DIE_from_attribute("DW_AT_type")
        if die.tag not in _STRIPPED:
            return die
    return None


def _size(kind: Any) -> tuple[int | None, int | None]:
    if kind is None:
        return None, None
    if kind.tag == "DW_TAG_array_type":
        counts = [
            c.attributes["DW_AT_upper_bound"].value + 1
            for c in kind.iter_children()
            if c.tag == "DW_TAG_subrange_type" and "DW_AT_upper_bound" in c.attributes
        ]
        element, _ = _size(_strip(kind))
        return element, counts[0] if len(counts) == 1 else None
    if kind.tag in ("DW_TAG_pointer_type", "DW_TAG_reference_type"):
        return 8, None
    size = kind.attributes.get("DW_AT_byte_size")
    return (int(size.value) if size is not None else None), None


def members_of(member: Member) -> dict[str, Member]:
    """The members of a member that is a structure; none for anything else."""
    kind = member.die
    if kind is None or kind.tag not in _STRUCTURES:
        return {}
    if "DW_AT_declaration" in kind.attributes:
        return {}
    return _members(kind)
