"""Episodes of the toy environment with actions of a policy server, asked by the protocol's own client package.

Runs in an interpreter that has that package and not embodrl's dependencies: python serve_toy_client.py PROTOCOL URL
TOKEN EPISODES SEED. Prints one JSON list: whether each episode was solved.
"""

from __future__ import annotations

import asyncio
import io
import json
import sys
from collections.abc import Awaitable, Callable

import numpy as np

from embodrl.envs.toy.env import ToyVectorEnv

CHUNK = 2  # actions run of each chunk, as in the evaluation
FIRST = np.zeros(1, np.int64)
Picture = np.ndarray


def openpi(url: str, token: str) -> Callable[[Picture, str], np.ndarray]:
    from openpi_client.websocket_client_policy import WebsocketClientPolicy

    client = WebsocketClientPolicy(url, None, token)
    return lambda picture, text: client.infer({"observation/base_camera": picture, "prompt": text})["actions"]


def act(url: str, token: str) -> Callable[[Picture, str], np.ndarray]:
    import json_numpy
    import requests

    json_numpy.patch()
    session = requests.Session()

    def ask(picture: Picture, text: str) -> np.ndarray:
        body = {"full_image": picture, "instruction": text}
        return np.stack(session.post(f"{url}/act?token={token}", json=body, timeout=60).json())

    return ask


def gr00t(url: str, token: str, dialect: str) -> Callable[[Picture, str], np.ndarray]:
    """GR00T's client is no package: its messages as gr00t/policy/server_client.py of N1.6 (commit 38624df) and of N1.7
    sends them; the latter with the package that packs its arrays.
    """
    import msgpack
    import msgpack_numpy
    import zmq

    def encode_npy(value: object) -> object:
        if not isinstance(value, np.ndarray):
            return value
        output = io.BytesIO()
        np.save(output, value, allow_pickle=False)
        return {"__ndarray_class__": True, "as_npy": output.getvalue()}

    def decode_npy(content: dict) -> object:
        is_array = "__ndarray_class__" in content
        return np.load(io.BytesIO(content["as_npy"]), allow_pickle=False) if is_array else content

    is_npy = dialect == "n1.6"
    encode, decode = (encode_npy, decode_npy) if is_npy else (msgpack_numpy.encode, msgpack_numpy.decode)
    socket = zmq.Context.instance().socket(zmq.REQ)
    socket.connect(url)

    def call(endpoint: str, data: object) -> object:
        request = {"endpoint": endpoint, "data": data, "api_token": token}
        socket.send(msgpack.packb(request, default=encode))
        return msgpack.unpackb(socket.recv(), object_hook=decode)

    def ask(picture: Picture, text: str) -> np.ndarray:
        language = {"annotation.human.task_description": [[text]]}
        observation = {"video": {"base_camera": picture[None, None]}, "state": {}, "language": language}
        actions, _ = call("get_action", {"observation": observation, "options": None})
        return actions["action"][0]

    assert call("ping", {})["status"] == "ok" and call("reset", {"options": None}) == {}
    return ask


def play(env: ToyVectorEnv, seed: int, ask: Callable[[Picture, str], np.ndarray]) -> bool:
    """Run an episode; tell whether it was solved."""
    observation = env.reset(np.array([seed]), np.zeros(1, np.int32), FIRST)
    while True:
        actions = ask(observation.images[0, 0], observation.instruction[0])[:CHUNK]
        step = env.chunk_step(actions[None].astype(np.float32), np.ones(1, np.bool_))
        observation = step.observation
        if (step.terminated | step.truncated).any():
            return bool(step.success[0])


def main(protocol: str, url: str, token: str, episodes: int, seed: int) -> list[bool]:
    env = ToyVectorEnv(1, ("reach-red",), image_size=64, max_episode_steps=20, max_chunk=CHUNK, auto_reset=False)
    if protocol == "vla_eval":
        return asyncio.run(with_harness(env, f"{url}/?token={token}", episodes, seed))
    if protocol == "gr00t":
        asks = [gr00t(url, token, dialect) for dialect in ("n1.6", "n1.7")]
        found, again = ([play(env, seed + number, ask) for number in range(episodes)] for ask in asks)
        assert found == again
        return found
    ask = {"openpi": openpi, "act": act}[protocol](url, token)
    return [play(env, seed + number, ask) for number in range(episodes)]


async def with_harness(env: ToyVectorEnv, url: str, episodes: int, seed: int) -> list[bool]:
    """Run episodes by the harness's own runner and connection, over the environment as one of its benchmarks."""
    from vla_eval.benchmarks.base import StepBenchmark, StepResult
    from vla_eval.connection import Connection
    from vla_eval.runners.sync_runner import SyncEpisodeRunner
    from vla_eval.specs import DimSpec

    class Toy(StepBenchmark):
        def get_tasks(self):
            return [{"name": "reach-red", "seed": seed + number} for number in range(episodes)]

        def reset(self, task):
            return env.reset(np.array([task["seed"]]), np.zeros(1, np.int32), FIRST)

        def step(self, action):
            step = env.chunk_step(np.asarray(action["actions"], np.float32)[None, None], np.ones(1, np.bool_))
            done = bool((step.terminated | step.truncated).any())
            return StepResult(step.observation, float(step.reward.sum()), done, {"success": bool(step.success[0])})

        def make_obs(self, raw_obs, task):
            picture, text = raw_obs.images[0, 0], raw_obs.instruction[0]
            return {"images": {"base_camera": picture}, "task_description": text}

        def get_step_result(self, step_result):
            return {"success": step_result.info["success"]}

        def get_action_spec(self):
            return {"action": DimSpec("action", 7, "raw")}

        def get_observation_spec(self):
            return {"image": DimSpec("image", 0, "rgb")}

    benchmark, runner, solved = Toy(), SyncEpisodeRunner(), []
    wait: Callable[..., Awaitable] = runner.run_episode
    async with Connection(url) as connection:
        for task in benchmark.get_tasks():
            result = await wait(benchmark, task, connection, max_steps=40)
            solved.append(bool(result["metrics"]["success"]))
    return solved


if __name__ == "__main__":
    name, address, secret, count, first = sys.argv[1:6]
    print(json.dumps(main(name, address, secret, int(count), int(first))))
