"""Signatures of collectives, interned: rows compare as integers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from nccluprobe.match.model import SIG_LOST, Int32, Int64
from nccluprobe.nccl.api import BY_NAME
from nccluprobe.nccl.enums import SEQ_NAMES

#: A reduction made by the user: a local number, not comparable across ranks.
CUSTOM_OP = "custom"


@dataclass(frozen=True, slots=True)
class Signature:
    """What all ranks must agree on.  ``api`` is the canonical full name."""

    api: str
    count: int | None = None
    datatype: str | None = None
    op: str | None = None
    root: int | None = None

    def text(self) -> str:
        """For people, such as ``ncclAllReduce(count 1024, float32, sum)``."""
        parts = []
        if self.count is not None:
            parts.append(f"count {self.count}")
        parts += [p for p in (self.datatype, self.op) if p is not None]
        if self.root is not None:
            parts.append(f"root {self.root}")
        return f"{self.api}({', '.join(parts)})"


LOST = Signature("lost")


def _shape(s: Signature) -> Signature:
    """What of a call agrees whatever is reduced with."""
    return s if s.op is None else replace(s, op=None)


#: More call sites than a program has: beyond that they are no call sites.
_MOST_SITES = 1 << 20

#: So many calls are remembered as the trace writes them, before all are forgotten.
_MOST_CACHED = 1 << 16

#: More signatures than this are looked through for those that nobody needs any more.
MANY = 1 << 16

#: Functions that NCCL counts (``seqNumber[]``) -> index of their counter.
COUNTED = {f"nccl{name}": at for at, name in enumerate(SEQ_NAMES)}
#: ``functions``: the library does not count this call; nobody knows which call it was.
UNCOUNTED, UNSEEN = -1, -2


class SiteNames:
    """Call sites, as the trace names them <-> small integers; 0: not known."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}
        self._all = [""]

    def id_of(self, site: object) -> int:
        """Id of a call site; a wrong type raises TypeError."""
        if site is None:
            return 0
        if not isinstance(site, str):
            raise TypeError("site is not a text")
        found = self._ids.get(site)
        if found is None:
            if len(self._all) >= _MOST_SITES:
                return 0
            found = self._ids[site] = len(self._all)
            self._all.append(site)
        return found

    def __getitem__(self, site: int) -> str:
        return self._all[site]


