"""Clients of policy servers: an observation of B rows becomes B concurrent requests, or one request of B rows.

Shapes: B batch, H chunk length of the server, A action dimensions.
"""

from __future__ import annotations

import asyncio
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from typing import Any, Protocol, TypeVar, cast
from urllib.parse import urlsplit, urlunsplit

import numpy as np

from embodrl.config.schema import GrootKeysConfig
from embodrl.errors import RemotePolicyError
from embodrl.serving.wire import TOKEN_VARIABLE
from embodrl.serving.wire.codec import Array, Message, need, openpi_default, openpi_envelope, pack, unpack
from embodrl.serving.wire.keys import WireMap
from embodrl.types import Observation

logger = logging.getLogger(__name__)

MAX_BYTES = 256 << 20
PROBE_S = 5.0
PROBE_TIMEOUT_S = 15.0
"""Seconds before a client probes a slow server, and the time limit of the probe."""
RETRY_S = 0.5
_T = TypeVar("_T")
_PASSING = ("[server-stopping]", "[server-model-hangs]")
"""Error codes of a server that is ending and may be replaced."""


def unreachable(url: str, error: object) -> RemotePolicyError:
    """Return the error for a server that does not answer."""
    text = str(error) or type(error).__name__
    if getattr(error, "status", None) in (401, 403):
        hint = f"put the token that the server printed into the environment variable {TOKEN_VARIABLE}"
        return RemotePolicyError(f"{url} refuses the token: {text}", hint, code="remote-token")
    hint = f"check model.url, the environment variable {TOKEN_VARIABLE}, and that the server is ready"
    return RemotePolicyError(f"{url} can't be reached: {text}", hint, code="remote-unreachable")


def refused(text: str) -> RemotePolicyError:
    """Return the error for a refusal where actions were expected."""
    hint = "check model.keys against the keys that the server reads; its output has the details"
    return RemotePolicyError(f"the server refused the observation: {text[:2000]}", hint, code="remote-refused")


def changed(url: str) -> RemotePolicyError:
    """Return the error for a server that came back with another policy."""
    text = f"{url} went away and came back with another policy"
    return RemotePolicyError(text, "repeat the evaluation", code="remote-changed")


class ClientSettings(Protocol):
    """Client settings: the section ``model`` of model=remote."""

    @property
    def url(self) -> str | None: ...

    @property
    def keys(self) -> GrootKeysConfig:
        """Configured keys, which override the ones the server announces."""
        ...

    @property
    def answer_timeout_s(self) -> float:
        """Seconds for the connection, and for each response."""
        ...

    @property
    def reconnect_timeout_s(self) -> float:
        """Seconds to keep reconnecting to a lost server."""
        ...


class Gone(Exception):
    """A connection ended before its response."""


def refusal(text: str) -> Exception:
    """Return the error for a refusal; ``Gone`` if the server is ending."""
    return Gone(text[:500]) if any(code in text for code in _PASSING) else refused(text)


def _keys(info: object) -> Message:
    """Return the keys that an embodrl server announces; {} for other servers."""
    keys = info.get("keys") if isinstance(info, Mapping) else None
    return keys if isinstance(keys, Mapping) else {}


def _identity(info: object) -> list[Any]:
    names = ("model", "keys", "num_action_chunks", "action_dim")
    return [info.get(name) for name in names] if isinstance(info, Mapping) else []


def keys_needed(missing: Iterable[str]) -> RemotePolicyError:
    """Return the error for keys that neither the configuration nor the server provides."""
    names = ", ".join(f"model.keys.{name}" for name in missing)
    hint = "set them, e.g. model.keys.images=[observation/image] model.keys.instruction=prompt"
    return RemotePolicyError(
        f"the server does not announce the keys of its observations: {names}", hint, code="remote-keys"
    )


