"""What ``doctor`` found, for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from nccluprobe.inspect.text import escape

#: Whose variables told the rank.  Others set them as torchrun does, ``canary`` among them.
_BY = {
    "torchrun": "the variables of torchrun",
    "environment": "the variable RANK",
    "openmpi": "the variables of Open MPI",
    "pmi": "the variables of PMI",
    "slurm": "the variables of Slurm",
}


def render(host: dict[str, Any], targets: Sequence[dict[str, Any]]) -> Iterable[str]:
    """The machine, then each process."""
    yield f"nccluprobe {host['probe_version']} on {host['host']}, Linux {host['kernel']}"
    for check in host["checks"]:
        yield f"  {'ok ' if check['ok'] else 'NO '} {check['name']}: {check['detail']}"
    if host["seccomp_kernel_at_risk"]:
        yield (
            "  NO  this kernel may kill processes that have a seccomp filter when returns are "
            "probed: use attach --no-exit on those, or a kernel from 6.14"
        )
    yield f"attach works here: {'yes' if host['can_attach'] else 'no'}"
    for target in targets:
        yield from _target(target)


def _target(target: dict[str, Any]) -> Iterable[str]:
    by = _BY.get(target["rank_source"], target["rank_source"])
    rank = "" if target["rank"] is None else f", rank {target['rank']} by {by}"
    yield ""
    yield f"process {target['pid']} ({escape(target['exe'] or '?')}{rank})"
    if target["own_pid_namespace"] or target["own_mount_namespace"]:
        yield "  runs in a container: its files are reached through /proc"
    for lib in target["libraries"]:
        yield from _library(lib)
    for problem in target["problems"]:
        yield f"  note: {problem}"
    preload = target.get("preload")
    if preload is not None:
        reaches = {True: "yes", False: "no", None: "likely"}[preload["reaches"]]
        yield f"  preload would reach it: {reaches} ({preload['why']})"
    for what in target.get("invisible", ()):
        yield f"  will not be seen: {escape(what)}"


def _library(lib: dict[str, Any]) -> Iterable[str]:
    version = lib["nccl_version"] or "of unknown version"
    where = ", linked into another library" if lib["static"] else ""
    gone = ", deleted" if lib["deleted"] else ""
    yield f"  NCCL {version}: {escape(lib['path'])}{where}{gone}"
    costs = ", ".join(f"{n} {name}" for name, n in sorted(lib["costs"].items()))
    yield (
        f"    build id {lib['build_id'] or 'none'}; {lib['functions']} functions by "
        f"{lib['symbols']} ({costs})"
    )
    if lib["single_step"]:
        yield f"    dearer probes: {', '.join(lib['single_step'])}"
    layout = lib["layout"]
    if layout is None:
        yield f"    struct ncclComm: refused ({lib['layout_refused']})"
        return
    what = ["identity of communicators in mid-life"]
    if lib["counters"]:
        what.append("absolute sequence")
    if lib["inspect"]:
        what.append("inspect")
    yield (f"    struct ncclComm by {layout['method']}, {layout['confidence']}: {', '.join(what)}")
    for refused in layout.get("refused", ()):
        yield f"      {refused['field']} not known: {refused['text']}"
