"""One run of ``attach``: discovery, probes and the collector put together."""

from __future__ import annotations

import os
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from nccluprobe.capture import hazards
from nccluprobe.capture.attacher import Attacher, describe, plan
from nccluprobe.capture.bpf import Sizes
from nccluprobe.capture.discover import Discovery, DiscoveryEvents
from nccluprobe.capture.ebpf_source import EbpfSource
from nccluprobe.capture.preload_marks import Notes, about_preload, traced_by_preload
from nccluprobe.capture.processes import (
    ProcessKey,
    ProcessMatcher,
    exec_pages,
    glance,
    is_running,
)
from nccluprobe.cli.unwritten import refuse_unclosed, say_unwritten
from nccluprobe.collect.collector import Collector
from nccluprobe.collect.exits import ExitWatcher
from nccluprobe.collect.safedir import check_out, parse_owner
from nccluprobe.collect.writer import Limits
from nccluprobe.errors import ExitCode, NccluprobeError, remedy
from nccluprobe.plural import counted, plural, verb

#: Matching processes that ended lately: their last records are still wanted.
_REMEMBERED = 4096
#: After so long without a call the user is told what else there is.
_QUIET_S = 10.0


@dataclass(frozen=True)
class SessionConfig:
    """The options of ``attach``.  ``ring_bytes`` is rounded up to a power of two."""

    pid_globs: tuple[str, ...]
    pids: tuple[int, ...]
    libs: tuple[Path, ...]
    out: Path
    run_id: str | None
    owner: str | None
    exits: bool
    link: str
    ring_bytes: int
    max_bytes: int
    debug: bool = False


