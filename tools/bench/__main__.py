"""Benchmarks: ``python tools/bench NAME [options]``; NAME is a module beside this file."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def benchmarks() -> list[str]:
    return sorted(p.stem for p in HERE.glob("*.py") if not p.stem.startswith("_"))


def main() -> int:
    names = benchmarks()
    if len(sys.argv) < 2 or sys.argv[1] not in names:
        wanted = sys.argv[1] if len(sys.argv) > 1 else None
        print(f"usage: python tools/bench {{{','.join(names)}}} [options]", file=sys.stderr)
        return 0 if wanted in ("-h", "--help") else 2
    name = sys.argv[1]
    # The benchmarks import this checkout, and each other's helpers.
    sys.path[:0] = [str(HERE.parent.parent), str(HERE.parent.parent / "tests")]
    sys.argv = [f"tools/bench {name}", *sys.argv[2:]]
    runpy.run_path(str(HERE / f"{name}.py"), run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main())
