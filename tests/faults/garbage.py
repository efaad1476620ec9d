"""What a simulator may send instead of its answer: functions of the ``EnvServer`` in its process, by name."""

import array
import fcntl
import gc
import json
import os
import socket
import struct
from pathlib import Path

import numpy as np

from embodrl.envs.pool.worker_main import EnvServer
from embodrl.processes.frames import Frame, Kind
from embodrl.processes.memory_file import FIXED_SIZE

_HEADER = struct.Struct("<BQQQQ")
_SPARSE_BYTES = 1 << 40


def server():
    """Return what serves in this process."""
    (found,) = (item for item in gc.get_objects() if isinstance(item, EnvServer))
    return found


def send(data):
    return lambda: server()._connection.sock.sendmsg([data])


def send_frame(kind, number, argument, value=None):
    return lambda: server()._connection.send(Frame(kind, number, argument, value))


def send_memory(content, size=None, seals=FIXED_SIZE):
    """Send a memory file as the value of an answer."""

    def send_it():
        memory = os.memfd_create("garbage", os.MFD_ALLOW_SEALING)
        os.pwrite(memory, content, 0)
        os.ftruncate(memory, size or len(content))
        fcntl.fcntl(memory, fcntl.F_ADD_SEALS, seals)
        header = _HEADER.pack(Kind.OK, 0, 3, len(content), size or len(content))
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [memory]))]
        server()._connection.sock.sendmsg([header], rights)

    return send_it


def spoil(name, value):
    """Write ``value`` into an array of the shared memory after the result has been written."""

    def spoil_it():
        for slot in server().hosted.ring.slots:
            write = slot.write_step

            def write_and_spoil(step, slot=slot, write=write):
                write(step)
                slot.arrays[name].view(np.uint8)[:] = value if isinstance(value, int) else np.frombuffer(value, "u1")

            slot.write_step = write_and_spoil

    return spoil_it


def answer_twice():
    connection = server()._connection
    once = connection.send

    def twice(frame):
        connection.send = once
        once(frame)
        once(frame)

    connection.send = twice


def shrink():
    memory = next(fd for fd in Path("/proc/self/fd").iterdir() if "embodrl-env" in str(fd.readlink()))
    os.truncate(memory, 0)


# name -> (what it does, what the message must say)
GARBAGE = {
    "noise": (send(bytes(range(255, 55, -1))), "there is no kind 255"),
    "an empty frame": (send(b""), "it has 0 bytes"),
    "half a header": (send(b"\x10\0\0"), "it has 3 bytes"),
    "a truncated frame": (send(_HEADER.pack(Kind.OK, 1, 3, 500, 0) + b"{"), "announces 500 bytes"),
    "a frame that is too long": (send(_HEADER.pack(Kind.OK, 1, 3, 5, 0) + b" " * 5000), "arrived in part"),
    "an unknown kind": (send(_HEADER.pack(77, 0, 3, 0, 0)), "there is no kind 77"),
    "a huge size": (send(_HEADER.pack(Kind.OK, 0, 3, 2**63, 2**63)), "0 memory files"),
    "a huge memory file": (send_memory(b"1", _SPARSE_BYTES), "of them written"),
    "a memory file that is not sealed": (send_memory(b"1", seals=0), "not sealed"),
    "deep JSON": (send_memory(b"[" * 100_000), "RecursionError"),
    "a huge array": (send_memory(json.dumps({"__ndarray__": ["<f8", [2**45], 0]}).encode()), "announced"),
    "no JSON": (send_memory(b"\xff\xfe garbage"), "unreadable message"),
    "a wrong slot": (send_frame(Kind.OK, 9, 3), "the answer OK 9 3 instead of OK"),
    "a wrong count": (send_frame(Kind.OK, 0, 2**40), "instead of OK"),
    "a request": (send_frame(Kind.STEP, 0, 3), "the answer STEP"),
    "an error that is none": (send_frame(Kind.RAISED, 2, 3, [1, 2]), "the answer RAISED"),
    "truth values": (spoil("valid", 0xAB), "booleans other than 0 and 1"),
    "a task that there is not": (spoil("task_id", 0x7F), "task_id"),
    "a negative length": (spoil("instruction_length", 0xFF), "instruction has [-1"),
    "no text": (spoil("instruction", 0xC3), "instruction is not a text"),
    "memory that shrinks": (shrink, "PermissionError"),
}
