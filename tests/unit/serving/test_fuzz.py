"""Damaged and made-up frames: each gets a readable error or an answer, and the server keeps running.

The conversation that is changed is valid; what comes is changed bytes of it, cut pieces, and noise.
"""

import asyncio

import numpy as np
import pytest
from served import TOKEN, raw, served, wanted, websocket
from test_gr00t_protocol import VIDEO, nd, npy
from test_lerobot_protocol import _lerobot, robot, setup  # noqa: F401
from test_lerobot_protocol import seen as robot_seen
from test_openpi import observation
from test_vla_eval import message, seen

from embodrl.wire.codec import openpi_envelope, unpack

aiohttp = pytest.importorskip("aiohttp", reason="the extra serve is not installed")

COUNTS = [
    pytest.param(60, id="60"),
    pytest.param(10_000, id="10000", marks=[pytest.mark.long, pytest.mark.timeout(900)]),
]


def damaged(valid: bytes, count: int):
    """Yield changed copies of a frame; the same ones every time."""
    random = np.random.default_rng(0)
    for number in range(count):
        data = bytearray(valid)
        kind = number % 4
        if kind == 0:
            data = data[: random.integers(len(data))]
        elif kind == 1:
            data = bytearray(random.bytes(int(random.integers(1, 200))))
        else:
            # Most bytes of a frame are pixels: half of the changes go into its head.
            last = len(data) if kind == 2 else min(len(data), 80)
            for place in random.integers(last, size=int(random.integers(1, 5))):
                data[place] = int(random.integers(256))
        yield bytes(data)


def is_readable(text: str) -> bool:
    """Tell whether an error names its code, and no path or stack of the server."""
    return text.endswith("]") and "Traceback" not in text and "/embodrl/" not in text and len(text) < 2000


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
def test_vla_eval(count):
    async def run():
        valid = message("observation", seen(7), 3)
        async with served("vla_eval") as server, websocket(server.urls["vla_eval"]) as socket:
            for frame in damaged(valid, count):
                await socket.send_bytes(frame)
                # An episode's start gets no answer: a valid frame tells where the answers to this one end.
                await socket.send_bytes(message("hello", {}, -7))
                while True:
                    answer = unpack(await socket.receive_bytes(timeout=10), lambda content: content)
                    if answer["seq"] == -7:
                        break
                    assert answer["type"] in ("action", "error", "hello")
                    if answer["type"] == "error":
                        text = answer["payload"]["error"]
                        assert is_readable(text) and "policy-raised" not in text, text

    asyncio.run(run())


@pytest.mark.parametrize("count", COUNTS)
def test_gr00t(count):
    import zmq
    import zmq.asyncio

    flat = {"video.base_camera": npy(VIDEO), "annotation.human.task_description": "push"}
    batch = {
        "video": {"base_camera": nd(VIDEO[None])},
        "language": {"annotation.human.task_description": [["push"]]},
    }
    frames = [
        raw({"api_token": TOKEN, "endpoint": "get_action", "data": data}) for data in (flat, {"observation": batch})
    ]

    async def run():
        async with served("gr00t") as server:
            context = zmq.asyncio.Context()
            socket = context.socket(zmq.REQ)
            socket.linger = 0
            socket.connect(server.urls["gr00t"])
            for valid in frames:
                for frame in damaged(valid, count // 2):
                    await socket.send(frame)
                    answer = unpack(await asyncio.wait_for(socket.recv(), 10), lambda content: content)
                    if "error" in answer:
                        text = answer["error"]
                        assert is_readable(text) or "Unauthorized" in text, text
                        assert "policy-raised" not in text, text
            socket.close()
            context.term()

    asyncio.run(run())


@pytest.mark.parametrize("count", COUNTS)
def test_lerobot(count):
    import grpc

    async def run():
        valid = (setup(), robot_seen(7))
        async with served("lerobot") as server, robot(server, setup()) as client:
            for call, data in zip((client.instruct, lambda data: client.observe((3, data))), valid, strict=True):
                errors = 0
                for frame in damaged(data, count // 2):
                    try:
                        await call(frame)
                    except grpc.aio.AioRpcError as error:
                        errors += 1
                        assert error.code().name in ("INVALID_ARGUMENT", "UNAUTHENTICATED"), error
                        assert is_readable(error.details()) and "policy-raised" not in error.details(), error
                assert errors > count / 6
                await client.instruct(setup())
            await client.observe((3, robot_seen(7)))
            assert (await client.act())[0].action[0] == wanted(7 + 3, "push")[0, 0]

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
