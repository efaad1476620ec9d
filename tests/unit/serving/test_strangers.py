"""What clients without a token can do to a server: little, and not for long."""

import asyncio
import gzip
import logging

import aiohttp
import pytest
from served import TOKEN, served, websocket
from served_http import picture

from embodrl.reporting.log import PER_WINDOW
from embodrl.serving import door
from embodrl.serving.listener import HttpListener

HALF = b"GET /he"
PUSH = {"images.base_camera": picture(9), "instruction": "push"}


async def half_open(port: int, count: int) -> list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    streams = [await asyncio.open_connection("127.0.0.1", port) for _ in range(count)]
    for _, writer in streams:
        writer.write(HALF)
    return streams


async def act(url: str) -> int:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with aiohttp.ClientSession() as session, session.post(f"{url}/act", json=PUSH, headers=headers) as answer:
        return answer.status


HEAD = f"POST /act HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: 100\r\n\r\n"


@pytest.mark.parametrize("protocol", ["http", "act"])
def test_a_body_that_does_not_come_ends_its_request(protocol, monkeypatch):
    monkeypatch.setattr(door, "BODY_S", 0.2)

    async def run():
        async with served(protocol, max_connections=1) as server:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port(protocol))
            writer.write(HEAD.encode() + b"{")
            status = await reader.readline()
            assert status.split()[1] == b"408"
            assert await act(server.urls[protocol]) not in (408, 503)  # its place is free again
            writer.close()

    asyncio.run(asyncio.wait_for(run(), 30))


@pytest.mark.parametrize("rest", [b"", b"GET /in"], ids=["nothing", "half a header"])
def test_a_connection_that_rests_is_closed_after_its_time(rest, monkeypatch):
    monkeypatch.setattr(door, "REST_S", 0.2)

    async def run():
        async with served("http") as server:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port("http"))
            writer.write(f"GET /info?token={TOKEN} HTTP/1.1\r\nHost: x\r\n\r\n".encode() + rest)
            assert (await reader.read()).startswith(b"HTTP/1.1 200")  # to the end
            writer.close()

    asyncio.run(asyncio.wait_for(run(), 30))


def test_of_many_connections_none_rests(monkeypatch):
    monkeypatch.setattr(door.resource, "getrlimit", lambda _: (8, 8))

    async def run():
        async with served("http") as server:
            streams = []
            for _ in range(6):
                reader, writer = await asyncio.open_connection("127.0.0.1", server.port("http"))
                streams.append((reader, writer))
                writer.write(f"GET /info?token={TOKEN} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
                assert b"200" in await reader.readline()
            assert [b"HTTP" in await reader.read() for reader, _ in streams[4:]] == [False, False]  # to the end
            assert not any(reader.at_eof() for reader, _ in streams[:4])
            for _, writer in streams:
                writer.close()

    asyncio.run(asyncio.wait_for(run(), 30))


@pytest.mark.parametrize("protocol", ["http", "act", "openpi"])
def test_the_oldest_of_too_many_strangers_makes_room(protocol, monkeypatch):
    monkeypatch.setattr(HttpListener, "max_strangers", 4)

    async def run():
        async with served(protocol) as server:
            streams = await half_open(server.port(protocol), 12)
            assert [await reader.read() for reader, _ in streams[:8]] == [b""] * 8
            async with (
                aiohttp.ClientSession() as session,
                session.get(f"{server.urls[protocol].replace('ws', 'http')}/health") as answer,
            ):
                assert answer.status == 200
            for _, writer in streams:
                writer.close()

    asyncio.run(asyncio.wait_for(run(), 30))


def test_a_stranger_is_closed_after_its_time_and_who_was_admitted_stays(monkeypatch):
    monkeypatch.setattr(door, "HELLO_S", 0.3)

    async def run():
        async with served("http") as server:
            url = server.urls["http"]
            async with aiohttp.ClientSession(url, headers={"Authorization": f"Bearer {TOKEN}"}) as session:
                async with session.get("/info") as answer:
                    await answer.read()
                    admitted = answer.connection
                assert admitted is None  # back in the pool
                streams = await half_open(server.port("http"), 3)
                assert [await reader.read() for reader, _ in streams] == [b""] * 3
                ((_, kept),) = ((key, pool) for key, pool in session.connector._conns.items())
                assert kept[0][0].is_connected()

    asyncio.run(asyncio.wait_for(run(), 30))


def test_a_client_too_many_gets_an_answer_and_its_connection_ends():
    async def run():
        async with served("openpi", max_connections=1) as server, websocket(server.urls["openpi"]) as first:
            await first.receive_bytes(timeout=10)
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port("openpi"))
            writer.write(f"GET /?token={TOKEN} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            assert (await reader.read()).split()[1] == b"503"
            writer.close()

    asyncio.run(asyncio.wait_for(run(), 30))


def test_answers_without_a_token_end_their_connection():
    async def run():
        async with served("http") as server:
            for path, status in (("/health", 200), ("/info", 401)):
                reader, writer = await asyncio.open_connection("127.0.0.1", server.port("http"))
                writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
                assert (await reader.read()).split()[1] == str(status).encode()
                writer.close()

    asyncio.run(asyncio.wait_for(run(), 30))


def test_too_many_open_files_end_the_oldest_strangers_and_are_reported_once(monkeypatch, caplog):
    monkeypatch.setattr(door, "_PAUSE_S", 0.0)
    failures = [True] * 5

    async def run():
        async with served("http") as server:
            streams = await half_open(server.port("http"), 5)
            loop = asyncio.get_running_loop()
            accept = loop.sock_accept

            async def failing(listening):
                if failures and failures.pop():
                    raise OSError(24, "Too many open files")
                return await accept(listening)

            monkeypatch.setattr(loop, "sock_accept", failing)
            streams += await half_open(server.port("http"), 1)  # the accept that was waiting takes this one
            assert [await reader.read() for reader, _ in streams[:5]] == [b""] * 5
            assert await act(server.urls["http"]) == 200
            streams[-1][1].close()

    with caplog.at_level(logging.WARNING):
        asyncio.run(asyncio.wait_for(run(), 30))
    assert [record.name for record in caplog.records].count("embodrl.serving.door") == 1


@pytest.mark.parametrize(("protocol", "module"), [("gr00t", "zmq"), ("lerobot", "grpc")])
def test_what_does_not_begin_the_protocol_is_closed(protocol, module, monkeypatch):
    pytest.importorskip(module)
    monkeypatch.setattr(door, "HELLO_S", 0.2)

    async def run():
        async with served(protocol) as server:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port(protocol))
            await reader.read()  # to the end
            writer.close()

    asyncio.run(asyncio.wait_for(run(), 20))


