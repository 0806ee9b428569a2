"""Plain call lines by the native reader, with the signatures of this analysis."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

import numpy as np

from nccluprobe.match import model as m
from nccluprobe.match.callrows import CODES, DATA, LIFECYCLE, MATCHED, SIMULATES, compared
from nccluprobe.match.signature import SignatureTable
from nccluprobe.nccl.api import BY_NAME, Kind
from nccluprobe.trace import scanner as s
from nccluprobe.trace.schema import known_fields

_NEEDS = (s.HAS_COUNT, s.HAS_DATATYPE, s.HAS_OP, s.HAS_ROOT)


def _functions() -> list[tuple[str, int, int]]:
    """Name, code and needs of what the native reader takes; the rest is rare."""
    found = []
    for name, code in CODES.items():
        if code in (LIFECYCLE, SIMULATES):
            continue
        needs = 0
        if code >= DATA:
            needs = s.NUMBERED | sum(
                n for n, has in zip(_NEEDS, compared(name), strict=True) if has
            )
            if BY_NAME[name].kind is Kind.P2P:
                needs |= s.HAS_PEER
        found.append((name, code, needs))
    return found


#: Of calls that have no signature.
_NONE = np.array([m.SIG_LOST], np.int64)


class FastCalls:
    """Chunks of lines to tables of calls, where the native part is here."""

    def __init__(self, table: SignatureTable, library: ctypes.CDLL) -> None:
        self._table = table
        self._scanner = s.Scanner(library, _functions(), known_fields()["call"], m.MAX_NRANKS)
        #: SIG of the scanner's calls -> id in the table.
        self._ids = _NONE
        self._epoch = table.epoch

    def read(self, data: bytes) -> s.Scanned:
        """A chunk of whole lines; SIG of its calls is an id in the signature table."""
        if self._scanner.full or self._epoch != self._table.epoch:
            self._scanner.forget()
            self._ids, self._epoch = _NONE, self._table.epoch
        found = self._scanner.scan(data)
        sig = found.calls[s.SIG]
        if len(sig):
            if int(sig.max()) >= len(self._ids):
                self._learn()
            found.calls[s.SIG] = self._ids[sig]
        return found

    def learn(self, fields: Iterable[str]) -> None:
        """Fields that a later version has added: calls that have them are taken as well."""
        for name in fields:
            self._scanner.learn(name)

    def _learn(self) -> None:
        new = []
        for raw in self._scanner.signatures(len(self._ids) - 1):
            api = MATCHED[raw.code - DATA]
            four = (raw.count, raw.datatype, raw.op, raw.root)
            has = compared(api)
            arguments = [v if h else None for v, h in zip(four, has, strict=True)]
            new.append(self._table.intern_call(api, *arguments))
        self._ids = np.concatenate((self._ids, np.array(new, np.int64)))
