"""A policy server under load: many clients, slow ones, idle ones, and weights that change meanwhile.

The policy answers a request by the number in its state plus an offset that names the version of its weights, so that
every reply tells which request it belongs to and which weights computed it.
"""

import asyncio
import contextlib
import resource

import numpy as np
import pytest
from served import MeanPolicy, served, websocket

from embodrl.hybrid_engines.weight_sync.disk import DiskSender
from embodrl.serving.wire.codec import openpi_default, openpi_envelope, pack, unpack

aiohttp = pytest.importorskip("aiohttp", reason="the extra serve is not installed")

PICTURE = np.zeros((4, 4, 3), np.uint8)
STEP = 2.0**17  # of the offset from one version to the next: above every number of a request, exact in float32
CLIENTS = 32
SIZES = [
    pytest.param(2, 20, 2, id="small"),
    pytest.param(100_000 // CLIENTS, 1000, 20, id="large", marks=[pytest.mark.long, pytest.mark.timeout(3600)]),
]


def request(number: int) -> bytes:
    content = {"observation/base_camera": PICTURE, "observation/state": np.array([number], np.float32), "prompt": ""}
    return pack(content, openpi_default)


def publish(directory, version: int) -> None:
    policy = MeanPolicy()
    named = {name: tensor.detach().clone() for name, tensor in policy.named_parameters()}
    named["offset"].fill_(version * STEP)
    DiskSender(directory).send(named.items(), version)


def number_in(frame: bytes) -> tuple[int, int]:
    """Return the number of the request that a reply is for, and the version that it names."""
    reply = unpack(frame, openpi_envelope)
    version = reply["policy_version"]
    return int(reply["actions"][0, 0] - version * STEP), version


@pytest.mark.parametrize("requests, idle, versions", SIZES)
def test_no_reply_is_lost_reordered_or_of_another_version(requests, idle, versions, tmp_path, monkeypatch):
    monkeypatch.setattr("embodrl.hybrid_engines.weight_sync.follower.LOOK_S", 0.01)
    wanted = 2 * (idle + CLIENTS) + 500
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < wanted:
        pytest.skip(f"needs {wanted} open files (ulimit -n)")
    seen: set[int] = set()

    async def client(url: str, first: int) -> None:
        async with websocket(url) as socket:
            await socket.receive_bytes(timeout=60)
            for number in range(first, first + requests):
                await socket.send_bytes(request(number))
                answered, version = number_in(await socket.receive_bytes(timeout=60))
                assert answered == number
                seen.add(version)

    async def run() -> None:
        async with served("openpi", weights_dir=tmp_path) as server, contextlib.AsyncExitStack() as stack:
            url = server.urls["openpi"]
            for _ in range(idle):
                await stack.enter_async_context(websocket(url))
            tasks = [asyncio.create_task(client(url, number * requests)) for number in range(CLIENTS)]
            while not seen:
                await asyncio.sleep(0.01)
            for version in range(1, versions + 1):
                await asyncio.to_thread(publish, tmp_path, version)
                while server.core.version != version:
                    await asyncio.sleep(0.01)
            await asyncio.gather(*tasks)
            await client(url, 0)  # with the last version
            assert server.core.metrics.text({}).count("errors_total{") == 0

    asyncio.run(run())
    assert {0, versions} <= seen


def test_a_client_that_reads_nothing_does_not_slow_others():
    """It leaves 2,000 replies unread, 0.8 MB; another one is answered meanwhile, and no reply of the first is lost."""

    async def run() -> None:
        async with served("openpi", max_connections=8) as server:
            url = server.urls["openpi"]
            async with websocket(url) as slow, websocket(url) as other:
                slow._response.connection.transport.pause_reading()
                for number in range(2000):
                    await slow.send_bytes(request(number))
                await other.receive_bytes(timeout=60)
                for number in range(20):
                    await other.send_bytes(request(number))
                    assert number_in(await other.receive_bytes(timeout=60))[0] == number
                slow._response.connection.transport.resume_reading()
                await slow.receive_bytes(timeout=60)
                for number in range(2000):
                    assert number_in(await slow.receive_bytes(timeout=60))[0] == number

    asyncio.run(run())
