"""`embodrl env serve`: simulator processes for runs on other machines.

Each simulator is an EnvManager with the usual watchdog. A session outlives its connection: it executes each request
once, identified by serial number, and keeps the last answer until the next request, so that a run reconnecting within
its ``reconnect_s`` misses and repeats nothing. After that time, or when the run says goodbye, the simulator ends.

A client names a registered environment and its settings, never code: neither modules nor interpreters.
"""

from __future__ import annotations

import hmac
import logging
import os
import queue
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from embodrl.config.isolated import AUTO, installed_python
from embodrl.config.trust import CODE_SETTINGS
from embodrl.deployment.topology import assign_cpus
from embodrl.envs.env_server.link import HANDSHAKE_S, SILENCE_S, Link, LinkMessage, pack_observation, pack_step, prove
from embodrl.envs.env_server.videos import START, ServedVideos
from embodrl.envs.pool.manager import EnvManager
from embodrl.envs.pool.options import EnvTimeouts
from embodrl.envs.pool.transport import spec_to_dict
from embodrl.errors import EmbodrlError, EnvError, EnvTimeout, EnvWorkerDied, MessageError
from embodrl.fields import Fields
from embodrl.processes.frames import Frame, Kind
from embodrl.processes.serve import describe_error
from embodrl.specs import ENVS
from embodrl.version import __version__

logger = logging.getLogger("embodrl.envs")

MAX_RECONNECT_S = 3600.0
_MAX_STRANGERS = 16  # unauthenticated connections
_LOOK_S = 0.5
Core = tuple[int | None, int | None]
"""CPU and NUMA node; None for any."""


@dataclass(frozen=True)
class SimulatorSettings:
    """What the simulators of a server have in common.

    Attributes:
        extensions: modules that register further environments, imported by the server and by the simulators.
        log_dir: directory for the simulators' output; None for none.
        cores: (cpu, NUMA node) of the simulators; None for this machine's in turn.
        runs_code: runs may name code in the arguments of an environment, which others may not.
    """

    extensions: Sequence[str] = ()
    log_dir: Path | None = None
    cores: Sequence[Core] | None = None
    runs_code: bool = False


