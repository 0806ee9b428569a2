"""NCCL's enumerations, as numbers in the record and as names in the trace.

Source: nccl.h 2.16 to 2.32 (values never changed; float8 came with 2.24).
"""

from __future__ import annotations

#: Index order of ``ncclComm.seqNumber[]``: see ``Api.seq_slot``.
SEQ_NAMES = ("Broadcast", "Reduce", "AllGather", "ReduceScatter", "AllReduce")

DATATYPES: dict[int, str] = {
    0: "int8",
    1: "uint8",
    2: "int32",
    3: "uint32",
    4: "int64",
    5: "uint64",
    6: "float16",
    7: "float32",
    8: "float64",
    9: "bfloat16",
    10: "float8e4m3",
    11: "float8e5m2",
}
DATATYPE_IDS: dict[str, int] = {name: value for value, name in DATATYPES.items()}
DATATYPE_BYTES: dict[str, int] = {
    "int8": 1,
    "uint8": 1,
    "int32": 4,
    "uint32": 4,
    "int64": 8,
    "uint64": 8,
    "float16": 2,
    "float32": 4,
    "float64": 8,
    "bfloat16": 2,
    "float8e4m3": 1,
    "float8e5m2": 1,
}

#: Predefined reductions.  Higher values are handles made per communicator by
#: ncclRedOpCreatePreMulSum; they may differ legally between ranks.
REDUCTION_OPS: dict[int, str] = {0: "sum", 1: "prod", 2: "max", 3: "min", 4: "avg"}

RESULTS: dict[int, str] = {
    0: "ncclSuccess",
    1: "ncclUnhandledCudaError",
    2: "ncclSystemError",
    3: "ncclInternalError",
    4: "ncclInvalidArgument",
    5: "ncclInvalidUsage",
    6: "ncclRemoteError",
    7: "ncclInProgress",
}
SUCCESS = 0
IN_PROGRESS = 7

#: ncclCommSplit colour of a rank that takes no part in the new communicator.
SPLIT_NOCOLOR = -1


def datatype_name(value: int) -> str:
    """Name of an ncclDataType_t, or its number as text when it is unknown."""
    return DATATYPES.get(value, str(value))


def op_name(value: int) -> str:
    """Name of an ncclRedOp_t; a user-made one is "custom"."""
    return REDUCTION_OPS.get(value, "custom")
