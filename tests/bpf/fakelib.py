"""A C library with the prototypes of the API table, made to order by the tests.

Every function can be told its return code, what it writes, and to misbehave.
``drive_*`` make calls from C, where loops, jumps and threads are exact.
"""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nccluprobe.capture import elf
from nccluprobe.nccl.api import API_TABLE, Api, Role

_TYPES = {
    Role.OTHER: "uint64_t",
    Role.COUNT: "size_t",
    Role.SIZE: "size_t",
    Role.COMM: "void *",
    Role.STREAM: "void *",
    Role.NEW_COMM: "void **",
    Role.COMM_ARRAY: "void **",
    Role.UID: "uid_s",
    Role.UID_PTR: "uid_s *",
    Role.CONFIG: "void *",
}

_HEAD = r"""
#include <pthread.h>
#include <setjmp.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

typedef struct { unsigned char b[128]; } uid_s;

/* What calls do, set by the tests. */
int fake_rc;                       /* what every call returns */
void *fake_handle;                 /* what a call writes for a new communicator */
int fake_defer;                    /* split and the like: NULL now, the handle at ncclGroupEnd */
unsigned fake_sleep_us;            /* every call takes this long */
volatile int fake_jump;            /* leave the next call by longjmp */
volatile int fake_inside;          /* calls that are inside now */
unsigned char fake_uid[128];       /* what ncclGetUniqueId writes */
static jmp_buf back;
static void **slots[64];
static void *values[64];
static int deferred;

static __attribute__((noinline)) int work(void) {
  __sync_fetch_and_add(&fake_inside, 1);
  if (fake_jump) { fake_jump = 0; __sync_fetch_and_add(&fake_inside, -1); longjmp(back, 1); }
  if (fake_sleep_us) usleep(fake_sleep_us);
  __sync_fetch_and_add(&fake_inside, -1);
  return fake_rc;
}
static __attribute__((noinline)) void make(void **out, int late) {
  if (fake_rc != 0 && fake_rc != 7) return;
  if (late && fake_defer) {
    *out = NULL;
    slots[deferred] = out;
    values[deferred++] = fake_handle;
    fake_handle = (char *)fake_handle + 0x1000;
  } else {
    *out = fake_handle;
  }
}
static __attribute__((noinline)) void finish(void) {
  while (fake_rc == 0 && deferred) { deferred--; *slots[deferred] = values[deferred]; }
  deferred = 0;
}
"""

_TAIL = r"""
int ncclGetVersion(int *version) { *version = 22809; return 0; }
void drive_allreduce(long n, void *comm, void *stream) {
  for (long i = 0; i < n; i++) ncclAllReduce(0, 0, i, 7, 0, comm, stream);
}
void drive_bcast(long n, void *comm) {
  for (long i = 0; i < n; i++) ncclBcast(0, i, 7, 0, comm, 0);
}
/* Whatever the program does next uses the stack below. */
static __attribute__((noinline)) void scribble(void) {
  volatile char room[8192];
  for (int i = 0; i < 8192; i++) room[i] = 0x11;
}
/* Leaves a call by longjmp, then makes another, `deeper` bytes further down. */
__attribute__((noinline)) int drive_after(int deeper, void *comm) {
  volatile char room[deeper + 1];
  memset((char *)room, 0x11, deeper + 1);
  return ncclAllReduce(0, 0, 222, 7, 0, comm, 0);
}
int drive_jump(int deeper, void *comm) {
  fake_jump = 1;
  if (setjmp(back) == 0) ncclAllReduce(0, 0, 111, 7, 0, comm, 0);
  scribble();
  return deeper ? drive_after(deeper, comm) : ncclAllReduce(0, 0, 222, 7, 0, comm, 0);
}
static void *in_call(void *comm) {
  ncclAllReduce(0, 0, 333, 7, 0, comm, 0);
  return 0;
}
/* A thread that is cancelled inside a call. */
int drive_cancel(void *comm) {
  pthread_t t;
  pthread_create(&t, 0, in_call, comm);
  while (!fake_inside) usleep(100);
  usleep(1000);
  pthread_cancel(t);
  fake_inside = 0;
  return pthread_join(t, 0);
}
"""


def _name(i: int) -> str:
    return f"a{i}"


