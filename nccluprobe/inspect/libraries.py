"""The copies of NCCL that a process maps, with the layout of their communicators."""

from __future__ import annotations

import os
from dataclasses import dataclass

from nccluprobe.capture.elf import ElfError, NcclImage, scan
from nccluprobe.capture.maps import Mapping, open_mapping, read_maps, stat_mapping
from nccluprobe.nccl import layout as layouts
from nccluprobe.nccl.layout import Layout

_Seen = tuple[int, int, int, int]


@dataclass(frozen=True)
class Copy:
    """A copy of NCCL as one process maps it; ``refused`` says why there is no layout."""

    path: str
    image: NcclImage
    layout: Layout | None
    refused: str | None
    mappings: tuple[Mapping, ...]


class Libraries:
    """Examines each file once, however many processes map it."""

    def __init__(self) -> None:
        self._known: dict[_Seen, tuple[NcclImage, Layout | None, str | None] | None] = {}

    def of(self, pid: int) -> list[Copy]:
        """Copies that the process maps; PermissionError when its maps may not be read."""
        by_file: dict[_Seen, list[Mapping]] = {}
        for mapping in read_maps(pid):
            try:
                status = stat_mapping(pid, mapping)
            except OSError:
                continue
            seen = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
            if seen not in self._known:
                self._known[seen] = _examine(pid, mapping)
            by_file.setdefault(seen, []).append(mapping)
        found = []
        for seen, mappings in by_file.items():
            known = self._known[seen]
            if known is not None:
                found.append(Copy(mappings[0].path, *known, tuple(mappings)))
        return found


def _examine(pid: int, mapping: Mapping) -> tuple[NcclImage, Layout | None, str | None] | None:
    try:
        file = open_mapping(pid, mapping)
    except OSError:
        return None
    try:
        image = scan(file.fd)
        if image is None:
            return None
        try:
            return image, layouts.find(file.fd, image), None
        except layouts.LayoutError as err:
            return image, None, f"{err.reason.value}: {err}"
    except ElfError:
        return None
    finally:
        os.close(file.fd)
