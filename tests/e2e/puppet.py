"""A process that makes exactly the NCCL calls it is told to make.

The tests copy this file under a name of their own, so that ``--pid-glob`` finds
only their processes.  Commands come as JSON lines on standard input, replies go
to standard output.  It imports nothing of nccluprobe: what it did is the truth
that a trace is compared with.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
import time
from typing import Any

#: Arguments by letter: x buffer, c count, d datatype, o op, r root, p peer, m comm, s stream,
#: g configuration.
ARGS = {
    "ncclAllReduce": "xxcdoms",
    "ncclBroadcast": "xxcdrms",
    "ncclBcast": "xcdrms",
    "ncclReduce": "xxcdorms",
    "ncclAllGather": "xxcdms",
    "ncclReduceScatter": "xxcdoms",
    "ncclAlltoAll": "xxcdms",
    "ncclGather": "xxcdrms",
    "ncclScatter": "xxcdrms",
    "ncclSend": "xcdpms",
    "ncclRecv": "xcdpms",
    "ncclGroupStart": "",
    "ncclGroupEnd": "",
    "ncclCommFinalize": "m",
    "ncclCommDestroy": "m",
    "ncclCommAbort": "m",
}
#: The same collectives with a configuration behind their other arguments.
ARGS |= {f"{name}Config": args + "g" for name, args in ARGS.items() if args.startswith("xx")}
TYPES: dict[str, Any] = {
    "x": ctypes.c_void_p,
    "c": ctypes.c_size_t,
    "d": ctypes.c_int,
    "o": ctypes.c_int,
    "r": ctypes.c_int,
    "p": ctypes.c_int,
    "m": ctypes.c_void_p,
    "s": ctypes.c_void_p,
    "g": ctypes.c_void_p,
}


class UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_char * 128),)

    def hex(self) -> str:
        return bytes(memoryview(self)).hex()


class Config(ctypes.Structure):
    """ncclConfig_t as of NCCL 2.16."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
    )


