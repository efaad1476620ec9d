"""GR00T's protocol: conversations in the bytes of its three dialects, and errors."""

import asyncio
import io

import numpy as np
import pytest
from served import TOKEN, raw, served, wanted

from embodrl.serving.wire.codec import unpack


def npy(array: np.ndarray) -> dict:
    stream = io.BytesIO()
    np.save(stream, array, allow_pickle=False)
    return {"__ndarray_class__": True, "as_npy": stream.getvalue()}


def nd(array: np.ndarray) -> dict:
    shape = list(array.shape)
    return {b"nd": True, b"type": array.dtype.str, b"kind": b"", b"shape": shape, b"data": array.tobytes()}


def read_npy(content: dict) -> np.ndarray:
    assert content.keys() == {"__ndarray_class__", "as_npy"}
    return np.load(io.BytesIO(content["as_npy"]), allow_pickle=False)


def read_nd(content: dict) -> np.ndarray:
    assert content[b"nd"] is True
    return np.frombuffer(content[b"data"], content[b"type"]).reshape(content[b"shape"])


def talk(requests: list, **settings) -> list:
    """Return the answers of one server to requests: raw bytes, or maps to which the token is added."""

    async def run():
        import zmq
        import zmq.asyncio

        async with served("gr00t", **settings) as server:
            context = zmq.asyncio.Context()
            socket = context.socket(zmq.REQ)
            socket.linger = 0
            socket.connect(server.urls["gr00t"])
            answers = []
            for request in requests:
                data = request if isinstance(request, bytes) else raw({"api_token": TOKEN} | request)
                await socket.send(data)
                answers.append(unpack(await asyncio.wait_for(socket.recv(), 10), lambda content: content))
            socket.close()
            context.term()
            return answers

    return asyncio.run(run())


VIDEO = np.full((1, 4, 4, 3), 9, np.uint8)  # [T,H,W,3]


def test_n1_5_sends_flat_keys_and_gets_a_map():
    data = {"video.base_camera": npy(VIDEO), "annotation.human.task_description": ["push"]}
    (answer,) = talk([{"endpoint": "get_action", "data": data}])
    assert list(answer) == ["action.action"] and (read_npy(answer["action.action"]) == wanted(9, "push")).all()


@pytest.mark.parametrize(("write", "read"), [(npy, read_npy), (nd, read_nd)], ids=["n1.6", "n1.7"])
def test_n1_6_and_n1_7_send_batches_and_get_a_pair(write, read):
    video = np.stack([np.stack([VIDEO[0] * 0, VIDEO[0]]), np.stack([VIDEO[0] * 0, VIDEO[0] * 2])])  # [B,T,H,W,3]
    observation = {
        "video": {"base_camera": write(video)},
        "state": {"arm": write(np.array([[[7.0], [1.0]], [[7.0], [2.0]]], np.float32))},  # [B,T,D]
        "language": {"annotation.human.task_description": [["push"], ["pull it"]]},
    }
    settings = {"state": ("state.arm:1",), "actions": ("arm:6", "gripper:1")}
    pair, sizes = talk(
        [
            {"endpoint": "get_action", "data": {"observation": observation, "options": None}},
            {"endpoint": "get_modality_config"},
        ],
        gr00t=settings,
    )
    actions, info = pair
    assert info == {"policy_version": 0} and list(actions) == ["arm", "gripper"]
    both = np.stack([wanted(9 + 1, "push"), wanted(18 + 2, "pull it")])
    assert (read(actions["arm"]) == both[..., :6]).all() and (read(actions["gripper"]) == both[..., 6:]).all()
    as_json = {name: content["as_json"] for name, content in sizes.items()}
    assert as_json["video"] == {"delta_indices": [0], "modality_keys": ["base_camera"]}
    assert as_json["state"]["modality_keys"] == ["arm"]
    assert as_json["action"] == {"delta_indices": [0, 1, 2, 3, 4], "modality_keys": ["arm", "gripper"]}


def test_ping_reset_and_what_is_refused():
    good = {"video.base_camera": npy(VIDEO), "annotation.human.task_description": "push"}
    stream = io.BytesIO()
    np.save(stream, np.array([print], object), allow_pickle=True)
    evil = {"__ndarray_class__": True, "as_npy": stream.getvalue()}
    answers = talk(
        [
            {"endpoint": "ping"},
            {"endpoint": "reset", "data": {"options": None}},
            {"endpoint": "kill"},
            raw({"endpoint": "ping"}),
            raw({"endpoint": "ping", "api_token": 3}),
            b"\xc1",
            raw([1]),
            {"endpoint": "get_action"},
            {"endpoint": "get_action", "data": good | {"video.base_camera": evil}},
            {"endpoint": "get_action", "data": {"observation": {"video": 3}}},
            {"endpoint": "get_action", "data": {"observation": {"video": {"base_camera": npy(VIDEO[0, 0, 0])}}}},
            {"endpoint": "get_action", "data": {"observation": {}}},
            {"endpoint": "get_action", "data": good},
        ]
    )
    ping, reset, kill, *refused, last = answers
    assert ping["status"] == "ok" and reset == {} and "wire-message" in kill["error"]
    codes = ["Unauthorized", "Unauthorized", "wire-message", "wire-message", "wire-message", "wire-array"]
    for code, answer in zip([*codes, *["wire-observation"] * 3], refused, strict=True):
        assert code in answer["error"]
    assert "action.action" in last


def test_several_clients_share_a_batch():
    async def run():
        import zmq
        import zmq.asyncio

        async with served("gr00t") as server:
            context = zmq.asyncio.Context()
            sockets = [context.socket(zmq.REQ) for _ in range(3)]
            server.core.pause()
            for number, socket in enumerate(sockets):
                socket.linger = 0
                socket.connect(server.urls["gr00t"])
                data = {"video.base_camera": npy(VIDEO * 0 + number), "annotation.human.task_description": ""}
                await socket.send(raw({"api_token": TOKEN, "endpoint": "get_action", "data": data}))
            while len(server.core._under_way) < 3:
                await asyncio.sleep(0.001)
            server.core.resume()
            for number, socket in enumerate(sockets):
                answer = unpack(await asyncio.wait_for(socket.recv(), 10), lambda content: content)
                assert (read_npy(answer["action.action"]) == wanted(number, "")).all()
                socket.close()
            assert server.policy.batches == [3]
            context.term()

    asyncio.run(run())
