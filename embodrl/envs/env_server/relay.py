"""Local stand-in for a simulator on another machine: forwards an EnvManager's frames to an env server.

The EnvManager sees an ordinary simulator process with the same frames and shared memory; the server supervises the
simulator and reports its end. If the connection is cut, the relay reconnects for up to ``RemoteEnv.reconnect_s`` and
resends the request in progress; after that it ends, and the simulator counts as dead.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import Any

from embodrl.envs.env_server.link import Link, LinkMessage, connect, write_result
from embodrl.envs.env_server.videos import START, RemoteVideos
from embodrl.envs.pool.transport import Ring, spec_from_dict
from embodrl.envs.pool.worker_main import make_ring
from embodrl.errors import EmbodrlError, EnvError, EnvWorkerDied, MessageError
from embodrl.fields import Fields
from embodrl.processes.ending import leave
from embodrl.processes.frames import Frame, Kind, PeerGoneError
from embodrl.processes.serve import begin, describe_error
from embodrl.serving.wire import HOSTS_TOKEN_VARIABLE, TOKEN_VARIABLE

_PAUSE_S = 0.5
_CONNECT_S = 3.0
_NOT_SENT = ("remote", "memory_fd", "heartbeat_fd", "sys_path", "started_by_main_thread", "extensions")
_NOT_SENT += ("cpu", "numa_node")
logger = logging.getLogger("embodrl.envs")


def probe(address: str) -> None:
    """Check that an env server answers, runs the same version and knows the same token; EnvError if not."""
    try:
        connect(address, os.environ.get(TOKEN_VARIABLE), {}).close()
    except OSError as error:
        raise _unreachable(address, str(error)) from error


def _unreachable(address: str, problem: str) -> EnvError:
    hint = "start `embodrl env serve` there, and check env.remote and the network in between"
    return EnvError(f"the env server {address} can't be reached: {problem}", hint, code="env-remote-unreachable")


class RemoteSimulator:
    """The run's end of a simulator on an env server, given the fields of a ``RemoteEnv`` and the token."""

    def __init__(self, remote: Fields, token: str | None) -> None:
        self._address = remote.text("address")
        self._others = remote.texts("others")
        self._session = remote.text("session")
        self._token = token
        self._reconnect_s = remote.number("reconnect_s")
        self._changed = threading.Condition()
        self._link: Link | None = None
        self._serial = 0
        self._asked = b""  # the request in progress
        self._answer: Frame | None = None
        self._lost: EmbodrlError | None = None

    def start(self) -> None:
        """Connect, and keep the connection alive from a thread; EnvError if refused or not connected in time."""
        link = self._connect(resume=False)
        threading.Thread(target=self._keep, args=(link,), name="env-server", daemon=True).start()

    def ask(self, frame: Frame) -> Frame:
        """Return the answer to a request, reconnecting as needed; EmbodrlError if the simulator is lost."""
        with self._changed:
            self._serial += 1
            self._answer = None
            self._asked = LinkMessage(self._serial, frame).encode()
            link = self._link
            asked = self._asked
        if link is not None:
            try:
                link.send(asked)
            except OSError:
                link.close()  # the other thread reconnects and resends it
        with self._changed:
            self._changed.wait_for(lambda: self._answer is not None or self._lost is not None)
            if self._answer is None:
                raise self._lost or EnvWorkerDied("no answer")
            return self._answer

    def _keep(self, link: Link) -> None:
        while True:
            with self._changed:
                self._link = link
                asked = self._asked if self._answer is None else b""
            try:
                if asked:
                    link.send(asked)
                while True:
                    self._take(link.receive())
            except OSError as error:
                logger.warning("lost connection to %s: %s", self._address, error)
            except EmbodrlError as error:
                return self._end(error)
            finally:
                link.close()
                with self._changed:
                    self._link = None
            try:
                link = self._connect(resume=True)
            except EmbodrlError as error:
                return self._end(error)
            logger.warning("reconnected to %s", self._address)

    def _take(self, message: LinkMessage) -> None:
        with self._changed:
            if message.serial == self._serial:  # otherwise a duplicate answer to a resent request
                self._answer = message.frame
                self._changed.notify_all()

    def _end(self, error: EmbodrlError) -> None:
        with self._changed:
            self._lost = error
            self._changed.notify_all()

    def _connect(self, resume: bool) -> Link:
        hello = {"session": self._session, "resume": resume, "reconnect_s": self._reconnect_s}
        deadline = time.monotonic() + self._reconnect_s
        addresses = [self._address, *(() if resume else self._others)]  # only its own server has a running simulator
        problems: dict[str, EnvError] = {}
        while True:
            for address in list(addresses):
                try:
                    link = connect(address, self._token, hello, _CONNECT_S)
                except OSError as error:
                    problems[address] = _unreachable(address, f"for {self._reconnect_s:g} s: {error}")
                except EnvError as error:
                    problems[address] = error
                    # A restart may arrive before the server has reaped the simulator it replaces.
                    if error.code == "env-remote-ending":
                        break
                    if error.code != "env-remote-full":
                        raise
                    addresses.remove(address)
                else:
                    if address != self._address:
                        logger.warning("%s; %s runs the simulator now", problems[self._address], address)
                    self._address = address
                    return link
            if not addresses or time.monotonic() >= deadline:
                raise problems[self._address]
            time.sleep(_PAUSE_S)