class Session:
    """Owns everything that one ``attach`` needs; not thread-safe."""

    def __init__(self, config: SessionConfig, say: Callable[[str], None]) -> None:
        self._config = config
        self._say = say
        _check_privileges()
        self._owner = None if config.owner is None else parse_owner(config.owner)
        globs = list(config.pid_globs)
        if not globs and not config.pids:
            globs = ["*"]  # --lib alone: whoever uses that copy
        self._matcher = ProcessMatcher(globs, list(config.pids))
        self._discovery = Discovery(self._matcher, [os.fspath(lib) for lib in config.libs])
        self._source: EbpfSource | None = None
        self._attacher: Attacher | None = None
        self._collector: Collector | None = None
        self._gone: OrderedDict[int, None] = OrderedDict()
        self._warned: set[int] = set()
        self._traced = False  # whether any process has a trace
        self._quiet_since: float | None = None  # NCCL is mapped, and nobody calls it
        self._notes = Notes()
        self._named: list[ProcessKey] = []  # those of --pid

    # -- starting

    def start(self, exit_if_none: bool = False) -> None:
        """Load the program, probe what is mapped now, begin to collect."""
        first = self._first_look(exit_if_none)
        config = self._config
        self._source = source = self._load()
        self._attacher = Attacher(source, self._say)
        self._collector = Collector(
            source,
            config.out,
            wanted=self._wanted,
            watcher=ExitWatcher(),
            run_id=config.run_id,
            owner=self._owner,
            limits=Limits(max_bytes=config.max_bytes),
            notify=self._notify,
        )
        if self._discovery.fallback:
            self._say(
                f"mapping events are not to be had ({self._discovery.fallback}): "
                "looking for new processes five times a second"
            )
        self._handle(first)
        if self._attacher.count == 0 and self._attacher.refused is not None:
            raise self._attacher.refused
        if not self._discovery.processes:
            self._say("no process matches yet: waiting")

    def dry_run(self, exit_if_none: bool = False, verbose: bool = False) -> None:
        """Do all but attach: compile, load, resolve; print what would be probed.

        ``verbose``: every function, too.
        """
        check_out(self._config.out)
        first = self._first_look(exit_if_none)
        source = self._load()
        print(f"BPF program: compiled and loaded; links: {source.link_kind}")
        print(f"processes that match: {len(self._discovery.processes)}")
        for pid in sorted({key.pid for key in self._discovery.processes}):
            if preload := about_preload(pid):
                print(f"process {pid}: {preload}")
        for found in first.new_files:
            planned = plan(found)
            print(f"would probe {describe(found, planned)}, {len(planned.absent)} missing")
            if verbose:
                functions = sorted(found.image.functions.values(), key=lambda f: f.name)
                for f in functions:
                    print(f"  {f.name}: first instruction {f.insn}, {f.cost}")
                for name in planned.absent:
                    print(f"  {name}: missing")
            os.close(found.file.fd)
        if not first.new_files:
            print("no copy of NCCL is mapped by a matching process now")
        source.close()
        self._discovery.close()

    def _load(self) -> EbpfSource:
        config = self._config
        ring = 1 << (config.ring_bytes - 1).bit_length()
        return EbpfSource(
            Sizes(ring_bytes=ring),
            exits=config.exits,
            link=None if config.link == "auto" else config.link,
            debug=config.debug,
        )

    def _first_look(self, exit_if_none: bool) -> DiscoveryEvents:
        for pid in self._config.pids:
            seen = glance(pid)
            if seen is None or not is_running(seen):
                why = "there is no such process" if seen is None else "it has ended"
                raise NccluprobeError(f"--pid {pid}: {why}", ExitCode.NO_PROCESS)
            self._named.append(seen.key)
        first = self._discovery.poll(budget=30.0)
        if exit_if_none and not self._discovery.processes:
            raise NccluprobeError(
                f"no process matches {' '.join(self._config.pid_globs) or 'the request'}; "
                "without --exit-if-none attach would wait for one",
                ExitCode.NO_PROCESS,
            )
        return first

    # -- running

    def discover(self) -> None:
        """Look for new processes and new copies of NCCL."""
        self._handle(self._discovery.poll())
        if self._quiet_since is not None and time.monotonic() - self._quiet_since > _QUIET_S:
            self._quiet_since = None
            self._say(
                "processes that match map NCCL, but none has called it yet; if their job hangs "
                "already, `nccluprobe inspect` reads from memory where each rank stands"
            )

    def over(self) -> bool:
        """Whether nothing can come any more: all processes of --pid have ended and are written.

        With a pattern others may come at any time.
        """
        assert self._collector is not None
        if self._config.pid_globs or not self._named or self._collector.processes:
            return False
        for key in self._named:
            seen = glance(key.pid)
            if seen is not None and seen.key == key and is_running(seen):
                return False
        n = len(self._named)
        pids = ", ".join(str(key.pid) for key in self._named[:8]) + (", ..." if n > 8 else "")
        self._say(f"{plural(n, 'process')} {pids} {verb(n, 'has')} ended, and --pid names no other")
        return True

    def _notify(self, kind: str, text: str) -> None:
        if kind == "process":
            self._traced = True
            self._quiet_since = None
        self._say(f"{kind} {text}")

    def drain(self) -> None:
        """Bring what was captured into the files."""
        assert self._collector is not None
        self._collector.step()

    def stop(self) -> None:
        """Flush the files first, then remove the probes, which can take seconds."""
        assert self._collector is not None and self._source is not None
        self._collector.close()
        self._discovery.close()
        self._notes.clear()
        stats = self._source.stats()
        where = (
            f"traces are in {self._config.out}"
            if self._traced
            else "no call that makes or uses a communicator was seen: no trace"
        )
        self._say(f"{where}; removing the probes")
        seconds = self._source.close()
        lost = stats["lost"] + stats["thread_full"] + stats["proc_full"]
        undecided = self._collector.stats.undecided
        if undecided:
            self._say(
                f"{counted(undecided, 'record', 'is')} in no file: a process ended before it could "
                "be seen whether it matches"
            )
        say_unwritten(self._collector.stats, self._say)
        self._say(
            f"done: probes removed in {seconds:.1f} s; records lost: {lost}, "
            f"calls without identity: {stats['comm_full'] + stats['p2p_full']}"
        )
        refuse_unclosed([self._collector.stats])

    def _handle(self, events: DiscoveryEvents) -> None:
        assert self._attacher is not None
        assert self._collector is not None
        for key in events.new_processes:
            # Now, while it can be asked: it may end milliseconds after its first call.
            self._collector.introduce(key.pid)
        for pid in events.brief:
            self._remember(pid)
        for file in events.changed:
            self._attacher.remove(file)
        for found in events.new_files:
            self._attacher.add(found)
        if events.uses and not self._traced and self._quiet_since is None:
            self._quiet_since = time.monotonic()
        if self._config.exits:
            self._warn_of_seccomp([key.pid for key, _ in events.uses])
        for key in events.unreadable:
            self._say(f"process {key.pid} matches, but its maps may not be read: it is not traced")
        for key in events.gone:
            self._warned.discard(key.pid)
            self._notes.remove(key.pid)
            self._remember(key.pid)

    def _remember(self, pid: int) -> None:
        self._gone[pid] = None
        if len(self._gone) > _REMEMBERED:
            self._gone.popitem(last=False)

    def _warn_of_seccomp(self, pids: list[int]) -> None:
        fresh = [pid for pid in pids if pid not in self._warned]
        if not fresh:
            return
        self._warned.update(fresh)
        warning = hazards.seccomp_risk(fresh).warning
        if warning:
            self._say(f"warning: {warning}")

    def _wanted(self, pid: int) -> bool | None:
        seen = glance(pid)
        if seen is None or not is_running(seen):  # a zombie has no name to be judged by
            return True if pid in self._gone else None
        if not self._matcher.matches(seen):
            # One without memory is ending: its names went first, so nobody knows.
            return False if exec_pages(pid) else None
        if traced_by_preload(pid):
            self._say(f"process {pid} is traced by the preload library already: left to it")
            return False
        self._notes.add(pid)
        return True


def _check_privileges() -> None:
    caps = hazards.capabilities()
    for lack in caps.lacks:
        if lack.purpose == hazards.LOADING:
            raise NccluprobeError(
                f"attach needs privileges for {lack.purpose}: missing {lack}; {remedy()}",
                ExitCode.NOT_PERMITTED,
            )
