"""Paths that commands are given."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from nccluprobe.errors import ExitCode, NccluprobeError


def check_there(paths: Iterable[Path], what_to_do: str = "") -> None:
    """Refuse a path that is not there, or that may not be looked at."""
    for path in paths:
        try:
            path.stat()
        except FileNotFoundError as error:
            raise NccluprobeError(
                f"{path}: no such file or folder{what_to_do}", ExitCode.NO_TRACE
            ) from error
        except OSError as error:  # a folder above it is closed, or links go in a circle
            raise NccluprobeError(f"{path}: {error.strerror}", ExitCode.NO_TRACE) from error
        except ValueError as error:  # a name that no file can have
            raise NccluprobeError(f"{path}: {error}", ExitCode.NO_TRACE) from error
