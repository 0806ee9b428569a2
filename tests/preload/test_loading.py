"""Every way in which programs come by NCCL's functions."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from nccluprobe.nccl.api import BY_NAME
from preload.conftest import Compile, Rings

ALL_REDUCE = BY_NAME["ncclAllReduce"].id
DECLARED = """
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
int ncclAllReduce(const void *, void *, size_t, int, int, void *, void *);
int ncclCommShrink(void *, int *, int, void **, void *, int);
typedef int (*all_reduce)(const void *, void *, size_t, int, int, void *, void *);
"""
LACKING = """
#include <stddef.h>
int ncclAllReduce(const void *s, void *r, size_t n, int t, int o, void *c, void *st) { return 0; }
int ncclCommInitRank(void) { return 0; }
int ncclGroupEnd(void) { return 0; }
int ncclGetVersion(int *v) { *v = 21605; return 0; }
"""


def test_needs_no_newer_glibc_than_217(library: Path) -> None:
    text = subprocess.run(
        ["objdump", "-T", "-p", library], capture_output=True, text=True, check=True
    ).stdout
    versions = {tuple(map(int, v.split("."))) for v in re.findall(r"GLIBC_([0-9.]+)", text)}
    assert versions and max(versions) <= (2, 17)
    assert set(re.findall(r"NEEDED\s+(\S+)", text)) == {"libdl.so.2", "libc.so.6"}


def test_exports_only_the_table_and_dlsym(library: Path) -> None:
    text = subprocess.run(
        ["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True
    ).stdout
    names = {line.split()[-1] for line in text.splitlines()}
    assert names == {*BY_NAME, "dlsym", "dlvsym"}


def test_python_with_ctypes_local(rings: Rings, fake: Path) -> None:
    code = (
        "import ctypes, sys; n = ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_LOCAL);"
        "n.ncclAllReduce.argtypes = [ctypes.c_void_p]*2 + [ctypes.c_size_t] + [ctypes.c_int]*2"
        " + [ctypes.c_void_p]*2;"
        "[n.ncclAllReduce(None, None, i, 7, 0, 0x1000, None) for i in range(5)]"
    )
    rings.run(sys.executable, "-c", code, fake)
    found = rings.records()
    assert [(r.api, r.count, r.call_idx) for r in found] == [(ALL_REDUCE, i, i) for i in range(5)]


def test_linked_program(rings: Rings, fake: Path, compile_c: Compile) -> None:
    program = compile_c(
        DECLARED
        + """int main(void) {
          for (int i = 0; i < 3; i++) ncclAllReduce(0, 0, i, 7, 0, (void *)64, 0);
          return 9; }""",
        fake, f"-Wl,-rpath,{fake.parent}",
    )  # fmt: skip
    rings.run(program, rc=9)
    assert [r.count for r in rings.records()] == [0, 1, 2]


@pytest.mark.parametrize("scope", ["RTLD_LOCAL", "RTLD_GLOBAL"])
@pytest.mark.parametrize("where", ["handle", "RTLD_DEFAULT"])
def test_looked_up(scope: str, where: str, rings: Rings, fake: Path, compile_c: Compile) -> None:
    program = compile_c(
        DECLARED
        + f"""int main(int argc, char **argv) {{
          void *handle = dlopen(argv[1], RTLD_NOW | {scope});
          all_reduce f = (all_reduce)dlsym({where}, "ncclAllReduce");
          void *version = dlsym({where}, "ncclGetVersion");
          if (f) f(0, 0, 77, 7, 0, (void *)64, 0);
          printf("%d %d\\n", f != NULL, version != NULL);
          return !handle; }}"""
    )
    said = rings.run(program, fake).stdout.split()
    assert said[0] == said[1]  # the one that is wrapped is found where another is
    assert [r.count for r in rings.records()] == [77] * int(said[0])


def test_user_of_nccl_loaded_local(rings: Rings, fake: Path, compile_c: Compile) -> None:
    """As PyTorch: an extension, loaded RTLD_LOCAL, is linked with NCCL."""
    compile_c(
        DECLARED + "int use(int n) { return ncclAllReduce(0, 0, n, 7, 0, (void *)64, 0); }",
        fake, f"-Wl,-rpath,{fake.parent}", name="libuser.so", shared=True,
    )  # fmt: skip
    program = compile_c(
        DECLARED
        + """int main(int argc, char **argv) {
          void *h = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
          int (*use)(int) = (int (*)(int))dlsym(h, "use");
          return use(5); }"""
    )
    rings.run(program, program.parent / "libuser.so")
    assert [r.count for r in rings.records()] == [5]


def test_two_copies_are_told_apart(
    rings: Rings, fake: Path, tmp_path: Path, compile_c: Compile
) -> None:
    other = tmp_path / "libother.so"
    other.write_bytes(fake.read_bytes())
    for n, lib in ((1, fake), (2, other)):
        compile_c(
            DECLARED
            + f"int use{n}(void) {{ return ncclAllReduce(0, 0, {n}, 7, 0, (void *)64, 0); }}",
            lib, f"-Wl,-rpath,{lib.parent}", name=f"libuser{n}.so", shared=True,
        )  # fmt: skip
    program = compile_c(
        DECLARED
        + """int main(int argc, char **argv) {
          for (int round = 0; round < 3; round++)
            for (int i = 1; i < 3; i++) {
              char name[8];
              void *h = dlopen(argv[i], RTLD_NOW | RTLD_LOCAL);
              sprintf(name, "use%d", i);
              ((int (*)(void))dlsym(h, name))();
              void *n = dlopen(argv[2 + i], RTLD_NOW | RTLD_LOCAL);
              ((all_reduce)dlsym(n, "ncclAllReduce"))(0, 0, 10 + i, 7, 0, (void *)128, 0);
            }
          return 0; }"""
    )
    users = [tmp_path / f"libuser{n}.so" for n in (1, 2)]
    rings.run(program, *users, fake, other)
    found = rings.records()
    paths = {r.count: Path(lib.path).name for r in found if (lib := rings.libraries[r.lib])}
    assert paths == {1: fake.name, 2: other.name, 11: fake.name, 12: other.name}
    assert len(found) == 12


def test_a_function_that_nccl_lacks_is_not_invented(rings: Rings, compile_c: Compile) -> None:
    lib = compile_c(LACKING, name="libold.so", shared=True)
    program = compile_c(
        DECLARED
        + """int main(int argc, char **argv) {
          void *h = dlopen(argv[1], RTLD_NOW | RTLD_GLOBAL);
          void *scopes[] = {h, RTLD_DEFAULT, dlopen(NULL, RTLD_NOW)};
          for (int i = 0; i < 3; i++) {
            void *have = dlsym(scopes[i], "ncclAllReduce");
            dlerror();
            void *lack = dlsym(scopes[i], "ncclCommShrink");
            const char *why = dlerror();
            printf("%d %d %d ", have != 0, lack != 0, why && strstr(why, "ncclCommShrink") != 0);
            void *versioned = dlvsym(scopes[i], "ncclCommShrink", "NCCL_2");
            printf("%d\\n", versioned != 0);
          }
          return 0; }"""
    )
    assert rings.run(program, lib).stdout.split("\n")[:3] == ["1 0 1 0"] * 3
    assert rings.files == []  # no call was made


def test_dlsym_means_what_it_did(rings: Rings, compile_c: Compile) -> None:
    """RTLD_NEXT and RTLD_DEFAULT depend on who calls: the same with and without us."""
    for n in (1, 2):
        compile_c(
            f"""#include <dlfcn.h>
            const char *who(void) {{ return "lib{n}"; }}
            const char *next{n}(void) {{
              const char *(*f)(void) = (const char *(*)(void))dlsym(RTLD_NEXT, "who");
              return f ? f() : "none"; }}
            const char *any{n}(void) {{
              return ((const char *(*)(void))dlsym(RTLD_DEFAULT, "who"))(); }}""",
            name=f"lib{n}.so", shared=True,
        )  # fmt: skip
    program = compile_c(
        """#include <dlfcn.h>
        #include <stdio.h>
        #include <stdlib.h>
        const char *who(void) { return "main"; }
        const char *next1(void), *next2(void), *any1(void);
        int main(int argc, char **argv) {
          const char *(*f)(void) = (const char *(*)(void))dlsym(RTLD_NEXT, "who");
          void *m = dlsym(RTLD_NEXT, "malloc"), *v = dlvsym(RTLD_DEFAULT, "free", "GLIBC_2.2.5");
          printf("%s %s %s %s %d %d", f(), next1(), next2(), any1(), m != 0, v != 0);
          printf(" %d\\n", dlsym(RTLD_DEFAULT, "no_such_thing") == 0 && dlerror() != 0);
          return 0; }""",
        "-rdynamic", "-L", rings.folder.parent, "-l:lib1.so", "-l:lib2.so",
        f"-Wl,-rpath,{rings.folder.parent}",
    )  # fmt: skip
    bare = subprocess.run([program], capture_output=True, text=True, check=True).stdout
    assert bare.split()[:4] == ["lib1", "lib2", "none", "main"]
    assert rings.run(program).stdout == bare


def test_does_nothing_in_programs_without_nccl(rings: Rings) -> None:
    done = rings.run("sh", "-c", "echo a; ls / | wc -l; exec sh -c 'echo b >&2; exit 4'", rc=4)
    assert done.stdout.startswith("a\n") and done.stderr == "b\n"
    assert not rings.folder.exists()
