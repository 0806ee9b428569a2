"""Executable file mappings of a process, and which file each one really is.

A library's identity is the inode that a probe would sit on.  Paths do not tell
it: the same path means other files in other mount namespaces, and a file that
was replaced lives on, deleted, in the processes that mapped it before.  So files
are opened through /proc/PID/map_files, and an overlay file is traced back to
the file of the layer that it comes from: a container image seen through four
overlay mounts is one inode, and four probes on it would count each call four
times.
"""

from __future__ import annotations

import ctypes
import os
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

_LINE = re.compile(
    rb"^([0-9a-f]+-[0-9a-f]+) ..x. ([0-9a-f]+) ([0-9a-f]+):([0-9a-f]+) (\d+) +(/.*)$", re.M
)
_ESCAPE = re.compile(rb"\\([0-7]{3})")
_DELETED = " (deleted)"
_MAX_FILE = 256 << 20
_OVERLAYFS = 0x794C7630
_O_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY


class Mapping(NamedTuple):
    """An executable mapping of a file.

    ``range`` is as /proc writes it ("start-end" in hex); ``path`` is how the
    process, or the one who mapped it, names the file.  ``dev`` and ``inode``
    are as the kernel shows them: for a file of an overlay they are those of the
    overlay (of the layer below on kernels before about 6.8).
    """

    range: str
    offset: int
    dev: tuple[int, int]
    inode: int
    path: str
    deleted: bool


class FileId(NamedTuple):
    """A file, as probes see it.

    ``dev`` and ``inode`` are the real ones, of the layer below an overlay.
    ``stamp`` is 0 for those; when the layer could not be found it holds the
    file's change time, and ``dev`` is -1: then the file is told by inode number,
    size and change time, which overlays of one layer file show alike.
    """

    dev: int
    inode: int
    stamp: int = 0
    size: int = 0


@dataclass(frozen=True)
class OpenFile:
    """An opened mapped file; whoever takes it closes ``fd``.

    ``overlay`` is true for a file of an overlay mount, ``resolved`` false when
    the layer that it comes from could not be found.
    """

    fd: int
    path: str
    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int
    id: FileId
    overlay: bool = False
    resolved: bool = True

    def same_file(self, other: OpenFile) -> bool:
        """Whether two opened files are one inode.

        The identity decides.  Where an overlay's layer was not found on either
        side, agreement of inode number, size, modification and change time is
        taken for it.  The change time matters: a copied-up file keeps the other
        three (and its build id), yet is another inode with other pages.
        """
        if self.id == other.id:
            return True
        if self.resolved and other.resolved:
            return False
        return self._marks() == other._marks()

    def _marks(self) -> tuple[int, int, int, int]:
        return self.inode, self.size, self.mtime_ns, self.ctime_ns


