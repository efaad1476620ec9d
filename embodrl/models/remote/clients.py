"""Clients of policy servers: an observation of B rows becomes B requests at the same time, or one of B rows.

Shapes: B batch, H actions of a chunk as the server has it, A action dimensions.
"""

from __future__ import annotations

import asyncio
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit, urlunsplit

import numpy as np

from embodrl.config.schema import GrootKeysConfig
from embodrl.errors import RemotePolicyError
from embodrl.models.remote.spec import TOKEN_VARIABLE, RemoteConfig
from embodrl.types import Observation
from embodrl.wire.codec import (
    Array,
    Message,
    groot_envelope,
    groot_npy_default,
    need,
    openpi_default,
    openpi_envelope,
    pack,
    unpack,
)
from embodrl.wire.keys import WireMap, lookup, put

logger = logging.getLogger(__name__)

MAX_BYTES = 256 << 20
PROBE_S, PROBE_TIMEOUT_S = 5.0, 15.0
"""An answer that takes longer makes a client ask whether the server lives, and how long that may take."""
RETRY_S = 0.5
_T = TypeVar("_T")
_PASSING = ("[server-stopping]", "[server-model-hangs]")
"""Refusals of a server that ends, and may be replaced by another one."""


def unreachable(url: str, error: object) -> RemotePolicyError:
    """Return the error for a server that does not answer."""
    text = str(error) or type(error).__name__
    hint = f"check model.url, the environment variable {TOKEN_VARIABLE}, and that the server is ready"
    return RemotePolicyError(f"{url} can't be reached: {text}", hint, code="remote-unreachable")


def refused(text: str) -> RemotePolicyError:
    """Return the error for what a server answered instead of actions."""
    hint = "check model.keys against what the server reads; its output has the details"
    return RemotePolicyError(f"the server refused the observation: {text[:2000]}", hint, code="remote-refused")


def changed(url: str) -> RemotePolicyError:
    """Return the error for a server that came back as another one."""
    text = f"{url} was gone and came back with another policy"
    return RemotePolicyError(text, "repeat the evaluation", code="remote-changed")


class Gone(Exception):
    """A connection ended before an answer came."""


def _refusal(text: str) -> Exception:
    return Gone(text[:500]) if any(code in text for code in _PASSING) else refused(text)


def _keys(told: object) -> Message:
    """Return the keys that a server of embodrl has told; {} of another make."""
    keys = told.get("keys") if isinstance(told, Mapping) else None
    return keys if isinstance(keys, Mapping) else {}


def _identity(told: object) -> list[Any]:
    names = ("model", "keys", "num_action_chunks", "action_dim")
    return [told.get(name) for name in names] if isinstance(told, Mapping) else []


def keys_needed(missing: Iterable[str]) -> RemotePolicyError:
    """Return the error for keys that neither the configuration nor the server tells."""
    names = ", ".join(f"model.keys.{name}" for name in missing)
    hint = "set them, e.g. model.keys.images=[observation/image] model.keys.instruction=prompt"
    return RemotePolicyError(f"the server does not say what its observations hold: {names}", hint, code="remote-keys")


