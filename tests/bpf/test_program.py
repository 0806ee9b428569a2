"""Loading: what is said when it fails, what is not printed, and aarch64."""

from __future__ import annotations

import builtins
import os
import sys
import types

import pytest

from nccluprobe import resources
from nccluprobe.capture import bpf, links
from nccluprobe.capture.bpf import BpfProgram, Sizes, program_text
from nccluprobe.errors import ExitCode, NccluprobeError

pytestmark = pytest.mark.root


def test_compiles_for_aarch64(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as this machine can tell: the other registers and places compile."""
    from bcc import BPF

    monkeypatch.setenv("BCC_KERNEL_SOURCE", str(resources.ebpf_dir()))
    b = BPF(text=program_text().encode(), cflags=["-U__x86_64__", "-D__aarch64__=1"])
    assert len(b.dump_func(b"ncp_enter")) > 1000
    b.cleanup()


def test_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    program = BpfProgram()
    program.load_probes(multi=False)
    program.close()
    assert capfd.readouterr() == ("", "")


def test_broken_program(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(bpf, "program_text", lambda: "int broken( {")
    with pytest.raises(NccluprobeError) as e:
        BpfProgram()
    assert e.value.code is ExitCode.BPF_REFUSED
    assert "error: " in str(e.value) and "\n" not in str(e.value)
    assert capfd.readouterr() == ("", "")
    assert "BCC_KERNEL_SOURCE" not in os.environ


def test_program_refused_by_the_verifier(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    bad = "int ncp_enter(void *ctx) { return *(volatile int *)0; }"
    program = BpfProgram()
    program.close()
    monkeypatch.setattr(bpf, "program_text", lambda: bad)
    program = BpfProgram()
    with pytest.raises(NccluprobeError) as e:
        program.load_probes(multi=False)
    assert e.value.code is ExitCode.BPF_REFUSED
    assert capfd.readouterr() == ("", "")
    program.close()


def test_not_permitted(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise Exception("Need super-user privileges to run")

    monkeypatch.setattr(bpf, "_import_bcc", lambda: refuse)
    with pytest.raises(NccluprobeError) as e:
        BpfProgram()
    assert e.value.code is ExitCode.NOT_PERMITTED


@pytest.mark.parametrize("other", [True, False])
def test_no_bcc(monkeypatch: pytest.MonkeyPatch, other: bool) -> None:
    if other:  # PyPI's package of that name
        monkeypatch.setitem(sys.modules, "bcc", types.ModuleType("bcc"))
    else:
        real = builtins.__import__

        def refuse(name: str, *args: object, **kwargs: object) -> object:
            if name == "bcc":
                raise ImportError("No module named 'bcc'")
            return real(name, *args, **kwargs)  # type: ignore[arg-type]

        monkeypatch.delitem(sys.modules, "bcc", raising=False)
        monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(NccluprobeError) as e:
        BpfProgram()
    assert e.value.code is ExitCode.NO_BCC


def test_sizes() -> None:
    for size in (0, 4095, 3 * 4096):
        with pytest.raises(NccluprobeError) as e:
            Sizes(ring_bytes=size).cflags()
        assert e.value.code is ExitCode.USAGE


def test_kinds_of_links(monkeypatch: pytest.MonkeyPatch) -> None:
    program = BpfProgram()
    with pytest.raises(NccluprobeError) as e:
        links.open_links(program, "kprobe")
    assert e.value.code is ExitCode.USAGE
    assert links.open_links(program).kind == "multi"
    monkeypatch.setattr(links, "_multi_works", lambda fd: False)
    assert links.open_links(program).kind == "perf"
    with pytest.raises(NccluprobeError) as e:
        links.open_links(program, "multi")
    assert e.value.code is ExitCode.BPF_REFUSED
    program.close()
