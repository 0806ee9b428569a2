"""The layout of ``struct ncclComm`` in an open copy of NCCL.

Debug information is taken where it is there and agrees with the code of the
accessors; else the code alone is read.  Nothing is guessed: a layout without
rank, size and device that check out is refused, and so is each further field.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from nccluprobe.elf_file import ElfError
from nccluprobe.nccl.layout import dwarf
from nccluprobe.nccl.layout.accessors import field_of
from nccluprobe.nccl.layout.model import (
    HASH_SINCE,
    MAGIC_SINCE,
    Image,
    Layout,
    LayoutError,
    Reason,
    Refusal,
    release_of,
)
from nccluprobe.nccl.layout.patterns import Code
from nccluprobe.nccl.layout.symbols import Elf

#: Loads of the hash that the code of a copy must show at the least.
_HASH_LOADS = 2
_BASE = ("rank", "nranks", "cuda_dev")
_COUNTERS = 5


@dataclass
class _Found:
    """Offsets by field, and what was refused."""

    offsets: dict[str, int] = field(default_factory=dict)
    refused: list[Refusal] = field(default_factory=list)

    def refuse(self, name: str, reason: Reason, text: str) -> None:
        self.offsets.pop(name, None)
        self.refused.append(Refusal(name, reason, text))


def derive(fd: int, image: Image) -> Layout:
    """The layout, worked out; LayoutError when it is refused."""
    try:
        return _derive(Elf(fd), image)
    except (ElfError, OSError, MemoryError) as err:
        why = err.strerror if isinstance(err, OSError) else str(err)
        raise LayoutError(Reason.DAMAGED, f"cannot be read: {why or 'no memory'}"[:200]) from err


def read_accessors(elf: Elf) -> tuple[dict[str, int], list[Refusal]]:
    """What the accessors' code says, by field."""
    found: dict[str, int] = {}
    refused = []
    for name, (vaddr, size) in elf.accessors().items():
        try:
            code = elf.code(vaddr, size or 2048)
            found[name] = field_of(code, vaddr, name)
        except LayoutError as err:
            refused.append(Refusal(name, err.reason, str(err)))
    return found, refused


def check_base(offsets: dict[str, int]) -> None:
    """Rank, size and device stand side by side in every version."""
    rank = offsets["rank"]
    if offsets["nranks"] != rank + 4 or offsets["cuda_dev"] != rank + 8:
        raise LayoutError(
            Reason.DISAGREES,
            f"rank {rank}, nRanks {offsets['nranks']} and cudaDev {offsets['cuda_dev']} "
            "are not side by side",
        )
    if rank < 8 or rank % 4:
        raise LayoutError(Reason.DISAGREES, f"rank at {rank} makes no sense")


def _derive(elf: Elf, image: Image) -> Layout:
    machine = elf.headers.machine
    accessors, unread = read_accessors(elf) if machine == "x86_64" else ({}, [])
    try:
        structure = dwarf.read(elf.fd, elf.headers, elf.sections)
    except (LayoutError, ElfError) as err:
        if machine != "x86_64":
            raise LayoutError(
                Reason.MACHINE, f"code of {machine} is not read here, and: {err}"
            ) from err
        return _from_code(elf, image, accessors, unread)
    return _from_dwarf(elf, image, structure, accessors)


def _layout(image: Image, found: _Found, method: str, confirmed: bool) -> Layout:
    return Layout(
        **found.offsets,
        method=method,
        confidence="confirmed" if confirmed else "checked",
        version=image.version,
        build_id=image.build_id,
        refused=tuple(found.refused),
    )


# -- from debug information

#: Our name, NCCL's, bytes, elements of an array.
_MEMBERS = (
    ("rank", "rank", 4, None),
    ("nranks", "nRanks", 4, None),
    ("cuda_dev", "cudaDev", 4, None),
    ("async_result", "asyncResult", 4, None),
    ("comm_hash", "commHash", 8, None),
    ("seq_number", "seqNumber", 8, _COUNTERS),
    ("start_magic", "startMagic", 8, None),
    ("end_magic", "endMagic", 8, None),
    ("name", "commName", 8, None),
    ("init_state", "initState", 4, None),
    ("finalize_called", "finalizeCalled", 1, None),
    ("destroy_flag", "destroyFlag", 4, None),
)