class SimulatorSession:
    """One simulator and the run it serves.

    Args:
        reconnect_s: seconds to wait for a run whose connection is cut.
        core: (cpu, NUMA node) to bind its process to.
    """

    def __init__(self, reconnect_s: float, core: Core, settings: SimulatorSettings) -> None:
        self.reconnect_s = reconnect_s
        self.core = core
        self._settings = settings
        self.is_ending = False
        self._lock = threading.Lock()
        self._link: Link | None = None
        self._lost_at = time.monotonic()
        self._serial = 0
        self._answer = b""
        self._requests: queue.SimpleQueue[LinkMessage | None] = queue.SimpleQueue()
        self._manager: EnvManager | None = None
        self._videos = ServedVideos()
        self._thread = threading.Thread(target=self._work, name="env-session", daemon=True)
        self._thread.start()

    def attach(self, link: Link) -> None:
        """Answer on this connection from now on."""
        with self._lock:
            previous = self._link
            self._link = link
        if previous is not None:
            previous.close()

    def detach(self, link: Link) -> None:
        """Handle a cut connection; if it is the current one, start the ``reconnect_s`` timer."""
        link.close()
        with self._lock:
            if self._link is link:
                self._link = None
                self._lost_at = time.monotonic()

    def is_over(self) -> bool:
        """Whether the time to reconnect is over, plus one silence period: the run may notice a cut later."""
        away = time.monotonic() - self._lost_at
        return self._link is None and away > self.reconnect_s + 2 * SILENCE_S

    def take(self, message: LinkMessage) -> None:
        """Execute a new request; answer a resent one from memory. MessageError for any other serial number."""
        with self._lock:
            again = message.serial == self._serial
            answer = self._answer
            link = self._link
            if not again and message.serial != self._serial + 1:
                raise MessageError(f"request {message.serial} after {self._serial}", "this is a bug in the client")
            if not again:
                self._serial = message.serial
                self._answer = b""
                self._requests.put(message)
        if again and answer:
            _send(link, answer)

    def end(self) -> None:
        """End the simulator once the request in progress is done."""
        self.is_ending = True
        self._requests.put(None)

    def is_alive(self) -> bool:
        """Whether the simulator is still running."""
        return self._thread.is_alive()

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def _work(self) -> None:
        while (message := self._requests.get()) is not None and not self.is_ending:
            frame = message.frame
            try:
                answer = Frame(Kind.OK, frame.number, frame.argument, self._carry_out(frame))
                data = LinkMessage(message.serial, answer).encode()
            except (EnvWorkerDied, EnvTimeout) as error:  # the run restarts a dead simulator
                logger.warning("%s", error)
                answer = Frame(Kind.CLOSE, value=str(error))
                data = LinkMessage(message.serial, answer).encode()
            except Exception as error:  # noqa: BLE001 - process boundary: the run raises it
                answer = Frame(Kind.RAISED, value=self._describe(error))
                data = LinkMessage(message.serial, answer).encode()
            with self._lock:
                self._answer = data
                link = self._link
            _send(link, data)
            started = frame.kind != Kind.START or answer.kind == Kind.OK
            self.is_ending |= frame.kind == Kind.CLOSE or answer.kind == Kind.CLOSE or not started
        if self._manager is not None:
            self._manager.close()
        self._videos.close()
        with self._lock:
            link = self._link
        if link is not None:
            link.close()

    def _describe(self, error: Exception) -> dict[str, object]:
        report: dict[str, object] = {**describe_error(error)}
        if isinstance(error, EnvError) and self._manager is not None:
            report["message"] = error.message.removeprefix(f"{self._manager}: ")
        return report

    def _carry_out(self, frame: Frame) -> object:
        if frame.kind == Kind.START:
            self._manager = self._make(Fields(_mapping(frame.value), "a START message", MessageError))
            self._manager.start()
            return spec_to_dict(self._manager.spec)
        if self._manager is None:
            raise MessageError(f"{frame.kind.name} came before START")
        return _simulate(self._manager, frame, self._videos)

    def _make(self, start: Fields) -> EnvManager:
        name = start.text("env_type")
        kwargs = start.fields("kwargs").content
        if name not in ENVS:
            message = f"this server has no environment '{name}'"
            hint = "start it with --extension MODULE, which registers the environment"
            raise EnvError(message, hint, code="env-remote-unknown")
        named = sorted(key for key, value in kwargs.items() if _names_code(key, value))
        if named and not self._settings.runs_code:
            message = f"{', '.join(named)} would run client-supplied code here, or drive a robot without its limits"
            hint = "register the environment under its own name in a module, and pass the module to --extension"
            raise EnvError(message, hint, code="env-remote-code")
        timeouts = start.fields("timeouts")
        cpu, numa_node = self.core if start.flag("pin_cpus") else (None, None)
        python = installed_python(name) if start.text("python", None) == AUTO else None
        return EnvManager(
            name,
            kwargs,
            name=f"{name}-{secrets.token_hex(4)}",
            cpu=cpu,
            numa_node=numa_node,
            python=None if python is None else str(python),
            timeouts=EnvTimeouts(*(timeouts.number(part) for part in ("start_s", "reset_s", "step_s", "heartbeat_s"))),
            log_dir=self._settings.log_dir,
            max_chunk=start.integer("max_chunk", None),
            extensions=self._settings.extensions,
            axis=start.text("axis", None),
        )


def _names_code(key: str, value: object) -> bool:
    """Whether an environment argument is one of ``CODE_SETTINGS`` or a ``module:name``."""
    return value is not None and (f"env.{key}" in CODE_SETTINGS or (isinstance(value, str) and ":" in value))


