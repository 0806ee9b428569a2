"""Folders and files made as root in places where others may write.

Every component of a path is opened by itself, relative to the folder before it
and without following links, so that nobody can swap one between a check and its
use.  A link is followed only when root, this user or the user who called sudo
made it.
"""

from __future__ import annotations

import contextlib
import errno
import grp
import os
import pwd
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from nccluprobe import numerals
from nccluprobe.errors import ExitCode, NccluprobeError

DIR_MODE = 0o755
FILE_MODE = 0o640
_MOST_LINKS = 20
#: The next one, -1 to the kernel, means: leave it as it is.
_LARGEST_ID = 2**32 - 2
_DIR_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True)
class Owner:
    """A user and group."""

    uid: int
    gid: int


def parse_owner(text: str) -> Owner:
    """``user[:group]``, names or numbers."""
    user, _, group = text.partition(":")
    try:
        if (number := _number(user)) is not None:
            uid = number
            try:
                gid = pwd.getpwuid(uid).pw_gid
            except KeyError:
                gid = uid
        else:
            entry = pwd.getpwnam(user)
            uid, gid = entry.pw_uid, entry.pw_gid
        if group:
            number = _number(group)
            gid = grp.getgrnam(group).gr_gid if number is None else number
    except KeyError as error:
        raise NccluprobeError(
            f"--owner {text}: no such user or group; use names or numbers of this host",
            ExitCode.USAGE,
        ) from error
    if max(uid, gid) > _LARGEST_ID:
        raise NccluprobeError(
            f"--owner {text}: no user or group has a number above {_LARGEST_ID}", ExitCode.USAGE
        )
    return Owner(uid, gid)


def _number(text: str) -> int | None:
    return numerals.whole(text) if text.isdecimal() else None


def sudo_owner(environ: Mapping[str, str]) -> Owner | None:
    """The user who called sudo, if one did."""
    try:
        return Owner(int(environ["SUDO_UID"]), int(environ["SUDO_GID"]))
    except (KeyError, ValueError):
        return None


def file_owner(explicit: Owner | None, process: Owner | None, sudo: Owner | None) -> Owner | None:
    """Whose a trace file is: as told, the traced process's user, the sudo user.

    A process of root's (in a container, say) leaves its trace to the user who
    called sudo: root can read it anyway.  None: leave it as it is made.
    """
    if os.geteuid() != 0:
        return None
    if explicit is not None:
        return explicit
    if process is not None and process.uid != 0:
        return process
    return sudo or process


def _refuse(path: str, why: str) -> NccluprobeError:
    return NccluprobeError(
        f"{path}: {why}; choose another --out folder or remove it", ExitCode.OUTPUT
    )


def _trusted() -> set[int]:
    sudo = sudo_owner(os.environ)
    return {0, os.geteuid(), *([sudo.uid] if sudo is not None else [])}


def check_out(path: Path) -> None:
    """Refuse an output folder that could not be used or made; nothing is left."""
    absolute = path if path.is_absolute() else Path.cwd() / path
    if absolute.exists():
        os.close(open_out(path, for_writing=True))
        return
    made = Path(os.path.realpath(absolute))  # a link may point to what is not there
    nearest = next(p for p in (made, *made.parents) if os.path.lexists(p))
    if not nearest.is_dir():
        raise _refuse(str(absolute), f"{nearest} is no folder")
    with _opened(nearest) as fd:
        if why := _unwritable(fd):
            raise _refuse(str(absolute), f"{nearest} cannot be written to: {why}")


