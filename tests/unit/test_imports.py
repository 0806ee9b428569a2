"""Imports go one way: capture, collect, match, report; what is below knows no stage."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "nccluprobe"
#: Below the stages: no part of these imports a stage.
BASE = {"errors", "memory", "numerals", "plural", "procinfo", "syscalls", "elf_file", "record",
        "resources", "nccl", "trace"}  # fmt: skip
#: What each part may import beside itself and the base.
ALLOWED = {
    "capture": set(),
    "collect": {"capture"},
    "match": set(),
    "importers": {"match"},
    "report": {"match"},
    "inspect": {"capture", "collect"},
    "canary": set(),
    "cli": {"capture", "collect", "match", "importers", "report", "inspect", "canary"},
    "__main__": {"cli"},
    "__init__": set(),
}  # fmt: skip
#: What makes a function impure: files, processes, clocks, threads.
IMPURE = {"os", "io", "pathlib", "subprocess", "socket", "threading", "time", "shutil",
          "tempfile", "random", "asyncio", "multiprocessing"}  # fmt: skip


def _part(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def _modules(path: Path) -> set[str]:
    """Names of the modules that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: relative import"
            module = node.module or ""
            found |= (
                {f"{module}.{alias.name}" for alias in node.names}
                if module == "nccluprobe"
                else {module}
            )
    return found


def _imported() -> dict[str, set[str]]:
    """part -> parts of the package that it imports."""
    found = defaultdict(set)
    for path in PACKAGE.rglob("*.py"):
        own = _part(path)
        for module in _modules(path):
            names = module.split(".")
            if names[0] == "nccluprobe" and len(names) > 1 and names[1] != own:
                found[own].add(names[1])
    return found


def test_imports_go_one_way() -> None:
    parts = {_part(path) for path in PACKAGE.rglob("*.py")}
    assert parts == BASE | set(ALLOWED)
    wrong = {
        part: sorted(others - BASE - ALLOWED.get(part, set()) - {"__version__"})
        for part, others in _imported().items()
    }
    assert {part: others for part, others in wrong.items() if others} == {}


def test_the_matcher_is_pure() -> None:
    """It reads no file and no clock, and starts nothing."""
    wrong = {
        path.name: sorted(used)
        for path in (PACKAGE / "match").rglob("*.py")
        if (used := {m.split(".")[0] for m in _modules(path)} & IMPURE)
    }
    assert wrong == {}


def test_the_map_of_the_code_has_every_module_of_the_matcher() -> None:
    text = (PACKAGE.parent / "ARCHITECTURE.md").read_text()
    table = text.partition("| modules in `nccluprobe/match/`")[2]
    rows = re.findall(r"^\| (`.*?`) \|", table, re.M)
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    there = {p.stem for p in (PACKAGE / "match").glob("*.py")} - {"__init__"}
    assert there <= set(named), sorted(there - set(named))
    assert len(named) == len(set(named))
