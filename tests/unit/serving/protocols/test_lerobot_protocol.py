"""lerobot's gRPC service: conversations in pickles as lerobot 0.6.1 sends them, and what is refused."""

import asyncio
import pickle
import sys
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import ModuleType

import numpy as np
import pytest
import torch
from expect import raises_code
from served import CHUNK, TOKEN, served, wanted

from embodrl.serving.protocols import lerobot as service
from embodrl.serving.protocols import pickled
from embodrl.serving.protocols.pickled import MODULE, read_pickle

grpc = pytest.importorskip("grpc")
BEGIN, MIDDLE, END = 1, 2, 3


@dataclass
class TimedObservation:
    timestamp: float
    timestep: int
    observation: dict
    must_go: bool = False


@dataclass
class RemotePolicyConfig:
    policy_type: str
    pretrained_name_or_path: str
    lerobot_features: dict
    actions_per_chunk: int
    device: str
    rename_map: dict


@dataclass
class TimedAction:
    timestamp: float
    timestep: int
    action: torch.Tensor


@pytest.fixture(autouse=True)
def _lerobot(monkeypatch):
    """Modules of lerobot's names with its three classes, for Python's pickle."""
    module = ModuleType(MODULE)
    for kind in (TimedObservation, RemotePolicyConfig, TimedAction):
        monkeypatch.setattr(kind, "__module__", MODULE)
        setattr(module, kind.__name__, kind)
    for name in ("lerobot", "lerobot.async_inference"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, MODULE, module)
    monkeypatch.setattr(service, "POLL_S", 0.05)


def seen(pixel: int, timestep: int = 0, must_go: bool = True, text: str = "push", **more) -> bytes:
    picture = np.full((4, 4, 3), pixel, np.uint8)
    values = {"a.pos": 1.0, "b.pos": np.float32(2.0), "base_camera": picture, "task": text}
    return pickle.dumps(TimedObservation(100.0, timestep, values | more, must_go))


def setup(token: str | None = TOKEN, number: int = 50, names: object = ("b.pos", "a.pos")) -> bytes:
    features = {
        "observation.state": {"dtype": "float32", "shape": (2,), "names": list(names)},
        "observation.images.base_camera": {"dtype": "image", "shape": (4, 4, 3), "names": ["height", "width", "c"]},
    }
    return pickle.dumps(RemotePolicyConfig("act", token, features, number, "cpu", {}))


def field(number: int, data: bytes) -> bytes:
    """Return a field of bytes in protobuf's wire format."""
    size, text = len(data), b""
    while size > 127:
        text, size = text + bytes([size & 127 | 128]), size >> 7
    return bytes([number << 3 | 2]) + text + bytes([size]) + data


class Robot:
    """The four calls, on raw bytes."""

    def __init__(self, channel) -> None:
        path = "/transport.AsyncInference/"
        self.ready = channel.unary_unary(path + "Ready")
        self._instruct = channel.unary_unary(path + "SendPolicyInstructions")
        self._observe = channel.stream_unary(path + "SendObservations")
        self._act = channel.unary_unary(path + "GetActions")

    async def instruct(self, data: bytes) -> None:
        assert await self._instruct(field(1, data), timeout=10) == b""

    async def observe(self, *parts: tuple[int, bytes]) -> None:
        requests = [bytes([1 << 3, state]) + field(2, data) for state, data in parts]
        assert await self._observe(iter(requests), timeout=10) == b""

    async def act(self, timeout: float = 10) -> list[TimedAction]:
        answer = await self._act(b"", timeout=timeout)
        data = answer[1 + len(field(1, answer)) - len(answer) - 1 :] if answer else b""
        return pickle.loads(data) if data else []  # noqa: S301 - of our own server


@asynccontextmanager
async def robot(server, data: bytes | None = None):
    address = server.urls["lerobot"].removeprefix("grpc://")
    options = [("grpc.use_local_subchannel_pool", 1)]  # else channels of one process share a connection
    async with grpc.aio.insecure_channel(address, options) as channel:
        client = Robot(channel)
        await client.ready(b"", timeout=10)
        if data is not None:
            await client.instruct(data)
        yield client


def with_robot(test, data: bytes | None, **settings):
    async def run():
        async with served("lerobot", **settings) as server, robot(server, data) as client:
            return await asyncio.wait_for(test(client, server), 60)

    return asyncio.run(run())


