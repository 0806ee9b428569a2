"""What this machine and this process's privileges allow."""

from __future__ import annotations

import ctypes
import errno
import importlib.util
import os
import platform
from pathlib import Path
from typing import Any

from nccluprobe import __version__, resources
from nccluprobe.capture import hazards
from nccluprobe.errors import NccluprobeError, remedy
from nccluprobe.nccl.layout import cache

Check = dict[str, Any]

_BPF = {"x86_64": 321, "aarch64": 280}
_MAP_CREATE = 0


def look_at_host() -> dict[str, Any]:
    """Facts and checks of this machine."""
    kernel = hazards.kernel()
    capabilities = hazards.capabilities()
    tracefs = hazards.tracefs()
    checks = [
        _bpf(),
        _bcc(),
        _program(),
        _check(
            "uprobes",
            hazards.uprobe_pmu() or tracefs.writable,
            "perf events" if hazards.uprobe_pmu() else "tracefs",
            "the kernel has no uprobe events (CONFIG_UPROBE_EVENTS), and tracefs is not writable",
        ),
        _links(kernel, capabilities),
        *(
            _check(lack.purpose, False, "", f"missing {lack}")
            for lack in capabilities.lacks
            if lack.purpose not in ("uprobe_multi links",)
        ),
        _cache(),
    ]
    return {
        "probe_version": __version__,
        "host": platform.node(),
        "kernel": kernel.release,
        "machine": kernel.machine,
        "uid": os.geteuid(),
        "capabilities": sorted(capabilities.effective),
        "initial_user_ns": capabilities.initial_user_ns,
        "tracefs": tracefs.path,
        "btf": Path("/sys/kernel/btf/vmlinux").exists(),
        "seccomp_kernel_at_risk": hazards.seccomp_risk([], kernel).kernel_at_risk,
        "checks": checks,
        "can_attach": all(
            c["ok"] for c in checks if c["name"] in ("BPF", "BCC", "program", "uprobes")
        )
        and not any(lack.purpose == hazards.LOADING for lack in capabilities.lacks),
    }


def _check(name: str, ok: bool, good: str, bad: str) -> Check:
    return {"name": name, "ok": ok, "detail": good if ok else bad}


def _bpf() -> Check:
    number = _BPF.get(platform.machine())
    if number is None:
        return _check("BPF", False, "", f"{platform.machine()} is not supported")
    attr = (ctypes.c_uint32 * 32)(2, 4, 8, 1)  # an array of one: the least that a tracer does
    libc = ctypes.CDLL(None, use_errno=True)
    fd = libc.syscall(number, _MAP_CREATE, ctypes.byref(attr), ctypes.sizeof(attr))
    if fd >= 0:
        os.close(fd)
        return _check("BPF", True, "maps can be made", "")
    code = ctypes.get_errno()
    why = {
        errno.EPERM: f"not permitted: {remedy('run as root, or with CAP_BPF and CAP_PERFMON')}",
        errno.ENOSYS: "the kernel has no BPF (CONFIG_BPF_SYSCALL)",
    }.get(code, os.strerror(code))
    return _check("BPF", False, "", why)


def _bcc() -> Check:
    spec = importlib.util.find_spec("bcc")
    if spec is None:
        return _check("BCC", False, "", "not installed: apt install python3-bpfcc")
    places = spec.submodule_search_locations or []
    right = any(Path(place, "libbcc.py").is_file() for place in places)
    return _check("BCC", right, "installed", "another module named bcc is in its place")


def _program() -> Check:
    try:
        return _check("program", (resources.ebpf_dir()).is_dir(), "found", "missing")
    except NccluprobeError as err:
        return _check("program", False, "", str(err))


def _links(kernel: hazards.Kernel, capabilities: hazards.Capabilities) -> Check:
    new = kernel.version >= (6, 6)
    allowed = not any(lack.purpose == "uprobe_multi links" for lack in capabilities.lacks)
    bad = "kernels before 6.6 have none: one perf event per function is used"
    if new:
        bad = "not permitted: CAP_BPF and CAP_PERFMON are needed"
    return _check("uprobe_multi links", new and allowed, "one link per library", bad)


def _cache() -> Check:
    folder = cache.folder()
    return _check(
        "layout cache",
        folder is not None,
        str(folder),
        "the cache folder is not ours: layouts are worked out each time",
    )
