"""One analysis from files to findings: a reader and a matcher, driven by a clock."""

from __future__ import annotations

import errno
import gc
import os
import signal
import sys
import time
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from types import FrameType

from nccluprobe.cli import output
from nccluprobe.cli.summary import summary_of
from nccluprobe.errors import ExitCode, NccluprobeError, remedy
from nccluprobe.importers.files import RAS, Found
from nccluprobe.importers.run import Imported, import_files
from nccluprobe.match.finding import Finding
from nccluprobe.match.matcher import Due
from nccluprobe.match.model import Phase
from nccluprobe.match.options import Options
from nccluprobe.match.pipeline import Analysis
from nccluprobe.plural import counted, verb
from nccluprobe.report.text import report, single
from nccluprobe.report.writer import FindingWriter, finding_line
from nccluprobe.trace import scanner
from nccluprobe.trace.heartbeats import HeartbeatReader, Wanted
from nccluprobe.trace.reader import TraceReader

SCAN_S = 1.0
_STEP_S = 0.25
_PASSES = 4
#: Rows of JSON are many objects, without cycles and soon gone: looking for cycles
#: at every 700th costs a tenth of the time.
COLLECT_AT = 100_000

#: All files are read to their ends when they were not for so long, s; who is not heard for
#: ``silent_after`` (5 s, of which a collector needs one) would be called silent.
_STALE_S = 3.0

#: What scans of limits may take at once, s, before they pause for as long as they took.
_CREDIT_S = 2.0


def _until(due: Due) -> float:
    """Seconds that are left."""
    return max(0, due.at - time.time_ns()) / 1e9


