"""Names of PyTorch's flight recorder in NCCL's terms."""

from __future__ import annotations

import re
from typing import NamedTuple

#: profiling_name without "nccl:" -> NCCL function.
_APIS: dict[str, str] = {
    "all_reduce": "ncclAllReduce",
    "all_reduce_sparse": "ncclAllReduce",
    "all_reduce_barrier": "ncclAllReduce",
    "allreduce_coalesced": "ncclAllReduce",
    "barrier": "ncclAllReduce",
    "broadcast": "ncclBroadcast",
    "_broadcast_oop": "ncclBroadcast",
    "reduce": "ncclReduce",
    "_reduce_oop": "ncclReduce",
    "all_gather": "ncclAllGather",
    "_all_gather_base": "ncclAllGather",
    "all_gather_into_tensor_coalesced": "ncclAllGather",
    "reduce_scatter": "ncclReduceScatter",
    "_reduce_scatter_base": "ncclReduceScatter",
    "reduce_scatter_tensor_coalesced": "ncclReduceScatter",
    "all_to_all": "ncclAlltoAll",
    "all_to_all_base": "ncclAlltoAll",
    "all_to_allv": "ncclAlltoAll",
    "gather": "ncclGather",
    "scatter": "ncclScatter",
}
#: No rank can complete these without all others.
_NEEDS_ALL = frozenset({"ncclAllReduce", "ncclAllGather", "ncclReduceScatter", "ncclAlltoAll"})
#: What each rank passes may differ: the sizes are not compared.
_UNEVEN = frozenset({"ncclAlltoAll", "ncclGather", "ncclScatter"})
#: NCCL's count is that of the output, not of the input.
_BY_OUTPUT = frozenset({"ncclReduceScatter", "ncclScatter"})
#: The end of a group of calls that were put together: it has the group's state.
COALESCED = "coalesced"

_DATATYPES: dict[str, tuple[str, int]] = {
    "Byte": ("uint8", 1),
    "Char": ("int8", 1),
    "Bool": ("uint8", 1),
    "Short": ("int16", 1),
    "Int": ("int32", 1),
    "Long": ("int64", 1),
    "Half": ("float16", 1),
    "Float": ("float32", 1),
    "Double": ("float64", 1),
    "BFloat16": ("bfloat16", 1),
    "ComplexFloat": ("float32", 2),
    "ComplexDouble": ("float64", 2),
    "Float8_e4m3fn": ("float8e4m3", 1),
    "Float8_e4m3fnuz": ("float8e4m3", 1),
    "Float8_e5m2": ("float8e5m2", 1),
    "Float8_e5m2fnuz": ("float8e5m2", 1),
    "UInt16": ("uint16", 1),
    "UInt32": ("uint32", 1),
    "UInt64": ("uint64", 1),
}

_P2P = re.compile(r"(send|recv) (\d{1,9})(?:->|<-)(\d{1,9})")


class Operation(NamedTuple):
    """What a profiling name says.  ``peer``: rank in the group, sends and receives only."""

    api: str
    send: bool | None = None
    peer: int | None = None

    @property
    def by_output(self) -> bool:
        """Whether the output's size is NCCL's count."""
        return self.api in _BY_OUTPUT

    @property
    def needs_all(self) -> bool:
        """Whether no rank can complete it without all others."""
        return self.api in _NEEDS_ALL

    @property
    def uneven(self) -> bool:
        """Whether ranks may pass different sizes."""
        return self.api in _UNEVEN


def operation(profiling_name: str) -> Operation:
    """The operation of a name such as ``nccl:all_reduce`` or ``nccl:send 0->1``.

    A name that is not known stands for itself: it is compared as it is.
    """
    name = profiling_name.partition(":")[2] or profiling_name
    found = _P2P.fullmatch(name)
    if found is not None:
        send = found[1] == "send"
        return Operation("ncclSend" if send else "ncclRecv", send, int(found[3]))
    return Operation(_APIS.get(name, name))


def datatype(name: str) -> tuple[str | None, int]:
    """NCCL's name of a scalar type, and elements for one of PyTorch's."""
    short = name.removeprefix("c10::").removeprefix("torch.")
    return _DATATYPES.get(short, (short or None, 1))
