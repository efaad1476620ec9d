"""Episodes of the toy environment by lerobot's own RobotClient, over the environment as one of lerobot's robots.

Runs in an interpreter with lerobot and grpcio: python lerobot_robot.py HOST:PORT ACT_URL TOKEN EPISODES SEED. Every
command has to be that of the same conversation over ``POST /act``. Prints one JSON list: whether each episode was
solved.
"""

from __future__ import annotations

import base64
import json
import sys
import threading
import urllib.request
from dataclasses import dataclass

import numpy as np
from lerobot.async_inference.configs import RobotClientConfig
from lerobot.async_inference.robot_client import RobotClient
from lerobot.robots import Robot, RobotConfig

from embodrl.envs.toy.env import ToyVectorEnv

JOINTS = tuple(f"joint{number}.pos" for number in range(7))
SIZE, CHUNK = 64, 2


@RobotConfig.register_subclass("toy")
@dataclass(kw_only=True)
class ToyRobotConfig(RobotConfig):
    seed: int


class ToyRobot(Robot):
    """A robot in the toy environment. A command moves it until the next one, as it would a real one: the picture that
    is taken right after a command is that of before it.
    """

    config_class, name = ToyRobotConfig, "toy"

    def __init__(self, config: ToyRobotConfig) -> None:
        super().__init__(config)
        self.env = ToyVectorEnv(1, ("reach-red",), image_size=SIZE, max_episode_steps=20, max_chunk=2, auto_reset=False)
        seed, first = np.array([config.seed]), np.zeros(1, np.int32)
        self.observation = self.env.reset(seed, first, np.zeros(1, np.int64))
        self.command: np.ndarray | None = None
        self.commands: list[np.ndarray] = []
        self.solved, self.end = False, threading.Event()

    observation_features = dict.fromkeys(JOINTS, float) | {"base_camera": (SIZE, SIZE, 3)}
    action_features = dict.fromkeys(JOINTS, float)
    is_connected = is_calibrated = True

    def connect(self, calibrate: bool = True) -> None: ...
    def calibrate(self) -> None: ...
    def configure(self) -> None: ...
    def disconnect(self) -> None: ...

    def get_observation(self) -> dict:
        return {**dict.fromkeys(JOINTS, 0.0), "base_camera": self.observation.images[0, 0]}

    def send_action(self, action: dict) -> dict:
        assert list(action) == list(JOINTS)
        if self.command is not None and not self.end.is_set():
            step = self.env.chunk_step(self.command[None, None], np.ones(1, np.bool_))
            self.observation = step.observation
            if (step.terminated | step.truncated).any():
                self.solved = bool(step.success[0])
                self.end.set()
        self.command = np.array(list(action.values()), np.float32)
        self.commands.append(self.command)
        return action


def make(address: str, token: str, seed: int) -> RobotClient:
    return RobotClient(
        RobotClientConfig(
            policy_type="smolvla",
            pretrained_name_or_path=token,
            robot=ToyRobotConfig(id="toy", seed=seed),
            actions_per_chunk=CHUNK,
            chunk_size_threshold=0.0,
            server_address=address,
            fps=200,
        )
    )


def play(client: RobotClient) -> ToyRobot:
    """Let the client run an episode."""
    assert client.start()
    robot: ToyRobot = client.robot
    text = robot.observation.instruction[0]
    threads = [
        threading.Thread(target=client.receive_actions),
        threading.Thread(target=client.control_loop, args=(text,)),
    ]
    for thread in threads:
        thread.start()
    assert robot.end.wait(120)
    client.stop()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return robot


def replay(robot: ToyRobot, act_url: str, token: str) -> ToyRobot:
    """Run the same episode with chunks of ``POST /act``: after the first chunk, the client passes over the first action
    of each, whose timestep is that of the last command.
    """
    begin = 0
    while not robot.end.is_set():
        picture = robot.get_observation()["base_camera"]
        array = {"__numpy__": base64.b64encode(picture.tobytes()).decode(), "dtype": "|u1", "shape": picture.shape}
        body = {"full_image": array, "instruction": robot.observation.instruction[0]}
        request = urllib.request.Request(f"{act_url}/act?token={token}", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=60) as answer:
            chunk = json.load(answer)[begin:CHUNK]
        for action in chunk:
            values = np.frombuffer(base64.b64decode(action["__numpy__"]), action["dtype"])
            robot.send_action(dict(zip(JOINTS, values.tolist(), strict=True)))
        begin = 1
    return robot


def main(address: str, act_url: str, token: str, seeds: range) -> list[bool]:
    solved = []
    for seed in seeds:
        robot = play(make(address, token, seed))
        other = replay(ToyRobot(ToyRobotConfig(id="toy", seed=seed)), act_url, token)
        assert robot.solved == other.solved
        for command, wanted in zip(robot.commands, other.commands, strict=False):  # both continue past the end
            assert (command == wanted).all()
        solved.append(robot.solved)
    return solved


if __name__ == "__main__":
    place, url, secret, count, first = sys.argv[1:6]
    print(json.dumps(main(place, url, secret, range(int(first), int(first) + int(count)))))
