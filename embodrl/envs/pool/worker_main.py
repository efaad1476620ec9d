"""Main program of a simulator process: builds the VectorEnv and answers the EnvManager's frames, one at a time."""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import importlib
import logging
import os
import sys
import traceback
from collections.abc import Callable

from embodrl.envs.base import VectorEnv
from embodrl.envs.pool.transport import Ring, compute_layout, spec_to_dict
from embodrl.errors import EmbodrlError, EnvError, EnvOrderError
from embodrl.fields import Fields
from embodrl.names import import_object
from embodrl.processes.ending import OUT_OF_MEMORY, leave, ran_out_of_memory
from embodrl.processes.frames import Connection, Frame, Kind, PeerGoneError
from embodrl.processes.serve import begin, bind_to_cores, describe_error
from embodrl.processes.trace import span
from embodrl.specs import ENVS
from embodrl.types import EnvSpec
from embodrl.user_code import report_exits


def main(socket_fd: int) -> None:
    """Serve until closed or until the parent has ended."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    try:
        connection, start = begin(socket_fd)
        report_exits()
        server = EnvServer(connection, Fields(start, "the START frame"))
        frame = Frame(Kind.START)
        # After an error in START or ONLOAD there is no environment left to answer with; other errors leave it in place.
        while server.answer(frame) or frame.kind not in (Kind.START, Kind.ONLOAD):
            if frame.kind == Kind.CLOSE:
                leave(0)
            frame = connection.receive()
    except PeerGoneError:
        leave(0)
    sys.exit(1)


class EnvServer:
    """One VectorEnv, serving the parent's requests; ``start`` are the fields of its START frame."""

    def __init__(self, connection: Connection, start: Fields) -> None:
        self._connection = connection
        self.hosted = HostedEnv(lambda: build(start), start.integer("memory_fd"))

    def answer(self, frame: Frame) -> bool:
        """Execute and answer a request; return False if the answer is an error. The environment stays."""
        try:
            with span(frame.kind.name.lower()):
                value = self.hosted.carry_out(frame)
            self._connection.send(Frame(Kind.OK, frame.number, frame.argument, value))
        except PeerGoneError:
            raise
        except BaseException as error:  # noqa: BLE001 - process boundary: the parent raises it
            if ran_out_of_memory(error):  # its memory keeps it from continuing; the parent starts a new one
                traceback.print_exc()
                os._exit(OUT_OF_MEMORY)
            self._connection.send(Frame(Kind.RAISED, frame.number, frame.argument, describe_error(error)))
            return False
        return True


class HostedEnv:
    """A VectorEnv on shared memory, made by the factory ``make`` at the start and after each offload.

    ``env`` is None while offloaded; ``ring``, in the parent's memory file, is None before the start.
    """

    def __init__(self, make: Callable[[], VectorEnv], memory_fd: int) -> None:
        self._make = make
        self._memory_fd = memory_fd
        self.env: VectorEnv | None = None
        self.ring: Ring | None = None

    def carry_out(self, frame: Frame) -> object:
        """Return the answer to a request; observations and outcomes go to the frame's slot of the shared memory."""
        if frame.kind == Kind.START:
            self.env = self._make()
            self.ring = make_ring(self.env.spec, self._memory_fd)
            return spec_to_dict(self.env.spec)
        if frame.kind == Kind.ONLOAD:
            env = self._make()
            env.set_state(frame.value)
            self.env = env
            return None
        if frame.kind == Kind.CLOSE and self.env is None:
            return None
        if self.env is None or self.ring is None:
            raise EnvOrderError(f"{frame.kind.name} was requested without a simulator")
        if frame.kind == Kind.OFFLOAD:
            state = get_state(self.env)
            self.env.close()
            self.env = None
            release_memory()
            return state
        return simulate(self.env, self.ring, frame)


def simulate(env: VectorEnv, ring: Ring, frame: Frame) -> object:
    """Execute a request on an environment.

    Requests are copied out of the shared memory: an environment may keep its arguments, and the next request is written
    to the same place.
    """
    request = ring.request
    count = frame.argument
    if frame.kind == Kind.STEP:
        step = env.chunk_step(request["actions"][:, :count].copy(), request["active"].copy())
        ring.slots[frame.number].write_step(step)
    elif frame.kind == Kind.RESET:
        arguments = (request[name][:count].copy() for name in ("seeds", "task_ids", "indices"))
        ring.slots[frame.number].write_observation(env.reset(*arguments))
    elif frame.kind == Kind.GET_STATE:
        return get_state(env)
    elif frame.kind == Kind.SET_STATE:
        env.set_state(frame.value)
    elif frame.kind == Kind.CALL:
        return env.call(frame.value["method"], frame.value["arguments"])
    elif frame.kind == Kind.CLOSE:
        env.close()
    else:
        raise EnvOrderError(f"unexpected frame {frame.kind.name}")
    return None


def get_state(env: VectorEnv) -> bytes:
    """Return the state of an environment, which may be third-party code."""
    state: object = env.get_state()
    if not isinstance(state, bytes):
        raise EnvError(
            f"get_state() of {type(env).__name__} returned {type(state).__name__}, not bytes",
            "encode it, for example with embodrl.processes.codec.encode",
            code="env-state-type",
        )
    return state


def build(start: Fields) -> VectorEnv:
    """Return the environment named by the START frame."""
    cpu = start.integer("cpu", None)
    numa_node = start.integer("numa_node", None)
    # Bound first: memory is taken from the NUMA node of the core that first writes it.
    bind_to_cores([] if cpu is None else [cpu], numa_node, "set env.pin_cpus=false")
    for module in start.texts("extensions"):
        importlib.import_module(module)
    target = start.text("env_type")  # module:Class, or a name registered by an extension
    gc.disable()  # imports and objects created here live for the whole process
    try:
        make: Callable[..., VectorEnv] = import_object(target) if ":" in target else ENVS.get(target)
        env = make(**start.fields("kwargs").content)
        if axis := start.text("axis", None):
            env.set_axis(axis)
        if real_time := start.fields("real_time", {}).content:
            env.set_real_time(real_time)
    finally:
        gc.enable()
    max_chunk = start.integer("max_chunk", None)
    if max_chunk is not None:
        env.spec = dataclasses.replace(env.spec, max_chunk=max_chunk)
    return env


def make_ring(spec: EnvSpec, memory_fd: int) -> Ring:
    """Size the shared memory and map it.

    Allocated here and not by the parent, since pages lie on the NUMA node of the process that touches them first; and
    at once, because running out of memory later is a bus error, not an exception.
    """
    num_bytes = compute_layout(spec).num_bytes
    try:
        os.posix_fallocate(memory_fd, 0, num_bytes)
    except OSError as error:
        raise EmbodrlError(
            f"no {num_bytes / 2**20:.0f} MiB of shared memory: {error}",
            "use fewer or smaller environments",
            code="shared-memory",
        ) from error
    return Ring(memory_fd, spec)


def release_memory() -> None:
    """Return unused memory to the system."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
    if trim is not None:
        trim(0)