class SignatureTable:
    """Signature <-> small integer; one table for a whole analysis.

    An id is good for as long as somebody holds it (``keep``): ids that nobody
    holds are given to other signatures, so that a job whose counts hardly ever
    come again does not make the table grow.
    """

    def __init__(self) -> None:
        self._ids: dict[Signature, int] = {LOST: SIG_LOST}
        self._all: list[Signature] = [LOST]
        self._free: list[int] = []
        self._by_call: dict[tuple[object, ...], int] = {}
        self._zero: set[int] = set()
        self._shapes: dict[Signature, int] = {LOST: 0}
        self._next_shape = 1
        self._shape_of: Int32 = np.zeros(64, np.int32)
        self._function_of: Int32 = np.full(64, UNSEEN, np.int32)
        self._most = MANY
        #: Changes when ids are given anew: what was remembered of them is void.
        self.epoch = 0
        self.sites = SiteNames()

    def intern_call(
        self, api: object, count: object, datatype: object, op: object, root: object
    ) -> int:
        """Id of a call's signature; wrong types raise TypeError."""
        key = (api, count, datatype, op, root)
        found = self._by_call.get(key)
        if found is None:
            found = self._new_call(key)
        return found

    def _new_call(self, key: tuple[object, ...]) -> int:
        api, count, datatype, op, root = key
        if (
            not isinstance(api, str)
            or not (count is None or type(count) is int)
            or not (datatype is None or isinstance(datatype, str))
            or not (op is None or isinstance(op, str))
            or not (root is None or type(root) is int)
        ):
            raise TypeError("an argument has the wrong type")
        known = BY_NAME.get(api)
        made = self.intern(Signature(known.canonical if known else api, count, datatype, op, root))
        if len(self._by_call) >= _MOST_CACHED:
            self._by_call.clear()  # a job whose counts hardly ever come again
        self._by_call[key] = made
        return made

    def intern(self, signature: Signature) -> int:
        """Id of a signature."""
        found = self._ids.get(signature)
        return self._new(signature) if found is None else found

    def _new(self, signature: Signature) -> int:
        if self._free:
            made = self._free.pop()
            self._all[made] = signature
        else:
            made = len(self._all)
            self._all.append(signature)
            if made >= len(self._shape_of):
                self._shape_of = np.concatenate((self._shape_of, self._shape_of))
                self._function_of = np.concatenate((self._function_of, self._function_of))
        self._ids[signature] = made
        if signature.count == 0:
            self._zero.add(made)
        shape = _shape(signature)
        number = self._shapes.get(shape)
        if number is None:
            number = self._shapes[shape] = self._next_shape
            self._next_shape += 1
        self._shape_of[made] = number
        counted = COUNTED.get(signature.api, UNCOUNTED)
        self._function_of[made] = UNCOUNTED if signature.count == 0 else counted
        return made

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def crowded(self) -> bool:
        """Whether it is worth looking which signatures are still held."""
        return len(self._ids) > self._most

    def keep(self, held: Int64) -> None:
        """Forget all signatures but these ids; duplicates do no harm."""
        wanted = np.zeros(len(self._all), np.bool_)
        wanted[held] = True
        wanted[SIG_LOST] = True
        old = self._ids
        self._ids = {s: i for s, i in old.items() if wanted[i]}
        self._shapes = {x: self._shapes[x] for x in map(_shape, self._ids)}
        self._zero = {i for i in self._zero if wanted[i]}
        for i in np.flatnonzero(~wanted).tolist():
            self._all[i] = LOST
        self._free = np.flatnonzero(~wanted)[::-1].tolist()
        self._by_call.clear()
        self._most = max(MANY, 2 * len(self._ids))
        self.epoch += 1

    def __getitem__(self, sig: int) -> Signature:
        return self._all[sig]

    def is_zero(self, sig: int) -> bool:
        """Whether the call passed count 0, which NCCL discards."""
        return sig in self._zero

    def shapes(self, sig: Int32) -> Int32:
        """Numbers for (api, count, datatype, root) of a column; 0: a call that was lost."""
        found: Int32 = self._shape_of[sig]
        return found

    def functions(self, sig: Int32) -> Int32:
        """Which counter each call of a column moves; UNCOUNTED, UNSEEN."""
        found: Int32 = self._function_of[sig]
        return found

    @property
    def any_zero(self) -> bool:
        """Whether any call so far passed count 0."""
        return bool(self._zero)

    def compatible(self, a: int, b: int) -> bool:
        """Whether two calls can be one collective (user-made reductions are not compared)."""
        if a == b or SIG_LOST in (a, b):
            return True
        x, y = self._all[a], self._all[b]
        if CUSTOM_OP in (x.op, y.op):
            x, y = replace(x, op=None), replace(y, op=None)
        return x == y


#: From this version on NCCL discards calls of count 0.
_DISCARDS = (2, 20, 5)


def runs_zero_counts(versions: Sequence[str]) -> bool:
    """Whether all libraries of a process are known to run calls of count 0 as any other."""
    known = [tuple(int(n) for n in re.findall(r"\d+", v)[:3]) for v in versions]
    return bool(known) and all(v and v < _DISCARDS for v in known)


def difference(a: Signature, b: Signature) -> list[str]:
    """Names of the parts in which two signatures differ, the api first."""
    if a.api != b.api:
        return ["api"]
    custom = CUSTOM_OP in (a.op, b.op)
    return [
        name
        for name in ("count", "datatype", "op", "root")
        if getattr(a, name) != getattr(b, name) and not (name == "op" and custom)
    ]
