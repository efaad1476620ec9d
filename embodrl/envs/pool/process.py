"""SimulatorProcess: lifecycle of a simulator's process, one request at a time, and its errors."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from typing import NamedTuple, TypeVar, cast

from embodrl.envs.pool.episodes import EnvEpisodes
from embodrl.envs.pool.launch import Child, Launch
from embodrl.envs.pool.transport import NUM_SLOTS, ResultSlot, Ring, spec_from_dict
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
from embodrl.processes.child import ChildHungError
from embodrl.processes.ending import closing_grace_s
from embodrl.processes.frames import Frame, Kind, PeerGoneError
from embodrl.processes.traffic import count_received, count_sent

logger = logging.getLogger("embodrl.envs")

_LINK = "env"
_SHOWN_TEXT = 8000  # characters of an error reported by a simulator
# Requests that bring the simulators back or end the process.
_WHILE_OFFLOADED = (Kind.ONLOAD, Kind.SET_STATE, Kind.CLOSE)
_Result = TypeVar("_Result")
_Ended = TypeVar("_Ended", bound=EnvError)


class _Pending(NamedTuple):
    """The request in progress; its answer repeats ``number`` and ``argument``."""

    kind: Kind
    number: int
    argument: int


class SimulatorProcess:
    """A process with shared memory that can be started repeatedly; after EnvWorkerDied or EnvTimeout there is none.

    Args:
        launch: starts a process.
        episodes: named in messages; receives the EnvSpec.
        debug: overwrite expired results.

    Attributes:
        saved: state of the simulators while offloaded, which only a few requests can change; else None.
        starts: processes so far.
    """

    def __init__(self, launch: Launch, episodes: EnvEpisodes, debug: bool = False) -> None:
        self.launch = launch
        self.episodes = episodes
        self.saved: bytes | None = None
        self.starts = 0
        self._debug = debug
        self._ring: Ring | None = None
        self._slot = 0
        self._child: Child | None = None
        self._memory_fd = -1
        self._pending: _Pending | None = None
        self._serial = 0
        self._is_apart = True

    @property
    def pid(self) -> int | None:
        return None if self._child is None else self._child.pid

    @property
    def pending(self) -> Kind | None:
        """Kind of the request in progress."""
        return None if self._pending is None else self._pending.kind

    @property
    def child(self) -> Child:
        """The process; EnvOrderError if there is none."""
        if self._child is None:
            state, hint = ("not running", "start() or restart()") if self.saved is None else ("offloaded", "start()")
            raise EnvOrderError(f"{self.episodes} is {state}", f"call {hint}")
        return self._child

    @property
    def ring(self) -> Ring:
        """The shared memory; EnvOrderError if there is no process, or it is still starting."""
        if self._ring is None and self.child:  # raises without a child
            raise EnvOrderError(f"{self.episodes} is still starting", "call wait_started()")
        assert self._ring is not None
        return self._ring

    def start(self, heartbeat_s: float) -> None:
        """Start the process; ``wait_started`` waits until it is ready."""
        if self._child is not None:
            raise EnvOrderError(f"{self.episodes} runs already", "close() it or restart() it")
        # Unnamed: nothing is left behind when processes are killed. The child sizes it, see worker_main.make_ring.
        self._memory_fd = os.memfd_create("embodrl-env", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            self.starts += 1
            self._child = self.launch(self._memory_fd, heartbeat_s)
            self._is_apart = self._child.pid != os.getpid()  # only then does memory lead to another process
        except OSError as error:
            self.drop()
            message = f"{self.episodes}: cannot start '{self.launch.interpreter}': {error}"
            raise EnvError(message, "check env.python", code="python-not-runnable") from error
        except BaseException:  # signals too must not leave the process and its memory
            self.drop()
            raise
        # START is answered without a request: the configuration came with the start message.
        self._pending = _Pending(Kind.START, 0, 0)

    def wait_started(self, timeout_s: float) -> None:
        """Wait until the process has built its environments, and map its memory."""
        known = self.episodes.found
        try:
            frame = self.receive(Kind.START, timeout_s)
            spec = spec_from_dict(frame.value)
            # Batches and buffers of the run are laid out by the first EnvSpec.
            if known not in (None, spec):
                raise EnvProtocolError(f"its EnvSpec was {known} before a restart, and is {spec}")
            self._ring = Ring(self._memory_fd, spec, seal=True)
            self._let_go()  # mapped: neither side needs the file any longer
        except EnvRaised:
            self.drop()
            raise
        except (EnvProtocolError, OSError) as error:
            raise self.invalid(error, "during START") from None
        self.episodes.started(spec)

    def request(self, kind: Kind, timeout_s: float, count: int | None = None, value: object = None) -> None:
        """Send a request within ``timeout_s`` seconds; ``receive`` returns the answer.

        ``count`` is C of a step or the number of rows of a reset, whose result goes to the next memory slot; ``value``
        is the content of the frame.
        """
        child = self.child
        if self.saved is not None and kind not in _WHILE_OFFLOADED:
            raise EnvOrderError(f"{self.episodes} is offloaded", "call start()")
        if self._pending is not None:
            raise EnvOrderError(
                f"{self.episodes}: {kind.name} requested while {self._pending.kind.name} is in progress",
                "wait for it first",
            )
        slot = 0
        # Only resets and steps write a result; other requests leave the two valid results alone.
        if count is not None:
            slot = (self._slot + 1) % NUM_SLOTS
            if self._debug:
                self.ring.slots[slot].poison()
        self._serial += 1
        # The answer must repeat these numbers, so that an answer to an earlier request is never mistaken for it.
        pending = _Pending(kind, slot, self._serial if count is None else count)
        # Set before sending: a signal may end the call right after it, and the process would work unnoticed.
        before = self._slot
        self._pending = pending
        if count is not None:
            self._slot = slot
        try:
            child.connection.send(Frame(*pending, value), time.monotonic() + timeout_s)
        except PeerGoneError:
            raise self._died(f"before {kind.name}") from None
        except TimeoutError:
            raise self._timed_out(f"a {kind.name} request was not taken in {timeout_s:g} s") from None
        except (MessageError, OSError):  # the frame could not be made, or was rejected whole: nothing was sent
            self._pending, self._slot = None, before
            raise
        if kind == Kind.STEP and self._is_apart:
            count_sent(_LINK, self.ring.request["actions"][:, :count].nbytes)

    def replace_result(self) -> None:
        """Let the next result replace the last one, so that the one before stays valid."""
        self._slot = (self._slot - 1) % NUM_SLOTS

    def receive(self, kind: Kind, timeout_s: float, detail: str = "") -> Frame:
        """Return the answer to the request in progress; ``detail`` is for messages."""
        child = self.child
        pending = self._pending
        if pending is None or pending.kind != kind:
            raise EnvOrderError(f"{self.episodes}: no {kind.name} is in progress", "send the request first")
        doing = f"{kind.name} {detail}".strip()
        try:
            frame = child.receive(time.monotonic() + timeout_s)
        except PeerGoneError:
            raise self._died(f"during {doing}") from None
        except TimeoutError:
            raise self._timed_out(f"no answer within {timeout_s:g} s during {doing}") from None
        except ChildHungError as error:
            raise self._timed_out(f"process {child.pid} {error} during {doing}") from None
        except MessageError as error:
            raise self.invalid(error, f"during {doing}") from None
        # Whatever is wrong with the answer, no request is in progress any more.
        self._pending = None
        if frame.kind not in (Kind.OK, Kind.RAISED) or (frame.number, frame.argument) != pending[1:]:
            found = f"{frame.kind.name} {frame.number} {frame.argument}"
            problem = f"the answer {found} instead of OK {pending.number} {pending.argument}"
            raise self.invalid(problem, f"during {doing}")
        if frame.kind == Kind.RAISED:
            raise self._raised(frame.value, doing)
        return frame

    def result(self, kind: Kind, timeout_s: float, read: Callable[[ResultSlot, int], _Result]) -> _Result:
        """Apply ``read`` to the result slot of an answer and the number of executed actions of the chunk."""
        frame = self.receive(kind, timeout_s)
        slot = self.ring.slots[frame.number]
        if self._is_apart:
            count_received(_LINK, self.ring.result_bytes)
        try:
            # Before any use: native code of a simulator may have written anywhere in this memory.
            slot.check(frame.argument if kind == Kind.STEP else None, len(self.episodes.spec.tasks))
            return read(slot, frame.argument)
        except EnvProtocolError as error:
            raise self.invalid(error, f"during {kind.name}") from None

    def state(self, kind: Kind, timeout_s: float) -> bytes:
        """Request the state with this kind of request, and wait for it."""
        self.request(kind, timeout_s)
        return self.wait_state(kind, timeout_s)

    def wait_state(self, kind: Kind, timeout_s: float) -> bytes:
        """Return the state requested with this kind of request."""
        state = self.receive(kind, timeout_s).value
        if not isinstance(state, bytes):
            raise self.invalid(f"a state of type {type(state).__name__}, not bytes", f"during {kind.name}")
        return state

    def close_async(self, timeout_s: float) -> None:
        """Ask the process to end, or kill it if a request is in progress; ``close`` waits for it."""
        if self._child is None or self.pending == Kind.CLOSE:
            return
        # A process serves one request at a time: CLOSE would wait behind the one in progress, perhaps forever.
        if self._pending is not None:
            self.drop()
            return
        try:
            self.request(Kind.CLOSE, timeout_s)
        except EnvError as error:
            logger.warning("%s", error)

    def close(self, deadline: float | None) -> None:
        """Wait until the process has ended after ``close_async``; kill it at the deadline."""
        child = self._child
        if child is None:
            return
        deadline = time.monotonic() + closing_grace_s() if deadline is None else deadline
        try:
            self.receive(Kind.CLOSE, max(0.0, deadline - time.monotonic()))
            if not child.wait_ended(max(0.0, deadline - time.monotonic())) or child.end_group() != 0:
                logger.warning("%s did not end by itself after close; it was killed", self.episodes)
        except EnvError as error:
            logger.warning("%s", error)
        self.drop()

    def drop(self) -> None:
        """Kill the process, if any, and release its memory."""
        child = self._child
        # Cleared before the kill, which may raise: the next start must find no process.
        self._child = None
        self._ring = None
        self._pending = None
        self._let_go()
        if child is not None:
            child.kill()

    def _let_go(self) -> None:
        if self._memory_fd >= 0:
            os.close(self._memory_fd)
        self._memory_fd = -1

    def invalid(self, error: Exception | str, when: str) -> EnvProtocolError:
        """Kill a process that sent an invalid answer, and return the error that names it."""
        problem = error.message if isinstance(error, EmbodrlError) else str(error)
        what = f"process {self.child.pid} sent invalid data {when}: {problem}; killed"
        hint = "look for simulator code that writes to foreign file descriptors or memory"
        return self._ended(EnvProtocolError, what, hint)

    def _raised(self, content: object, doing: str) -> EnvError:
        """Return the error of an exception in the process, with a traceback unless it is an error of embodrl."""
        # The report comes from a process that may be broken, so it is checked like any other answer.
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
            return self.invalid(error, f"during {doing}")
        if code is not None:
            return EnvRaised(f"{self.episodes}: {message[:_SHOWN_TEXT]}", hint[:_SHOWN_TEXT], code=code)
        hint = "fix the simulator code at the last line of the traceback"
        if self.child.log_path is not None:
            hint += f"; its output is in {self.child.log_path}"
        frames = traceback.rstrip()[-_SHOWN_TEXT:]
        return EnvRaised(f"{self.episodes}: {kind} during {doing}: {message[:_SHOWN_TEXT]}\n{frames}", hint)

    def _died(self, when: str) -> EnvWorkerDied:
        what = f"process {self.child.pid} {self.child.exit_reason()} {when}"
        return self._ended(EnvWorkerDied, what, "look at the log for the cause")

    def _timed_out(self, what: str) -> EnvTimeout:
        self.child.dump_stack()  # before the kill: a dead process has no stack
        hint = "raise env.{start,reset,step}_timeout_s if the simulator is only slow"
        return self._ended(EnvTimeout, f"{what}; killed", hint)

    def _ended(self, error_type: type[_Ended], what: str, hint: str) -> _Ended:
        """Kill the remains of the process, and return the error with the end of its log."""
        child = self.child
        # Read before ``drop`` closes the log.
        tail = child.log_tail()
        where = f" of {child.log_path}" if child.log_path else ""
        message = f"{self.episodes}: {what}" + (f"\n--- end of the log{where} ---\n{tail}\n---" if tail else "")
        self.drop()
        return error_type(message, hint)