async def status(call) -> tuple[str, str]:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    return error.value.code().name, error.value.details()


def test_an_observation_gets_the_actions_of_its_timesteps():
    async def test(client, server):
        data = seen(9, 7)
        await client.observe((BEGIN, data[:100]), (MIDDLE, data[100:150]), (END, data[150:]))
        actions = await client.act()
        assert [one.timestep for one in actions] == [7, 8, 9, 10, 11]
        assert [one.timestamp for one in actions] == [100.0 + step / 30 for step in range(CHUNK)]
        assert all(one.action.dtype == torch.float32 for one in actions)
        assert (torch.stack([one.action for one in actions]).numpy() == wanted(9 + 3, "push")).all()

    with_robot(test, setup())


def test_the_state_has_the_order_of_the_robot_or_of_the_settings():
    async def test(client, server):
        seen_states = []
        monkey = server.core.act

        async def spy(observation, *arguments):
            seen_states.append(observation.state.tolist())
            return await monkey(observation, *arguments)

        server.core.act = spy
        await client.observe((END, seen(9)))
        assert len(await client.act()) == 2
        return seen_states

    assert with_robot(test, setup(number=2)) == [[[2.0, 1.0]]]
    assert with_robot(test, setup(number=2), lerobot={"state": ("a.pos", "b.pos")}) == [[[1.0, 2.0]]]


def test_the_newest_observation_counts_and_none_is_answered_twice():
    async def test(client, server):
        await client.observe((END, seen(1, 3)))
        await client.observe((END, seen(2, 4)))
        assert (await client.act())[0].action[0] == wanted(2 + 3, "push")[0, 0]
        await client.observe((END, seen(3, 4, must_go=False)))
        assert await client.act() == []
        await client.observe((END, seen(3, 4, must_go=True)))
        assert (await client.act())[0].action[0] == wanted(3 + 3, "push")[0, 0]
        await client.ready(b"")
        assert (await status(client.observe((END, seen(1)))))[0] == "FAILED_PRECONDITION"

    with_robot(test, setup())


def test_a_token_is_needed_and_stands_in_the_policys_name():
    async def test(client, server):
        for given in ("another", None):
            code, text = await status(client.instruct(setup(given)))
            assert code == "UNAUTHENTICATED" and "[server-token]" in text
        assert (await status(client.observe((END, seen(1)))))[0] == "FAILED_PRECONDITION"
        assert (await status(client.act()))[0] == "FAILED_PRECONDITION"
        assert server.core.metrics.counters["refused_total", "lerobot"] == 2
        await client.instruct(setup())
        async with robot(server) as stranger:
            assert (await status(stranger.act()))[0] == "FAILED_PRECONDITION"

    with_robot(test, None)


def test_a_client_without_instructions_can_not_poll_in_a_tight_loop(monkeypatch):
    monkeypatch.setattr(service, "POLL_S", 3600.0)

    async def test(client, server):
        assert (await status(client.act(timeout=0.2)))[0] == "DEADLINE_EXCEEDED"

    with_robot(test, None)


def test_a_client_that_was_silent_is_forgotten_with_its_token(monkeypatch):
    async def test(client, server):
        await client.observe((END, seen(1)))
        monkeypatch.setattr(service, "IDLE_S", 0.0)
        assert (await status(client.observe((END, seen(2)))))[0] == "FAILED_PRECONDITION"

    with_robot(test, setup())


def test_several_robots_share_a_batch():
    async def run():
        async with served("lerobot") as server, robot(server, setup()) as one, robot(server, setup()) as two:
            server.core.pause()
            await one.observe((END, seen(1)))
            await two.observe((END, seen(2)))
            both = [asyncio.create_task(client.act()) for client in (one, two)]
            while len(server.core._under_way) < 2:
                await asyncio.sleep(0.001)
            server.core.resume()
            first, second = await asyncio.gather(*both)
            assert (first[0].action[0], second[0].action[0]) == (wanted(4, "push")[0, 0], wanted(5, "push")[0, 0])
            assert server.policy.batches == [2]

    asyncio.run(run())


class Evil:
    def __reduce__(self):
        return (print, ("executed",))


def huge_memo() -> bytes:
    """A pickle whose memo has the index 2**31 - 1: CPython's unpickler would allocate 32 GB for it."""
    return b"\x80\x04Nr\xff\xff\xff\x7f."


