"""Common parts of the protocols: addresses, tokens, and the HTTP and websocket listener."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ssl
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from embodrl.config.policy_card import reads_state, trained_state_dim
from embodrl.config.schema import Config, ServeConfig, WireKeysConfig
from embodrl.errors import EmbodrlError, ServingError, WireError
from embodrl.fields import TooLargeError, unpack
from embodrl.hybrid_engines.weight_sync.follower import WeightSource
from embodrl.serving import door
from embodrl.serving.core import ModelCore
from embodrl.serving.door import ConnectionLimiter, bound_logs
from embodrl.serving.wire.codec import need
from embodrl.serving.wire.keys import WireMap, vector_of
from embodrl.types import Observation

if TYPE_CHECKING:
    from aiohttp.web import AppRunner, Request, StreamResponse, WebSocketResponse

OPEN_PATHS = ("/health", "/healthz")
"""Health checks, answered without a token."""
VERSION_HEADER = "X-Policy-Version"
"""Response header with the version of the weights."""
CLOSE_S = 1.0
MB = 1 << 20
_STATUS = {
    "server-stopping": 503,
    "server-model-hangs": 503,
    "wire-too-large": 413,
    "wire-encoding": 400,
    "wire-slow": 408,
}


class Service:
    """The served policy, as the protocols see it.

    Args:
        token: token that clients must send; None for none.
    """

    def __init__(self, core: ModelCore, config: Config, token: str | None) -> None:
        self.core = core
        self.config = config
        self.token = token
        self.source = WeightSource(core.engine)
        # A checkpoint records the dimension; the card belongs to the policy that its run started from.
        seen = core.engine.policy.seen_state_dim
        self._state_dim = trained_state_dim(config) if seen is None else seen
        reads = reads_state(config)
        self._needs_state = self._state_dim != 0 and (reads or (reads is None and self._state_dim is not None))
        core.check_observation = self.check_state

    def check_state(self, observation: Observation) -> None:
        """Refuse an observation without the state that the policy was trained on, rather than acting on zeros.

        Raises:
            WireError: the state is missing or has a wrong number of values.
        """
        found = observation.state.shape[1]
        if self.settings.pad_state or not self._needs_state or found == (self._state_dim or found) != 0:
            return
        wanted = "a state" if self._state_dim is None else f"a state of {self._state_dim} numbers"
        raise WireError(
            f"the policy was trained on {wanted}, and the observation has {found or 'none'}",
            "send it under the key that the server printed at startup; serve.pad_state=true pads missing"
            " values with zeros",
            code="wire-state",
        )

    @property
    def settings(self) -> ServeConfig:
        return self.config.serve

    @property
    def max_bytes(self) -> int:
        """Size limit of a message."""
        return self.settings.max_message_mb * MB

    @property
    def horizon(self) -> int:
        """Number of actions executed per chunk where the server returns one action at a time."""
        return self.settings.execution_horizon or self.config.model.num_action_chunks

    def admits(self, token: object) -> bool:
        """Whether a token is right, compared in constant time."""
        if self.token is None:
            return True
        return isinstance(token, str) and hmac.compare_digest(
            *(text.encode(errors="surrogatepass") for text in (token, self.token))
        )

    def wire_map(self, keys: WireKeysConfig, image: str, state: str, instruction: str) -> WireMap:
        """Return the message keys of an observation: configured keys first, else the protocol's own.

        ``image`` has ``{}`` in place of the camera's name.
        """
        cameras = self.config.env.cameras
        images = keys.images[: len(cameras)] or tuple(image.format(camera.name) for camera in cameras)
        return WireMap(images, keys.state or (state,), keys.instruction or instruction)

    def prefix(self, message: object) -> tuple[NDArray[np.float32], int] | None:
        """Return the client's remaining actions and the delay, for real-time chunking; None without ``rtc``.

        ``rtc`` is ``{"actions": [N,A], "delay": d}``: the actions from the observation's time on, of which the first d
        are executed before the response arrives.

        Raises:
            WireError: ``rtc`` is malformed, or ``serve.decoding`` is not greedy, which continuing a chunk requires.
        """
        content = message.get("rtc") if isinstance(message, Mapping) else None
        if content is None:
            return None
        model = self.config.model
        decoding = self.config.serve.decoding
        if decoding != "greedy":
            message = f"a chunk is continued greedily, but serve.decoding={decoding}"
            raise WireError(message, "leave 'rtc' out, or serve with serve.decoding=greedy", code="wire-rtc")
        hint = (
            f"send {{'actions': [N,{model.action_dim}], 'delay': 0 to N}} with 1 to {model.num_action_chunks} actions"
        )
        found = content.get("actions") if isinstance(content, Mapping) else None
        delay = content.get("delay") if isinstance(content, Mapping) else None
        rows = [vector_of(row, "rtc.actions") for row in found] if isinstance(found, (list, np.ndarray)) else []
        fits = 0 < len(rows) <= model.num_action_chunks and all(row.shape == (model.action_dim,) for row in rows)
        if not fits or type(delay) is not int or not 0 <= delay <= len(rows):
            raise WireError("'rtc' is malformed", hint, code="wire-rtc")
        return np.stack(rows), delay

    def example(self) -> Observation:
        """Return a black observation ``[1]`` of the configured cameras, without state."""
        cameras = self.config.env.cameras
        height = cameras[0].height
        width = cameras[0].width
        images = np.zeros((1, len(cameras), height, width, 3), np.uint8)
        return Observation(images, np.zeros((1, 0), np.float32), ["do the task"], np.zeros(1, np.int32))

    def info(self, keys: WireMap) -> dict[str, object]:
        """Return the policy's properties for clients."""
        model = self.config.model
        return {
            "model": model.model_type,
            "policy_version": self.core.version,
            "num_action_chunks": model.num_action_chunks,
            "action_dim": model.action_dim,
            "cameras": [camera.name for camera in self.config.env.cameras],
            "keys": {"images": list(keys.images), "state": list(keys.state), "instruction": keys.instruction},
        }


