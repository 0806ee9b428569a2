"""Where a process's trace goes: folder, name, owner."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from nccluprobe.collect import runs
from nccluprobe.collect.ports import ProcInfo
from nccluprobe.collect.process import Traced
from nccluprobe.collect.safedir import Owner, file_owner, open_inside, open_out, sudo_owner
from nccluprobe.collect.vanished import Vanished
from nccluprobe.collect.writer import Limits, TraceFile

TRACING = "tracing"


class Places:
    """``<out>/tracing/<run id>/rank_<rank>_pid_<pid>.jsonl``, safely made."""

    def __init__(
        self, out: Path, owner: Owner | None, limits: Limits, problem: Callable[[str], None]
    ) -> None:
        self._out = out
        self._owner = owner
        self._limits = limits
        self._problem = problem
        self._sudo = sudo_owner(os.environ)
        # Fails here and now, with one line, when the folder cannot be used.
        os.close(open_out(out, for_writing=True))

    def file(self, process: Traced, info: ProcInfo) -> TraceFile:
        """The trace file of a process; made when first written to."""
        rank = "unknown" if process.rank is None else process.rank
        base = f"rank_{rank}_pid_{process.pid}"
        host = runs.component(info.host) or "host"
        user = None if isinstance(info, Vanished) else Owner(info.uid, info.gid)
        owner = file_owner(self._owner, user, self._sudo)

        def folder() -> int:
            out = open_out(self._out)
            try:
                tracing = open_inside(out, TRACING, self._owner or self._sudo)
            finally:
                os.close(out)
            try:
                return open_inside(tracing, process.run_id, owner)
            finally:
                os.close(tracing)

        return TraceFile(
            folder,
            (base, f"{base}_{host}_{info.start_ns}"),
            owner,
            process.header,
            self._limits,
            self._problem,
        )