class Client(ABC):
    """A connection to a server; its methods belong to one event loop."""

    def __init__(self, config: ClientSettings) -> None:
        assert config.url is not None
        self.url = config.url
        self.config = config
        self.token = os.environ.get(TOKEN_VARIABLE)
        self.keys = WireMap((), (), "")
        self._server_info: Any = None

    @abstractmethod
    async def connect(self) -> None:
        """Connect to the server and learn its keys.

        Raises:
            RemotePolicyError: the server can't be reached, or does not announce its keys.
        """

    @abstractmethod
    async def act(self, observation: Observation) -> Array:
        """Return actions ``[B,H,A]``.

        Raises:
            RemotePolicyError: the server refused the observation, or is gone.
            WireError: the observation does not fit the keys, or the response is malformed.
        """

    @abstractmethod
    async def close(self) -> None:
        """End the connection."""

    async def _with_reconnect(
        self, attempt: Callable[[], Awaitable[_T]], come_back: Callable[[], Awaitable[None]]
    ) -> _T:
        """Retry a request that a lost connection interrupted: servers keep no client state between requests.

        ``come_back`` reconnects, and refuses a server with another policy. Raises RemotePolicyError if the server is
        not back within ``model.reconnect_timeout_s`` or answers with an error.
        """
        loop = asyncio.get_running_loop()
        limit_s = self.config.reconnect_timeout_s
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

    def _learn(self, info: Message) -> None:
        """Use the configured keys, and the announced ones for the rest."""
        own = self.config.keys
        images = own.images or texts(info.get("images"))
        instruction = own.instruction or info.get("instruction")
        missing = [name for name, value in (("images", images), ("instruction", instruction)) if not value]
        if missing:
            raise keys_needed(missing)
        self.keys = WireMap(images, own.state or texts(info.get("state")), str(instruction))


def texts(value: object) -> tuple[str, ...]:
    """Return a list of texts as a tuple; () for anything else."""
    items = cast(list[object], value) if isinstance(value, (list, tuple)) else []
    return tuple(item for item in items if isinstance(item, str))


class HttpClient(Client):
    """`embodrl serve protocol=http`: one request per row."""

    def __init__(self, config: ClientSettings) -> None:
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
        self._server_info = await self._hello()
        self._learn(_keys(self._server_info))

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
        content = await self._with_reconnect(lambda: self._while_alive(self._exchange(message)), self._return)
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
            raise refusal(content.decode("utf-8", "replace"))
        return content

    async def _return(self) -> None:
        info = await self._hello()
        if _identity(info) != _identity(self._server_info):
            raise changed(self.url)

    async def _while_alive(self, exchange: Coroutine[Any, Any, _T]) -> _T:
        """Wait for a response; an embodrl server that does not answer health checks meanwhile is unreachable."""
        task = asyncio.ensure_future(exchange)
        try:
            while not (await asyncio.wait({task}, timeout=PROBE_S))[0]:
                if not _keys(self._server_info):
                    continue  # another implementation: openpi's own server answers nothing while it computes
                if self._probing is None or self._probing.done():
                    self._probing = asyncio.create_task(self._probe())
                await asyncio.wait({task, self._probing}, return_when=asyncio.FIRST_COMPLETED)
                if not task.done() and (problem := self._probing.result()):
                    raise unreachable(self.url, problem)
            return task.result()
        finally:
            task.cancel()

    async def _probe(self) -> str:
        """Return why the server counts as hung; "" if it answers, or is gone, which the request's connection shows."""
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
    """openpi's websocket: one connection per concurrent row."""

    def __init__(self, config: ClientSettings) -> None:
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
            self._free.clear()  # the connections of the lost server
            raise Gone("the connection was closed before the response")
        if not socket.closed:
            self._free.append(socket)
        if frame.type == self.aiohttp.WSMsgType.TEXT:
            raise refusal(frame.data)
        data: bytes = frame.data
        return data


def actions_in(answer: object) -> Array:
    """Return ``actions [H,A]`` of a response. Raises RemotePolicyError if the response has no actions."""
    actions = answer.get("actions") if isinstance(answer, Mapping) else None
    if not isinstance(actions, np.ndarray) or actions.ndim != 2:
        raise refused("a response without actions of shape [H,A]")
    return actions