class Relay:
    """Answers an EnvManager's frames from the server; ``start`` are the fields of the START frame."""

    def __init__(self, start: Fields) -> None:
        self._start = start
        self._ring: Ring | None = None
        self._videos = RemoteVideos()
        token = os.environ.get(HOSTS_TOKEN_VARIABLE) or os.environ.get(TOKEN_VARIABLE)
        self._simulator = RemoteSimulator(start.fields("remote"), token)

    def answer(self, frame: Frame) -> Frame:
        """Return the answer to a frame; EnvWorkerDied if the simulator is lost."""
        answer = self._simulator.ask(Frame(frame.kind, frame.number, frame.argument, self._content(frame)))
        if answer.kind == Kind.CLOSE:
            raise EnvWorkerDied(str(answer.value))
        if answer.kind != Kind.OK:
            return Frame(Kind.RAISED, frame.number, frame.argument, answer.value)
        if frame.kind == Kind.START:
            self._ring = make_ring(spec_from_dict(answer.value), self._start.integer("memory_fd"))
        elif frame.kind in (Kind.STEP, Kind.RESET):
            write_result(self._mapped().slots[frame.number], answer.value, frame.kind == Kind.STEP)
            self._videos.keep(answer.value.get("videos", {}))
            return Frame(Kind.OK, frame.number, frame.argument)
        return Frame(Kind.OK, frame.number, frame.argument, answer.value)

    def _mapped(self) -> Ring:
        if self._ring is None:
            raise MessageError("a request came before START was answered")
        return self._ring

    def _content(self, frame: Frame) -> Any:
        if frame.kind == Kind.START:
            self._simulator.start()
            remote = self._start.fields("remote")
            content = {name: value for name, value in self._start.content.items() if name not in _NOT_SENT}
            return content | {name: remote.content[name] for name in ("python", "pin_cpus", "timeouts")}
        if frame.kind == Kind.STEP:
            request = self._mapped().request
            return {"actions": request["actions"][:, : frame.argument], "active": request["active"]}
        if frame.kind == Kind.RESET:
            return {name: self._mapped().request[name][: frame.argument] for name in ("seeds", "task_ids", "indices")}
        if frame.kind == Kind.CALL and frame.value["method"] == START:
            return {"method": START, "arguments": self._videos.start(frame.value["arguments"])}
        return frame.value


def main(socket_fd: int) -> None:
    """Serve until closed or until the parent has ended."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    try:
        connection, start = begin(socket_fd)
        relay = Relay(Fields(start, "the START frame", MessageError))
        frame = Frame(Kind.START)
        while True:
            try:
                answer = relay.answer(frame)
            except EnvError as error:
                if frame.kind != Kind.START or isinstance(error, EnvWorkerDied):
                    raise
                answer = Frame(Kind.RAISED, frame.number, frame.argument, describe_error(error))
            connection.send(answer)
            if frame.kind == Kind.CLOSE or (frame.kind == Kind.START and answer.kind == Kind.RAISED):
                leave(0)
            frame = connection.receive()
    except PeerGoneError:
        leave(0)
    except EmbodrlError as error:
        logger.error("%s", error)  # the end of its log becomes part of the EnvManager's message
        leave(1)