def test_what_strangers_send_wrongly_is_a_line_each_and_not_many(caplog):
    async def run():
        async with served("http") as server:
            for _ in range(PER_WINDOW + 30):
                reader, writer = await asyncio.open_connection("127.0.0.1", server.port("http"))
                writer.write(b"GET /\x01 HTTP/1.1\r\nHost: x\r\n\r\n")
                await reader.read()
                writer.close()

    asyncio.run(asyncio.wait_for(run(), 60))
    found = [record for record in caplog.records if record.name == "aiohttp.server"]
    assert 0 < len(found) <= PER_WINDOW and not any(record.exc_info for record in found)


@pytest.mark.parametrize(
    ("encoding", "body", "status", "code"),
    [
        ("gzip", b"no gzip", 400, "wire-encoding"),
        ("gzip", gzip.compress(b"{}")[:-9], 400, "wire-encoding"),
        ("br", b"{}", 400, "wire-encoding"),
        ("gzip", gzip.compress(bytes(2**24)), 413, "wire-too-large"),
        ("gzip", gzip.compress(b"[]"), 422, "wire-message"),
    ],
    ids=["junk", "cut off", "unknown", "too large", "whole"],
)
def test_a_packed_body_is_unpacked_within_the_limit(encoding, body, status, code):
    async def run():
        async with served("http", max_message_mb=1) as server, aiohttp.ClientSession() as session:
            headers = {"Authorization": f"Bearer {TOKEN}", "Content-Encoding": encoding}
            async with session.post(f"{server.urls['http']}/act", data=body, headers=headers) as answer:
                assert answer.status == status and f"[{code}]" in (await answer.json())["error"]

    asyncio.run(asyncio.wait_for(run(), 30))


def test_a_peer_that_only_shakes_hands_is_closed(monkeypatch):
    pytest.importorskip("zmq")
    monkeypatch.setattr(door, "HELLO_S", 0.2)
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
    kind = b"\x0bSocket-Type" + len(b"DEALER").to_bytes(4, "big") + b"DEALER"
    ready = b"\x05READY" + kind

    async def run():
        async with served("gr00t") as server:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port("gr00t"))
            writer.write(greeting + b"\x04" + bytes([len(ready)]) + ready)
            assert b"READY" in await reader.read()  # to the end
            writer.close()

    asyncio.run(asyncio.wait_for(run(), 20))