def open_out(path: Path, for_writing: bool = False) -> int:
    """A descriptor of the output folder, which is made when it is missing.

    ``for_writing``: refuse one that cannot be written to (read-only, say).
    """
    absolute = path if path.is_absolute() else Path.cwd() / path
    todo = [p for p in absolute.parts[1:] if p != "."][::-1]
    links = 0
    trail: list[int] = [os.open("/", _DIR_FLAGS)]
    try:
        while todo:
            name = todo.pop()
            if name == "..":
                if len(trail) > 1:
                    os.close(trail.pop())
                continue
            try:
                trail.append(_open_or_make(trail[-1], name, sudo_owner(os.environ)))
            except OSError as error:
                if error.errno not in (errno.ELOOP, errno.ENOTDIR):
                    raise
                target = _follow(trail[-1], name, str(absolute))
                links += 1
                if links > _MOST_LINKS:
                    raise _refuse(str(absolute), "too many links") from error
                parts = Path(target).parts
                if target.startswith("/"):
                    while len(trail) > 1:
                        os.close(trail.pop())
                    parts = parts[1:]
                todo.extend(parts[::-1])
        found = os.dup(trail[-1])
    except OSError as error:
        raise NccluprobeError(
            f"{absolute}: cannot be used for traces: {_why(error)}; choose another --out folder",
            ExitCode.OUTPUT,
        ) from error
    finally:
        for fd in trail:
            os.close(fd)
    _check_folder(found, str(absolute), _trusted())
    unwritable = _unwritable(found) if for_writing else None
    if unwritable is not None:
        os.close(found)
        raise _refuse(str(absolute), f"cannot be written to: {unwritable}")
    return found


def _unwritable(folder: int) -> str | None:
    """Why nothing can be made in an open folder, or None.

    Tried, with a folder that goes at once: permissions say nothing of /proc, or of a server
    that takes root for nobody.
    """
    name = f".nccluprobe-{os.getpid()}"
    try:
        os.mkdir(name, 0o700, dir_fd=folder)
        os.rmdir(name, dir_fd=folder)
    except FileExistsError:
        pass
    except OSError as error:
        return _why(error)
    return None


def _why(error: OSError) -> str:
    """Why no folder could be made; what /proc and its like say to that makes no sense."""
    if error.errno == errno.ENOENT:
        return "this file system lets nobody make a folder there"
    return error.strerror or str(error)


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[int]:
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise _refuse(str(folder), f"cannot be opened: {error.strerror}") from error
    try:
        yield fd
    finally:
        os.close(fd)


def _follow(parent: int, name: str, path: str) -> str:
    info = os.stat(name, dir_fd=parent, follow_symlinks=False)
    if not stat.S_ISLNK(info.st_mode):
        raise _refuse(path, f"{name} is not a folder")
    if info.st_uid not in _trusted():
        raise _refuse(path, f"{name} is a link made by user {info.st_uid}")
    return os.readlink(name, dir_fd=parent)


def _open_or_make(parent: int, name: str, owner: Owner | None) -> int:
    try:
        return os.open(name, _DIR_FLAGS, dir_fd=parent)
    except FileNotFoundError:
        pass
    try:
        os.mkdir(name, DIR_MODE, dir_fd=parent)
    except FileExistsError:
        return os.open(name, _DIR_FLAGS, dir_fd=parent)
    fd = os.open(name, _DIR_FLAGS, dir_fd=parent)
    try:
        os.fchmod(fd, DIR_MODE)
        if owner is not None and os.geteuid() == 0:
            os.fchown(fd, owner.uid, owner.gid)
    except OSError:
        os.close(fd)
        raise
    return fd


def _check_folder(fd: int, path: str, trusted: set[int]) -> None:
    info = os.fstat(fd)
    if info.st_uid in trusted:
        return
    os.close(fd)
    raise _refuse(path, f"the folder belongs to user {info.st_uid}")


def open_inside(parent: int, name: str, owner: Owner | None) -> int:
    """A descriptor of a folder below the output folder, made when missing.

    Never through a link, and never in a folder that a stranger made.
    """
    try:
        fd = _open_or_make(parent, name, owner)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise _refuse(name, "is a link or not a folder") from error
        raise
    trusted = _trusted() | ({owner.uid} if owner is not None else set())
    _check_folder(fd, name, trusted)
    return fd


def create_file(folder: int, name: str, owner: Owner | None) -> int:
    """A new file for appending: never an existing one, never through a link."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_APPEND | os.O_CLOEXEC
    fd = os.open(name, flags, FILE_MODE, dir_fd=folder)
    try:
        os.fchmod(fd, FILE_MODE)
        if owner is not None and os.geteuid() == 0:
            os.fchown(fd, owner.uid, owner.gid)
    except OSError:
        os.close(fd)
        os.unlink(name, dir_fd=folder)
        raise
    return fd
