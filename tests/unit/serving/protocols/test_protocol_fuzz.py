"""Damaged and made-up frames: each gets a readable error or an answer, and the server keeps running."""

import asyncio

import pytest
from damaged import COUNTS, damaged, is_readable
from served import TOKEN, raw, served, wanted, websocket
from test_gr00t_protocol import VIDEO, nd, npy
from test_lerobot_protocol import _lerobot, robot, setup  # noqa: F401
from test_lerobot_protocol import seen as robot_seen
from test_vla_eval import message, seen

from embodrl.serving.wire.codec import unpack


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