def _body(api: Api) -> str:
    where = {role: _name(i) for i, role in enumerate(api.args)}
    if api.name == "ncclBcast":
        return "return ncclBroadcast(a0, a0, a1, a2, a3, a4, a5);"
    if api.name == "ncclGetUniqueId":
        return "memcpy(a0, fake_uid, 128); return 0;"
    if api.name == "ncclCommInitAll":
        return (
            "uid_s id; ncclGetUniqueId(&id); int rc = work();"
            " if (rc == 0) for (int i = 0; i < a1; i++)"
            " a0[i] = (char *)fake_handle + 0x1000 * i; return rc;"
        )
    if api.name == "ncclGroupEnd":
        return "int rc = work(); finish(); return rc;"
    if Role.NEW_COMM in where:
        late = int(api.makes_comm in ("split", "shrink", "grow"))
        return f"int rc = work(); make({where[Role.NEW_COMM]}, {late}); return rc;"
    return "return work();"


def source() -> str:
    """The library's source."""
    heads = {}
    for api in API_TABLE:
        args = ", ".join(f"{_TYPES.get(r, 'int')} {_name(i)}" for i, r in enumerate(api.args))
        heads[api.name] = f"int {api.name}({args or 'void'})"
    declared = "".join(f"{head};\n" for head in heads.values())
    defined = "".join(f"{heads[a.name]} {{ {_body(a)} }}\n" for a in API_TABLE)
    return _HEAD + declared + defined + _TAIL


def build(path: Path) -> Path:
    """Compile the library so that functions begin as NCCL's do."""
    flags = ["-O1", "-g", "-fPIC", "-shared", "-pthread", "-fexceptions", "-fno-ipa-icf"]
    flags += ["-fno-optimize-sibling-calls", "-fno-omit-frame-pointer", "-fno-shrink-wrap"]
    subprocess.run(
        ["gcc", "-x", "c", "-", *flags, "-o", str(path)], input=source(), text=True, check=True
    )
    return path


def functions(path: Path, only: set[str] | None = None) -> list[tuple[int, int]]:
    """(api id, file offset) of the traced functions of a library."""
    with path.open("rb") as f:
        image = elf.scan(f.fileno())
    assert image is not None
    return [
        (api.id, image.functions[api.name].offset)
        for api in API_TABLE
        if api.name in image.functions and (only is None or api.name in only)
    ]


class Uid(ctypes.Structure):
    """ncclUniqueId."""

    _fields_ = (("b", ctypes.c_ubyte * 128),)


def uid(data: bytes) -> Uid:
    """A unique id of these bytes."""
    return Uid((ctypes.c_ubyte * 128)(*data))


class Config(ctypes.Structure):
    """The head of ncclConfig_t."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("ints", ctypes.c_int * 3),
        ("net_name", ctypes.c_char_p),
        ("more", ctypes.c_int * 2),
        ("comm_name", ctypes.c_char_p),
    )


def config(blocking: int = 1, name: bytes | None = None, size: int = 64) -> Config:
    """A config as programs pass it."""
    return Config(size=size, magic=0xCAFEBEEF, blocking=blocking, comm_name=name)


def ctype(role: Role) -> type:
    """The ctypes type of an argument."""
    text = _TYPES.get(role, "int")
    if text == "int":
        return ctypes.c_int
    if text == "uid_s":
        return Uid
    return ctypes.c_uint64


class FakeLib:
    """The library loaded into this process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.dll = ctypes.CDLL(str(path))
        for api in API_TABLE:
            getattr(self.dll, api.name).argtypes = [ctype(role) for role in api.args]
        for name in ("drive_allreduce", "drive_bcast", "drive_jump", "drive_cancel"):
            getattr(self.dll, name).restype = ctypes.c_int
        self.dll.drive_allreduce.argtypes = [ctypes.c_long, ctypes.c_uint64, ctypes.c_uint64]
        self.dll.drive_bcast.argtypes = [ctypes.c_long, ctypes.c_uint64]
        self.dll.drive_jump.argtypes = [ctypes.c_int, ctypes.c_uint64]
        self.dll.drive_cancel.argtypes = [ctypes.c_uint64]
        self.reset()

    def reset(self) -> None:
        """Well-behaved again."""
        self.set(rc=0, handle=0, defer=0, sleep_us=0, jump=0, inside=0)

    def set(self, **values: int) -> None:
        """Set ``fake_NAME`` variables."""
        for name, value in values.items():
            kind = ctypes.c_uint64 if name == "handle" else ctypes.c_int
            kind.in_dll(self.dll, f"fake_{name}").value = value

    def set_uid(self, data: bytes) -> None:
        """What ncclGetUniqueId will write."""
        ctypes.memmove((ctypes.c_ubyte * 128).in_dll(self.dll, "fake_uid"), data, 128)

    @contextmanager
    def group(self) -> Iterator[None]:
        """Between ncclGroupStart and ncclGroupEnd."""
        assert self.dll.ncclGroupStart() == 0
        yield
        self.dll.ncclGroupEnd()
