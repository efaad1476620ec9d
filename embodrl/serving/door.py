"""Connections of strangers: few at a time, and closed unless they show soon what they want and that they may."""

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
"""What a connection may take until its first request is admitted; TLS included."""
BODY_S = 60.0
"""What the body of an admitted request may take."""
REST_S = 60.0
"""What an admitted connection may rest between two requests; the header of the next one included."""
MAX_STRANGERS = 256
MAX_ADMITTED = 65536
_BACKLOG = 128
_PAUSE_S = 0.1
_QUIET_S = 60.0


LOGGERS = ("asyncio", "aiohttp.server", "aiohttp.web", "aiohttp.websocket")


class _WithoutTraceback(logging.Filter):
    """A line for what strangers do wrong: the traceback is one of the library's own."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
        if type(error).__module__.startswith("aiohttp."):
            record.msg = f"{record.getMessage()}: {error!s:.200}"
            record.args = record.exc_info = None
        return True


_FILTERS = (_WithoutTraceback(), FloodFilter())


def bound_logs() -> None:
    """Bound what the libraries of servers log, since everybody who reaches a port can make them."""
    for name in LOGGERS:
        for one in _FILTERS:
            logging.getLogger(name).addFilter(one)


@dataclass
class _Stranger:
    greeting: asyncio.Task[None]
    limit: asyncio.TimerHandle


class Door:
    """Accepts connections, and bounds those that have not been admitted: the oldest makes room for the next one.

    Args:
        make_protocol: returns what handles a connection.
        tls: None: plain.
        most: strangers at a time; None: at most an eighth of the files that this process may open.

    Attributes:
        most_admitted: open connections above which none may rest: half of the files that this process may open.
    """

    def __init__(
        self, make_protocol: Callable[[], asyncio.Protocol], tls: ssl.SSLContext | None, most: int | None = None
    ) -> None:
        self._make_protocol = make_protocol
        self._tls = tls
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._most = most or (MAX_STRANGERS if files < 0 else max(1, min(MAX_STRANGERS, files // 8)))
        self.most_admitted = min(files // 2, MAX_ADMITTED) if files >= 0 else MAX_ADMITTED
        self._strangers: dict[asyncio.Protocol, _Stranger] = {}
        self._admitted: set[asyncio.Protocol] = set()
        self._looked_through_at = _BACKLOG
        self._sockets: list[socket.socket] = []
        self._accepting: list[asyncio.Task[None]] = []
        self._reported = -_QUIET_S

    async def open(self, host: str, port: int) -> int:
        """Listen at every address of a host; return the port.

        Raises:
            OSError: one is not available.
        """
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
        """Accept no more; those that were admitted stay."""
        for task in self._accepting:
            task.cancel()
        await asyncio.gather(*self._accepting, return_exceptions=True)
        for listening in self._sockets:
            listening.close()
        for protocol in list(self._strangers):
            if self._is_gone(protocol):
                self._end(protocol)

    def admit(self, protocol: asyncio.Protocol) -> None:
        """Let a connection stay: its server bounds the time of a body by ``BODY_S`` and rests by ``REST_S``."""
        self._admitted.add(protocol)
        if len(self._admitted) > self._looked_through_at:
            self._forget_closed()
        stranger = self._strangers.pop(protocol, None)
        if stranger is not None:
            stranger.limit.cancel()

    def is_crowded(self) -> bool:
        """Return whether the connections that rest have to make room: an answer is then the last of its connection."""
        if len(self._admitted) > self.most_admitted:
            self._forget_closed()
        return len(self._admitted) > self.most_admitted

    def _forget_closed(self) -> None:
        """Forget connections that were closed; again once there are twice as many as are left."""
        self._admitted = {one for one in self._admitted if getattr(one, "transport", None) is not None}
        self._looked_through_at = max(_BACKLOG, 2 * len(self._admitted))

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, _ = await loop.sock_accept(listening)
            except OSError as error:  # a client that was gone again, or too many open files for now
                self._report(error)
                self._make_room()
                await asyncio.sleep(_PAUSE_S)
                continue
            while len(self._strangers) >= self._most:
                self._make_room()
            protocol = self._make_protocol()
            greeting = loop.create_task(self._greet(protocol, accepted))
            self._strangers[protocol] = _Stranger(greeting, loop.call_later(HELLO_S, self._end, protocol))
            await asyncio.sleep(0)  # requests that have come are read before the next connection is accepted

    async def _greet(self, protocol: asyncio.Protocol, accepted: socket.socket) -> None:
        with suppress(OSError):  # it left during the TLS handshake, or speaks none
            await asyncio.get_running_loop().connect_accepted_socket(lambda: protocol, accepted, ssl=self._tls)

    def _make_room(self) -> None:
        """End the strangers that have left, else the one that came first."""
        gone = [protocol for protocol in self._strangers if self._is_gone(protocol)]
        for protocol in gone or list(self._strangers)[:1]:
            self._end(protocol)

    def _is_gone(self, protocol: asyncio.Protocol) -> bool:
        return self._strangers[protocol].greeting.done() and getattr(protocol, "transport", None) is None

    def _end(self, protocol: asyncio.Protocol) -> None:
        stranger = self._strangers.pop(protocol)
        stranger.limit.cancel()
        stranger.greeting.cancel()
        transport: asyncio.Transport | None = getattr(protocol, "transport", None)
        if transport is not None:
            transport.abort()

    def _report(self, error: OSError) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._reported >= _QUIET_S:
            self._reported = now
            logger.warning("a connection could not be accepted: %s", error.strerror or error)
