"""openpi's protocol: whole conversations in bytes, tokens, errors, and what a connection may do to the server."""

import asyncio
import contextlib
import shutil
import ssl
import subprocess
from unittest.mock import Mock

import numpy as np
import pytest
from expect import raises_code
from served import TOKEN, raw, served, wanted, websocket

from embodrl.errors import ServingError
from embodrl.serving import listener
from embodrl.serving.wire.codec import openpi_envelope, unpack

aiohttp = pytest.importorskip("aiohttp", reason="the extra serve is not installed")


def picture(pixel: int) -> dict:
    return {b"__ndarray__": True, b"data": bytes([pixel]) * 48, b"dtype": "|u1", b"shape": [4, 4, 3]}


def observation(pixel: int, text: str = "push") -> bytes:
    return raw({"observation/base_camera": picture(pixel), "prompt": text})


def run(test, *protocols, **settings):
    async def inner():
        async with served(*(protocols or ("openpi",)), **settings) as server:
            await test(server)

    asyncio.run(inner())


def test_a_conversation():
    async def test(server):
        async with websocket(server.urls["openpi"]) as socket:
            metadata = unpack(await socket.receive_bytes(timeout=10), openpi_envelope)  # before anything is asked
            assert metadata["keys"]["images"] == ["observation/base_camera"] and metadata["action_dim"] == 7
            for pixel in (3, 200):
                await socket.send_bytes(observation(pixel))
                reply = await socket.receive_bytes(timeout=10)
                plain = unpack(reply, lambda content: content)
                assert plain["actions"][b"__ndarray__"] is True and plain["actions"][b"dtype"] == "<f4"
                assert plain["actions"][b"shape"] == [5, 7]
                assert plain["actions"][b"data"] == wanted(pixel, "push").tobytes()
                assert plain["policy_version"] == 0 and plain["server_timing"]["infer_ms"] >= 0
            assert "prev_total_ms" in plain["server_timing"]

    run(test)


def test_a_request_that_says_what_is_left_of_its_chunk_is_continued():
    left = np.full((3, 7), 0.25, np.float32)
    array = {b"__ndarray__": True, b"data": left.tobytes(), b"dtype": "<f4", b"shape": [3, 7]}

    async def test(server):
        async with websocket(server.urls["openpi"]) as socket:
            await socket.receive_bytes(timeout=10)
            content = {"observation/base_camera": picture(3), "prompt": "push"}
            await socket.send_bytes(raw(content | {"rtc": {"actions": array, "delay": 2}}))
            reply = unpack(await socket.receive_bytes(timeout=10), openpi_envelope)
            np.testing.assert_array_equal(reply["actions"], np.full((5, 7), 0.25 + 2 + 30 + 100 * 4.0))
            short = {**array, b"shape": [1, 7], b"data": left[:1].tobytes()}
            for wrong in ({"delay": 1}, {"actions": short, "delay": 2}, {"actions": array, "delay": -1}, 7):
                await socket.send_bytes(raw(content | {"rtc": wrong}))
                assert "[wire-rtc]" in await socket.receive_str(timeout=10)
            await socket.send_bytes(observation(3))
            reply = unpack(await socket.receive_bytes(timeout=10), openpi_envelope)
            np.testing.assert_array_equal(reply["actions"], wanted(3, "push"))

    run(test, rtc_max_guidance_weight=4.0)


def test_a_chunk_is_not_continued_greedily_where_actions_are_drawn():
    array = {b"__ndarray__": True, b"data": np.zeros((1, 7), np.float32).tobytes(), b"dtype": "<f4", b"shape": [1, 7]}

    async def test(server):
        async with websocket(server.urls["openpi"]) as socket:
            await socket.receive_bytes(timeout=10)
            content = {"observation/base_camera": picture(3), "prompt": "push"}
            await socket.send_bytes(raw(content | {"rtc": {"actions": array, "delay": 0}}))
            assert "[wire-rtc]" in await socket.receive_str(timeout=10)

    run(test, decoding="mean")


