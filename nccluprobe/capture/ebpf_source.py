"""The eBPF front as the collector sees it."""

from __future__ import annotations

import os
import re
import struct
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from nccluprobe.capture import reclaim, state
from nccluprobe.capture.bpf import BpfProgram, Sizes
from nccluprobe.capture.elf import hash_form
from nccluprobe.capture.links import Attached, open_links
from nccluprobe.capture.ring import open_ring
from nccluprobe.capture.source import Library, Losses
from nccluprobe.capture.sysbpf import Map, open_raw_tracepoint
from nccluprobe.errors import ExitCode, NccluprobeError
from nccluprobe.nccl.layout.model import Layout

_U32 = struct.Struct("=I")
_TRACEPOINTS = (("sched_process_exit", "ncp_sched_exit"), ("sched_process_exec", "ncp_sched_exec"))
_POLL = 0.01  # seconds between looks at the ring in wait()
_SWEEP_EVERY = 60.0  # seconds between sweeps of counters of ended communicators


class EbpfSource:
    """Probes, ring and maps of one tracer; a ``Source``.

    Not thread-safe.  The order of use: ``add_library``, ``attach``, then
    ``drain`` and the rest as often as wanted, at last ``close``.
    """

    front = "ebpf"

    def __init__(
        self,
        sizes: Sizes | None = None,
        *,
        exits: bool = True,
        link: str | None = None,
        debug: bool = False,
    ) -> None:
        self.exits = exits
        self._program = BpfProgram(sizes, exits=exits, debug=debug)
        self._maps: dict[str, Map] = {name: self._program.table(name) for name in state.MAPS}
        state.check_layout(lambda name: (self._maps[name].key_size, self._maps[name].value_size))
        self._links = open_links(self._program, link)
        ring = self._program.table("ring")
        self._ring = open_ring(self._program.bcc, "ring", ring.fd, ring.max_entries)
        self._libraries: dict[int, Library] = {}
        self._attached: dict[int, Attached] = {}
        self._next_lib = 1
        self._version = 0
        self._swept = time.monotonic()
        self._tracepoints = self._attach_tracepoints()

    def _attach_tracepoints(self) -> list[int]:
        # Before any probe: no thread may be known whose end would be missed.
        fds = []
        try:
            for name, program in _TRACEPOINTS:
                fds.append(open_raw_tracepoint(name, self._program.load_tracepoint(program)))
        except OSError as e:
            raise NccluprobeError(
                f"the kernel refused the tracepoint {name}: {e.strerror}", ExitCode.BPF_REFUSED
            ) from e
        return fds

    # Libraries

    @property
    def link_kind(self) -> str:
        """How functions are probed: "multi" or "perf"."""
        return self._links.kind

    def new_lib_id(self) -> int:
        """An unused number for a ``Library``."""
        lib = self._next_lib
        if lib >= self._program.sizes.libs:
            raise NccluprobeError(
                f"more than {lib - 1} copies of NCCL in one run: restart", ExitCode.INTERNAL
            )
        self._next_lib += 1
        return lib

    def add_library(self, library: Library, form: int | None = None) -> None:
        """Register a copy of NCCL; ``form`` is its hash form, else from its version."""
        form = hash_form(library.version) if form is None else form
        self._maps["libs"].put(
            _U32.pack(library.lib), state.LIB.pack(form, *_offsets(library.layout), 0, 0, 0)
        )
        self._libraries[library.lib] = library
        self._next_lib = max(self._next_lib, library.lib + 1)

    def attach(
        self, lib: int, fd_or_path: int | str, functions: Iterable[tuple[int, int]]
    ) -> Attached:
        """Probe functions of a registered library: (api id, file offset) each."""
        if lib in self._attached:
            raise ValueError(f"library {lib} is attached already")
        offsets = [(offset, lib << 16 | api) for api, offset in functions]
        if not offsets:
            raise NccluprobeError("no function to probe", ExitCode.NOT_NCCL)
        attached = self._links.attach(fd_or_path, offsets, self.exits)
        self._attached[lib] = attached
        return attached

    def detach(self, lib: int) -> float:
        """Remove the probes of a library; the seconds that it took."""
        attached = self._attached.pop(lib, None)
        return self._links.detach(attached) if attached else 0.0

    def library(self, lib: int) -> Library | None:
        """The copy of NCCL that a record speaks of."""
        return self._libraries.get(lib)

    # Records

    def drain(self) -> Iterator[bytes]:
        """All records now in the ring, oldest first, in chunks of whole records."""
        return self._ring.chunks()

    def wait(self, timeout: float) -> bool:
        """Sleep; True at once when the ring is a quarter full.

        Nothing wakes the reader per record: that would cost the traced thread
        more than the probe itself.
        """
        end = time.monotonic() + timeout
        while True:
            if self._ring.fill() > 0.25:
                return True
            left = end - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(left, _POLL))

    def _threads(self) -> np.ndarray:
        found = [np.frombuffer(v, state.THREAD) for _, v in self._maps["threads"].batches()]
        return np.concatenate(found) if found else np.empty(0, state.THREAD)

    def in_flight(self) -> bytes:
        """Records (t_exit 0) of all calls that are inside now; see ``Source``."""
        if time.monotonic() - self._swept > _SWEEP_EVERY:
            self.sweep()
        threads = self._threads()
        # The end of a call is not seen any more once its library is detached.
        seen = np.isin(threads["lib"], list(self._attached))
        return bytes(threads["rec"][(threads["active"] == 1) & seen].tobytes())

    # Counts

    def _tallies(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for keys, values in self._maps["tallies"].batches():
            yield np.frombuffer(keys, "<u4"), np.frombuffer(values, state.TALLY)

    def losses(self) -> Losses:
        """Counts so far, of the processes not yet forgotten."""
        losses = Losses()
        for epochs, tallies in self._tallies():
            for i in np.flatnonzero((tallies["lost"] > 0) | (tallies["blind"] > 0)):
                who = (int(tallies["pid"][i]), int(epochs[i]))
                if tallies["lost"][i]:
                    losses.by_process[who] = int(tallies["lost"][i])
                if tallies["blind"][i]:
                    losses.blind[who] = int(tallies["blind"][i])
        losses.unattributed = self.stats()["proc_full"]
        return losses

    def captured(self) -> dict[tuple[int, int], int]:
        """Records put into the ring so far, by (pid, epoch) not yet forgotten."""
        by_epoch: dict[int, int] = {}
        threads = self._threads()
        for epoch in np.unique(threads["epoch"]):
            mine = threads["epoch"] == epoch
            by_epoch[int(epoch)] = int(threads["captured"][mine].sum())
        found: dict[tuple[int, int], int] = {}
        for epochs, tallies in self._tallies():
            for epoch, tally in zip(epochs.tolist(), tallies, strict=True):
                found[int(tally["pid"]), epoch] = int(tally["captured"]) + by_epoch.get(epoch, 0)
        return found

    def stats(self) -> dict[str, int]:
        """Counters of the program and the ring since the start, by name."""
        cpus = _possible_cpus()
        table = self._maps["stats"]
        found: dict[str, int] = {}
        for i, name in enumerate(state.STATS):
            values = Map(table.fd, 4, 8 * cpus, table.max_entries).get(_U32.pack(i)) or b""
            found[name] = sum(struct.unpack(f"={cpus}Q", values))
        found["unknown"] = self._ring.unknown
        return found

    # Processes

    def deny(self, pid: int, epoch: int) -> None:
        """Record nothing more of this process (it does not match)."""
        self._maps["denied"].put(_U32.pack(epoch), _U32.pack(pid))
        self._version += 1  # every thread looks again when this has changed
        self._maps["deny_version"].put(_U32.pack(0), _U32.pack(self._version))

    def forget(self, pid: int, epoch: int) -> None:
        """The process is gone: free what is kept for it."""
        reclaim.forget(self._maps, pid, epoch)

    def sweep(self) -> None:
        """Free what belongs to processes and communicators that are gone.

        Comes about by itself once a minute; ``forget`` does it at once.
        """
        self._swept = time.monotonic()
        reclaim.sweep(self._maps)

    def close(self) -> float:
        """Remove all probes and free the maps; the seconds that it took.

        Drain before: what is in the ring is gone afterwards.  Records of calls
        that end while probes are being removed are still drained if ``drain``
        is called between ``detach`` and ``close``.
        """
        start = time.monotonic()
        for lib in list(self._attached):
            self.detach(lib)
        for fd in self._tracepoints:
            os.close(fd)
        self._tracepoints = []
        self._ring.close()
        self._program.close()
        return time.monotonic() - start


def _offsets(layout: Layout | None) -> tuple[int, int, int, int, int]:
    """magics, rank, hash, seq and end_magic of struct ncp_lib; 0: unknown."""
    if layout is None:
        return 0, 0, 0, 0, 0
    seq = layout.seq_number if layout.seq_counts else None
    magics = layout.start_magic == 0 and layout.end_magic is not None
    end = layout.end_magic if magics else None
    return int(magics), layout.rank, layout.comm_hash or 0, seq or 0, end or 0


def _possible_cpus() -> int:
    """CPUs that a per-CPU map has a value for."""
    text = Path("/sys/devices/system/cpu/possible").read_text(encoding="ascii").strip()
    return int(re.split("[-,]", text)[-1]) + 1
