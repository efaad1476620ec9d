"""``model=remote``: a policy behind a server, asked in each protocol that has a client here."""

import asyncio
import threading

import numpy as np
import pytest
import torch
from expect import raises_code
from served import TOKEN, served

from embodrl.config.load import load_config
from embodrl.errors import RemotePolicyError
from embodrl.models.remote_policy.policy import build_remote
from embodrl.models.remote_policy.spec import RemoteConfig
from embodrl.models.remote_policy.spec import clients as remote_clients
from embodrl.serving.wire import clients
from embodrl.specs import SERVE_PROTOCOLS
from embodrl.types import Observation, SamplingParams


@pytest.fixture(autouse=True)
def _token(monkeypatch):
    monkeypatch.setenv("EMBODRL_TOKEN", TOKEN)


def build(url: str, **settings):
    config = RemoteConfig.model_validate({"model_type": "remote", "warm_start": None, "url": url} | settings)
    return build_remote(config, device="cpu", dtype=torch.float32, seed=0)


def seen(*pixels: int) -> Observation:
    images = np.stack([np.full((2, 4, 4, 3), pixel, np.uint8) for pixel in pixels])
    state = np.arange(2.0 * len(pixels), dtype=np.float32).reshape(-1, 2)
    return Observation(images, state, [f"push {pixel}" for pixel in pixels], np.zeros(len(pixels), np.int32))


def ask(policy, observation):
    return policy.predict_action_batch(observation, "eval", SamplingParams(), compute_values=False).actions


SERVED = {
    "openpi": {"openpi": {"state": ("observation/a:1", "observation/b")}},
    "gr00t": {"gr00t": {"state": ("state.a:1", "state.b:1"), "actions": ("arm:6", "gripper:1")}},
    "http": {},
}


@pytest.mark.parametrize("protocol", SERVED)
def test_a_remote_policy_acts_as_the_policy_itself(protocol):
    async def run():
        async with served(protocol, cameras=("front", "wrist"), **SERVED[protocol]) as server:
            keys = {} if protocol != "gr00t" else {"keys": {"state": ("state.a:1", "state.b:1")}}
            policy, report = await asyncio.to_thread(build, server.urls[protocol], num_action_chunks=3, **keys)
            assert "front" in report.conventions["observation"]
            for pixels in ((9,), (1, 2, 3, 4), (200, 100)):
                observation = seen(*pixels)
                found = await asyncio.to_thread(ask, policy, observation)
                wanted = server.policy.predict_action_batch(observation, "eval", SamplingParams()).actions
                assert (found == wanted[:, :3]).all() and found.dtype == np.float32
            await asyncio.to_thread(policy.connection.close)

    asyncio.run(run())


def test_rows_are_asked_about_at_the_same_time():
    async def run():
        async with served("openpi", cameras=("front", "wrist")) as server:
            policy, _ = await asyncio.to_thread(build, server.urls["openpi"])
            server.core.pause()
            asked = asyncio.create_task(asyncio.to_thread(ask, policy, seen(1, 2, 3)))
            while len(server.core._under_way) < 3:
                await asyncio.sleep(0.001)
            server.core.resume()
            await asked
            assert server.policy.batches == [3]
            await asyncio.to_thread(policy.connection.close)

    asyncio.run(run())


@pytest.mark.parametrize("protocol", SERVED)
def test_a_server_that_was_restarted_is_asked_again(protocol):
    async def run():
        async with served(protocol, cameras=("front", "wrist"), **SERVED[protocol]) as first:
            keys = {} if protocol != "gr00t" else {"keys": {"state": ("state.a:1", "state.b:1")}}
            policy, _ = await asyncio.to_thread(build, first.urls[protocol], **keys)
            await asyncio.to_thread(ask, policy, seen(1))
            port = first.port(protocol)
        asked = asyncio.create_task(asyncio.to_thread(ask, policy, seen(1, 2)))  # while it is gone
        async with served(protocol, cameras=("front", "wrist"), port=port, **SERVED[protocol]):
            assert (await asked).shape == (2, 5, 7)
        policy.connection.client.config = policy.config.model_copy(update={"reconnect_timeout_s": 0.1})
        with raises_code("remote-unreachable", RemotePolicyError):
            await asyncio.to_thread(ask, policy, seen(1))
        await asyncio.to_thread(policy.connection.close)

    asyncio.run(run())


@pytest.mark.parametrize("protocol", SERVED)
def test_what_does_not_fit_is_named(protocol, monkeypatch):
    async def run():
        async with served(protocol, cameras=("front", "wrist")) as server:
            url = server.urls[protocol]
            for settings in ({"num_action_chunks": 6}, {"action_dim": 8}):
                policy, _ = await asyncio.to_thread(build, url, **settings)
                with raises_code("remote-does-not-fit", RemotePolicyError):
                    await asyncio.to_thread(ask, policy, without_state(seen(1)))
            image = "video.other" if protocol == "gr00t" else "other"
            keys = {"images": (image, image + "2")}
            policy, _ = await asyncio.to_thread(build, url, keys=keys)
            with raises_code("remote-refused", RemotePolicyError):
                await asyncio.to_thread(ask, policy, without_state(seen(1)))
            monkeypatch.setenv("EMBODRL_TOKEN", "wrong-token")
            with pytest.raises(RemotePolicyError) as error:
                await asyncio.to_thread(build, url)
            assert error.value.code in ("remote-token", "remote-unreachable", "remote-refused")
        with raises_code("remote-unreachable", RemotePolicyError):
            await asyncio.to_thread(build, url, answer_timeout_s=0.2)

    asyncio.run(run())


