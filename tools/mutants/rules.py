"""What a rule is, and what it answers when it is disabled."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "nccluprobe.match"
FOLDER = "nccluprobe/match"

#: Modules that decide nothing: reading and wording.
_NO_RULES = {
    "__init__", "callrows", "calls", "columns", "decode", "fastcalls", "finding", "init_text",
    "lines", "model", "p2p_finding", "p2p_orders", "pipeline", "standing_text",
}  # fmt: skip
#: Answers of "does not apply", by how the annotation of the result begins.
_EMPTY = {
    "list[": "[]", "set[": "set()", "frozenset[": "frozenset()", "dict[": "{}",
    "Iterator[": "iter(())", "Iterable[": "()",
}  # fmt: skip

#: Rules that no verdict needs, each with the reason: "module.function" or, for one
#: answer of it, "module.function -> answer".
EXCUSED: dict[str, str] = {
    "endpoint.Endpoint._take_fast -> False": "spares looking at each row, which says the same",
    "endpoint.Endpoint._resolve_groups": "spares looking at each row, which says the same",
    "p2p_queue.Side._take_fast -> False": "spares looking at each row, which says the same",
    "device_ran.note_ended": "spares running again what ended long ago, which says the same",
    "children.Children.any_made -> True": "spares asking each member, which says the same",
    "p2p.P2P._alone -> True": "spares looking at each channel again, which says the same",
    "p2p.P2P._somebody_quiet -> True": "spares running the devices while nobody is held",
    "p2p.P2P._has_sides -> True": "spares running streams in which nothing is sent",
    "signature.SignatureTable.crowded -> True": "says when to look; forgets what nothing holds",
}


@dataclass(frozen=True)
class Mutant:
    """One rule of the matcher, disabled.

    ``line``: of the function; ``answer``: what it returns, a Python expression.
    """

    module: str
    name: str
    answer: str
    line: int

    @property
    def rule(self) -> str:
        return f"{self.module}.{self.name}"

    @property
    def text(self) -> str:
        return f"{self.rule} -> {self.answer}"

    @property
    def excuse(self) -> str | None:
        """Why no test can miss it; None: one must."""
        return EXCUSED.get(self.text, EXCUSED.get(self.rule))


def _answers(function: ast.FunctionDef) -> list[str]:
    result = "" if function.returns is None else ast.unparse(function.returns)
    if result == "bool":
        return ["False", "True"]
    if result == "None" or result.endswith("| None"):
        return ["None"]
    if result.startswith("tuple[") and result.endswith(", ...]"):
        return ["()"]
    return [answer for start, answer in _EMPTY.items() if result.startswith(start)]


def _functions(tree: ast.Module) -> list[tuple[str, ast.FunctionDef]]:
    found = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            found.append((node.name, node))
        elif isinstance(node, ast.ClassDef):
            found += [
                (f"{node.name}.{x.name}", x) for x in node.body if isinstance(x, ast.FunctionDef)
            ]
    return found


def _mutants_of(module: str, tree: ast.Module) -> list[tuple[Mutant, ast.FunctionDef]]:
    if module in _NO_RULES:
        return []
    return [
        (Mutant(module, name, answer, function.lineno), function)
        for name, function in _functions(tree)
        if not name.rpartition(".")[2].startswith("__")
        for answer in _answers(function)
    ]


def all_mutants() -> list[Mutant]:
    """One mutant for each answer of each rule, from the code."""
    found = []
    for path in sorted((ROOT / FOLDER).glob("*.py")):
        found += [m for m, _ in _mutants_of(path.stem, ast.parse(path.read_text()))]
    return found


def with_switches(module: str, source: str, numbers: dict[str, int]) -> ast.Module:
    """The module with a switch for each of its mutants.

    A function of which there are mutants notes that it was called (``__calls__``,
    by the mutant's number), and returns the mutant's answer while that mutant is
    the one in ``__off__``.  ``numbers``: ``Mutant.text`` -> number.
    """
    tree = ast.parse(source)
    for mutant, function in _mutants_of(module, tree):
        number = numbers.get(mutant.text)
        if number is None:
            continue
        switch = ast.parse(
            f"def f():\n"
            f"    __calls__[{number}] = 1\n"
            f"    if __off__[0] == {number}: return {mutant.answer}\n"
        ).body[0]
        assert isinstance(switch, ast.FunctionDef)
        at = 0 if ast.get_docstring(function) is None else 1
        for node in ast.walk(switch):
            if isinstance(node, (ast.stmt, ast.expr)):
                node.lineno = node.end_lineno = function.lineno
                node.col_offset = node.end_col_offset = 0
        function.body[at:at] = switch.body
    return ast.fix_missing_locations(tree)