def test_errors_are_text_and_the_connection_goes_on():
    async def test(server):
        async with websocket(server.urls["openpi"], scheme="Bearer") as socket:
            await socket.receive_bytes(timeout=10)
            image = picture(1)
            for frame, code in (
                (b"\xc1", "wire-message"),
                (raw({"prompt": "push"}), "wire-observation"),
                (raw({"observation/base_camera": image | {b"dtype": "|O"}, "prompt": ""}), "wire-array"),
                (raw({"observation/base_camera": image, "prompt": "fail"}), "policy-raised"),
                (raw([1, 2]), "wire-observation"),
                ("text", "wire-message"),
            ):
                await (socket.send_str(frame) if isinstance(frame, str) else socket.send_bytes(frame))
                answer = await socket.receive(timeout=10)
                assert answer.type == aiohttp.WSMsgType.TEXT and code in answer.data
            await socket.send_bytes(observation(9))
            assert (await socket.receive(timeout=10)).type == aiohttp.WSMsgType.BINARY
        assert server.core.metrics.counters["errors_total", "openpi"] == 5

    run(test)


def test_a_token_is_needed_and_may_stand_in_the_url():
    async def test(server):
        url = server.urls["openpi"]
        for token in (None, "", "wrong", TOKEN[:-1], TOKEN + "x"):
            with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
                async with websocket(url, token):
                    pass
            assert refused.value.status == 401
        async with websocket(f"{url}?token={TOKEN}", None) as socket:
            await socket.receive_bytes(timeout=10)
        async with aiohttp.ClientSession(url.replace("ws", "http")) as session:
            answers = {}
            for path in ("/healthz", "/health", "/metrics", "/", "/nowhere"):
                async with session.get(path) as answer:
                    answers[path] = answer.status
            assert answers == {"/healthz": 200, "/health": 200, "/metrics": 401, "/": 401, "/nowhere": 401}

    run(test)


def test_without_a_token_pages_in_browsers_are_refused():
    async def test(server):
        async with websocket(server.urls["openpi"], None) as socket:
            await socket.receive_bytes(timeout=10)
        async with aiohttp.ClientSession() as session:
            with pytest.raises(aiohttp.WSServerHandshakeError):
                await session.ws_connect(server.urls["openpi"], origin="http://example.org")

    run(test, token="none")


def test_too_large_a_message_ends_its_connection_alone():
    async def test(server):
        async with websocket(server.urls["openpi"]) as other, websocket(server.urls["openpi"]) as socket:
            for each in (socket, other):
                await each.receive_bytes(timeout=10)
            await socket.send_bytes(bytes(2**20 + 1))
            answer = await socket.receive(timeout=10)
            assert answer.type == aiohttp.WSMsgType.CLOSE and answer.data == 1009
            await other.send_bytes(observation(1))
            await other.receive_bytes(timeout=10)

    run(test, max_message_mb=1)


def test_clients_beyond_the_limit_are_refused_until_one_leaves():
    async def test(server):
        async with websocket(server.urls["openpi"]) as socket:
            await socket.receive_bytes(timeout=10)
            with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
                async with websocket(server.urls["openpi"]):
                    pass
            assert refused.value.status == 503

    run(test, max_connections=1)


def test_connections_share_a_batch_and_one_that_breaks_off_does_not_matter():
    async def test(server):
        url = server.urls["openpi"]
        async with websocket(url) as first, websocket(url) as second, websocket(url) as third:
            sockets = [first, second, third]
            for socket in sockets:
                await socket.receive_bytes(timeout=10)
            server.core.pause()
            for pixel, socket in enumerate(sockets):
                await socket.send_bytes(observation(pixel))
            while len(server.core._under_way) < 3:
                await asyncio.sleep(0.001)
            third._conn.close()  # without a word
            server.core.resume()
            for pixel, socket in enumerate(sockets[:2]):
                found = unpack(await socket.receive_bytes(timeout=10), openpi_envelope)["actions"]
                assert (found == wanted(pixel, "push")).all()
        assert server.policy.batches == [3]

    run(test)


