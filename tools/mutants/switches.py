"""Imports the matcher with a switch for each mutant.

All are in one process: a mutant costs no copy of the project and no new import.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

from mutants.rules import PACKAGE, Mutant, with_switches

#: Number of the mutant that is on.
NONE = -1


class Switches(MetaPathFinder):
    """Finds the matcher's modules.  Install it before the first import of them."""

    def __init__(self, mutants: list[Mutant]) -> None:
        self.numbers = {m.text: i for i, m in enumerate(mutants)}
        #: A byte for each mutant: its function was called.
        self.calls = bytearray(len(mutants))
        self.off = [NONE]

    def install(self) -> None:
        loaded = [name for name in sys.modules if name.startswith(PACKAGE)]
        if loaded:
            raise RuntimeError(f"imported before the switches: {loaded[0]}")
        sys.meta_path.insert(0, self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(PACKAGE + "."):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.origin is not None:
            spec.loader = _Loader(fullname, spec.origin, self)
        return spec

    def called(self) -> bytes:
        """Which functions were called since the last time."""
        found = bytes(self.calls)
        self.calls[:] = bytes(len(found))
        return found


class _Loader(SourceFileLoader):
    def __init__(self, fullname: str, path: str, switches: Switches) -> None:
        super().__init__(fullname, path)
        self._switches = switches

    def get_code(self, fullname: str) -> CodeType:
        # Not the base class's: it would read and write .pyc files.
        source = Path(self.path).read_text()
        tree = with_switches(fullname.rpartition(".")[2], source, self._switches.numbers)
        return compile(tree, self.path, "exec", dont_inherit=True)

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__.update(__calls__=self._switches.calls, __off__=self._switches.off)
        super().exec_module(module)
