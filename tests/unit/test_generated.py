"""The generated files are fresh, and the C header agrees with Python."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nccluprobe import record
from nccluprobe.nccl.api import API_TABLE

ROOT = Path(__file__).resolve().parent.parent.parent
INCLUDE = ROOT / "ebpf" / "include"
needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")


def generate(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "tools" / "generate"), *args], capture_output=True, text=True
    )


def run_c(tmp_path: Path, source: str) -> list[str]:
    program = tmp_path / "program"
    subprocess.run(
        ["gcc", "-Wall", "-Wextra", "-Werror", "-I", str(INCLUDE), "-x", "c", "-", "-o", program],
        input=source,
        text=True,
        check=True,
    )
    return subprocess.run([program], capture_output=True, text=True, check=True).stdout.split("\n")


def test_fresh() -> None:
    result = generate("--check")
    assert result.returncode == 0, f"stale: {result.stdout.split()}: run tools/generate"


def test_stale_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    from gen import GENERATORS  # type: ignore[import-not-found]

    for name, render in GENERATORS.items():
        assert render() == render(), f"{name} is not reproducible"
        assert (ROOT / name).read_text(encoding="utf-8") == render(), name
    assert generate("no/such/file").returncode == 2


@needs_gcc
def test_record_header(tmp_path: Path) -> None:
    prints = "".join(
        f'printf("%s %zu %zu\\n", "{f.name}", offsetof(struct ncp_record, {f.name}),'
        f" sizeof(r.{f.name}));"
        for f in record.FIELDS
    )
    out = run_c(
        tmp_path,
        '#include <stddef.h>\n#include <stdio.h>\n#include "ncp_record.h"\n'
        f"int main(void) {{ struct ncp_record r = {{0}}; {prints}"
        ' printf("%zu %d\\n", sizeof(r), r.reserved); return 0; }',
    )
    widths = {"u64": 8, "u32": 4, "i32": 4, "u16": 2, "u8": 1}
    expected = [f"{f.name} {record.OFFSETS[f.name]} {widths[f.ctype]}" for f in record.FIELDS]
    assert out == [*expected, f"{record.SIZE} 0", ""]


@needs_gcc
def test_api_header(tmp_path: Path) -> None:
    out = run_c(
        tmp_path,
        '#include <stdio.h>\n#include "ncp_api.h"\n'
        "#define X(id, name, class, canonical, slot, makes, ends) \\\n"
        '  printf("%d %s %d %d %d %d\\n", NCP_API_##id, #name, canonical, slot, makes, ends);\n'
        "int main(void) { NCP_API_TABLE(X)\n"
        "  for (unsigned i = 0; i <= NCP_API_MAX; i++)\n"
        "    if (ncp_api_makes(i) || ncp_api_child(i) || ncp_api_closes(i)\n"
        "        || ncp_api_direction(i) || ncp_api_init_uid(i) || !ncp_api_class(i)) continue;\n"
        "  return 0; }\n",
    )
    by_name = {api.name: api for api in API_TABLE}
    assert out == [
        f"{api.id} {api.name} {by_name[api.canonical].id}"
        f" {-1 if api.seq_slot is None else api.seq_slot}"
        f" {int(bool(api.makes_comm))} {int(bool(api.ends_comm))}"
        for api in API_TABLE
    ] + [""]


def test_places_match_the_abi() -> None:
    """The reader names for each api the places that the table computes."""
    text = (INCLUDE / "ncp_api.h").read_text()
    x86 = text[text.index("defined(__x86_64__)") : text.index("defined(__aarch64__)")]
    assert "case NCP_API_PUT_SIGNAL:\n    ncp_stack(s, 2, ncp_sp(ctx) + 32);" in x86
    assert x86.count("a->uid = ncp_sp(ctx) + 8;") == 2