class Listener(ABC):
    """One protocol at one address.

    Attributes:
        name: registered name of the protocol.
        scheme: scheme of its URL.
        keys: message keys of an observation, set by the constructor (``Service.wire_map``); none in protocols of text.
    """

    name: str
    scheme: str
    keys: WireMap

    def __init__(self, service: Service) -> None:
        self.service = service
        self.core = service.core

    def takes(self) -> str:
        """Return what a message holds, for the lines printed at startup."""
        return self.keys.describe()

    @abstractmethod
    async def start(self, host: str, port: int) -> int:
        """Listen; return the port. Raises OSError if the address is not available."""

    @abstractmethod
    async def stop_accepting(self) -> None:
        """Stop accepting connections; existing ones stay open."""

    @abstractmethod
    async def close(self) -> None:
        """Close all connections."""


Handler: TypeAlias = "Callable[[Request], Awaitable[StreamResponse]]"
"""aiohttp request handler."""


class HttpListener(Listener):
    """A protocol over HTTP or websockets; also answers GET /health, /healthz and /metrics.

    Clients send the token as ``Authorization: Bearer TOKEN`` (or ``Api-Key TOKEN``), or, if they can't set headers, in
    the URL: ``?token=TOKEN``.
    """

    scheme = "http"
    max_strangers: int | None = None
    """Limit on connections without an admitted request; None for the default of ``ConnectionLimiter``."""

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self.web: Any = need("aiohttp.web")
        self._connections = 0
        self._sockets: set[WebSocketResponse] = set()
        self._runner: AppRunner | None = None
        self._limiter: ConnectionLimiter | None = None

    def routes(self) -> list[tuple[str, str, Handler]]:
        """Return (method, path, handler) of each route."""
        return [("GET", "/", self._websocket)]

    def refusal(self, content: dict[str, str], status: int) -> StreamResponse:
        """Return the response to a request that is not admitted; ``content`` has ``error`` and ``code``."""
        return self.web.json_response(content, status=status)

    async def body(self, request: Request) -> bytes:
        """Return the body of a request.

        Raises:
            WireError: the body is too large, too slow, or not in its stated encoding.
        """
        encoding = request.headers.get("Content-Encoding", "identity").strip().lower()
        if encoding not in ("identity", "gzip", "deflate"):
            raise WireError(
                f"Content-Encoding {encoding!r:.40} is not supported",
                "use gzip, deflate, or no encoding",
                code="wire-encoding",
            )
        try:
            async with asyncio.timeout(door.BODY_S):
                content = await request.read()
            return content if encoding == "identity" else unpack(content, self.service.max_bytes)
        except (self.web.HTTPRequestEntityTooLarge, TooLargeError) as error:
            limit = self.service.settings.max_message_mb
            text = f"the body is larger than {limit} MB (serve.max_message_mb)"
            raise WireError(text, "send smaller images", code="wire-too-large") from error
        except TimeoutError as error:
            text = f"the body has not arrived within {door.BODY_S:g} s"
            raise WireError(text, "send the body without pauses, or send smaller images", code="wire-slow") from error
        except (self.web.RequestPayloadError, ValueError) as error:
            text = f"the body does not match its headers: {error}"
            raise WireError(text, "send the body without Content-Encoding", code="wire-encoding") from error

    async def converse(self, socket: Any, client: object) -> None:
        """Serve a client on a websocket until it disconnects."""
        raise NotImplementedError

    async def start(self, host: str, port: int) -> int:
        app = self.web.Application(middlewares=[self._middleware()], client_max_size=self.service.max_bytes)
        own = [("GET", path, self._health) for path in OPEN_PATHS] + [("GET", "/metrics", self._metrics)]
        for method, path, handler in (*self.routes(), *own):
            app.router.add_route(method, path, handler)
        bound_logs()
        runner: AppRunner = self.web.AppRunner(
            app,
            access_log=None,
            shutdown_timeout=CLOSE_S,
            keepalive_timeout=door.REST_S,
            handle_signals=False,
            auto_decompress=False,  # see ``body``: aiohttp would decompress before the token check, without a limit
        )
        self._runner = runner
        await runner.setup()
        assert runner.server is not None
        self._limiter = ConnectionLimiter(runner.server, self._tls(), self.max_strangers)
        return await self._limiter.open(host, port)

    def _tls(self) -> ssl.SSLContext | None:
        settings = self.service.settings
        if settings.tls_cert is None or settings.tls_key is None:
            return None
        self.scheme += "s"
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            context.load_cert_chain(Path(settings.tls_cert).expanduser(), Path(settings.tls_key).expanduser())
        except (ssl.SSLError, OSError) as error:
            raise ServingError(
                f"the certificate can't be used: {error}", "check serve.tls_cert and serve.tls_key", code="server-tls"
            ) from error
        return context

    async def stop_accepting(self) -> None:
        if self._limiter is not None:
            await self._limiter.close()

    async def close(self) -> None:
        await self.stop_accepting()
        closing = (socket.close(code=1001, message=b"the server is stopping") for socket in list(self._sockets))
        with contextlib.suppress(TimeoutError):  # a client that does not read is disconnected below
            await asyncio.wait_for(asyncio.gather(*closing, return_exceptions=True), 2 * CLOSE_S)
        if self._runner is not None:
            await self._runner.cleanup()

    def _middleware(self) -> Any:
        web = self.web

        @web.middleware
        async def admit(request: Request, handler: Handler) -> StreamResponse:
            if request.path in OPEN_PATHS:
                return _close_after(await handler(request))
            is_right = self.service.token is not None and self.service.admits(token_of(request))
            # A web page must not use a tokenless server on its user's machine.
            if not is_right and (self.service.token is not None or "Origin" in request.headers):
                self.core.metrics.count("refused_total", self.name)
                text = "send the token that the server printed: Authorization: Bearer TOKEN, or ?token=TOKEN"
                return _close_after(self.refusal({"error": text, "code": "server-token"}, 401))
            assert self._limiter is not None
            if self._connections >= min(self.service.settings.max_connections, self._limiter.most_admitted):
                text = f"the server has {self._connections} clients (serve.max_connections, or half of ulimit -n)"
                return _close_after(self.refusal({"error": text, "code": "server-full"}, 503))
            self._limiter.admit(request.protocol)
            self._connections += 1
            self.core.metrics.count("connections", self.name)
            try:
                response = await handler(request)
                return _close_after(response) if self._limiter.is_crowded() else response
            finally:
                self._connections -= 1
                self.core.metrics.count("connections", self.name, -1)

        return admit

    async def _health(self, request: Request) -> StreamResponse:
        if self.core.is_stopping:
            return self.web.json_response({"status": "stopping"}, status=503)
        if self.core.stalled:
            return self.web.json_response({"status": self.core.stalled}, status=503)
        if request.path == "/healthz":
            return self.web.Response(text="OK\n")
        return self.web.json_response({"status": "ok"})

    async def _metrics(self, request: Request) -> StreamResponse:
        return self.web.Response(text=self.core.figures())

    async def _websocket(self, request: Request) -> StreamResponse:
        # No pings: a client in a long reset does not answer them. TCP notices lost hosts.
        socket = self.web.WebSocketResponse(timeout=CLOSE_S, max_msg_size=self.service.max_bytes, compress=False)
        if not socket.can_prepare(request):
            text = f"this is the websocket endpoint of protocol {self.name}"
            return self.web.json_response({"error": text, "code": "server-websocket"}, status=426)
        await socket.prepare(request)
        self._sockets.add(socket)
        try:
            await self.converse(socket, id(socket))
        except ConnectionResetError:  # the client left before its response
            pass
        finally:
            self._sockets.discard(socket)
            self.core.forget(id(socket))
        return socket


def _close_after(response: StreamResponse) -> StreamResponse:
    """Close the connection after this response."""
    response.force_close()
    return response


def status_of(error: Exception) -> int:
    """Return the HTTP status of an error: 4xx for the request's fault, 5xx for the server's."""
    return _STATUS.get(error.code, 422) if isinstance(error, EmbodrlError) else 500


def token_of(request: Request) -> str | None:
    """Return the token of an HTTP request; None if absent."""
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() in ("bearer", "api-key"):
        return token.strip()
    found: str | None = request.query.get("token")
    return found
