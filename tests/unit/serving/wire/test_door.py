"""Connections that a server remembers."""

import asyncio

from embodrl.serving.door import Door


class Connection(asyncio.Protocol):
    """A connection that is open while it has a transport, as aiohttp's."""

    def __init__(self, transport: object) -> None:
        self.transport = transport


def test_closed_connections_are_forgotten_long_before_many_are_open() -> None:
    door = Door(asyncio.Protocol, None)
    open_ones = [Connection(object()) for _ in range(10)]
    for one in open_ones:
        door.admit(one)
    for _ in range(5000):
        door.admit(Connection(None))
    assert set(open_ones) <= door._admitted and len(door._admitted) <= 300
    assert not door.is_crowded()