class Client(ABC):
    """A connection to a server. Its methods belong to one event loop.

    Args:
        config: section ``model``.
    """

    def __init__(self, config: RemoteConfig) -> None:
        assert config.url is not None
        self.url, self.config = config.url, config
        self.token = os.environ.get(TOKEN_VARIABLE)
        self.keys = WireMap((), (), "")
        self._told: Any = None

    @abstractmethod
    async def connect(self) -> None:
        """Reach the server, and learn its keys.

        Raises:
            RemotePolicyError: it can't be reached, or does not tell its keys.
        """

    @abstractmethod
    async def act(self, observation: Observation) -> Array:
        """Return ``[B,H,A]``.

        Raises:
            RemotePolicyError: the server refused the observation, or is gone.
            WireError: the observation does not fit the keys, or the answer is malformed.
        """

    @abstractmethod
    async def close(self) -> None:
        """End the connection."""

    async def _persist(self, attempt: Callable[[], Awaitable[_T]], come_back: Callable[[], Awaitable[None]]) -> _T:
        """Repeat a request that a lost connection has cut short: servers keep nothing of a client between requests.

        Args:
            attempt: of the request.
            come_back: reaches the server again, and refuses another one in its place.

        Raises:
            RemotePolicyError: the server is not back within ``model.reconnect_timeout_s``, or answers an error.
        """
        loop, limit_s = asyncio.get_running_loop(), self.config.reconnect_timeout_s
        lost: float | None = None
        while True:
            try:
                if lost is not None:
                    await come_back()
                return await attempt()
            except Gone as error:
                problem = unreachable(self.url, error)
            except RemotePolicyError as error:
                if lost is None or error.code != "remote-unreachable":
                    raise
                problem = error
            if lost is None:
                lost = loop.time()
                logger.warning("%s; trying for %g s (model.reconnect_timeout_s)", problem.message, limit_s)
            else:
                await asyncio.sleep(RETRY_S)
            if loop.time() - lost >= limit_s:
                raise problem

    def _late(self) -> RemotePolicyError:
        limit = f"{self.config.answer_timeout_s:g} s (model.answer_timeout_s)"
        return unreachable(self.url, f"no answer within {limit}")

    def _learn(self, told: Message) -> None:
        """Take the keys that are configured, and the others from what the server told."""
        own: GrootKeysConfig = self.config.keys
        images = own.images or _texts(told.get("images"))
        instruction = own.instruction or told.get("instruction")
        missing = [name for name, value in (("images", images), ("instruction", instruction)) if not value]
        if missing:
            raise keys_needed(missing)
        self.keys = WireMap(images, own.state or _texts(told.get("state")), str(instruction))


def _texts(value: object) -> tuple[str, ...]:
    items = cast(list[object], value) if isinstance(value, (list, tuple)) else []
    return tuple(item for item in items if isinstance(item, str))