class Session:
    """Reader and matcher, driven by a clock."""

    def __init__(self, found: Found, options: Options, run_id: str | None, as_json: bool) -> None:
        self.reader = TraceReader(found.traces, run_id)
        self.found = found
        self.run_id = run_id
        self.imported: Imported | None = None
        self.analysis = Analysis(options, scanner.load())
        self.as_json = as_json
        self.heartbeats = HeartbeatReader()
        self._declared: set[int] = set()  # sources whose phases come from files
        self._live = self._stopped = False
        self._whole = 0.0  # when all was read last, s
        self._credit = _CREDIT_S
        self._judged = time.monotonic()  # when a limit was judged last, s
        gc.set_threshold(COLLECT_AT, 50, 50)

    def read(self, only: Collection[int] | None = None, until: int | None = None) -> bool:
        """Everything there is to read now (``only``: of these sources); whether there was any.

        ``until``: not beyond this moment, unix ns.
        """
        self.reader.discover()
        self.analysis.open(self.reader.names())
        something = False
        for c in self.reader.poll(only=only):
            if self._stopped:
                break
            through = self.analysis.feed(c.source, c.path, c.first_line, c.data, c.caught_up)
            self.reader.at_time(c.source, through)
            if c.caught_up and self._live:
                self.analysis.heard(c.source, time.time_ns())
            something = something or bool(c.data)
            if until is not None and time.time_ns() >= until:
                break
        return something

    def declare(self) -> None:
        """Take the phases that heartbeat files declare, of processes whose traces hold none."""
        now, folders = time.time_ns(), dict[str, list[Wanted]]()
        processes = self.analysis.matcher.processes
        for source, name in self.reader.names():
            p = processes.get(source)
            if p is None or p.info is None or p.snapshot:
                continue
            if p.phases.declared and source not in self._declared:
                continue
            start = self.analysis.decoder.unix(source, p.info.key.start)
            pids = (p.info.pid, p.info.ns_pid)
            ahead = self.analysis.matcher.clocks.hosts.get(p.info.host, 0)
            theirs = max(now, now + ahead, p.newest)
            wanted = Wanted(source, p.info.host, pids, p.rank, start, theirs)
            folders.setdefault(os.path.dirname(name), []).append(wanted)  # noqa: PTH120 - many
        for folder, some in folders.items():
            for source, h in self.heartbeats.look(folder, some):
                self._declared.add(source)
                since = h.time if h.since is None else h.since
                phase = Phase(source, h.time, h.phase, since, h.time, h.every, h.limit, h.step)
                self.analysis.take([phase])

    def load(self) -> None:
        """Read all that there is."""
        self._read_all()
        if self._set_right():
            self._read_all()
        self._import()

    def _set_right(self) -> bool:
        """Whether all is to be read anew, as the clocks of some hosts are known to be wrong."""
        other = self.analysis.corrected()
        if other is not None:
            self.analysis = other
            self.reader = TraceReader(self.found.traces, self.run_id)
        return other is not None

    def _read_all(self) -> None:
        self.reader.discover(force=True)
        # Files may still grow: read on until all ends are of about the same time,
        # so that no trace is taken for silent because it was read first.
        for _ in range(_PASSES):
            began = time.monotonic()
            self.read()
            if time.monotonic() - began < SCAN_S:
                break

    def afterwards(self, writer: FindingWriter) -> None:
        """Judge at the end of the traces, all of which are read."""
        self.declare()
        self._emit(self.analysis.scan(None), writer)

    def _import(self) -> None:
        """Read what is no trace, once."""
        if self.found.any or self.found.problems:
            self.imported = import_files(self.found, self.analysis)

    def follow(
        self, writer: FindingWriter, duration: float | None, until_quiet: float | None
    ) -> None:
        """Read and judge until told to stop."""
        self._live = True
        # Also where a shell started it in the background, with SIGINT ignored.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._stop)
        began = heard = time.monotonic()
        next_scan, takes = began, 0
        due: Due | None = None
        self.read()
        if not self._stopped and self._set_right():
            self.read()
        self._import()
        self._say_what_is_watched()
        while not self._stopped:
            now = time.monotonic()
            if self._catch_up(due):
                heard = now
            clock = time.time_ns()
            left = None if due is None else due.at - clock
            # No limit shall pass while a scan goes on that came just before it.
            if now >= next_scan if left is None or left > takes else left <= 0:
                next_scan = now + SCAN_S
                self.declare()
                self._emit(self.analysis.scan(clock), writer)
                takes = time.time_ns() - clock
                due = self._due(clock, limit=left is not None and left <= 0)
                writer.mark()
            if duration is not None and now - began >= duration:
                break
            if until_quiet is not None and now - heard >= until_quiet:
                break
            time.sleep(_STEP_S if due is None else min(_STEP_S, _until(due)))
        self.declare()
        self._emit(self.analysis.scan(time.time_ns()), writer)

    def _say_what_is_watched(self) -> None:
        """So that it is known to be at work: it may have nothing to say for hours."""
        n = len(self.reader.names())
        what = f"{counted(n, 'trace')} so far" if n else "no trace yet, waiting for one"
        where = f" in {', '.join(map(str, self.found.traces[:3]))}" if self.found.traces else ""
        more = ", ..." if len(self.found.traces) > 3 else ""
        if self.imported is not None:
            read = sum(self.imported.files.values())
            what += f"; {counted(read, 'file')} of other tools {verb(read, 'was')} read, once"
        limit = self.analysis.matcher.options.missing_after / 1e9
        output.say(
            f"watching{where}{more}: {what}; findings are told as they come, that a rank is "
            f"missed after {limit:g} s (--missing-after); Ctrl-C ends with the report"
        )

    def _stop(self, number: int, frame: FrameType | None) -> None:
        """End after what is being done, so that nothing is left half done; asked twice: now."""
        if self._stopped:
            signal.default_int_handler(number, frame)
        self._stopped = True

    def _due(self, began: int, limit: bool) -> Due | None:
        """The next limit after a scan that began then, unix ns.

        ``limit``: that scan was of a limit, too.  Those of many waits may pass one
        after another: in the long run at most half of the time is spent on their scans.
        """
        due = self.analysis.due(began)
        if not limit:
            return due
        now, took = time.monotonic(), (time.time_ns() - began) / 1e9
        free = max(0.0, now - took - self._judged)
        self._credit = min(_CREDIT_S, self._credit + free) - took
        self._judged = now
        if due is None or self._credit >= 0:
            return due
        return replace(due, at=max(due.at, time.time_ns() - round(self._credit * 1e9)))

    def _catch_up(self, due: Due | None) -> bool:
        """Read; when a limit is over, what it depends on first; whether there was any.

        Thousands of files take a second, and nobody shall wait for that as well.
        """
        if due is None or time.monotonic() - self._whole >= _STALE_S:
            something = self.read()
            self._whole = time.monotonic()
            return something
        something = _until(due) > 0 and self.read(until=due.at)
        if _until(due) > 0:
            self._whole = time.monotonic()
            return something
        return self.read(due.sources) or something

    def _emit(self, findings: list[Finding], writer: FindingWriter) -> None:
        try:
            if self.has_input():
                writer.open()
            writer.write(findings)
        finally:  # the verdict is shown also where it cannot be written
            self._show(findings)

    def has_input(self) -> bool:
        """Whether anything was read that can be judged."""
        matcher = self.analysis.matcher
        if self.imported is not None and self.imported.files.get(RAS):
            return True  # a text says nothing of what is as it should be
        return bool(matcher.standing.looks) or any(p.info for p in matcher.processes.values())

    def _show(self, findings: list[Finding]) -> None:
        """Findings as they come: in follow mode, and as JSON."""
        if self._live and not self.as_json:
            for f in findings:
                sys.stdout.write(time.strftime("%H:%M:%S  ") + single(f, sys.stdout.isatty()))
            sys.stdout.flush()
        if self.as_json and findings:
            output.write_lines(b"".join(finding_line(f) for f in findings))

    def finish(self) -> None:
        """The report."""
        if self.as_json:
            return
        sys.stdout.write(self.text(sys.stdout.isatty()))
        sys.stdout.flush()

    def text(self, colour: bool) -> str:
        """The report for a person."""
        summary = summary_of(self.analysis, self.reader, self.imported, self.heartbeats)
        return report(self.analysis.matcher.book.all(), summary, colour)

    def exit_code(self) -> ExitCode:
        """What a script wants to know."""
        found = self.analysis.matcher.book.all()
        if any(f.severity == "error" and f.state == "open" for f in found):
            return ExitCode.FINDINGS
        return ExitCode.NOTICES if found else ExitCode.OK


