"""What runs in a simulator process: builds the VectorEnv and answers the EnvManager's frames, one at a time."""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import importlib
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

from embodrl.envs.base import VectorEnv
from embodrl.envs.pool.transport import Ring, compute_layout
from embodrl.errors import EmbodrlError
from embodrl.names import import_object
from embodrl.processes.frames import Connection, Frame, Kind, PeerGoneError
from embodrl.processes.serve import begin, bind_to_cores, describe_error
from embodrl.specs import ENVS


def main(socket_fd: int) -> None:
    """Serve until asked to close or until the parent has gone."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    try:
        connection, config = begin(socket_fd)
        try:
            env = build(config)
            ring = make_ring(env, config["memory_fd"])
        except Exception as error:  # noqa: BLE001 - process border: the parent raises it
            connection.send(Frame(Kind.RAISED, value=describe_error(error)))
            sys.exit(1)
        connection.send(Frame(Kind.OK, value=dataclasses.asdict(env.spec)))
        while (state := serve(env, ring, connection)) is not None:
            del env
            release_memory()
            connection.send(Frame(Kind.OK, value=state))
            del state
            restored = restore_env(config, connection)
            if restored is None:
                return
            env = restored
    except PeerGoneError:
        sys.exit(0)


def build(config: dict[str, Any]) -> VectorEnv:
    """Return the environment that the START frame names."""
    cpus = [] if config["cpu"] is None else [config["cpu"]]
    bind_to_cores(cpus, config["numa_node"], "set env.pin_cpus=false")
    for module in config["extensions"]:
        importlib.import_module(module)
    target: str = config["env_type"]  # module:Class, or a name that an extension has registered
    make: Callable[..., VectorEnv] = import_object(target) if ":" in target else ENVS.get(target)
    env = make(**config["kwargs"])
    if config["max_chunk"] is not None:
        env.spec = dataclasses.replace(env.spec, max_chunk=config["max_chunk"])
    return env


def make_ring(env: VectorEnv, memory_fd: int) -> Ring:
    """Size the shared memory and map it.

    Reserved here and not by the parent: pages lie on the NUMA node of the process that touches them first. Reserved at
    once, because memory that runs out later is a bus error and not an exception.
    """
    num_bytes = compute_layout(env.spec).num_bytes
    try:
        os.posix_fallocate(memory_fd, 0, num_bytes)
    except OSError as error:
        raise EmbodrlError(
            f"no {num_bytes / 2**20:.0f} MiB of shared memory: {error}", "use fewer or smaller environments"
        ) from error
    return Ring(memory_fd, env.spec)


def release_memory() -> None:
    """Return memory that is no longer used to the system."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
    if trim is not None:
        trim(0)


def restore_env(config: dict[str, Any], connection: Connection) -> VectorEnv | None:
    """Wait without a simulator until ONLOAD, and return it as it was; None after CLOSE."""
    frame = connection.receive()
    if frame.kind == Kind.CLOSE:
        connection.send(Frame(Kind.OK))
        return None
    try:
        env = build(config)
        env.set_state(frame.value)
    except Exception as error:  # noqa: BLE001 - process border: the parent raises it
        connection.send(Frame(Kind.RAISED, value=describe_error(error)))
        sys.exit(1)
    connection.send(Frame(Kind.OK))
    return env


def serve(env: VectorEnv, ring: Ring, connection: Connection) -> bytes | None:
    """Answer frames until CLOSE, or until OFFLOAD: then return the state; the simulator is closed."""
    while True:
        frame = connection.receive()
        try:
            if frame.kind == Kind.OFFLOAD:
                state = env.get_state()
                env.close()
                return state
            answer = Frame(Kind.OK, frame.number, frame.argument, carry_out(env, ring, frame))
            connection.send(answer)
        except PeerGoneError:
            raise
        except Exception as error:  # noqa: BLE001 - process border: the parent raises it; the environment stays
            connection.send(Frame(Kind.RAISED, value=describe_error(error)))
        if frame.kind == Kind.CLOSE:
            return None


def carry_out(env: VectorEnv, ring: Ring, frame: Frame) -> Any:
    """Carry out one request; bulk results go to the frame's slot, the rest is returned.

    Requests are copied out of the shared memory: an environment may keep its arguments, and the next request is
    written to the same place.
    """
    request, count = ring.request, frame.argument
    if frame.kind == Kind.STEP:
        step = env.chunk_step(request["actions"][:, :count].copy(), request["active"].copy())
        ring.slots[frame.number].write_step(step)
        return None
    if frame.kind == Kind.RESET:
        arguments = (request[name][:count].copy() for name in ("seeds", "task_ids", "indices"))
        ring.slots[frame.number].write_observation(env.reset(*arguments))
        return None
    if frame.kind == Kind.GET_STATE:
        return env.get_state()
    if frame.kind == Kind.SET_STATE:
        return env.set_state(frame.value)
    if frame.kind == Kind.CALL:
        return env.call(frame.value["method"], frame.value["arguments"])
    if frame.kind == Kind.CLOSE:
        return env.close()
    raise EmbodrlError(f"unexpected frame {frame.kind.name}")
