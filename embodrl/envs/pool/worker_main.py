"""What runs in a simulator process: builds the VectorEnv and answers the EnvManager's frames, one at a time."""

from __future__ import annotations

import ctypes
import dataclasses
import faulthandler
import gc
import importlib
import logging
import os
import platform
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from embodrl.envs.base import VectorEnv
from embodrl.envs.pool.channel import Channel, Frame, Kind, PeerGoneError
from embodrl.envs.pool.codec import decode, encode
from embodrl.envs.pool.transport import Ring, compute_layout
from embodrl.errors import EmbodrlError
from embodrl.names import import_object
from embodrl.specs import ENVS

logger = logging.getLogger("embodrl.envs")

_PR_SET_PDEATHSIG = 1
_MPOL_PREFERRED = 1
_SET_MEMPOLICY_SYSCALL = {"x86_64": 238, "aarch64": 237}


def main(socket_fd: int, memory_fd: int) -> None:
    """Serve until asked to close or until the parent has gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    sock = socket.socket(fileno=socket_fd)
    channel = Channel(sock)
    try:
        config = decode(channel.receive().payload)
        die_with_parent(sock, config["started_by_main_thread"])
        try:
            env = build(config)
            ring = make_ring(env, memory_fd)
        except Exception as error:  # noqa: BLE001 - the parent raises it
            channel.send(describe(error))
            sys.exit(1)
        channel.send(Frame(Kind.OK, payload=encode(dataclasses.asdict(env.spec))))
        while (state := serve(env, ring, channel)) is not None:
            del env
            give_memory_back()
            channel.send(Frame(Kind.OK, payload=state))
            del state
            back = come_back(config, channel)
            if back is None:
                return
            env = back
    except PeerGoneError:
        sys.exit(0)


def die_with_parent(sock: socket.socket, started_by_main_thread: bool) -> None:
    """Make sure that this process does not outlive its parent, not even one killed by SIGKILL.

    The kernel's parent-death signal works even where a simulator hangs in native code, but is tied to the *thread*
    that started us, so it is used only if that was the main thread. The watcher sees the socket's end-of-file.
    """
    if started_by_main_thread:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    watch = select.poll()
    watch.register(sock, 0)
    if watch.poll(0):
        os._exit(0)  # the parent went before the signal was armed

    def wait_for_hangup() -> None:
        watch.poll()
        os._exit(0)

    threading.Thread(target=wait_for_hangup, name="parent-watch", daemon=True).start()


def bind_to_core(cpu: int | None, numa_node: int | None) -> None:
    """Bind this process to a core and let it prefer the memory of a NUMA node.

    Raises:
        EmbodrlError: this process may not use that core.
    """
    if cpu is not None:
        try:
            os.sched_setaffinity(0, {cpu})
        except OSError as error:
            allowed = sorted(os.sched_getaffinity(0))
            raise EmbodrlError(
                f"core {cpu} cannot be used ({error}); allowed: {allowed}", "set env.pin_cpus=false"
            ) from error
    num_nodes = len(list(Path("/sys/devices/system/node").glob("node[0-9]*")))
    if numa_node is None or num_nodes < 2:
        return
    number = _SET_MEMPOLICY_SYSCALL.get(platform.machine())
    mask = (ctypes.c_ulong * 16)()
    mask[numa_node // 64] = 1 << (numa_node % 64)
    libc = ctypes.CDLL(None, use_errno=True)
    if number is None or libc.syscall(number, _MPOL_PREFERRED, mask, 16 * 64) != 0:
        logger.warning("memory stays unbound to NUMA node %d (errno %d)", numa_node, ctypes.get_errno())


def build(config: dict[str, Any]) -> VectorEnv:
    """Return the environment that the BUILD frame names."""
    sys.path[:0] = [path for path in config["sys_path"] if path not in sys.path]
    bind_to_core(config["cpu"], config["numa_node"])
    for module in config["extensions"]:
        importlib.import_module(module)
    target: str = config["env_type"]  # module:Class, or a name that an extension has registered
    make: Callable[..., VectorEnv] = import_object(target) if ":" in target else ENVS.get(target)
    env = make(**config["kwargs"])
    if config["max_chunk"] is not None:
        env.spec = dataclasses.replace(env.spec, max_chunk=config["max_chunk"])
    return env


def make_ring(env: VectorEnv, memory_fd: int) -> Ring:
    """Size the shared memory and map it; this process touches it first, so that it lies on its NUMA node."""
    num_bytes = compute_layout(env.spec).num_bytes
    try:
        os.posix_fallocate(memory_fd, 0, num_bytes)
    except OSError as error:
        raise EmbodrlError(
            f"no {num_bytes / 2**20:.0f} MiB of shared memory: {error}", "use fewer or smaller environments"
        ) from error
    return Ring(memory_fd, env.spec)


def give_memory_back() -> None:
    """Hand memory that is not used any more to the system."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
    if trim is not None:
        trim(0)


def come_back(config: dict[str, Any], channel: Channel) -> VectorEnv | None:
    """Wait without a simulator until ONLOAD, and return it as it was; None after CLOSE."""
    frame = channel.receive()
    if frame.kind == Kind.CLOSE:
        channel.send(Frame(Kind.OK))
        return None
    try:
        env = build(config)
        env.set_state(bytes(frame.payload))
    except Exception as error:  # noqa: BLE001 - the parent raises it
        channel.send(describe(error))
        sys.exit(1)
    channel.send(Frame(Kind.OK))
    return env


def serve(env: VectorEnv, ring: Ring, channel: Channel) -> bytes | None:
    """Answer frames until CLOSE, or until OFFLOAD: then return the state; the simulator is closed."""
    while True:
        frame = channel.receive()
        try:
            if frame.kind == Kind.OFFLOAD:
                state = env.get_state()
                env.close()
                return state
            payload = answer(env, ring, frame)
        except Exception as error:  # noqa: BLE001 - the parent raises it; the environment stays usable where it can
            channel.send(describe(error))
        else:
            channel.send(Frame(Kind.OK, frame.slot, frame.argument, payload))
        if frame.kind == Kind.CLOSE:
            return None


def answer(env: VectorEnv, ring: Ring, frame: Frame) -> bytes:
    """Carry out one request; bulk results go to the frame's slot, the rest is returned."""
    request, count = ring.request, frame.argument
    if frame.kind == Kind.STEP:
        step = env.chunk_step(request["actions"][:, :count].copy(), request["active"].copy())
        ring.slots[frame.slot].write_step(step)
        return b""
    if frame.kind == Kind.RESET:
        arguments = (request[name][:count].copy() for name in ("seeds", "task_ids", "indices"))
        ring.slots[frame.slot].write_observation(env.reset(*arguments))
        return b""
    if frame.kind == Kind.GET_STATE:
        return env.get_state()
    if frame.kind == Kind.SET_STATE:
        env.set_state(bytes(frame.payload))
        return b""
    if frame.kind == Kind.CALL:
        message = decode(frame.payload)
        return encode(env.call(message["method"], message["arguments"]))
    if frame.kind == Kind.CLOSE:
        env.close()
        return b""
    raise EmbodrlError(f"unexpected frame {frame.kind.name}")


def describe(error: Exception) -> Frame:
    """Return the frame that lets the parent raise this error with its traceback."""
    return Frame(
        Kind.RAISED,
        payload=encode(
            {
                "type": type(error).__name__,
                "message": error.message if isinstance(error, EmbodrlError) else str(error),
                "hint": error.hint if isinstance(error, EmbodrlError) else "",
                "traceback": "".join(traceback.format_exception(type(error), error, error.__traceback__)),
            }
        ),
    )