def test_stopping_answers_what_is_under_way_and_closes_the_connections():
    async def test(server):
        async with websocket(server.urls["openpi"]) as socket:
            await socket.receive_bytes(timeout=10)
            server.core.pause()
            await socket.send_bytes(observation(5))
            while not len(server.core._under_way):
                await asyncio.sleep(0.001)
            server.server.stop()
            found = unpack(await socket.receive_bytes(timeout=10), openpi_envelope)["actions"]
            assert (found == wanted(5, "push")).all()
            answer = await socket.receive(timeout=10)
            assert answer.type == aiohttp.WSMsgType.CLOSE and answer.data == 1001

    run(test)


def test_the_lines_name_the_addresses_and_a_generated_token():
    async def test(server):
        assert server.lines[0] == f"listening: openpi at {server.urls['openpi']}" and server.lines[-1] == "ready"
        token = server.lines[1].removeprefix("token: ")
        assert len(token) >= 32
        async with websocket(server.urls["openpi"], token) as socket:
            await socket.receive_bytes(timeout=10)

    run(test, token="auto")


def test_an_address_that_is_taken_is_named():
    async def test(server):
        with raises_code("server-address", ServingError, server.port("openpi")):
            async with served("openpi", port=server.port("openpi")):
                pass

    run(test)


def test_several_cameras_and_a_state():
    async def test(server):
        async with websocket(server.urls["openpi"]) as socket:
            await socket.receive_bytes(timeout=10)
            state = {b"__ndarray__": True, b"data": np.float64([2.0]).tobytes(), b"dtype": "<f8", b"shape": [1]}
            await socket.send_bytes(raw({"images": {"a": picture(2), "b": picture(4)}, "state": state, "prompt": ""}))
            found = unpack(await socket.receive_bytes(timeout=10), openpi_envelope)["actions"]
            assert (found == wanted(3 + 2, "")).all()

    run(test, cameras=("a", "b"), openpi={"images": ("images.a", "images.b"), "state": ("state:1",)})


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_tls(tmp_path):
    files = {"tls_cert": str(tmp_path / "cert.pem"), "tls_key": str(tmp_path / "key.pem")}
    command = "openssl req -x509 -nodes -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -subj /CN=localhost -days 1"
    outputs = ["-addext", "subjectAltName=IP:127.0.0.1", "-out", files["tls_cert"], "-keyout", files["tls_key"]]
    subprocess.run([*command.split(), *outputs], check=True, capture_output=True)

    async def test(server):
        assert server.urls["openpi"].startswith("wss://")
        trusted = aiohttp.TCPConnector(ssl=ssl.create_default_context(cafile=files["tls_cert"]))
        url = f"{server.urls['openpi']}/?token={TOKEN}"
        async with aiohttp.ClientSession(connector=trusted) as session, session.ws_connect(url) as socket:
            await socket.receive_bytes(timeout=10)
            await socket.send_bytes(observation(5))
            found = unpack(await socket.receive_bytes(timeout=10), openpi_envelope)["actions"]
            assert (found == wanted(5, "push")).all()

    run(test, **files)
    (tmp_path / "key.pem").write_text("no key")
    with raises_code("server-tls", ServingError):
        run(test, **files)


def test_idle_connections_do_not_delay_a_client():
    async def test(server):
        async with contextlib.AsyncExitStack() as stack:
            idle = [await stack.enter_async_context(websocket(server.urls["openpi"])) for _ in range(50)]
            socket = await stack.enter_async_context(websocket(server.urls["openpi"]))
            for each in (*idle, socket):
                await each.receive_bytes(timeout=10)
            for _ in range(3):  # waiting for the others would take longer than the limit
                await socket.send_bytes(observation(5))
                await socket.receive_bytes(timeout=10)
        assert server.policy.batches == [1, 1, 1]

    run(test, max_wait_ms=10_000.0)


def test_clients_that_do_not_read_do_not_delay_the_end(monkeypatch):
    monkeypatch.setattr(listener, "CLOSE_S", 0.02)

    async def test():
        async with served("openpi") as server:
            # What is to be sent to them waits for room in their buffers.
            stuck = [Mock(close=Mock(side_effect=lambda **_: asyncio.Event().wait())) for _ in range(3)]
            server.server.listeners[0]._sockets.update(stuck)
        assert all(socket.close.called for socket in stuck)

    asyncio.run(test())