class Puppet:
    def __init__(self) -> None:
        self.libs: dict[str, ctypes.CDLL] = {}
        self.comms: dict[str, tuple[ctypes.CDLL, ctypes.c_void_p]] = {}
        self.pair = threading.Barrier(2)
        self.buffer = ctypes.create_string_buffer(4096)
        self.threads: dict[str, tuple[threading.Thread, list[Any]]] = {}

    def do(self, cmd: dict[str, Any]) -> dict[str, Any]:
        result: dict[str, Any] = getattr(self, "do_" + cmd["op"])(cmd)
        return result

    def lib(self, cmd: dict[str, Any]) -> ctypes.CDLL:
        return self.libs[cmd.get("lib", "nccl")]

    def do_load(self, cmd: dict[str, Any]) -> dict[str, Any]:
        lib = ctypes.CDLL(cmd["path"])
        init = (ctypes.c_void_p, ctypes.c_int, UniqueId, ctypes.c_int)
        lib.ncclCommInitRank.argtypes = init
        lib.ncclCommInitRankConfig.argtypes = (*init, ctypes.c_void_p)
        for name, args in ARGS.items():
            getattr(lib, name).argtypes = tuple(TYPES[a] for a in args)
        lib.simStreamSynchronize.argtypes = (ctypes.c_void_p,)
        self.libs[cmd.get("lib", "nccl")] = lib
        return {}

    def do_uid(self, cmd: dict[str, Any]) -> dict[str, Any]:
        uid = UniqueId()
        rc = self.lib(cmd).ncclGetUniqueId(ctypes.byref(uid))
        return {"rc": rc, "uid": uid.hex()}

    def do_init(self, cmd: dict[str, Any]) -> dict[str, Any]:
        uid = UniqueId.from_buffer_copy(bytes.fromhex(cmd["uid"]))
        comm = ctypes.c_void_p()
        lib = self.lib(cmd)
        args = (ctypes.byref(comm), cmd["nranks"], uid, cmd["rank"])
        if cmd.get("config"):
            config = Config(ctypes.sizeof(Config), 0xCAFEBEEF, 21602, 1)
            rc = lib.ncclCommInitRankConfig(*args, ctypes.byref(config))
        else:
            rc = lib.ncclCommInitRank(*args)
        self.comms[cmd.get("comm", "world")] = (lib, comm)
        return {"rc": rc}

    def do_call(self, cmd: dict[str, Any]) -> dict[str, Any]:
        """``n`` calls of ``fn``; with ``sync`` the stream is waited for after each."""
        fn = cmd["fn"]
        if "m" in ARGS[fn]:
            lib, comm = self.comms[cmd.get("comm", "world")]
        else:
            lib, comm = self.lib(cmd), ctypes.c_void_p()
        address = ctypes.addressof(self.buffer)
        values = {
            "x": address,
            "c": cmd.get("count", 8),
            "d": cmd.get("datatype", 7),
            "o": cmd.get("redop", 0),
            "r": cmd.get("root", 0),
            "p": cmd.get("peer", 0),
            "m": comm,
            "s": None,
            "g": None,
        }
        call, args = getattr(lib, fn), [values[a] for a in ARGS[fn]]
        bad = 0
        for _ in range(cmd.get("n", 1)):
            bad = call(*args) or bad
            if cmd.get("sync"):
                lib.simStreamSynchronize(None)
        return {"rc": bad}

    def do_churn(self, cmd: dict[str, Any]) -> dict[str, Any]:
        """``n`` times: a communicator of one rank, ``calls`` on it, its end; the pointers.

        Two threads do it in step, so that what one frees is what the other gets.
        """
        lib = self.lib(cmd)
        pointers = []
        for _ in range(cmd["n"]):
            uid, comm = UniqueId(), ctypes.c_void_p()
            self.pair.wait(20)
            bad = lib.ncclGetUniqueId(ctypes.byref(uid))
            bad = lib.ncclCommInitRank(ctypes.byref(comm), 1, uid, 0) or bad
            for _ in range(cmd["calls"]):
                bad = lib.ncclAllReduce(None, None, cmd["count"], 7, 0, comm, None) or bad
            pointers.append(comm.value)
            bad = lib.ncclCommDestroy(comm) or bad
            if bad:
                return {"rc": bad}
        return {"rc": 0, "pointers": pointers}

    def do_sync(self, cmd: dict[str, Any]) -> dict[str, Any]:
        return {"rc": self.lib(cmd).simStreamSynchronize(None)}

    def do_hold(self, cmd: dict[str, Any]) -> dict[str, Any]:
        """Until a file appears."""
        while not os.path.exists(cmd["path"]):  # noqa: PTH110
            time.sleep(0.005)
        return {}

    def do_list(self, cmd: dict[str, Any]) -> dict[str, Any]:
        return {"replies": [self.do(c) for c in cmd["cmds"]]}

    def do_thread(self, cmd: dict[str, Any]) -> dict[str, Any]:
        """Starts ``cmds`` on a thread; ``join`` gives their replies."""
        replies: list[Any] = []
        ids: list[int] = []
        started = threading.Event()

        def run() -> None:
            ids.append(threading.get_native_id())
            started.set()
            for c in cmd["cmds"]:
                replies.append(self.do(c))

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        started.wait()
        self.threads[cmd["name"]] = (thread, replies)
        return {"tid": ids[0]}

    def do_join(self, cmd: dict[str, Any]) -> dict[str, Any]:
        thread, replies = self.threads.pop(cmd["name"])
        thread.join()
        return {"replies": replies}

    def do_fork(self, cmd: dict[str, Any]) -> dict[str, Any]:
        """The child does ``cmds`` and ends with ``code``."""
        pid = os.fork()
        if pid == 0:
            try:
                for c in cmd["cmds"]:
                    self.do(c)
            except BaseException:
                os._exit(99)
            os._exit(cmd.get("code", 0))
        return {"pid": pid}

    def do_wait(self, cmd: dict[str, Any]) -> dict[str, Any]:
        return {"status": os.waitstatus_to_exitcode(os.waitpid(cmd["pid"], 0)[1])}

    def do_exec(self, cmd: dict[str, Any]) -> dict[str, Any]:
        os.execv(cmd["argv"][0], cmd["argv"])

    def do_exit(self, cmd: dict[str, Any]) -> dict[str, Any]:
        os._exit(cmd.get("code", 0))

    def do_kill(self, cmd: dict[str, Any]) -> dict[str, Any]:
        os.kill(os.getpid(), cmd.get("signal", signal.SIGKILL))
        return {}


def main() -> None:
    puppet = Puppet()
    out = sys.stdout
    print(json.dumps({"pid": os.getpid()}), file=out, flush=True)
    for line in sys.stdin:
        try:
            reply = puppet.do(json.loads(line))
        except Exception as e:
            reply = {"error": repr(e)}
        print(json.dumps(reply), file=out, flush=True)


if __name__ == "__main__":
    main()