@pytest.mark.parametrize("protocol", ["openpi", "http"])
def test_a_server_without_a_sign_of_life_is_unreachable(protocol, monkeypatch):
    monkeypatch.setattr(clients, "PROBE_S", 0.01)

    async def run():
        async with served(protocol, cameras=("front", "wrist")) as server:
            policy, _ = await asyncio.to_thread(build, server.urls[protocol])
            server.core.pause()  # it answers when it is asked whether it lives
            asked = asyncio.create_task(asyncio.to_thread(ask, policy, seen(1)))
            await asyncio.sleep(0.2)
            assert not asked.done()
            server.core.resume()
            await asked
            monkeypatch.setattr(clients, "PROBE_TIMEOUT_S", 0.05)
            found = []

            def attempt():
                with raises_code("remote-unreachable", RemotePolicyError):
                    ask(policy, seen(1))
                found.append("unreachable")

            thread = threading.Thread(target=attempt)
            thread.start()
            thread.join(20)  # meanwhile the server's loop hangs
            assert found
            await asyncio.to_thread(policy.connection.close)

    asyncio.run(run())


def without_state(observation: Observation) -> Observation:
    empty = np.zeros((len(observation.images), 0), np.float32)
    return Observation(observation.images, empty, observation.instruction, observation.task_id)


def test_a_server_that_does_not_tell_its_keys(monkeypatch):
    async def run():
        async with served("openpi") as server:
            monkeypatch.setattr(server.server.service, "info", lambda keys: {})  # as openpi's own may answer
            with raises_code("remote-keys", RemotePolicyError):
                await asyncio.to_thread(build, server.urls["openpi"])
            keys = {"images": ("observation/base_camera",), "instruction": "prompt"}
            policy, _ = await asyncio.to_thread(build, server.urls["openpi"], keys=keys)
            one = without_state(seen(1))
            one.images = one.images[:, :1]
            assert (await asyncio.to_thread(ask, policy, one)).shape == (1, 5, 7)

    asyncio.run(run())


def test_it_only_acts_and_needs_a_url():
    policy, _ = build_remote(RemoteConfig(url="ws://host:1"), device="meta", dtype=torch.float32, seed=0)
    with raises_code("remote-only-acts", RemotePolicyError):
        policy.predict_action_batch(seen(1), "train", SamplingParams())
    with raises_code("remote-only-acts", RemotePolicyError):
        policy.predict_values(seen(1))
    for url in ("null", "host", "ftp://host:1", "ws://host", "ws://:80", "'ws://[::1'"):
        with raises_code("remote-policy-has-a-url"):
            load_config(["env=toy", "model=remote", f"model.url={url}"], verb="eval")
    for verb, code in (("train", "trained-model-has-gradients"), ("sft", "fine-tuned-model-has-gradients")):
        with raises_code(code):
            load_config(["env=toy", "model=remote", "model.url=ws://host:1"], verb=verb)
    with raises_code("remote-policy-has-its-own-weights"):
        load_config(["env=toy", "model=remote", "model.url=ws://host:1", "model.unnorm_key=x"], verb="eval")
    assert set(remote_clients()) == {"ws", "wss", "http", "https", "tcp", "zmq"}


class StandIn(clients.Client):
    """A client of a protocol from outside: the action is the robot's state, once."""

    async def connect(self) -> None:
        self._learn({"images": ["picture"], "instruction": "text"})

    async def act(self, observation: Observation) -> np.ndarray:
        return observation.state[:, None]

    async def close(self) -> None:
        pass


def test_a_protocol_from_outside_brings_its_client(monkeypatch):
    monkeypatch.setattr(SERVE_PROTOCOLS, "_entries", dict(SERVE_PROTOCOLS._entries))
    SERVE_PROTOCOLS.add("standin", "nowhere:Listener", client=StandIn, schemes=("standin", "ws"))
    load_config(["env=toy", "model=remote", "model.url=standin://host:1"], verb="eval")
    policy, _ = build("standin://host:1", num_action_chunks=1, action_dim=2)
    assert (ask(policy, seen(1, 2)) == seen(1, 2).state[:, None]).all()
    policy.connection.close()
    assert remote_clients()["ws"] == "embodrl.serving.wire.clients:OpenpiClient"


def test_a_wrong_token_is_named() -> None:
    class Answer(Exception):
        status = 401

    assert clients.unreachable("http://server", Answer()).code == "remote-token"
    assert clients.unreachable("http://server", OSError("refused")).code == "remote-unreachable"