def _simulate(manager: EnvManager, frame: Frame, videos: ServedVideos) -> object:
    value = frame.value
    if frame.kind == Kind.STEP:
        request = _mapping(value)
        packed = pack_step(manager.step(_array(request, "actions"), _array(request, "active")))
        return packed | {"videos": videos.take()}
    if frame.kind == Kind.RESET:
        request = _mapping(value)
        return pack_observation(manager.reset(*(_array(request, name) for name in ("seeds", "task_ids", "indices"))))
    if frame.kind == Kind.CALL:
        request = Fields(_mapping(value), "a CALL message", MessageError)
        if request.text("method") == START:
            return videos.start(manager, request.fields("arguments"))
        return manager.call(request.text("method"), request.fields("arguments").content)
    if frame.kind in (Kind.GET_STATE, Kind.OFFLOAD):
        state = manager.get_state()
        if (
            frame.kind == Kind.OFFLOAD
        ):  # end the whole process: releasing its libraries' memory is worth a slower return
            manager.close()
        return state
    if frame.kind in (Kind.SET_STATE, Kind.ONLOAD):
        if frame.kind == Kind.ONLOAD:
            manager.start()
        manager.set_state(value)
    elif frame.kind != Kind.CLOSE:
        raise MessageError(f"unexpected message {frame.kind.name}")
    return None


def _mapping(value: object) -> dict[str, object]:
    if not isinstance(value, dict):
        raise MessageError(f"a {type(value).__name__} where fields are expected")
    return value


def _array(request: dict[str, object], name: str) -> np.ndarray:
    value = request.get(name)
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "bif":
        raise MessageError(f"'{name}' is not an array of numbers")
    return value


def _send(link: Link | None, data: bytes) -> None:
    """Send an answer if connected; otherwise keep it for the next connection."""
    if link is not None:
        try:
            link.send(data)
        except OSError:
            link.close()


