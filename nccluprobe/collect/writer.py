"""One trace file: parts, bounds, a full disk.

Every line that is handed over is either in the file, or counted as skipped, or
counted with the part that was deleted.  Nothing here raises: tracing goes on
when a disk does not.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nccluprobe.collect import lines, part_names
from nccluprobe.collect.reserve import ROOM, STEP, Reserve
from nccluprobe.collect.safedir import Owner, create_file
from nccluprobe.errors import NccluprobeError
from nccluprobe.plural import counted

RETRY_NS = 1_000_000_000
#: How often a file is looked at: somebody may have deleted it.
LOOK_NS = 1_000_000_000
DEFAULT_MAX_BYTES = 2_000_000_000
_LARGEST_PART = 256_000_000


@dataclass(frozen=True)
class Limits:
    """``max_bytes`` bounds all parts together, ``part_bytes`` one part."""

    max_bytes: int = DEFAULT_MAX_BYTES
    part_bytes: int = 0

    @property
    def part(self) -> int:
        """Size at which a new part begins: eight parts fill the bound."""
        most = max(1, self.max_bytes // 8)
        return min(self.part_bytes or _LARGEST_PART, most)


#: A part takes this many lines of a burst, however small it is to be.
_LEAST_LINES = 64


@dataclass
class _Part:
    name: str
    size: int = 0
    lines: int = 0


class TraceFile:
    """The parts of one process's trace.

    ``folder`` opens the folder (again, after a failure) and returns a
    descriptor that becomes this object's.  ``header`` gives the first lines of
    a part: with them every part is self-contained.  It is also written after a
    disk was full, as the lines that were skipped may have held any of it.
    """

    def __init__(
        self,
        folder: Callable[[], int],
        names: Sequence[str],
        owner: Owner | None,
        header: Callable[[int, int], list[str]],
        limits: Limits,
        problem: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._open_folder = folder
        self._names = names
        self._owner = owner
        self._header = header
        self._limits = limits
        self._problem = problem
        self._folder = -1
        self._fd = -1
        self._base = ""
        self._parts: deque[_Part] = deque()
        self._retry_at = 0
        self._full_since: int | None = None
        self._why = ""
        self._torn = False
        self._reserve = Reserve()
        self._look_at = 0
        self._gone: list[str] = []
        self.part = 0
        #: Lines not written because the disk was full.
        self.skipped = 0
        #: Lines deleted with the oldest parts, or by somebody else.
        self.dropped = 0

    @property
    def full(self) -> bool:
        """Whether lines are being skipped."""
        return self._full_since is not None

    @property
    def name(self) -> str:
        """Name of the current part; "" before the file could be made."""
        return self._parts[-1].name if self._parts else ""

    @property
    def folder(self) -> int:
        """Descriptor of the run's folder; -1 while it is not open."""
        return self._folder

    def write(self, batch: list[str], now: int) -> None:
        """Append whole lines, in one write per part; also retries after a failure."""
        rest = batch
        while True:
            piece, rest = self._fitting(rest)
            self._write(piece, now)
            if not rest:
                return

    def _fitting(self, batch: list[str]) -> tuple[list[str], list[str]]:
        """The lines that the present part has room for, and the rest.

        A burst must not make one part larger than the bound of all: it would be
        deleted whole by the next line.
        """
        room = self._limits.part - (self._parts[-1].size if self._parts else 0)
        if sum(map(len, batch)) <= room:
            return batch, []
        fit = 0
        for line in batch:
            room -= len(line)
            if room < 0:
                break
            fit += 1
        # A part whose head alone fills it still makes progress.
        fit = max(fit, _LEAST_LINES)
        return batch[:fit], batch[fit:]

    def _write(self, batch: list[str], now: int) -> None:
        if self._fd >= 0 and now >= self._look_at:
            self._look_at = now + LOOK_NS
            if self._deleted():
                self._let_go(now)
        if self._full_since is not None:
            if now < self._retry_at or not self._resume(now):
                self.skipped += len(batch)
                return
        elif self._fd < 0 and not self._begin(now):
            self.skipped += len(batch)
            return
        if not batch:
            return
        data = "".join(batch).encode("utf-8")
        notes = self._make_room(len(data), now)
        if notes:
            batch = [*notes, *batch]
            data = "".join(batch).encode("utf-8")
        self._append(data, len(batch), now)
        if self._parts[-1].size >= self._limits.part and not self.full:
            self._rotate(now)

    # -- beginning

    def _begin(self, now: int) -> bool:
        """Make the file; False when that failed (tried again later)."""
        try:
            self._create()
        except (OSError, NccluprobeError) as error:
            self._fail(error, now)
            return False
        header = [*self._header(self.part, now), *self._gone]
        self._append("".join(header).encode("utf-8"), len(header), now)
        self._gone.clear()
        return not self.full

    def _create(self) -> None:
        if self._folder < 0:
            self._folder = self._open_folder()
        if self._base:  # the file was deleted: on in a new part
            self._fd, self.part = part_names.create_next(
                self._folder, self._base, self.part, self._owner
            )
            name = f"{self._base}.part{self.part}.jsonl"
        else:
            self._fd, self._base = part_names.create_first(self._folder, self._names, self._owner)
            name = f"{self._base}.jsonl"
        self._parts.append(_Part(name))

    def _deleted(self) -> bool:
        try:
            return os.fstat(self._fd).st_nlink == 0
        except OSError as error:
            return error.errno == errno.ESTALE

    def _let_go(self, now: int) -> None:
        """Somebody deleted the file: what is written to it now, nobody can read."""
        finish = self.detach()
        if finish is not None:
            finish()
        gone = self._parts.pop()
        self._torn = False
        self.dropped += gone.lines
        self._gone.append(lines.state(now, "dropped_part", f"{gone.name}: deleted by somebody"))
        self._problem(
            f"{gone.name}: somebody deleted it, {counted(gone.lines, 'line')}; going on in a "
            "new part"
        )

    # -- appending

    def _append(self, data: bytes, count: int, now: int, whole: bool = False) -> bool:
        """All of it, or whole lines only (``whole``: nothing) and the rest counted as skipped."""
        size, done = self._parts[-1].size, 0
        fits = self._reserve.fits(self._fd, size, len(data))
        fits = len(data) if fits == len(data) else data.rfind(b"\n", 0, 0 if whole else fits) + 1
        try:
            while done < fits:
                done += os.write(self._fd, data[done:fits])
            if done < len(data):
                raise OSError(self._reserve.error, os.strerror(self._reserve.error))
        except OSError as error:
            kept = 0 if whole else data.rfind(b"\n", 0, done) + 1
            self._cut(size + kept, done > kept)
            self._grow(data[:kept])
            self.skipped += count - data.count(b"\n", 0, kept)
            self._fail(error, now)
            return False
        self._grow(data)
        return True

    def _grow(self, data: bytes) -> None:
        self._parts[-1].size += len(data)
        self._parts[-1].lines += data.count(b"\n")

    def _put(self, batch: list[str]) -> bool:
        """All of it, also from what is kept free, or nothing."""
        data = (b"\n" if self._torn else b"") + "".join(batch).encode("utf-8")
        size, done = self._parts[-1].size, 0
        try:
            while done < len(data):
                done += os.write(self._fd, data[done:])
        except OSError:
            self._cut(size, done > 0)
            return False
        self._torn = False
        self._grow(data)
        return True

    def _cut(self, size: int, torn: bool) -> None:
        if not torn:
            return
        try:
            os.ftruncate(self._fd, size)
        except OSError:
            self._torn = True  # the next line must not be glued to it
        else:
            self._reserve.was_cut(self._fd, size)

    def _fail(self, error: Exception, now: int) -> None:
        if self._full_since is None:
            self._full_since = now
            self._why = getattr(error, "strerror", None) or str(error)
            self._problem(f"{self.name or self._names[0]}: not written: {self._why}")
        self._retry_at = now + RETRY_NS

    def _resume(self, now: int) -> bool:
        """Try to go on: the header again, and what happened."""
        since = self._full_since
        assert since is not None
        if self._fd < 0:
            try:
                self._create()
            except (OSError, NccluprobeError) as error:
                self._fail(error, now)
                return False
        head = [
            *self._header(self.part, now),
            *self._gone,
            lines.state(since, "disk_full", self._why),
            lines.state(now, "disk_ok", f"{self.skipped} lines skipped so far"),
        ]
        data = "".join(head).encode("utf-8")
        if self._torn:
            data = b"\n" + data
        skipped = self.skipped
        worth = len(data) + STEP  # else it would be full again at once
        if self._reserve.fits(self._fd, self._parts[-1].size, worth) < worth:
            self._retry_at = now + RETRY_NS
            return False
        if not self._append(data, len(head), now, whole=True):
            self.skipped = skipped  # not a line of these was lost: all of it is made anew
            return False
        self._torn = False
        self._gone.clear()
        self._full_since = None
        self._problem(f"{self.name}: written again, {counted(self.skipped, 'line', 'was')} skipped")
        return True

    # -- parts

    def _rotate(self, now: int) -> None:
        number = self.part + 1
        name = f"{self._base}.part{number}.jsonl"
        try:
            fd = create_file(self._folder, name, self._owner)
        except FileExistsError:
            # A stranger's file: leave the number out.
            self.part = number
            return
        except OSError:
            return  # this part grows on; the next batch tries again
        reserve = Reserve()
        if reserve.fits(fd, 0, ROOM) < ROOM:  # what closes the trace has room in this part
            os.close(fd)
            with contextlib.suppress(OSError):  # somebody else has removed it
                os.unlink(name, dir_fd=self._folder)
            return
        self._reserve.give_back(self._fd)
        os.close(self._fd)
        self._fd, self._reserve = fd, reserve
        self.part = number
        self._parts.append(_Part(name))
        header = self._header(number, now)
        self._append("".join(header).encode("utf-8"), len(header), now)

    def _make_room(self, more: int, now: int) -> list[str]:
        notes = []
        while len(self._parts) > 1 and self._total() + more > self._limits.max_bytes:
            oldest = self._parts.popleft()
            with contextlib.suppress(OSError):
                os.unlink(oldest.name, dir_fd=self._folder)
            self.dropped += oldest.lines
            notes.append(lines.state(now, "dropped_part", f"{oldest.name}: {oldest.lines} lines"))
        return notes

    def _total(self) -> int:
        return sum(part.size for part in self._parts)

    # -- ending

    def last(self, closing: Callable[[], list[str]], now: int) -> bool:
        """Write the lines that close the trace, also where the disk is full; False: no way.

        ``closing`` makes them, when all that was skipped is counted.
        """
        self._retry_at = self._look_at = 0
        self._write([], now)
        if self._fd < 0:
            return False
        if self._full_since is None:
            return self._put(closing())
        # Who reads it has to know at least whose trace it is.
        head = [] if self._parts[-1].size else self._header(self.part, now)[:2]
        full = lines.state(self._full_since, "disk_full", self._why)
        return self._put([*head, full, *closing()])

    def detach(self) -> Callable[[], None] | None:
        """Give up the file; returns what syncs and closes it (may take seconds)."""
        fd, folder, reserve = self._fd, self._folder, self._reserve
        self._fd = self._folder = -1
        self._reserve = Reserve()
        if folder >= 0:
            os.close(folder)
        if fd < 0:
            return None

        def finish() -> None:
            reserve.give_back(fd)
            with contextlib.suppress(OSError):
                os.fsync(fd)
            os.close(fd)

        return finish

    def close(self) -> None:
        """Sync and close."""
        finish = self.detach()
        if finish is not None:
            finish()
