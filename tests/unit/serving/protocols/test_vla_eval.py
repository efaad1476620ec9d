"""vla-evaluation-harness's protocol: a conversation in bytes, chunks, and errors."""

import asyncio

from served import TOKEN, png, raw, served, wanted, websocket

from embodrl.serving.wire.codec import unpack


def message(kind: str, payload: object, sequence: int) -> bytes:
    return raw({"type": kind, "payload": payload, "seq": sequence, "timestamp": 1.5})


def seen(pixel: int, **change: object) -> dict:
    image = {"__image__": True, "format": "raw", "data": bytes([pixel]) * 12, "dtype": "|u1", "shape": [2, 2, 3]}
    return {"images": {"base_camera": image}, "task_description": "push"} | change


def converse(frames: list, **settings) -> list:
    """Return the answers to frames, of which those that get none are given as (frame,)."""

    async def run():
        async with served("vla_eval", **settings) as server:
            url, answers = f"{server.urls['vla_eval']}/?token={TOKEN}", []
            async with websocket(url, None) as socket:  # the client of the harness sends no headers
                for frame in frames:
                    await socket.send_bytes(frame[0] if isinstance(frame, tuple) else frame)
                    if not isinstance(frame, tuple):
                        answers.append(unpack(await socket.receive_bytes(timeout=10), lambda content: content))
            return answers

    return asyncio.run(run())


def test_a_conversation():
    hello, first, second, again = converse(
        [
            message("hello", {"harness_version": "0.8.0", "protocol_version": 1, "benchmark": "toy"}, 1),
            (message("episode_start", {"task": {"name": "push"}}, 2),),
            message("observation", seen(10), 3),
            message("observation", seen(99), 4),
            (message("episode_end", {"metrics": {"success": True}}, 5),),
            (message("episode_start", {"task": {"name": "push"}}, 6),),
            message("observation", seen(20), 7),
        ],
        vla_eval={"observation_params": {"send_state": True}},
    )
    assert (hello["type"], hello["seq"]) == ("hello", 1) and isinstance(hello["timestamp"], float)
    assert hello["payload"]["protocol_version"] == 1 and hello["payload"]["capabilities"] == {}
    assert hello["payload"]["observation_params"] == {"send_state": True}
    for answer, sequence, action in (
        (first, 3, wanted(10, "push")[0]),
        (second, 4, wanted(10, "push")[1]),  # of the same chunk
        (again, 7, wanted(20, "push")[0]),  # of a new episode
    ):
        assert (answer["type"], answer["seq"]) == ("action", sequence)
        array = answer["payload"]["actions"]
        assert array == {"__ndarray__": True, "data": action.tobytes(), "dtype": "<f4", "shape": [7]}
        assert answer["payload"]["policy_version"] == 0


def test_the_policy_is_asked_again_after_the_execution_horizon():
    frames = [message("observation", seen(pixel), pixel) for pixel in (10, 11, 12)]
    answers = converse(frames, execution_horizon=2)
    actions = [answer["payload"]["actions"]["data"] for answer in answers]
    assert actions == [step.tobytes() for step in (*wanted(10, "push")[:2], wanted(12, "push")[0])]


def test_pictures_come_as_png():
    image = {"__image__": True, "format": "png", "data": png(2, 2), "shape": [2, 2, 3]}
    (answer,) = converse([message("observation", seen(0, images={"base_camera": image}), 1)])
    mean = (0 + 2 + 3 + 1 + 2 + 3) / 6
    assert answer["payload"]["actions"]["data"] == wanted(mean, "push")[0].tobytes()


def test_errors_have_the_sequence_number_and_the_connection_goes_on():
    frames = [
        message("observation", {"images": {}}, 3),
        message("observation", seen(1, task_description="fail"), 4),
        message("observation", seen(1) | {"images": {"base_camera": {"__ndarray__": True, "dtype": "O"}}}, 5),
        message("dance", {}, 6),
        raw({"type": "observation"}),
        b"\xc1",
        message("observation", seen(1), 7),
    ]
    *errors, last = converse(frames)
    assert [(e["type"], e["seq"]) for e in errors] == [("error", n) for n in (3, 4, 0, 0, 0, 0)]
    codes = ["wire-observation", "policy-raised", *["wire-message"] * 4]
    assert all(code in error["payload"]["error"] for code, error in zip(codes, errors, strict=True))
    assert last["type"] == "action"
