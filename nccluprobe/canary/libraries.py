"""Where NCCL and the CUDA driver are, on this machine."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from nccluprobe import resources
from nccluprobe.canary.errors import LibraryError

NCCL_VARIABLE = "NCCLUPROBE_NCCL"
CUDA_VARIABLE = "NCCLUPROBE_CUDA"
NCCL_SONAME = "libnccl.so.2"
CUDA_SONAME = "libcuda.so.1"


def _given(argument: str | os.PathLike[str] | None, variable: str) -> str | None:
    path = os.fspath(argument) if argument is not None else os.environ.get(variable)
    if not path:
        return None
    if "/" in path and not Path(path).is_file():
        source = "given" if argument is not None else f"of {variable}"
        raise LibraryError(f"{path} ({source}) is no file; give the path of the library")
    return path


def _packaged_nccl() -> str | None:
    """The copy of NCCL that PyTorch's wheels depend on: the package nvidia-nccl-cu12 or -cu13."""
    try:
        spec = importlib.util.find_spec("nvidia.nccl")
    except (ImportError, ValueError):
        return None
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / "lib" / NCCL_SONAME
        if path.is_file():
            return str(path)
    return None


def find_nccl(path: str | os.PathLike[str] | None = None) -> str:
    """NCCL: the argument, $NCCLUPROBE_NCCL, the Python package, else what the loader finds."""
    return _given(path, NCCL_VARIABLE) or _packaged_nccl() or NCCL_SONAME


def find_cuda(path: str | os.PathLike[str] | None = None) -> str:
    """The CUDA driver: the argument, $NCCLUPROBE_CUDA, else what the loader finds."""
    return _given(path, CUDA_VARIABLE) or CUDA_SONAME


def simulated(*, build: bool = False) -> tuple[str, str]:
    """Paths of the stand-ins for NCCL and the driver, which need no GPU.

    `build`: in a checkout, compile them when they are missing or old.
    """
    nccl = resources.native_file(resources.SIMNCCL, build=build)
    return str(nccl), str(resources.native_file(resources.SIMCUDA))
