"""Who am I: rank, world size and rank 0's address from a launcher's variables."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from nccluprobe import numerals
from nccluprobe.canary.errors import ArgumentError
from nccluprobe.procinfo import ranks_of

ADDRESS_VARIABLE = "NCCLUPROBE_CANARY_ADDRESS"
DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", 29777
#: torchrun's agent listens at MASTER_PORT itself, and a reconnect takes the port after ours.
_BESIDE_TORCHRUN = 10

#: Variables of NCCL that decide which way the bytes take, or how long a call may block.
NCCL_VARIABLES = (
    "NCCL_ALGO",
    "NCCL_BUFFSIZE",
    "NCCL_COMM_BLOCKING",
    "NCCL_COMM_ID",
    "NCCL_CROSS_NIC",
    "NCCL_CUMEM_ENABLE",
    "NCCL_DEBUG",
    "NCCL_DEBUG_FILE",
    "NCCL_DEBUG_SUBSYS",
    "NCCL_DMABUF_ENABLE",
    "NCCL_IB_DISABLE",
    "NCCL_IB_GID_INDEX",
    "NCCL_IB_HCA",
    "NCCL_IB_RETRY_CNT",
    "NCCL_IB_TIMEOUT",
    "NCCL_LAUNCH_MODE",
    "NCCL_MAX_NCHANNELS",
    "NCCL_MIN_NCHANNELS",
    "NCCL_NET",
    "NCCL_NET_GDR_LEVEL",
    "NCCL_NET_PLUGIN",
    "NCCL_NVLS_ENABLE",
    "NCCL_P2P_DISABLE",
    "NCCL_P2P_LEVEL",
    "NCCL_PROTO",
    "NCCL_RAS_ENABLE",
    "NCCL_RUNTIME_CONNECT",
    "NCCL_SHM_DISABLE",
    "NCCL_SOCKET_FAMILY",
    "NCCL_SOCKET_IFNAME",
    "NCCL_TOPO_FILE",
)


@dataclass(frozen=True)
class Launch:
    """This process's place in the job."""

    rank: int
    world: int
    local_rank: int | None
    address: tuple[str, int]
    source: str


def from_environment(environ: Mapping[str, str] | None = None) -> Launch | None:
    """The place that torchrun, Slurm, Open MPI or PMI gave; None when none of them did.

    The address of rank 0 is $NCCLUPROBE_CANARY_ADDRESS (HOST:PORT), else
    MASTER_ADDR and MASTER_PORT, else the first node of the Slurm step.
    ArgumentError for values that make no sense.
    """
    environ = os.environ if environ is None else environ
    found = ranks_of(environ)
    if found.rank is None or found.world_size is None:
        return None
    return Launch(
        found.rank, found.world_size, found.local_rank, _address(environ), found.source or ""
    )


def job_name(environ: Mapping[str, str] | None = None) -> str | None:
    """A name that the launcher gave to all ranks of this job; None when it gave none."""
    environ = os.environ if environ is None else environ
    found = ranks_of(environ)
    if found.job is not None and found.source == "slurm":  # a job may have several steps
        return f"{found.job}.{environ.get('SLURM_STEP_ID') or environ.get('SLURM_STEPID')}"
    return found.job


def nccl_settings(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The NCCL variables that matter and are set."""
    environ = os.environ if environ is None else environ
    return {name: environ[name] for name in NCCL_VARIABLES if name in environ}


def parse_address(text: str, what: str = "address") -> tuple[str, int]:
    """HOST:PORT or [IPv6]:PORT; ArgumentError for anything else."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    number = numerals.whole(port)
    if not host or number is None or not 0 < number < 65536:
        raise ArgumentError(f"{what} {text!r}: give HOST:PORT")
    return host, number


def first_node(nodes: str) -> str:
    """First host name of a Slurm node list: "gpu[03-05,9],x1" gives "gpu03"."""
    found = re.match(r"([^,\[]+)(?:\[(\d+)[^\]]*\]([^,\[]*))?", nodes)
    return "".join(part or "" for part in found.groups()) if found else ""


def _address(environ: Mapping[str, str]) -> tuple[str, int]:
    given = environ.get(ADDRESS_VARIABLE)
    if given:
        return parse_address(given, ADDRESS_VARIABLE)
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or ""
    host = environ.get("MASTER_ADDR") or first_node(nodes) or DEFAULT_HOST
    port = environ.get("MASTER_PORT")
    if port is None:
        return host, DEFAULT_PORT
    host, number = parse_address(f"{host}:{port}", "MASTER_ADDR and MASTER_PORT")
    beside = "TORCHELASTIC_RUN_ID" in environ
    # Downwards near the end of the range, where there is nothing above.
    step = _BESIDE_TORCHRUN if number + _BESIDE_TORCHRUN < 65535 else -_BESIDE_TORCHRUN
    return host, number + step if beside else number