def read_file(path: str, limit: int = _MAX_FILE) -> bytes:
    """A whole /proc file; OSError when it, or its process, is gone."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        parts, left = [], limit
        while left > 0 and (data := os.read(fd, min(1 << 20, left))):
            parts.append(data)
            left -= len(data)
        return b"".join(parts)
    finally:
        os.close(fd)


def read_maps(pid: int) -> list[Mapping]:
    """Executable mappings of files, [] when the process is gone or has none.

    Raises PermissionError when the process may not be looked at.
    """
    try:
        text = read_file(f"/proc/{pid}/maps")
    except (FileNotFoundError, ProcessLookupError):
        return []
    return parse_maps(text)


def parse_maps(text: bytes) -> list[Mapping]:
    """The executable file mappings in the text of a /proc/PID/maps."""
    found = []
    for span, offset, major, minor, inode, raw in _LINE.findall(text):
        if inode == b"0":
            continue
        path = os.fsdecode(raw.replace(b"\\012", b"\n"))
        deleted = path.endswith(_DELETED)
        found.append(
            Mapping(
                span.decode(),
                int(offset, 16),
                (int(major, 16), int(minor, 16)),
                int(inode),
                path.removesuffix(_DELETED),
                deleted,
            )
        )
    return found


def stat_mapping(pid: int, mapping: Mapping) -> os.stat_result:
    """stat of the mapped file; OSError when it cannot be had."""
    for path in _ways(pid, mapping):
        try:
            found = os.stat(path)  # noqa: PTH116 - called for every mapping
        except (OSError, ValueError):
            continue
        if found.st_ino == mapping.inode:
            return found
    raise FileNotFoundError(f"{mapping.path}, as mapped by {pid}, cannot be looked at")


def open_mapping(pid: int, mapping: Mapping) -> OpenFile:
    """Open the mapped file itself; OSError when that is not possible (any more).

    /proc/PID/map_files opens the very inode that is mapped, also when it is
    deleted, but needs CAP_SYS_ADMIN or CAP_CHECKPOINT_RESTORE.  Else the path is
    opened inside the process's root and believed only when the inode number
    agrees (device numbers of maps and stat differ on btrfs).
    """
    for path in _ways(pid, mapping):
        try:
            fd = os.open(path, _O_FLAGS)
        except (OSError, ValueError):
            continue
        status = os.fstat(fd)
        if status.st_ino == mapping.inode and stat.S_ISREG(status.st_mode):
            return identify(fd, mapping.path, pid)
        os.close(fd)
    raise FileNotFoundError(f"{mapping.path}, as mapped by {pid}, cannot be opened")


def _ways(pid: int, mapping: Mapping) -> tuple[str, ...]:
    first = f"/proc/{pid}/map_files/{mapping.range}"
    if mapping.deleted:
        return (first,)
    return first, f"/proc/{pid}/root{mapping.path}"


def open_path(path: str) -> OpenFile:
    """Open a file that the user named; OSError when that fails."""
    fd = os.open(path, _O_FLAGS)
    return identify(fd, path, os.getpid(), str(Path(path).resolve()))


def identify(fd: int, path: str, pid: int, inner: str | None = None) -> OpenFile:
    """Work out which file an open descriptor is.  ``inner``: its path in the mount tree of pid."""
    status = os.fstat(fd)
    file_id = FileId(status.st_dev, status.st_ino)
    overlay, resolved = _fs_type(fd) == _OVERLAYFS, True
    if overlay:
        real = real_inode(status, inner or path, pid)
        resolved = real is not None
        file_id = real or FileId(-1, status.st_ino, status.st_ctime_ns, status.st_size)
    return OpenFile(
        fd,
        path,
        status.st_size,
        status.st_mtime_ns,
        status.st_ctime_ns,
        status.st_ino,
        file_id,
        overlay,
        resolved,
    )


def _fs_type(fd: int) -> int:
    """f_type of statfs, which os.fstatvfs does not give; 0 when unknown."""
    buffer = (ctypes.c_long * 32)()
    if _libc.fstatfs(fd, ctypes.byref(buffer)) != 0:
        return 0
    return int(buffer[0]) & 0xFFFFFFFF


_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class OverlayMount:
    """An overlay mount as /proc/PID/mountinfo shows it; layers are topmost first."""

    dev: int
    root: str
    point: str
    layers: tuple[str, ...] = field(default=())


def overlay_mounts(text: bytes) -> list[OverlayMount]:
    """The overlay mounts in the text of a mountinfo file."""
    found = []
    for line in text.splitlines():
        before, dash, after = line.partition(b" - overlay ")
        words = before.split()
        if not dash or len(words) < 5:
            continue
        major, _, minor = words[2].partition(b":")
        options = after.rpartition(b" ")[2]
        try:
            dev = os.makedev(int(major), int(minor))
        except ValueError:
            continue
        found.append(OverlayMount(dev, _text(words[3]), _text(words[4]), _layers(options)))
    return found


def _layers(options: bytes) -> tuple[str, ...]:
    upper: list[str] = []
    lower: list[str] = []
    # A comma inside a path is written "\,", a colon "\:" (after the octal escapes).
    for option in re.split(rb"(?<!\\),", options):
        key, _, value = option.partition(b"=")
        if key == b"upperdir":
            upper.append(_unquote(_text(value)))
        elif key in (b"lowerdir", b"lowerdir+", b"datadir+"):
            parts = re.split(r"(?<!\\):", _text(value)) if key == b"lowerdir" else [_text(value)]
            lower.extend(_unquote(part) for part in parts if part)
    return tuple(upper + lower)


def _text(raw: bytes) -> str:
    return os.fsdecode(_ESCAPE.sub(lambda m: bytes([int(m[1], 8) & 255]), raw))


def _unquote(path: str) -> str:
    return re.sub(r"\\([\\:,])", r"\1", path)


def real_inode(status: os.stat_result, path: str, pid: int) -> FileId | None:
    """The layer file behind a file of an overlay, None when it cannot be found.

    The mount is looked up where the process sees it and where we and the first
    process do; so are the layers, whose paths are those of the one who mounted.
    A layer file is believed when size and modification time agree.
    """
    views = tuple(dict.fromkeys((f"/proc/{pid}", "/proc/self", "/proc/1")))
    roots = ("", f"/proc/{pid}/root", "/proc/1/root")
    tried: set[OverlayMount] = set()
    for view in views:
        try:
            mounts = overlay_mounts(read_file(f"{view}/mountinfo"))
        except OSError:
            continue
        # The longest mount point first: the mount that the path is really on.
        for mount in sorted(mounts, key=lambda m: -len(m.point)):
            if mount.dev != status.st_dev or mount in tried:
                continue
            inside = _inside(mount, path)
            if inside is None:
                continue
            tried.add(mount)
            found = _search(mount, inside, status, roots)
            if found is not None:
                return found
    return None


def _inside(mount: OverlayMount, path: str) -> str | None:
    """Path of the file inside the overlay, when the mount point is above it."""
    point = mount.point.rstrip("/")
    if not path.startswith(point + "/"):
        return None
    return mount.root.rstrip("/") + path[len(point) :]


def _search(
    mount: OverlayMount, inside: str, status: os.stat_result, roots: tuple[str, ...]
) -> FileId | None:
    for layer in mount.layers:
        if not layer.startswith("/"):
            return None  # relative to where the mounter stood: not ours to guess
        found: list[os.stat_result] = []
        below = False
        for root in roots:
            candidate = root + layer + inside
            try:
                there = os.lstat(candidate)
            except (OSError, ValueError):
                continue
            found.append(there)
            # metacopy: the data, which is what is mapped, lies in a layer below
            below = below or _metadata_only(candidate, there)
        if below:
            continue
        for there in found:
            if (there.st_size, there.st_mtime_ns) == (status.st_size, status.st_mtime_ns):
                return FileId(there.st_dev, there.st_ino)
        if found:
            return None  # it hides the layers below, and disagrees
    return None


def _metadata_only(path: str, status: os.stat_result) -> bool:
    """An upper file made with metacopy=on: attributes, and no data."""
    if not stat.S_ISREG(status.st_mode) or not status.st_size:
        return False
    try:
        names = os.listxattr(path, follow_symlinks=False)
    except OSError:
        names = []
    if any(name.endswith(".overlay.metacopy") for name in names):
        return True
    # Only CAP_SYS_ADMIN sees the attribute.  Without: a file without blocks,
    # but for one that holds its attributes.
    return status.st_blocks <= 16 and status.st_size > 16 * 512
