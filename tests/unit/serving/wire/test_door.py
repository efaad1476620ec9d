"""Connections that a server remembers."""

import asyncio

from embodrl.serving.door import ConnectionLimiter


class Connection(asyncio.Protocol):
    """A connection that is open while it has a transport, as aiohttp's."""

    def __init__(self, transport: object) -> None:
        self.transport = transport


def test_closed_connections_are_forgotten_long_before_many_are_open() -> None:
    limiter = ConnectionLimiter(asyncio.Protocol, None)
    open_ones = [Connection(object()) for _ in range(10)]
    for one in open_ones:
        limiter.admit(one)
    for _ in range(5000):
        limiter.admit(Connection(None))
    assert set(open_ones) <= limiter._admitted and len(limiter._admitted) <= 300
    assert not limiter.is_crowded()
