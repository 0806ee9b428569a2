"""Names of the system calls that a waiting thread is likely to be in."""

from __future__ import annotations

import platform

_X86_64: dict[int, str] = {
    0: "read", 1: "write", 7: "poll", 16: "ioctl", 17: "pread64", 18: "pwrite64", 19: "readv",
    20: "writev", 23: "select", 24: "sched_yield", 26: "msync", 34: "pause", 35: "nanosleep",
    40: "sendfile", 42: "connect", 43: "accept", 44: "sendto", 45: "recvfrom", 46: "sendmsg",
    47: "recvmsg", 61: "wait4", 65: "semop", 70: "msgrcv", 73: "flock", 74: "fsync",
    75: "fdatasync", 128: "rt_sigtimedwait", 130: "rt_sigsuspend", 202: "futex",
    208: "io_getevents", 219: "restart_syscall", 220: "semtimedop", 230: "clock_nanosleep",
    232: "epoll_wait", 247: "waitid", 257: "openat", 270: "pselect6", 271: "ppoll",
    281: "epoll_pwait", 288: "accept4", 299: "recvmmsg", 307: "sendmmsg", 335: "uretprobe",
    336: "uprobe", 426: "io_uring_enter", 441: "epoll_pwait2", 449: "futex_waitv",
    455: "futex_wait",
}  # fmt: skip

_AARCH64: dict[int, str] = {
    21: "epoll_create1", 22: "epoll_pwait", 29: "ioctl", 32: "flock", 56: "openat", 63: "read",
    64: "write", 65: "readv", 66: "writev", 67: "pread64", 68: "pwrite64", 71: "sendfile",
    72: "pselect6", 73: "ppoll", 82: "fsync", 83: "fdatasync", 95: "waitid", 98: "futex",
    101: "nanosleep", 4: "io_getevents", 115: "clock_nanosleep", 124: "sched_yield",
    128: "restart_syscall", 133: "rt_sigsuspend", 137: "rt_sigtimedwait", 188: "msgrcv",
    192: "semtimedop", 193: "semop", 202: "accept", 203: "connect", 206: "sendto",
    207: "recvfrom", 211: "sendmsg", 212: "recvmsg", 227: "msync", 242: "accept4",
    243: "recvmmsg", 260: "wait4", 269: "sendmmsg", 426: "io_uring_enter", 441: "epoll_pwait2",
    449: "futex_waitv", 455: "futex_wait",
}  # fmt: skip

_TABLES = {"x86_64": _X86_64, "aarch64": _AARCH64}


def syscall_name(number: int, machine: str = platform.machine()) -> str:
    """Name of a system call on this machine, the number as text when not in the table."""
    return _TABLES.get(machine, {}).get(number) or str(number)
