"""Damaged and made-up frames: each gets a readable error or an answer, and the server keeps running.

The conversation that is changed is valid; what comes is changed bytes of it, cut pieces, and noise.
"""

import asyncio

import pytest
from damaged import COUNTS, damaged, is_readable
from served import TOKEN, served, wanted, websocket
from test_openpi import observation

from embodrl.serving.wire.codec import openpi_envelope, unpack

aiohttp = pytest.importorskip("aiohttp", reason="the extra serve is not installed")


@pytest.mark.parametrize("count", COUNTS)
def test_openpi(count):
    async def run():
        async with served("openpi") as server, websocket(server.urls["openpi"]) as socket:
            await socket.receive_bytes(timeout=10)
            errors = 0
            for frame in damaged(observation(7), count):
                await socket.send_bytes(frame)
                answer = await socket.receive(timeout=10)
                assert answer.type in (aiohttp.WSMsgType.TEXT, aiohttp.WSMsgType.BINARY)
                if answer.type == aiohttp.WSMsgType.TEXT:
                    errors += 1
                    assert is_readable(answer.data) and "policy-raised" not in answer.data, answer.data
            assert errors > count / 2
            await socket.send_bytes(observation(7))
            found = unpack(await socket.receive_bytes(timeout=10), openpi_envelope)["actions"]
            assert (found == wanted(7, "push")).all()

    asyncio.run(run())


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("protocol", ["act", "http"])
def test_http(protocol, count):
    array = b'{"__numpy__": "' + b"BwcH" * 16 + b'", "dtype": "|u1", "shape": [4, 4, 3]}'
    key = b"full_image" if protocol == "act" else b"images.base_camera"
    valid = b'{"' + key + b'": ' + array + b', "instruction": "push"}'

    async def run():
        headers = {"Authorization": f"Bearer {TOKEN}"}
        async with served(protocol) as server, aiohttp.ClientSession(server.urls[protocol], headers=headers) as session:
            for frame in (*damaged(valid, count), valid):
                async with session.post("/act", data=frame) as answer:
                    content = await answer.json()
                    assert answer.status in (200, 422), content
                    assert answer.status == 200 or is_readable(content["error"]), content
            assert answer.status == 200

    asyncio.run(run())
