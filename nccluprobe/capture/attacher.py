"""Putting probes on the copies of NCCL that discovery finds."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from nccluprobe.capture.discover import FoundFile
from nccluprobe.capture.ebpf_source import EbpfSource
from nccluprobe.capture.maps import FileId
from nccluprobe.capture.source import Library
from nccluprobe.errors import NccluprobeError
from nccluprobe.nccl import layout as layouts
from nccluprobe.nccl.api import API_TABLE, Kind
from nccluprobe.nccl.layout import Layout
from nccluprobe.plural import counted


@dataclass(frozen=True)
class Plan:
    """What is to be probed in one file: (api id, file offset) each."""

    functions: tuple[tuple[int, int], ...]
    slow: tuple[str, ...]  # names whose first instruction the kernel must single-step
    absent: tuple[str, ...]  # traced functions that this copy does not have


def plan(found: FoundFile) -> Plan:
    """Probes for the traced functions of a file."""
    functions, slow, absent = [], [], []
    for api in API_TABLE:
        function = found.image.functions.get(api.name)
        if function is None:
            if api.kind is not Kind.HELPER:
                absent.append(api.name)
            continue
        functions.append((api.id, function.offset))
        if function.cost == "single-step":
            slow.append(api.name)
    return Plan(tuple(functions), tuple(slow), tuple(absent))


def describe(found: FoundFile, planned: Plan) -> str:
    """One line about a copy of NCCL: what, which version, what a hit costs."""
    image = found.image
    costs = Counter(image.functions[f].cost for f in image.functions)
    cost = ", ".join(f"{count} {name}" for name, count in sorted(costs.items()))
    return (
        f"{found.file.path}: NCCL {image.version or 'of unknown version'}, "
        f"build id {(image.build_id or 'none')[:16]}, symbols in {image.table}, "
        f"{counted(len(planned.functions), 'function')} ({cost})"
    )


def _layout(found: FoundFile) -> tuple[Layout | None, str]:
    """The layout of its struct ncclComm, or None and why (some 50 ms, from the cache 10)."""
    try:
        return layouts.find(found.file.fd, found.image), ""
    except layouts.LayoutError as err:
        return None, str(err)


class Attacher:
    """Attaches once per real file.  A refusal is said and does not end the tracing."""

    def __init__(self, source: EbpfSource, say: Callable[[str], None]) -> None:
        self._source = source
        self._say = say
        self._libs: dict[FileId, int] = {}
        #: The last refusal, when a file could not be probed.
        self.refused: NccluprobeError | None = None

    @property
    def count(self) -> int:
        """Copies of NCCL with probes on."""
        return len(self._libs)

    def remove(self, file: FileId) -> None:
        """Take the probes off a file that was overwritten: they are at wrong places now."""
        lib = self._libs.pop(file, None)
        if lib is None:
            return
        library = self._source.library(lib)
        self._source.detach(lib)
        self._say(
            f"{library.path if library else 'a copy of NCCL'} was overwritten in place while "
            "in use: probes removed; calls of running processes in it are not seen any more"
        )

    def add(self, found: FoundFile) -> bool:
        """Probe a newly found file; takes over its descriptor."""
        planned = plan(found)
        lib = self._source.new_lib_id()
        image = found.image
        layout, unknown = _layout(found)
        self._source.add_library(
            Library(lib, found.file.path, image.version, image.build_id, layout), image.hash_form
        )
        try:
            # By descriptor: it is the file that was examined, also when its name
            # has gone or names another file by now.
            attached = self._source.attach(lib, found.file.fd, planned.functions)
        except NccluprobeError as error:
            self.refused = error
            self._say(f"cannot probe {found.file.path}: {error}")
            return False
        finally:
            os.close(found.file.fd)
        self._libs[found.file.id] = lib
        self._say(f"library {describe(found, planned)}; {counted(attached.count, 'link')}")
        if layout is None:
            self._say(
                "its struct ncclComm cannot be read, so communicators made before now stay "
                f"without identity: {unknown}"
            )
        if planned.slow:
            self._say(
                "first instruction is single-stepped (a hit costs about 1 us on metal, 10 us in a "
                f"virtual machine) in: {', '.join(planned.slow)}"
            )
        return True
