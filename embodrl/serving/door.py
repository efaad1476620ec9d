"""Limits on connections without an admitted request: few at a time, each with a short time limit."""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from embodrl.reporting.log import FloodFilter

logger = logging.getLogger(__name__)

HELLO_S = 10.0
"""Seconds until a connection's first request is admitted, TLS handshake included."""
BODY_S = 60.0
"""Seconds for the body of an admitted request."""
REST_S = 60.0
"""Seconds an admitted connection may idle between requests, including the header of the next one."""
MAX_STRANGERS = 256
MAX_ADMITTED = 65536
_BACKLOG = 128
_PAUSE_S = 0.1
_QUIET_S = 60.0


LOGGERS = ("asyncio", "aiohttp.server", "aiohttp.web", "aiohttp.websocket")


class _WithoutTraceback(logging.Filter):
    """Logs client errors without the traceback, which only shows library code."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
        if type(error).__module__.startswith("aiohttp."):
            record.msg = f"{record.getMessage()}: {error!s:.200}"
            record.args = record.exc_info = None
        return True


_FILTERS = (_WithoutTraceback(), FloodFilter())


def bound_logs() -> None:
    """Rate-limit what the server libraries log, since anyone who reaches a port can trigger it."""
    for name in LOGGERS:
        for one in _FILTERS:
            logging.getLogger(name).addFilter(one)


@dataclass
class _PendingConnection:
    greeting: asyncio.Task[None]
    limit: asyncio.TimerHandle


class ConnectionLimiter:
    """Accepts connections and limits the ones without an admitted request; the oldest makes room for the next.

    Args:
        make_protocol: factory of the protocol that handles a connection.
        tls: TLS context; None for plain TCP.
        most: limit on pending connections; None for at most an eighth of the file descriptor limit.

    Attributes:
        most_admitted: open connections above which none may idle: half of the file descriptor limit.
    """

    def __init__(
        self, make_protocol: Callable[[], asyncio.Protocol], tls: ssl.SSLContext | None, most: int | None = None
    ) -> None:
        self._make_protocol = make_protocol
        self._tls = tls
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._most = most or (MAX_STRANGERS if files < 0 else max(1, min(MAX_STRANGERS, files // 8)))
        self.most_admitted = min(files // 2, MAX_ADMITTED) if files >= 0 else MAX_ADMITTED
        self._pending: dict[asyncio.Protocol, _PendingConnection] = {}
        self._admitted: set[asyncio.Protocol] = set()
        self._sweep_at = _BACKLOG
        self._sockets: list[socket.socket] = []
        self._accepting: list[asyncio.Task[None]] = []
        self._reported = -_QUIET_S

    async def open(self, host: str, port: int) -> int:
        """Listen at every address of a host; return the port. Raises OSError if an address is not available."""
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        try:
            for family, address in dict.fromkeys((entry[0], entry[4][0]) for entry in found):
                listening = socket.create_server((address, port), family=family, backlog=_BACKLOG)
                listening.setblocking(False)
                self._sockets.append(listening)
                port = int(listening.getsockname()[1])
        except OSError:
            await self.close()
            raise
        self._accepting = [loop.create_task(self._accept(listening)) for listening in self._sockets]
        return port

    async def close(self) -> None:
        """Stop accepting connections; admitted ones stay open."""
        for task in self._accepting:
            task.cancel()
        await asyncio.gather(*self._accepting, return_exceptions=True)
        for listening in self._sockets:
            listening.close()
        for protocol in list(self._pending):
            if self._is_disconnected(protocol):
                self._end(protocol)

    def admit(self, protocol: asyncio.Protocol) -> None:
        """Admit a connection; its server limits request bodies to ``BODY_S`` and idle time to ``REST_S``."""
        self._admitted.add(protocol)
        if len(self._admitted) > self._sweep_at:
            self._forget_closed()
        pending = self._pending.pop(protocol, None)
        if pending is not None:
            pending.limit.cancel()

    def is_crowded(self) -> bool:
        """Whether idle connections must make room: each response then closes its connection."""
        if len(self._admitted) > self.most_admitted:
            self._forget_closed()
        return len(self._admitted) > self.most_admitted

    def _forget_closed(self) -> None:
        """Drop closed connections; the next sweep runs when the count has doubled."""
        self._admitted = {one for one in self._admitted if getattr(one, "transport", None) is not None}
        self._sweep_at = max(_BACKLOG, 2 * len(self._admitted))

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, _ = await loop.sock_accept(listening)
            except OSError as error:  # the client has left, or too many files are open
                self._report(error)
                self._make_room()
                await asyncio.sleep(_PAUSE_S)
                continue
            while len(self._pending) >= self._most:
                self._make_room()
            protocol = self._make_protocol()
            greeting = loop.create_task(self._handshake(protocol, accepted))
            self._pending[protocol] = _PendingConnection(greeting, loop.call_later(HELLO_S, self._end, protocol))
            await asyncio.sleep(0)  # read received requests before accepting the next connection

    async def _handshake(self, protocol: asyncio.Protocol, accepted: socket.socket) -> None:
        with suppress(OSError):  # the client left during the TLS handshake, or does not speak TLS
            await asyncio.get_running_loop().connect_accepted_socket(lambda: protocol, accepted, ssl=self._tls)

    def _make_room(self) -> None:
        """Close pending connections whose client has left, else the oldest one."""
        gone = [protocol for protocol in self._pending if self._is_disconnected(protocol)]
        for protocol in gone or list(self._pending)[:1]:
            self._end(protocol)

    def _is_disconnected(self, protocol: asyncio.Protocol) -> bool:
        return self._pending[protocol].greeting.done() and getattr(protocol, "transport", None) is None

    def _end(self, protocol: asyncio.Protocol) -> None:
        pending = self._pending.pop(protocol)
        pending.limit.cancel()
        pending.greeting.cancel()
        transport: asyncio.Transport | None = getattr(protocol, "transport", None)
        if transport is not None:
            transport.abort()

    def _report(self, error: OSError) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._reported >= _QUIET_S:
            self._reported = now
            logger.warning("a connection could not be accepted: %s", error.strerror or error)