def _from_dwarf(
    elf: Elf, image: Image, structure: dwarf.Structure, accessors: dict[str, int]
) -> Layout:
    found = _Found()
    for name, theirs, size, count in _MEMBERS:
        member = structure.members.get(theirs)
        if member is None:
            continue
        # An atomic one is a class of its own: its size is then that of the class.
        if member.size != size or member.count != count:
            found.refuse(name, Reason.DISAGREES, f"{theirs} is not of the known type")
            continue
        found.offsets[name] = member.offset
    for name in _BASE:
        if name not in found.offsets:
            raise LayoutError(Reason.DISAGREES, f"debug information without a sound {name}")
    found.offsets["size"] = structure.size
    check_base(found.offsets)
    for name, offset in accessors.items():
        known = found.offsets.get(name)
        if known is not None and known != offset:
            raise LayoutError(
                Reason.DISAGREES,
                f"{name} is at {known} in the debug information, at {offset} in the code",
            )
    config = structure.members.get("config")
    inside = dwarf.members_of(config) if config is not None else {}
    if config is not None and "commName" in inside and inside["commName"].size == 8:
        found.offsets["name"] = config.offset + inside["commName"].offset
    _check_magics(found)
    confirmed = all(name in accessors for name in _BASE)
    if confirmed:
        _compare_seq(elf, found)
    return _layout(image, found, "dwarf", confirmed)


def _compare_seq(elf: Elf, found: _Found) -> None:
    """The counters by the code, where it shows them: a second look at the same."""
    if "seq_number" not in found.offsets:
        return
    try:
        shown = Code(elf, found.offsets["rank"]).seq_number()
    except LayoutError:
        return  # not shown, which does not speak against it
    if shown != found.offsets["seq_number"]:
        found.refuse(
            "seq_number",
            Reason.DISAGREES,
            f"{found.offsets['seq_number']} in the debug information, {shown} in the code",
        )


def _check_magics(found: _Found) -> None:
    start, end = found.offsets.get("start_magic"), found.offsets.get("end_magic")
    if (start is None) != (end is None):
        for name in ("start_magic", "end_magic"):
            found.refuse(name, Reason.DISAGREES, "only one of the two magics is there")
    elif start is not None and (start != 0 or end is None or end + 8 != found.offsets["size"]):
        for name in ("start_magic", "end_magic"):
            found.refuse(name, Reason.DISAGREES, "the magics are not at start and end")


# -- from the code


def _from_code(elf: Elf, image: Image, accessors: dict[str, int], unread: list[Refusal]) -> Layout:
    for name in _BASE:
        if name not in accessors:
            why = next((r for r in unread if r.field == name), None)
            if why is not None:
                raise LayoutError(why.reason, why.text)
            raise LayoutError(Reason.NO_ACCESSORS, f"no symbol of the accessor of {name}")
    check_base(accessors)
    found = _Found(dict(accessors), list(unread))
    rank = accessors["rank"]
    release = release_of(image.version)
    after = found.offsets.get("async_result")
    if after is not None and not rank + 8 < after < rank + (1 << 20):
        found.refuse("async_result", Reason.DISAGREES, f"asyncResult at {after} makes no sense")
    code = Code(elf, rank)
    if release is None:
        found.refuse("comm_hash", Reason.VERSION, "the version is not known")
    elif release < HASH_SINCE:
        found.refuse("comm_hash", Reason.VERSION, "versions before 2.18 store no hash")
    elif code.hash_loads < _HASH_LOADS:
        found.refuse(
            "comm_hash", Reason.NOT_FOUND, f"{code.hash_loads} loads of the word before rank"
        )
    else:
        found.offsets["comm_hash"] = rank - 8
    try:
        found.offsets["seq_number"] = code.seq_number()
    except LayoutError as err:
        found.refuse("seq_number", err.reason, str(err))
    _magics(code, found, release)
    return _layout(image, found, "code", False)


def _magics(code: Code, found: _Found, release: tuple[int, int] | None) -> None:
    if not code.magic_seen:
        if release is None or release >= MAGIC_SINCE:
            found.refuse("end_magic", Reason.NOT_FOUND, "no instruction has the magic")
        return
    try:
        end = code.end_magic()
    except LayoutError as err:
        found.refuse("end_magic", err.reason, str(err))
        return
    highest = max(found.offsets.values())
    if end % 8 or end <= highest:
        found.refuse("end_magic", Reason.DISAGREES, f"the end at {end} is before other fields")
        return
    found.offsets |= {"start_magic": 0, "end_magic": end, "size": end + 8}