class HttpClient(Client):
    """`embodrl serve protocol=http`: one request per row."""

    def __init__(self, config: RemoteConfig) -> None:
        super().__init__(config)
        self.aiohttp: Any = need("aiohttp")
        self.session: Any = None
        self._probing: asyncio.Task[str] | None = None

    def _open(self) -> None:
        headers = {} if self.token is None else {"Authorization": f"Bearer {self.token}"}
        timeout = self.aiohttp.ClientTimeout(total=self.config.answer_timeout_s)
        connector = self.aiohttp.TCPConnector(limit=0)
        self.session = self.aiohttp.ClientSession(headers=headers, timeout=timeout, connector=connector)

    async def connect(self) -> None:
        self._open()
        self._told = await self._hello()
        self._learn(_keys(self._told))

    async def _hello(self) -> Any:
        url = self.url.rstrip("/")
        try:
            async with self.session.get(f"{url}/info") as answer:
                answer.raise_for_status()
                return await answer.json()
        except (self.aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise unreachable(url, error) from error

    async def act(self, observation: Observation) -> Array:
        return np.stack(await asyncio.gather(*(self._ask(observation, row) for row in range(len(observation.images)))))

    async def _ask(self, observation: Observation, row: int) -> Array:
        message = self.keys.message(observation, row)
        content = await self._persist(lambda: self._while_alive(self._exchange(message)), self._return)
        return actions_in(unpack(content, openpi_envelope))

    async def _exchange(self, message: dict[str, Any]) -> bytes:
        body = pack({"observation": message}, openpi_default)
        headers = {"Content-Type": "application/msgpack"}
        try:
            async with self.session.post(f"{self.url.rstrip('/')}/act", data=body, headers=headers) as answer:
                content = await answer.read()
        except TimeoutError as error:
            raise self._late() from error
        except self.aiohttp.ClientError as error:
            raise Gone(error) from error
        if answer.status != 200:
            raise _refusal(content.decode("utf-8", "replace"))
        return content

    async def _return(self) -> None:
        told = await self._hello()
        if _identity(told) != _identity(self._told):
            raise changed(self.url)

    async def _while_alive(self, exchange: Coroutine[Any, Any, _T]) -> _T:
        """Wait for an answer; a server of embodrl that does not even say that it lives meanwhile is unreachable."""
        task = asyncio.ensure_future(exchange)
        try:
            while not (await asyncio.wait({task}, timeout=PROBE_S))[0]:
                if not _keys(self._told):
                    continue  # of another make: openpi's own server does not answer anything while it computes
                if self._probing is None or self._probing.done():
                    self._probing = asyncio.create_task(self._probe())
                await asyncio.wait({task, self._probing}, return_when=asyncio.FIRST_COMPLETED)
                if not task.done() and (problem := self._probing.result()):
                    raise unreachable(self.url, problem)
            return task.result()
        finally:
            task.cancel()

    async def _probe(self) -> str:
        """Return why the server counts as hung; "" if it answers, or is gone, as the connection of a request tells."""
        parts = urlsplit(self.url)
        url = urlunsplit((parts.scheme.replace("ws", "http"), parts.netloc, "/health", "", ""))
        try:
            async with self.session.get(url, timeout=self.aiohttp.ClientTimeout(total=PROBE_TIMEOUT_S)):
                return ""
        except TimeoutError:
            return f"the server hangs: no sign of life for {PROBE_S + PROBE_TIMEOUT_S:g} s"
        except self.aiohttp.ClientError:
            return ""

    async def close(self) -> None:
        if self.session is not None:
            await self.session.close()


class OpenpiClient(HttpClient):
    """openpi's websocket: a connection for every row that is asked about at the same time."""

    def __init__(self, config: RemoteConfig) -> None:
        super().__init__(config)
        self._free: list[Any] = []

    async def _hello(self) -> Any:
        socket, metadata = await self._connection()
        self._free.append(socket)
        return metadata

    async def _connection(self) -> tuple[Any, Any]:
        headers = {} if self.token is None else {"Authorization": f"Api-Key {self.token}"}
        limit_s = self.config.answer_timeout_s
        try:
            opening = self.session.ws_connect(self.url, max_msg_size=MAX_BYTES, compress=0, headers=headers)
            socket = await asyncio.wait_for(opening, limit_s)
            return socket, unpack(await socket.receive_bytes(timeout=limit_s), openpi_envelope)
        except (self.aiohttp.ClientError, TimeoutError, TypeError, OSError) as error:
            raise unreachable(self.url, error) from error

    async def _exchange(self, message: dict[str, Any]) -> bytes:
        try:
            socket = self._free.pop() if self._free else (await self._connection())[0]
        except RemotePolicyError as error:
            raise Gone(error.message) from error
        try:
            await socket.send_bytes(pack(message, openpi_default))
            frame = await socket.receive(timeout=self.config.answer_timeout_s)
        except TimeoutError as error:
            raise self._late() from error
        except (self.aiohttp.ClientError, OSError) as error:
            raise Gone(error) from error
        if frame.type not in (self.aiohttp.WSMsgType.TEXT, self.aiohttp.WSMsgType.BINARY):
            self._free.clear()  # they belonged to a server that is gone
            raise Gone("the connection was closed before an answer came")
        if not socket.closed:
            self._free.append(socket)
        if frame.type == self.aiohttp.WSMsgType.TEXT:
            raise _refusal(frame.data)
        data: bytes = frame.data
        return data


class GrootClient(Client):
    """GR00T's ZMQ in the dialect of N1.6, which N1.7 reads as well: one request of B rows.

    ZMQ's threads send heartbeats and answer them while the policy computes, so that a server that is stopped or gone
    is noticed.
    """

    def __init__(self, config: RemoteConfig) -> None:
        super().__init__(config)
        self._asyncio: Any = need("zmq.asyncio")
        self._zmq: Any = need("zmq")
        self._address = "tcp://" + self.url.partition("://")[2]
        self._context: Any = None
        self._actions: tuple[str, ...] = ()
        self._lock = asyncio.Lock()  # a REQ socket has one request at a time
        self._socket: Any = None
        self._monitor: Any = None

    async def connect(self) -> None:
        self._context = self._asyncio.Context()
        self._told = await self._hello(self.config.answer_timeout_s)
        names: dict[str, tuple[str, ...]] = {}
        for kind, content in self._told.items() if isinstance(self._told, Mapping) else ():
            as_json = content.get("as_json") if isinstance(content, Mapping) else None
            names[kind] = _texts(as_json.get("modality_keys")) if isinstance(as_json, Mapping) else ()
        language = names.get("language", ())
        self._learn(
            {
                "images": [f"video.{name}" for name in names.get("video", ())],
                "state": [f"state.{name}" for name in names.get("state", ())],
                "instruction": language[0] if language else None,
            }
        )
        self._actions = tuple(text.rpartition(":")[0] or text for text in self.config.keys.actions) or names.get(
            "action", ()
        )

    async def _hello(self, limit_s: float) -> Any:
        return await self._call({"endpoint": "get_modality_config"}, limit_s)

    async def _return(self) -> None:
        # ZMQ connects whenever the server is back, and does not say that it is not.
        if await self._hello(self.config.reconnect_timeout_s) != self._told:
            raise changed(self.url)

    async def act(self, observation: Observation) -> Array:
        rows = [self.keys.message(observation, row) for row in range(len(observation.images))]
        content: dict[str, Any] = {"video": {}, "state": {}, "language": {}}
        for key in rows[0]:
            column = [row[key] for row in rows]
            if key == self.keys.instruction:
                content["language"][key.removeprefix("language.")] = [[text] for text in column]
            else:
                put(content, key, np.stack(column)[:, None], nested=True)
        request = {"endpoint": "get_action", "data": {"observation": content, "options": None}}
        answer = await self._persist(lambda: self._call(request, self.config.answer_timeout_s), self._return)
        actions = answer[0] if isinstance(answer, list) and answer else None
        if not isinstance(actions, Mapping):
            raise refused("an answer without actions")
        found = [lookup(actions, name) for name in self._actions or tuple(map(str, actions))]
        if not found or not all(isinstance(part, np.ndarray) and part.ndim == 3 for part in found):
            raise refused(f"actions {', '.join(map(str, actions))} where {', '.join(self._actions)} were due")
        return np.concatenate(cast(list[Array], found), axis=-1)

    def _connected(self) -> Any:
        if self._socket is None:
            self._socket = self._context.socket(self._zmq.REQ)
            self._socket.linger = 0
            self._socket.maxmsgsize = MAX_BYTES
            self._socket.heartbeat_ivl, self._socket.heartbeat_timeout = int(1e3 * PROBE_S), int(1e3 * PROBE_TIMEOUT_S)
            self._monitor = self._socket.get_monitor_socket(self._zmq.EVENT_DISCONNECTED)
            self._socket.connect(self._address)
        return self._socket

    def _disconnect(self) -> None:
        if self._socket is not None:
            self._socket.disable_monitor()
            self._monitor.close()
            self._socket.close()
            self._socket = None

    async def _call(self, request: dict[str, Any], limit_s: float) -> Any:
        if self.token is not None:
            request = request | {"api_token": self.token}
        async with self._lock:
            socket = self._connected()
            await socket.send(pack(request, groot_npy_default))
            answer, lost = asyncio.ensure_future(socket.recv()), asyncio.ensure_future(self._monitor.recv_multipart())
            await asyncio.wait({answer, lost}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            is_lost = lost.done()
            lost.cancel()
            if not answer.done():
                answer.cancel()
                self._disconnect()
                raise Gone("the connection has ended, or the server gives no sign of life") if is_lost else self._late()
            data = answer.result()
        found = unpack(data, groot_envelope)
        if isinstance(found, Mapping) and "error" in found:
            raise _refusal(str(found["error"]))
        return found

    async def close(self) -> None:
        if self._context is not None:
            self._disconnect()
            self._context.destroy(linger=0)  # a context with an open socket would wait for it when it is collected


def actions_in(answer: object) -> Array:
    """Return ``actions [H,A]`` of an answer.

    Raises:
        RemotePolicyError: it has none.
    """
    actions = answer.get("actions") if isinstance(answer, Mapping) else None
    if not isinstance(actions, np.ndarray) or actions.ndim != 2:
        raise refused("an answer without actions of shape [H,A]")
    return actions


CLIENTS: Mapping[str, type[Client]] = {
    "ws": OpenpiClient,
    "wss": OpenpiClient,
    "http": HttpClient,
    "https": HttpClient,
    "tcp": GrootClient,
    "zmq": GrootClient,
}
"""Scheme of a URL -> client."""
