"""Episodes of the toy environment with actions of a policy server, asked by NVIDIA's own PolicyClient.

Runs in an interpreter that has what it imports, with a checkout of Isaac-GR00T (N1.6 or N1.7) on the path, and not
embodrl's dependencies: python gr00t_client.py URL TOKEN EPISODES SEED. Prints one JSON list: whether each was solved.
"""

from __future__ import annotations

import json
import sys
from urllib.parse import urlsplit

import numpy as np
from gr00t.policy.server_client import PolicyClient
from serve_toy_client import CHUNK, Picture, play

from embodrl.envs.toy.env import ToyVectorEnv


def main(url: str, token: str, episodes: int, seed: int) -> list[bool]:
    place = urlsplit(url)
    client = PolicyClient(str(place.hostname), place.port, api_token=token)
    assert client.ping()
    client.reset()

    def ask(picture: Picture, text: str) -> np.ndarray:
        language = {"annotation.human.task_description": [[text]]}
        observation = {"video": {"base_camera": picture[None, None]}, "state": {}, "language": language}
        actions, _ = client.get_action(observation)
        return actions["action"][0]

    env = ToyVectorEnv(1, ("reach-red",), image_size=64, max_episode_steps=20, max_chunk=CHUNK, auto_reset=False)
    return [play(env, seed + number, ask) for number in range(episodes)]


if __name__ == "__main__":
    address, secret, count, first = sys.argv[1:5]
    print(json.dumps(main(address, secret, int(count), int(first))))
