"""Loading the BPF program with BCC.

BCC is given our own stub headers, never the machine's: the program touches no
kernel structure, so it is the same everywhere and compiles in 0.5 s without
kernel headers.
"""

from __future__ import annotations

import errno
import inspect
import mmap
import os
import re
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nccluprobe import resources
from nccluprobe.capture.sysbpf import ATTACH_UPROBE_MULTI, Map
from nccluprobe.errors import ExitCode, NccluprobeError

_INCLUDE = re.compile(r'^#include "([^"]+)"\s*$')
_KPROBE, _RAW_TRACEPOINT = 2, 17


@dataclass(frozen=True)
class Sizes:
    """How much the program can hold; all of it is allocated at the start."""

    ring_bytes: int = 32 << 20
    threads: int = 65_536
    procs: int = 4_096
    comms: int = 65_536
    p2p: int = 131_072
    pending: int = 4_096
    libs: int = 1_024

    def cflags(self) -> list[str]:
        """The same for the C preprocessor."""
        pages, rest = divmod(self.ring_bytes, mmap.PAGESIZE)
        if pages < 1 or pages & (pages - 1) or rest:
            raise NccluprobeError(
                f"the ring's size must be a power of two and whole pages, not {self.ring_bytes}",
                ExitCode.USAGE,
            )
        return [
            f"-DPAGE_SIZE={mmap.PAGESIZE}",
            f"-DNCP_RING_PAGES={pages}",
            f"-DNCP_MAX_THREADS={self.threads}",
            f"-DNCP_MAX_PROCS={self.procs}",
            f"-DNCP_MAX_COMMS={self.comms}",
            f"-DNCP_MAX_P2P={self.p2p}",
            f"-DNCP_MAX_PENDING={self.pending}",
            f"-DNCP_MAX_LIBS={self.libs}",
        ]


def _flatten(folder: Path, name: str, seen: set[str]) -> str:
    """One text of a file and its quoted includes: BCC rewrites the main file only."""
    path = folder / name if name.endswith(".c") else folder / "include" / name
    out = [f'#line 1 "{name}"\n']
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(True), 1):
        include = _INCLUDE.match(line)
        if not include:
            out.append(line)
        elif include[1] not in seen:
            seen.add(include[1])
            out.append(_flatten(folder, include[1], seen))
            out.append(f'#line {number + 1} "{name}"\n')
    return "".join(out)


def program_text() -> str:
    """The whole program as BCC gets it."""
    return _flatten(resources.ebpf_dir(), "nccluprobe.bpf.c", set())


def _import_bcc() -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import bcc
    except (ImportError, OSError) as e:  # OSError: one of its libraries cannot be loaded
        raise NccluprobeError(
            "BCC's Python module cannot be imported"
            f" ({e}): install your distribution's python3-bpfcc",
            ExitCode.NO_BCC,
        ) from e
    if not hasattr(bcc, "BPF"):
        raise NccluprobeError(
            "the Python module `bcc` is not the BPF Compiler Collection (PyPI has another one of"
            " that name): uninstall it and install your distribution's python3-bpfcc",
            ExitCode.NO_BCC,
        )
    return bcc.BPF


@contextmanager
def _quiet(debug: bool) -> Iterator[list[str]]:
    """Catches what BCC, clang and libbpf print; gives it as text at the end."""
    said: list[str] = []
    if debug:
        yield said
        return
    with tempfile.TemporaryFile() as catch:
        saved = [os.dup(1), os.dup(2)]
        try:
            os.dup2(catch.fileno(), 1)
            os.dup2(catch.fileno(), 2)
            yield said
        finally:
            for fd, kept in zip((1, 2), saved, strict=True):
                os.dup2(kept, fd)
                os.close(kept)
            catch.seek(0)
            said.append(catch.read().decode("utf-8", "replace"))


def _refusal(what: str, cause: Exception, said: str) -> NccluprobeError:
    """One line out of what BCC printed and raised."""
    text = f"{said}\n{cause}"
    # EPERM only: the verifier says EACCES, "permission denied", of a wrong program.
    if re.search(r"not permitted|super-user", text, re.IGNORECASE):
        return NccluprobeError(
            f"not permitted to {what}: run as root, or with CAP_BPF and CAP_PERFMON",
            ExitCode.NOT_PERMITTED,
        )
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line for line in lines if "error:" in line or line.startswith("bpf:")] or lines[-1:]
    why = errors[0][:200] if errors else str(cause)
    return NccluprobeError(
        f"the kernel or BCC refused to {what}: {why} (--debug shows all)", ExitCode.BPF_REFUSED
    )


class BpfProgram:
    """The compiled program, its maps and its functions."""

    def __init__(
        self, sizes: Sizes | None = None, *, exits: bool = True, debug: bool = False
    ) -> None:
        self.sizes = sizes or Sizes()
        self.exits = exits
        self.debug = debug
        factory = _import_bcc()
        cflags = self.sizes.cflags()
        if not exits:
            cflags.append("-DNCP_ENTER_ONLY=1")
        text = program_text()
        before = os.environ.get("BCC_KERNEL_SOURCE")
        os.environ["BCC_KERNEL_SOURCE"] = str(resources.ebpf_dir())
        said: list[str] = []
        try:
            with _quiet(debug) as said:
                self.bcc: Any = factory(text=text.encode(), cflags=cflags)
        except Exception as e:
            raise _refusal("compile the BPF program", e, "".join(said)) from e
        finally:
            if before is None:
                del os.environ["BCC_KERNEL_SOURCE"]
            else:
                os.environ["BCC_KERNEL_SOURCE"] = before

    def table(self, name: str) -> Map:
        """A map of the program."""
        fd = int(self.bcc[name.encode()].map_fd)
        sizes = _map_info(fd)
        return Map(fd, sizes["key_size"], sizes["value_size"], sizes["max_entries"])

    def _load(self, name: str, kind: int, attach_type: int | None) -> int:
        load = self.bcc.load_func
        extra: dict[str, Any] = {}
        if attach_type is not None:
            if "attach_type" not in inspect.signature(load).parameters:
                raise OSError(errno.ENOSYS, "this BCC cannot set an attach type")
            extra["attach_type"] = attach_type
        stale = self.bcc.funcs.pop(name.encode(), None)  # loaded for another kind of link
        if stale is not None:
            os.close(stale.fd)
        said: list[str] = []
        try:
            with _quiet(self.debug) as said:
                return int(load(name.encode(), kind, **extra).fd)
        except Exception as e:
            raise _refusal(f"load {name}", e, "".join(said)) from e

    def load_probes(self, multi: bool) -> tuple[int, int | None]:
        """File descriptors of the entry and the return program for a kind of link."""
        attach_type = ATTACH_UPROBE_MULTI if multi else None
        enter = self._load("ncp_enter", _KPROBE, attach_type)
        return enter, self._load("ncp_exit", _KPROBE, attach_type) if self.exits else None

    def close(self) -> None:
        """Free the program and its maps, as far as no link holds them."""
        with _quiet(self.debug):
            self.bcc.cleanup()

    def load_tracepoint(self, name: str) -> int:
        """File descriptor of the program for a raw tracepoint."""
        return self._load(name, _RAW_TRACEPOINT, None)


def _map_info(fd: int) -> dict[str, int]:
    """What the kernel says of a map."""
    text = Path(f"/proc/self/fdinfo/{fd}").read_text(encoding="ascii")
    pairs = (line.split(":", 1) for line in text.splitlines() if ":" in line)
    found: dict[str, int] = {}
    for key, value in pairs:
        if key in ("key_size", "value_size", "max_entries"):
            found[key] = int(value)
    return found