def built_twice() -> bytes:
    """A pickle that gives a map, which it names once, to an object two times."""
    name = b"".join(b"\x8c" + bytes([len(text)]) + text.encode() for text in (MODULE, "TimedObservation"))
    return b"\x80\x04" + name + b"\x93)\x81}\x8c\x01aK\x01s\x94bh\x00b."


def refused() -> dict[str, list[bytes]]:
    return {
        "wire-pickle": [
            *(
                b"",
                b"\x80\x04",
                huge_memo(),
                built_twice(),
                pickle.dumps([1], 2),
                pickle.dumps({(1, 2): 3}),
                pickle.dumps({1, 2}),
            ),
            *(pickle.dumps(Evil()), pickle.dumps(np.array([print], object)), b"\x80\x04(N."),
            b"\x80\x04" + b"]" * 201 + b".",
        ],
        "wire-array": [pickle.dumps(np.zeros(3, "V4")), pickle.dumps(np.zeros(2, complex))],
        "wire-message": [pickle.dumps(None), pickle.dumps([]), setup()],
        "wire-observation": [
            *(seen(1, base_camera=[1, 2]), seen(1, base_camera=np.zeros((4, 4), np.uint8)), seen(1, task=3)),
            *(seen(1, **{"a.pos": "far"}), seen(1, **{"a.pos": float("nan")})),
        ],
    }


def test_what_is_refused(capfd, monkeypatch):
    monkeypatch.setattr(pickled, "MAX_ITEMS", 200)

    async def test(client, server):
        for code, messages in refused().items():
            for data in messages:
                found, text = await status(client.observe((END, data)))
                assert found == "INVALID_ARGUMENT" and text.endswith(f"[{code}]"), (code, text)
        for parts in (((7, b""),), ((BEGIN, seen(1)),), ((BEGIN, bytes(600_000)), (END, bytes(600_000)))):
            found, text = await status(client.observe(*parts))
            assert found == "INVALID_ARGUMENT" and text.endswith("[wire-message]")
        for data in (seen(1), setup(number=0), setup(names=[3]), b"none"):
            found, text = await status(client.instruct(data))
            assert found == "INVALID_ARGUMENT" and "[wire-" in text
        await client.observe((END, seen(1, text="refuse")))
        assert (await status(client.act())) == (
            "INVALID_ARGUMENT",
            "this instruction is refused (say something else) [test-refused]",
        )
        await client.observe((END, seen(1, text="fail")))
        found, text = await status(client.act())
        assert found == "INTERNAL" and "secret" not in text and text.endswith("[policy-raised]")
        await client.observe((END, seen(9)))
        assert len(await client.act()) == CHUNK

    with_robot(test, setup(), max_message_mb=1)
    assert "executed" not in capfd.readouterr().out


class Shared:
    """An array of a buffer that several name."""

    def __init__(self, data: bytearray) -> None:
        self.data = data

    def __reduce__(self):
        return np._core.numeric._frombuffer, (self.data, np.dtype("u1"), (len(self.data),), "C")


def test_a_buffer_that_is_named_often_is_kept_once():
    data = bytearray(range(200))
    one, two = read_pickle(pickle.dumps([Shared(data), Shared(data)], 5))
    assert bytes(one) == bytes(data) and np.shares_memory(one, two)


def test_an_address_that_is_taken_is_named():
    async def run():
        async with served("lerobot") as server:
            await served("lerobot", port=server.port("lerobot")).__aenter__()

    with raises_code("server-address"):
        asyncio.run(run())


def test_arrays_of_every_order_and_protocol():
    values = {
        "c": np.arange(24, dtype=np.uint8).reshape(2, 3, 4),
        "f": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "big": np.arange(3, dtype=">f4"),
        "part": np.arange(10)[::2],
        "empty": np.zeros((0, 3), np.float32),
        "truth": np.array([True, False]),
        "one": np.int16(-3),
        "plain": [1, -5, 1 << 40, 2.5, None, True, "ä", b"x", (), (1,), (1, 2, 3, 4), {"a": {}}],
    }
    for protocol in (4, 5):
        found = read_pickle(pickle.dumps(values, protocol))
        assert found.keys() == values.keys()
        for name, value in values.items():
            if isinstance(value, np.ndarray):
                assert found[name].dtype == value.dtype and (found[name] == value).all()
            else:
                assert found[name] == value