def nothing_read(session: Session, folders: list[Path]) -> NccluprobeError:
    """Why there is nothing to judge, and what to do."""
    if session.imported is not None and session.imported.told.problems:
        return NccluprobeError(_denied(session.imported.told.problems[0]), ExitCode.NO_TRACE)
    run_id, known = session.run_id, sorted(session.reader.run_ids)
    if run_id is not None and known:
        more = "" if len(known) <= 20 else f" and {len(known) - 20} more"
        return NccluprobeError(
            f"--run-id {run_id}: no trace of that run; there are: {', '.join(known[:20])}{more}",
            ExitCode.NO_TRACE,
        )
    if session.reader.counts.unreadable_files:
        return NccluprobeError(
            _denied(f"no trace could be read: {session.reader.counts.examples[0]}"),
            ExitCode.NO_TRACE,
        )
    return NccluprobeError(
        f"no readable trace in {', '.join(map(str, folders))}; "
        "give the folder that attach wrote to (--out). A job that hung before attach came "
        "makes no calls and so no trace: `nccluprobe inspect` reads where its ranks stand",
        ExitCode.NO_TRACE,
    )


def _denied(text: str) -> str:
    """With what to do about it, where that is all."""
    owners = "traces belong to who runs the traced processes, others need sudo"
    return text + (f"; {remedy(owners)}" if text.endswith(os.strerror(errno.EACCES)) else "")
