"""Clients of policy servers: an observation of B rows becomes B requests at the same time, or one of B rows.

Shapes: B batch, H actions of a chunk as the server has it, A action dimensions.
"""

from __future__ import annotations

import asyncio
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, cast

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

MAX_BYTES = 256 << 20
_CLOSED_HINT = "look at the server's output"


def unreachable(url: str, error: object) -> RemotePolicyError:
    """Return the error for a server that does not answer."""
    text = str(error) or type(error).__name__
    hint = f"check model.url, the environment variable {TOKEN_VARIABLE}, and that the server is ready"
    return RemotePolicyError(f"{url} can't be reached: {text}", hint, code="remote-unreachable")


def refused(text: str) -> RemotePolicyError:
    """Return the error for what a server answered instead of actions."""
    hint = "check model.keys against what the server reads; its output has the details"
    return RemotePolicyError(f"the server refused the observation: {text[:2000]}", hint, code="remote-refused")


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

    def _open(self) -> None:
        headers = {} if self.token is None else {"Authorization": f"Bearer {self.token}"}
        timeout = self.aiohttp.ClientTimeout(total=self.config.answer_timeout_s)
        connector = self.aiohttp.TCPConnector(limit=0)
        self.session = self.aiohttp.ClientSession(headers=headers, timeout=timeout, connector=connector)

    async def connect(self) -> None:
        self._open()
        url = self.url.rstrip("/")
        try:
            async with self.session.get(f"{url}/info") as answer:
                answer.raise_for_status()
                told = await answer.json()
        except (self.aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise unreachable(url, error) from error
        self._learn(told.get("keys", {}) if isinstance(told, dict) else {})

    async def act(self, observation: Observation) -> Array:
        return np.stack(await asyncio.gather(*(self._ask(observation, row) for row in range(len(observation.images)))))

    async def _ask(self, observation: Observation, row: int) -> Array:
        body = pack({"observation": self.keys.message(observation, row)}, openpi_default)
        headers = {"Content-Type": "application/msgpack"}
        try:
            async with self.session.post(f"{self.url.rstrip('/')}/act", data=body, headers=headers) as answer:
                content = await answer.read()
        except (self.aiohttp.ClientError, TimeoutError) as error:
            raise unreachable(self.url, error) from error
        if answer.status != 200:
            raise refused(content.decode("utf-8", "replace"))
        return actions_in(unpack(content, openpi_envelope))

    async def close(self) -> None:
        if self.session is not None:
            await self.session.close()


class OpenpiClient(HttpClient):
    """openpi's websocket: a connection for every row that is asked about at the same time.

    A server is stateless between requests, so one whose connection broke is asked once more.
    """

    def __init__(self, config: RemoteConfig) -> None:
        super().__init__(config)
        self._free: list[Any] = []

    async def connect(self) -> None:
        self._open()
        socket, metadata = await self._connection()
        self._free.append(socket)
        told = metadata.get("keys") if isinstance(metadata, Mapping) else None
        self._learn(told if isinstance(told, Mapping) else {})

    async def _connection(self) -> tuple[Any, Any]:
        headers = {} if self.token is None else {"Authorization": f"Api-Key {self.token}"}
        limit_s = self.config.answer_timeout_s
        try:
            opening = self.session.ws_connect(self.url, max_msg_size=MAX_BYTES, compress=0, headers=headers)
            socket = await asyncio.wait_for(opening, limit_s)
            return socket, unpack(await socket.receive_bytes(timeout=limit_s), openpi_envelope)
        except (self.aiohttp.ClientError, TimeoutError, TypeError, OSError) as error:
            raise unreachable(self.url, error) from error

    async def _ask(self, observation: Observation, row: int) -> Array:
        data = pack(self.keys.message(observation, row), openpi_default)
        for attempt in range(2):
            socket = self._free.pop() if self._free else (await self._connection())[0]
            frame = await self._exchange(socket, data)
            if frame.type == self.aiohttp.WSMsgType.TEXT:
                if not socket.closed:
                    self._free.append(socket)
                raise refused(frame.data)
            if frame.type == self.aiohttp.WSMsgType.BINARY:
                self._free.append(socket)
                return actions_in(unpack(frame.data, openpi_envelope))
            self._free.clear()  # they belonged to a server that is gone
            if attempt:
                break
        raise unreachable(self.url, "the connection was closed before an answer came")

    async def _exchange(self, socket: Any, data: bytes) -> Any:
        try:
            await socket.send_bytes(data)
        except (self.aiohttp.ClientError, OSError):
            return self.aiohttp.WSMessage(self.aiohttp.WSMsgType.CLOSED, None, None)
        try:
            return await socket.receive(timeout=self.config.answer_timeout_s)
        except TimeoutError as error:
            limit = f"{self.config.answer_timeout_s:g} s (model.answer_timeout_s)"
            raise unreachable(self.url, f"no answer within {limit}") from error


class GrootClient(Client):
    """GR00T's ZMQ in the dialect of N1.6, which N1.7 reads as well: one request of B rows."""

    def __init__(self, config: RemoteConfig) -> None:
        super().__init__(config)
        self._asyncio: Any = need("zmq.asyncio")
        self._zmq: Any = need("zmq")
        self._address = "tcp://" + self.url.partition("://")[2]
        self._context: Any = None
        self._actions: tuple[str, ...] = ()
        self._lock = asyncio.Lock()  # a REQ socket has one request at a time
        self._socket: Any = None

    async def connect(self) -> None:
        self._context = self._asyncio.Context()
        told = await self._call({"endpoint": "get_modality_config"})
        names: dict[str, tuple[str, ...]] = {}
        for kind, content in told.items() if isinstance(told, Mapping) else ():
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
        answer = await self._call(request)
        actions = answer[0] if isinstance(answer, list) and answer else None
        if not isinstance(actions, Mapping):
            raise refused("an answer without actions")
        found = [lookup(actions, name) for name in self._actions or tuple(map(str, actions))]
        if not found or not all(isinstance(part, np.ndarray) and part.ndim == 3 for part in found):
            raise refused(f"actions {', '.join(map(str, actions))} where {', '.join(self._actions)} were due")
        return np.concatenate(cast(list[Array], found), axis=-1)

    async def _call(self, request: dict[str, Any]) -> Any:
        if self.token is not None:
            request = request | {"api_token": self.token}
        async with self._lock:
            if self._socket is None:
                self._socket = self._context.socket(self._zmq.REQ)
                self._socket.linger = 0
                self._socket.maxmsgsize = MAX_BYTES
                self._socket.connect(self._address)
            await self._socket.send(pack(request, groot_npy_default))
            try:
                data = await asyncio.wait_for(self._socket.recv(), self.config.answer_timeout_s)
            except TimeoutError as error:
                self._socket.close()
                self._socket = None
                limit = f"{self.config.answer_timeout_s:g} s (model.answer_timeout_s)"
                raise unreachable(self.url, f"no answer within {limit}") from error
        answer = unpack(data, groot_envelope)
        if isinstance(answer, Mapping) and "error" in answer:
            raise refused(str(answer["error"]))
        return answer

    async def close(self) -> None:
        if self._context is not None:
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
