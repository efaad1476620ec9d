"""EnvManager: a VectorEnv in a process of its own.

Shapes: B environments, C actions in a chunk, A action dimensions. docs/env_manager.md tells why it is built so.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from embodrl.envs.pool.options import EnvTimeouts, RemoteEnv
from embodrl.envs.pool.transport import NUM_SLOTS, ResultSlot, Ring, copy_observation, copy_step, spec_from_dict
from embodrl.envs.stepping import next_seed
from embodrl.errors import (
    EmbodrlError,
    EnvError,
    EnvOrderError,
    EnvProtocolError,
    EnvRaised,
    EnvTimeout,
    EnvWorkerDied,
    MessageError,
)
from embodrl.fields import Fields
from embodrl.processes import bootstrap
from embodrl.processes.child import ChildHungError, ChildProcess
from embodrl.processes.ending import closing_grace_s
from embodrl.processes.frames import Frame, Kind, PeerGoneError
from embodrl.processes.liveness import Limits
from embodrl.processes.memory import resident_bytes
from embodrl.specs import ENV_SERVERS, ENVS
from embodrl.types import EnvSpec, EnvStep, Observation

logger = logging.getLogger("embodrl.envs")

_SHOWN = 8
_SHOWN_TEXT = 8000  # characters of an error that a simulator reports
_OOM_SCORE_ADJ = 300
"""If memory runs out, the kernel ends a simulator, which is restarted, before it ends the driver."""
# One simulator process is bound to one core: thread pools would only compete for it.
SINGLE_THREADED = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "LP_NUM_THREADS": "1",
    "SAPIEN_DISABLE_RAY_TRACING": "1",
}
_WHILE_OFFLOADED = (Kind.ONLOAD, Kind.SET_STATE, Kind.CLOSE)
_Ended = TypeVar("_Ended", bound=EnvError)
_Result = TypeVar("_Result")


class _Pending(NamedTuple):
    """The request in progress; its answer repeats ``number`` and ``argument``."""

    kind: Kind
    number: int
    argument: int


class EnvManager:
    """Runs a VectorEnv in a process of its own; observations and actions go through shared memory.

    Results are views of the shared memory and stay valid until the next but one result of this manager; ask for
    ``copy=True`` to keep them longer. One request is in progress at a time, and one thread uses a manager. After
    EnvWorkerDied or EnvTimeout the process is gone: ``restart`` and ``reset``. After EnvRaised it continues.

    Args:
        env_type: a name of the environment registry.
        kwargs: keyword arguments of the VectorEnv, plain values only.
        name: for messages and the log file.
        cpu: core to bind to; None for no binding.
        numa_node: node whose memory is preferred.
        python: interpreter of the process; None is this one.
        timeouts: see EnvTimeouts.
        log_dir: directory of ``<name>.log`` with what the process prints; None keeps only the end, for messages.
        max_chunk: largest C; None leaves it to the environment.
        extensions: modules that the process imports first, which may register environments.
        axis, real_time: along which all episodes are perturbed, and section ``env.real_time``; None for none.
        first_env: number of its first environment in the whole run, for messages.
        environ: further environment variables of the process.
        debug: overwrite results whose time is over, so that views kept too long show.
        remote: the server that has the simulator; the process here then only passes on what is asked of it. ``cpu``,
            ``numa_node``, ``python``, ``extensions`` and ``environ`` are the server's affair. None: it is here.
    """

    def __init__(
        self,
        env_type: str,
        kwargs: Mapping[str, object] | None = None,
        *,
        name: str = "env",
        cpu: int | None = None,
        numa_node: int | None = None,
        python: str | None = None,
        timeouts: EnvTimeouts | None = None,
        log_dir: Path | None = None,
        max_chunk: int | None = None,
        extensions: Sequence[str] = (),
        axis: str | None = None,
        real_time: Mapping[str, object] | None = None,
        first_env: int = 0,
        environ: Mapping[str, str] | None = None,
        debug: bool = False,
        remote: RemoteEnv | None = None,
    ) -> None:
        self.name = name
        self.env_type = env_type
        self.python = python
        # Known here, so that the interpreter of a simulator need not have what specs import (pydantic).
        target = ENVS.entry(env_type).target if env_type in ENVS else env_type
        self.timeouts = timeouts or EnvTimeouts()
        self.first_env = first_env
        self.seeds: NDArray[np.int64] = np.zeros(0, np.int64)
        self.task_ids: NDArray[np.int32] = np.zeros(0, np.int32)
        self.refused: NDArray[np.int64] = np.zeros(0, np.int64)  # episodes in a row, by environment; see EnvPool
        # Requests that EnvPool repeats to a restarted process.
        self.lasting: dict[str, Mapping[str, object] | None] = {}
        self.has_stepped = False  # a chunk has worked, in any process of this manager
        self._starts_with_auto_reset = self._auto_reset = bool((kwargs or {}).get("auto_reset", True))
        self._config: dict[str, object] = {
            "env_type": target if isinstance(target, str) else env_type,
            "kwargs": dict(kwargs or {}),
            **{"cpu": cpu, "numa_node": numa_node, "max_chunk": max_chunk, "axis": axis},
            **{"extensions": list(extensions), "real_time": dict(real_time or {})},
        }
        self._main = "embodrl.envs.pool.worker_main"
        if remote is not None:
            self._main = ENV_SERVERS.entry(remote.scheme).relay
            self._config |= {"env_type": env_type, "remote": asdict(remote)}
        self._log_path = None if log_dir is None else log_dir / f"{name.replace('/', '_')}.log"
        self._environ = dict(environ or {})
        self._debug = debug
        self._process: ChildProcess | None = None
        self._memory_fd = -1
        self._ring: Ring | None = None
        self._spec: EnvSpec | None = None
        self._pending: _Pending | None = None
        self._serial = 0
        self._slot = 0
        self._offloaded: bytes | None = None

    # -- life ---------------------------------------------------------------------------------------------------------

    @property
    def spec(self) -> EnvSpec:
        """What the environment offers; known from the first start on."""
        if self._spec is None:
            raise EnvOrderError(f"{self} has not been started", "call start() first")
        return self._spec

    @property
    def pid(self) -> int | None:
        """Process id; None without a process."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the process and wait until the environment is ready.

        Raises:
            EnvRaised, EnvWorkerDied, EnvTimeout: it did not start.
        """
        self.start_async()
        self.wait_started()

    def start_async(self) -> None:
        """Start the process; several start at the same time this way."""
        if self._process is not None:
            raise EnvOrderError(f"{self} runs already", "close() it or restart() it")
        # No name: nothing is left behind when processes are killed. The child sizes it, see worker_main.make_ring.
        self._memory_fd = os.memfd_create("embodrl-env", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        interpreter = self.python or sys.executable
        try:
            self._process = ChildProcess(
                [interpreter, bootstrap.__file__, self._main],
                self._config | {"memory_fd": self._memory_fd},
                environ={**SINGLE_THREADED, **self._environ},
                log_path=self._log_path,
                pass_fds=[self._memory_fd],
                stuck_error=EnvTimeout,
                name=self.name,
                limits=Limits(self.timeouts.heartbeat_s),
                oom_score_adj=_OOM_SCORE_ADJ,
            )
        except OSError as error:
            self._drop()
            message = f"{self}: cannot start '{interpreter}': {error}"
            raise EnvError(message, "check env.python", code="python-not-runnable") from error
        except BaseException:  # a signal too must not leave the process and its memory
            self._drop()
            raise
        self._pending = _Pending(Kind.START, 0, 0)
        self._auto_reset = self._starts_with_auto_reset

    def wait_started(self) -> None:
        """Wait until the environment is ready; after ``offload``, until it is back in the state it had."""
        try:
            frame = self._receive(Kind.START, self.timeouts.start_s)
            spec = spec_from_dict(frame.value)
            if self._spec not in (None, spec):
                raise EnvProtocolError(f"its EnvSpec was {self._spec} before a restart, and is {spec}")
            self._ring = Ring(self._memory_fd, spec, seal=True)
            self._spec = spec
        except EnvRaised:
            self._drop()
            raise
        except (EnvProtocolError, OSError) as error:
            raise self._invalid(error, "during START") from None
        if len(self.seeds) != (batch := self._spec.num_envs):
            self.seeds = np.full(batch, -1, np.int64)
            self.task_ids = np.zeros(batch, np.int32)
            self.refused = np.zeros(batch, np.int64)
        if self._offloaded is not None:
            self.set_state(self._offloaded)
            self._offloaded = None

    def restart(self) -> None:
        """Start a fresh process, whatever has become of the present one; its environments need a reset."""
        self._drop()
        self._offloaded = None
        self.start()

    @property
    def is_offloaded(self) -> bool:
        """The simulators are away."""
        return self._offloaded is not None

    @property
    def resident_bytes(self) -> int:
        """Memory of the process, with what it shares; 0 without one."""
        return resident_bytes(self.pid)

    def offload(self, end_process: bool = True) -> None:
        """Take the state out and free the simulators; until ``onload``, nothing can be asked of them.

        ``end_process`` frees all memory of the process, once no view of a result is held; otherwise it stays, with the
        libraries that it has loaded, and comes back sooner.
        """
        if end_process:
            state = self.get_state()
            self.close()
        else:
            self._request(Kind.OFFLOAD)
            state = self._receive_state(Kind.OFFLOAD)
        self._offloaded = state

    def onload(self) -> None:
        """Continue bit-exactly where ``offload`` stopped, in a new process if there is none; can be retried."""
        self.onload_async()
        self.wait_onloaded()

    def onload_async(self) -> None:
        """Let the simulators come back; ``wait_onloaded`` waits for them."""
        if self._offloaded is None:
            raise EnvOrderError(f"{self} is not offloaded", "call offload() first")
        if self._process is None:
            self.start_async()
        else:
            self._request(Kind.ONLOAD, value=self._offloaded)

    def wait_onloaded(self) -> None:
        """Wait until the simulators are back."""
        try:
            if self._pending is not None and self._pending.kind == Kind.ONLOAD:
                self._receive(Kind.ONLOAD, self.timeouts.start_s)
                self._offloaded = None
            else:
                self.wait_started()
        except EnvRaised:
            self._drop()
            raise

    def close_async(self) -> None:
        """Ask the process to end, or kill it if a request is in progress; ``close`` waits for it."""
        if self._process is None or (self._pending is not None and self._pending.kind == Kind.CLOSE):
            return
        if self._pending is not None:
            self._drop()
            return
        try:
            self._request(Kind.CLOSE)
        except EnvError as error:
            logger.warning("%s", error)

    def close(self, deadline: float | None = None) -> None:
        """End the process; a pending request is given up.

        Args:
            deadline: of ``time.monotonic()``, when it is killed; None gives it some seconds.
        """
        self.close_async()
        process = self._process
        if process is None:
            return
        deadline = time.monotonic() + closing_grace_s() if deadline is None else deadline
        try:
            self._receive(Kind.CLOSE, max(0.0, deadline - time.monotonic()))
            if not process.wait_ended(max(0.0, deadline - time.monotonic())) or process.end_group() != 0:
                logger.warning("%s did not end by itself after close; it was killed", self)
        except EnvError as error:
            logger.warning("%s", error)
        self._drop()

    def __enter__(self) -> EnvManager:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __str__(self) -> str:
        text = f"env manager '{self.name}' ({self.env_type}"
        if self._spec is None:
            return text + ")"
        last = self.first_env + self._spec.num_envs - 1
        tasks = sorted({self._spec.tasks[int(task)] for task in self.task_ids})
        seeds = [int(seed) for seed in self.seeds if seed >= 0]
        shown = ", ".join(map(str, seeds[:_SHOWN])) + (", ..." if len(seeds) > _SHOWN else "")
        return f"{text}, envs {self.first_env}-{last}, tasks {', '.join(tasks[:_SHOWN])}, seeds {shown or 'none yet'})"

    # -- simulation ---------------------------------------------------------------------------------------------------

    def reset(
        self,
        seeds: NDArray[np.int64],
        task_ids: NDArray[np.int32],
        indices: NDArray[np.int64] | None = None,
        *,
        copy: bool = False,
    ) -> Observation:
        """Start new episodes; arguments as in ``VectorEnv.reset``, all environments without ``indices``."""
        self.reset_async(seeds, task_ids, indices)
        return self.wait_reset(copy=copy)

    def reset_async(
        self, seeds: NDArray[np.int64], task_ids: NDArray[np.int32], indices: NDArray[np.int64] | None = None
    ) -> None:
        """Ask for new episodes; ``wait_reset`` brings the observation."""
        batch = self.spec.num_envs
        rows = np.arange(batch, dtype=np.int64) if indices is None else np.asarray(indices, np.int64)
        count = len(rows)
        problem = None
        if not count or count > batch or rows.min() < 0 or rows.max() >= batch or len(set(rows.tolist())) < count:
            problem = f"cannot reset environments {rows.tolist()} of {batch}"
        elif np.shape(seeds) != (count,) or np.shape(task_ids) != (count,):
            problem = f"{count} seeds and task ids expected, got {np.shape(seeds)} and {np.shape(task_ids)}"
        elif np.min(task_ids) < 0 or np.max(task_ids) >= len(self.spec.tasks):
            problem = f"task ids {np.unique(task_ids).tolist()} for {len(self.spec.tasks)} tasks"
        if problem is not None:
            raise EnvError(f"{self}: {problem}", "give each index once, with its seed and task id", code="env-reset")
        request = self._running_ring().request
        request["seeds"][:count] = seeds
        request["task_ids"][:count] = task_ids
        request["indices"][:count] = rows
        self.seeds[rows] = seeds
        self.task_ids[rows] = task_ids
        self._request(Kind.RESET, count, slot=self._next_slot())

    def wait_reset(self, timeout: float | None = None, *, copy: bool = False) -> Observation:
        """Return the observation of all B environments after ``reset_async``."""
        timeout = self.timeouts.reset_s if timeout is None else timeout
        observation = self._result(Kind.RESET, timeout, lambda slot, _: slot.observation())
        return copy_observation(observation) if copy else observation

    def step_async(self, actions: NDArray[np.float32], active: NDArray[np.bool_] | None = None) -> None:
        """Send ``actions float32[B,C,A]``; environments where ``active bool[B]`` is False are left alone."""
        spec = self.spec
        chunk = actions.shape[1] if actions.ndim == 3 else 0
        if not 1 <= chunk <= spec.max_chunk or actions.shape != (spec.num_envs, chunk, spec.action_dim):
            raise EnvError(
                f"{self}: actions of shape {list(actions.shape)}, expected "
                f"[{spec.num_envs}, 1 to {spec.max_chunk}, {spec.action_dim}]",
                "check model.num_action_chunks and model.action_dim",
                code="actions-shape",
            )
        acted = actions if active is None else actions[active]
        if not np.isfinite(acted).all():
            broken = np.flatnonzero(~np.isfinite(actions).all(axis=(1, 2)) & (True if active is None else active))
            raise EnvError(
                f"the policy returned actions that are not finite, for environments"
                f" {', '.join(str(self.first_env + row) for row in broken[:_SHOWN].tolist())}",
                "its weights or action statistics are broken: check the checkpoint, and the loss and gradient norm of"
                " the last iterations",
                code="actions-not-finite",
            )
        request = self._running_ring().request
        request["actions"][:, :chunk] = actions
        request["active"][:] = True if active is None else active
        self._request(Kind.STEP, chunk, slot=self._next_slot())

    def wait(self, timeout: float | None = None, *, copy: bool = False) -> EnvStep:
        """Return what the chunk of ``step_async`` led to.

        Args:
            timeout: seconds from now; None takes ``timeouts.step_s``.
            copy: return private memory.

        Raises:
            EnvRaised, EnvWorkerDied, EnvTimeout: see the class.
        """
        step = self._result(Kind.STEP, self.timeouts.step_s if timeout is None else timeout, ResultSlot.step)
        seeded = (step.episode_seed >= 0) & step.valid[:, 0]
        self.seeds[seeded] = step.episode_seed[seeded]
        ended = np.flatnonzero(seeded & step.done & self._auto_reset)
        self.seeds[ended] = [next_seed(seed) for seed in self.seeds[ended].tolist()]
        self.task_ids[:] = step.observation.task_id
        self.has_stepped = True
        return copy_step(step) if copy else step

    def step(
        self, actions: NDArray[np.float32], active: NDArray[np.bool_] | None = None, *, copy: bool = False
    ) -> EnvStep:
        """Execute a chunk and wait for it."""
        self.step_async(actions, active)
        return self.wait(copy=copy)

    def get_state(self) -> bytes:
        """Return the full simulator state."""
        self._request(Kind.GET_STATE)
        return self._receive_state(Kind.GET_STATE)

    def set_state(self, state: bytes) -> None:
        """Continue bit-exactly from a state of ``get_state``."""
        self._request(Kind.SET_STATE, value=state)
        # A simulator may have to be rebuilt and replayed.
        self._receive(Kind.SET_STATE, self.timeouts.start_s)

    def call(self, method: str, arguments: Mapping[str, object] | None = None, timeout: float | None = None) -> object:
        """Return what ``VectorEnv.call`` answers: plain values and numeric arrays, both ways."""
        self.call_async(method, arguments)
        return self.wait_call(method, timeout)

    def call_async(self, method: str, arguments: Mapping[str, object] | None = None) -> None:
        """Send a request of ``VectorEnv.call``; ``wait_call`` fetches the answer."""
        self._request(Kind.CALL, value={"method": method, "arguments": dict(arguments or {})})
        if method == "set_auto_reset":
            self._auto_reset = bool((arguments or {}).get("value", self._auto_reset))

    def wait_call(self, method: str, timeout: float | None = None) -> object:
        """Return the answer to ``call_async``; ``method`` is for messages."""
        return self._receive(Kind.CALL, self.timeouts.reset_s if timeout is None else timeout, method).value

    # -- frames -------------------------------------------------------------------------------------------------------

    def _running(self) -> ChildProcess:
        if self._process is None:
            state, hint = ("offloaded", "onload()") if self.is_offloaded else ("not running", "start() or restart()")
            raise EnvOrderError(f"{self} is {state}", f"call {hint}")
        return self._process

    def _running_ring(self) -> Ring:
        self._running()
        if self._ring is None:
            raise EnvOrderError(f"{self} is still starting", "call wait_started()")
        return self._ring

    def _next_slot(self) -> int:
        slot = (self._slot + 1) % NUM_SLOTS
        if self._debug and self._ring is not None:
            self._ring.slots[slot].poison()
        return slot

    def _request(self, kind: Kind, count: int | None = None, value: object = None, slot: int = 0) -> None:
        process = self._running()
        if self._offloaded is not None and kind not in _WHILE_OFFLOADED:
            raise EnvOrderError(f"{self} is offloaded", "call onload()")
        if self._pending is not None:
            raise EnvOrderError(
                f"{self}: {kind.name} requested while {self._pending.kind.name} is in progress", "wait for it first"
            )
        self._serial += 1
        pending = _Pending(kind, slot, self._serial if count is None else count)
        try:
            process.connection.send(Frame(*pending, value), time.monotonic() + self.timeouts.reset_s)
        except PeerGoneError:
            raise self._died(f"before {kind.name}") from None
        except TimeoutError:
            raise self._timed_out(f"a {kind.name} request was not taken in {self.timeouts.reset_s:g} s") from None
        self._pending = pending
        if kind in (Kind.RESET, Kind.STEP):
            self._slot = slot

    def _receive(self, kind: Kind, timeout_s: float, detail: str = "") -> Frame:
        process = self._running()
        pending = self._pending
        if pending is None or pending.kind != kind:
            raise EnvOrderError(f"{self}: no {kind.name} is in progress", "send the request first")
        doing = f"{kind.name} {detail}".strip()
        try:
            frame = process.receive(time.monotonic() + timeout_s)
        except PeerGoneError:
            raise self._died(f"during {doing}") from None
        except TimeoutError:
            raise self._timed_out(f"no answer within {timeout_s:g} s during {doing}") from None
        except ChildHungError as error:
            raise self._timed_out(f"process {process.pid} {error} during {doing}") from None
        except MessageError as error:
            raise self._invalid(error, f"during {doing}") from None
        self._pending = None
        if frame.kind not in (Kind.OK, Kind.RAISED) or (frame.number, frame.argument) != pending[1:]:
            found = f"{frame.kind.name} {frame.number} {frame.argument}"
            problem = f"the answer {found} instead of OK {pending.number} {pending.argument}"
            raise self._invalid(problem, f"during {doing}")
        if frame.kind == Kind.RAISED:
            raise self._raised(frame.value, doing)
        return frame

    def _result(self, kind: Kind, timeout_s: float, read: Callable[[ResultSlot, int], _Result]) -> _Result:
        """Return what ``read`` makes of the slot of an answer, and of how many actions of the chunk were executed."""
        frame = self._receive(kind, timeout_s)
        slot = self._running_ring().slots[frame.number]
        try:
            slot.check(frame.argument if kind == Kind.STEP else None, len(self.spec.tasks))
            return read(slot, frame.argument)
        except EnvProtocolError as error:
            raise self._invalid(error, f"during {kind.name}") from None

    def _receive_state(self, kind: Kind) -> bytes:
        state = self._receive(kind, self.timeouts.reset_s).value
        if not isinstance(state, bytes):
            raise self._invalid(f"a state of type {type(state).__name__}, not bytes", f"during {kind.name}")
        return state

    def _raised(self, content: object, doing: str) -> EnvError:
        """Return the error of an exception in the process: one of embodrl's own says enough, others get a traceback."""
        try:
            if not isinstance(content, dict):
                raise MessageError(f"an error of type {type(content).__name__}")
            fields = Fields(cast("dict[str, object]", content), "its error", MessageError)
            code = fields.text("code", None)
            message = fields.text("message")
            hint = fields.text("hint")
            traceback = fields.text("user_traceback") or fields.text("traceback")
            kind = fields.text("type")
        except MessageError as error:
            return self._invalid(error, f"during {doing}")
        if code is not None:
            return EnvRaised(f"{self}: {message[:_SHOWN_TEXT]}", hint[:_SHOWN_TEXT], code=code)
        hint = "fix the simulator's code at the last line of the traceback"
        if self._log_path is not None:
            hint += f"; what it printed is in {self._log_path}"
        frames = traceback.rstrip()[-_SHOWN_TEXT:]
        return EnvRaised(f"{self}: {kind} during {doing}: {message[:_SHOWN_TEXT]}\n{frames}", hint)

    def _invalid(self, error: Exception | str, when: str) -> EnvProtocolError:
        """Kill a process that has sent an invalid answer, and return the error that names it."""
        problem = error.message if isinstance(error, EmbodrlError) else str(error)
        what = f"process {self._running().pid} sent invalid data {when}: {problem}; killed"
        hint = "look for code of the simulator that writes to file descriptors or memory that are not its own"
        return self._ended(EnvProtocolError, what, hint)

    def _died(self, when: str) -> EnvWorkerDied:
        process = self._running()
        what = f"process {process.pid} {process.exit_reason()} {when}"
        return self._ended(EnvWorkerDied, what, "look at the log for the cause")

    def _timed_out(self, what: str) -> EnvTimeout:
        self._running().dump_stack()  # before the kill: a dead process has no stack
        hint = "raise env.{start,reset,step}_timeout_s if the simulator is only slow"
        return self._ended(EnvTimeout, f"{what}; killed", hint)

    def _ended(self, error_type: type[_Ended], what: str, hint: str) -> _Ended:
        """Kill what is left of the process, and return the error with the end of its log."""
        process = self._running()
        tail = process.log_tail()
        where = f" of {process.log_path}" if process.log_path else ""
        message = f"{self}: {what}" + (f"\n--- end of the log{where} ---\n{tail}\n---" if tail else "")
        self._drop()
        return error_type(message, hint)

    def _drop(self) -> None:
        process = self._process
        self._process = None
        self._ring = None
        self._pending = None
        if self._memory_fd >= 0:
            os.close(self._memory_fd)
        self._memory_fd = -1
        if process is not None:
            process.kill()