class TcpEnvServer:
    """Listens for runs at ``address``, ``tcp://HOST:PORT``.

    Args:
        port: 0 picks a free port.
        token: token required from runs; None requires none.
        max_processes: maximum number of simulators at a time, including those being shut down.

    Raises:
        EnvError: the address is not available.
    """

    def __init__(
        self,
        host: str,
        port: int,
        token: str | None,
        max_processes: int,
        simulators: SimulatorSettings | None = None,
    ) -> None:
        try:
            self._listener = socket.create_server((host, port), family=_family(host))
        except OSError as error:
            message = f"can't listen on {host}:{port}: {error.strerror or error}"
            raise EnvError(message, "choose another --host or --port", code="env-remote-listen") from error
        shown = f"[{host}]" if ":" in host else host
        self.address = f"tcp://{shown}:{self._listener.getsockname()[1]}"
        self._token = token
        self._max_processes = max_processes
        self._settings = simulators or SimulatorSettings()
        self._sessions: dict[str, SimulatorSession] = {}
        self._ending: list[SimulatorSession] = []
        self._lock = threading.Lock()
        self._strangers = threading.BoundedSemaphore(_MAX_STRANGERS)
        own = [(slot.cpu, slot.numa_node) for slot in assign_cpus(len(os.sched_getaffinity(0)))]
        self._cores: Sequence[Core] = self._settings.cores or own

    def run(self, stopped: Callable[[], bool]) -> None:
        """Serve until ``stopped`` returns True."""
        self._listener.settimeout(_LOOK_S)
        try:
            while not stopped():
                self._drop_lost()
                try:
                    sock, _ = self._listener.accept()
                except TimeoutError:
                    continue
                except OSError as error:  # the client has already disconnected, or too many files are open
                    logger.warning("a connection failed: %s", error)
                    time.sleep(_LOOK_S)
                    continue
                if not self._strangers.acquire(blocking=False):
                    sock.close()
                    continue
                threading.Thread(target=self._welcome, args=(Link(sock),), name="env-client", daemon=True).start()
        finally:
            self.close()

    def close(self) -> None:
        """End all simulators."""
        self._listener.close()
        with self._lock:
            sessions = [*self._sessions.values(), *self._ending]
            self._sessions = {}
        for session in sessions:
            session.end()
        deadline = time.monotonic() + HANDSHAKE_S  # simulators that hang end with this process
        for session in sessions:
            session.join(max(0.0, deadline - time.monotonic()))

    def _drop_lost(self) -> None:
        with self._lock:
            over = [name for name, session in self._sessions.items() if session.is_ending or session.is_over()]
            for name in over:
                self._end(name)
            self._ending = [session for session in self._ending if session.is_alive()]

    def _end(self, name: str) -> None:
        session = self._sessions.pop(name, None)
        if session is not None:
            session.end()
            self._ending.append(session)

    def _welcome(self, link: Link) -> None:
        # A client that sends byte by byte must not hold its slot for long.
        limit = threading.Timer(HANDSHAKE_S, link.close)
        limit.start()
        try:
            session = self._shake_hands(link)
        except (OSError, EmbodrlError) as error:
            logger.info("a client was refused: %s", error)
            session = None
        finally:
            limit.cancel()
            self._strangers.release()
        if session is None:
            link.close()
            return
        link.begin_pings()
        session.attach(link)
        try:
            while True:
                session.take(link.receive())
        except (OSError, MessageError) as error:
            logger.info("a connection ended: %s", error)
        finally:
            session.detach(link)

    def _shake_hands(self, link: Link) -> SimulatorSession | None:
        """Return the session a client asks for; None if it asks for none or is refused."""
        nonce = secrets.token_hex(16)
        challenge = {"version": __version__, "nonce": nonce, "asks_token": self._token is not None}
        link.send(LinkMessage(0, Frame(Kind.ITEM, value=challenge)).encode())
        hello = Fields(_mapping(link.receive().frame.value), "a hello", MessageError)
        theirs = hello.text("nonce")
        session = None
        try:
            self._check_token(hello.text("proof"), prove(self._token or "", "client", nonce, theirs))
            if name := hello.text("session", None):
                session = self._find(name, hello)
            answer = {"proof": prove(self._token or "", "server", nonce, theirs)}
        except EnvError as error:
            answer = {"error": error.message, "hint": error.hint, "code": error.code}
        link.send(LinkMessage(0, Frame(Kind.ITEM, value=answer)).encode())
        return session

    def _check_token(self, proof: str, wanted: str) -> None:
        if self._token is not None and not hmac.compare_digest(proof.encode(), wanted.encode()):
            hint = "set EMBODRL_TOKEN to the token printed by the server"
            raise EnvError("refuses the token", hint, code="env-remote-token")

    def _find(self, name: str, hello: Fields) -> SimulatorSession:
        reconnect_s = hello.number("reconnect_s", low=0.0, high=MAX_RECONNECT_S)
        with self._lock:
            session = self._sessions.get(name)
            if hello.flag("resume"):
                if session is None or session.is_ending:
                    raise EnvError("no longer has the simulator", "it is restarted", code="env-remote-lost")
                return session
            self._end(name)
            self._check_room()
            used = Counter(session.core for session in self._sessions.values())
            core = min(self._cores, key=lambda core: used[core])
            self._sessions[name] = SimulatorSession(reconnect_s, core, self._settings)
            return self._sessions[name]

    def _check_room(self) -> None:
        """Reject a simulator beyond ``max_processes``, including those still shutting down."""
        self._ending = [session for session in self._ending if session.is_alive()]
        in_use = sum(not session.is_ending for session in self._sessions.values())
        if in_use >= self._max_processes:
            hint = "start it with a higher --max-processes, or wait until lost runs have timed out"
            raise EnvError(f"has {self._max_processes} simulators already running", hint, code="env-remote-full")
        ending = sum(session.is_ending and session.is_alive() for session in self._sessions.values())
        ending += len(self._ending)
        if in_use + ending >= self._max_processes:
            hint = "retry when they have ended, or start it with a higher --max-processes"
            message = f"is still ending {ending} of at most {self._max_processes} simulators"
            raise EnvError(message, hint, code="env-remote-ending")


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
