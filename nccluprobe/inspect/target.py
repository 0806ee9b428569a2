"""What can be seen of one process."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nccluprobe import procinfo
from nccluprobe.capture import hazards
from nccluprobe.capture.maps import read_file
from nccluprobe.capture.preload_marks import about_preload
from nccluprobe.capture.processes import ProcessMatcher, glance, is_running
from nccluprobe.errors import remedy
from nccluprobe.inspect.libraries import Copy, Libraries
from nccluprobe.nccl.api import API_TABLE, Kind
from nccluprobe.nccl.layout import to_json

#: Programs that reach NCCL by dlopen and dlsym, past LD_PRELOAD, by a mapped file's name.
_PAST_PRELOAD = ("xla_cuda_plugin", "libnvshmem_host", "libxgboost", "libctranslate2")
#: And such that are linked against it, so that their calls are reached.
_LINKED = (b"libtorch_cuda", b"cupy_backends", b"libtensorrt_llm")
_libraries = Libraries()


def matching(globs: list[str]) -> Iterator[int]:
    """Running processes that match and map NCCL."""
    if not globs:
        return
    matcher = ProcessMatcher(globs)
    for pid in sorted(int(name) for name in os.listdir("/proc") if name.isdigit()):  # noqa: PTH208
        seen = glance(pid)
        if seen is None or not is_running(seen) or not matcher.matches(seen):
            continue
        try:
            if _libraries.of(pid):
                yield pid
        except OSError:
            yield pid  # may not be read, which is worth saying


def look_at_target(pid: int, host: dict[str, Any]) -> dict[str, Any]:
    """Facts of a process.  ProcessLookupError when there is none."""
    info = procinfo.read(pid)
    found: dict[str, Any] = {
        "pid": pid,
        "exe": info.exe,
        "rank": info.ranks.rank,
        "rank_source": info.ranks.source,
        "environ_read": info.environ_read,
        "own_pid_namespace": info.ns_pid not in (None, pid),
        "own_mount_namespace": _other_namespace(pid, "mnt"),
        "seccomp": hazards.seccomp_mode(pid),
        "problems": [],
        "libraries": [],
    }
    problems: list[str] = found["problems"]
    warning = hazards.seccomp_risk([pid]).warning
    if warning:
        problems.append(warning)
    try:
        copies = _libraries.of(pid)
        maps = read_file(f"/proc/{pid}/maps")
    except PermissionError:
        do = remedy("run doctor with sudo")
        problems.append(f"its maps may not be read (CAP_SYS_PTRACE is needed): {do}")
        found["memory_readable"] = False
        return found
    except OSError as err:
        raise ProcessLookupError(str(err)) from err
    found["libraries"] = [_copy(copy) for copy in copies]
    if not copies:
        problems.append("no copy of NCCL is mapped (yet): attach waits for one")
    elif len(copies) > 1:
        problems.append(f"{len(copies)} copies of NCCL are mapped: each is probed")
    found["memory_readable"] = _readable(pid)
    if not found["memory_readable"]:
        problems.append("its memory may not be read: inspect needs CAP_SYS_PTRACE")
    if not info.environ_read:
        problems.append("its environment may not be read: the rank is learnt from communicators")
    found["preload"] = _preload(maps, copies)
    if preload := about_preload(pid):
        problems.append(preload)
        found["preload"] = {"reaches": True, "why": "it is loaded in it"}
    found["invisible"] = _invisible(copies)
    return found


def _copy(copy: Copy) -> dict[str, Any]:
    image = copy.image
    absent = [
        api.name
        for api in API_TABLE
        if api.kind is not Kind.HELPER and api.name not in image.functions
    ]
    line: dict[str, Any] = {
        "path": copy.path,
        "deleted": any(m.deleted for m in copy.mappings),
        "nccl_version": image.version,
        "build_id": image.build_id,
        "symbols": image.table,
        "static": image.soname is None or "nccl" not in image.soname,
        "functions": len(image.functions),
        "costs": dict(Counter(f.cost for f in image.functions.values())),
        "single_step": sorted(f.name for f in image.functions.values() if f.cost == "single-step"),
        "absent": absent,
        "folded": list(image.folded),
        "layout": None,
    }
    if copy.layout is not None:
        line["layout"] = to_json(copy.layout)
        line["inspect"] = copy.layout.searchable
        line["counters"] = copy.layout.seq_counts
    else:
        line["layout_refused"] = copy.refused
    return line


def _preload(maps: bytes, copies: list[Copy]) -> dict[str, Any]:
    """Whether LD_PRELOAD would reach the calls, by what is mapped."""
    past = sorted({name for name in _PAST_PRELOAD if name.encode() in maps})
    static = [c.path for c in copies if c.image.soname is None or "nccl" not in c.image.soname]
    if static:
        why = "NCCL is linked into another library: its own calls do not go through the linker"
        return {"reaches": False, "why": why}
    if not copies:
        return {"reaches": None, "why": "no copy of NCCL is mapped"}
    if past and not any(name in maps for name in _LINKED):
        return {"reaches": False, "why": f"{', '.join(past)} asks for NCCL by dlsym"}
    if past:
        return {
            "reaches": None,
            "why": f"but for the calls of {', '.join(past)}, which asks for NCCL by dlsym",
        }
    return {"reaches": None, "why": "unless the program asks for NCCL by dlsym, which is not seen"}


def _invisible(copies: list[Copy]) -> list[str]:
    found = ["replays of CUDA graphs: they do not call NCCL"]
    for copy in copies:
        if copy.layout is None:
            found.append(f"{copy.path}: communicators made before attach, and their counters")
        elif not copy.layout.seq_counts:
            found.append(f"{copy.path}: counters of calls made before attach (2.26 and later)")
        if copy.layout is not None and not copy.layout.searchable:
            found.append(f"{copy.path}: communicators by inspect (2.21 and later)")
    return found


def _readable(pid: int) -> bool:
    try:
        fd = os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    os.close(fd)
    return True


def _other_namespace(pid: int, kind: str) -> bool | None:
    try:
        return Path(f"/proc/{pid}/ns/{kind}").readlink() != Path(f"/proc/self/ns/{kind}").readlink()
    except OSError:
        return None
