"""Jobs: connected sets of processes that share communicator hashes."""

from __future__ import annotations

from collections.abc import Hashable


class UnionFind:
    """Disjoint sets of sources and hashes."""

    def __init__(self) -> None:
        self._parent: dict[Hashable, Hashable] = {}

    def find(self, x: Hashable) -> Hashable:
        """Representative of the set of ``x``; a new one is alone."""
        root = x
        while (up := self._parent.setdefault(root, root)) != root:
            root = up
        while (up := self._parent[x]) != root:
            self._parent[x] = root
            x = up
        return root

    def join(self, a: Hashable, b: Hashable) -> None:
        """Put two into one set."""
        x, y = self.find(a), self.find(b)
        if x != y:
            self._parent[y] = x


class Jobs:
    """Which sources belong together."""

    def __init__(self) -> None:
        self._sets = UnionFind()
        self._first_comm: dict[str, int] = {}  # hash -> when it was first seen

    def add(self, source: int, comm_hash: str | None, t: int) -> None:
        """A process has a communicator (or nothing yet)."""
        self._sets.find(source)
        if comm_hash is not None:
            self._sets.join(source, comm_hash)
            self._first_comm[comm_hash] = min(t, self._first_comm.get(comm_hash, t))

    def look(self, process: Hashable, comm_hash: str, t: int) -> None:
        """A process that is not traced has a communicator."""
        self._sets.join(process, comm_hash)
        self._first_comm[comm_hash] = min(t, self._first_comm.get(comm_hash, t))

    def same(self, source: int | str) -> Hashable:
        """A value that is equal for all sources and hashes of one job."""
        return self._sets.find(source)

    def labels(self) -> dict[Hashable, str]:
        """Name of each job: the hash of its first communicator."""
        best: dict[Hashable, tuple[int, str]] = {}
        for comm_hash, t in self._first_comm.items():
            job = self._sets.find(comm_hash)
            if job not in best or (t, comm_hash) < best[job]:
                best[job] = (t, comm_hash)
        return {job: comm_hash for job, (_, comm_hash) in best.items()}
