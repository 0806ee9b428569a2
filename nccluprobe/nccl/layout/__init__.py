"""Where the fields of ``struct ncclComm`` lie, in any copy of NCCL.

No table of versions: offsets change inside patch releases.
"""

from __future__ import annotations

import os

from nccluprobe.nccl.layout import cache
from nccluprobe.nccl.layout.find import check_base, derive, read_accessors
from nccluprobe.nccl.layout.model import (
    MAGIC,
    Image,
    Layout,
    LayoutError,
    Reason,
    Refusal,
    release_of,
    to_json,
)
from nccluprobe.nccl.layout.symbols import Elf

__all__ = [
    "MAGIC",
    "Image",
    "Layout",
    "LayoutError",
    "Reason",
    "Refusal",
    "find",
    "release_of",
    "to_json",
]


def find(fd: int, image: Image, *, cached: bool = True) -> Layout:
    """The layout of an open copy of NCCL; LayoutError when it is refused.

    ``image`` is what the scan of the file told: version, build id, machine.
    """
    if not cached:
        return derive(fd, image)
    size = os.fstat(fd).st_size
    kept = cache.load(image.build_id, size)
    if kept is not None and kept.version == image.version and _still(fd, kept):
        return kept
    layout = derive(fd, image)
    cache.store(layout, size)
    return layout


def _still(fd: int, layout: Layout) -> bool:
    """Whether the accessors of the file at hand read what the layout says."""
    try:
        elf = Elf(fd)
        if elf.headers.machine != "x86_64":
            return False
        accessors, _ = read_accessors(elf)
        check_base({"rank": layout.rank, "nranks": layout.nranks, "cuda_dev": layout.cuda_dev})
    except (LayoutError, OSError, MemoryError):
        return False
    offsets = layout.offsets()
    needed = {"rank", "nranks", "cuda_dev"} <= accessors.keys()
    return needed and all(offsets[k] in (None, v) for k, v in accessors.items())
