"""Datasets of demonstrations with known outcomes."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from embodrl.config.schema import Config
from embodrl.data.demos import DemoEpisode, Outcomes
from embodrl.data.lerobot_writer import LeRobotWriter
from embodrl.data.raw import RawWriter
from embodrl.learners.replay import reward_settings
from embodrl.pipelines.load import load_config

A = 7


def outcomes(length: int, success: bool) -> Outcomes:
    rewards = np.arange(length, dtype=np.float32)
    terminated = np.zeros(length, np.bool_)
    terminated[-1] = success
    return Outcomes(np.full((length, A), rewards[:, None] / 100, np.float32), rewards, terminated)


def episode(number: int, length: int, success: bool, known: bool = True, state_dim: int = 4) -> DemoEpisode:
    state = np.full((length, state_dim), 10 * number, np.float32) + np.arange(length, dtype=np.float32)[:, None]
    actions = np.zeros((length, A), np.float32)
    images = np.zeros((length, 1, 16, 16, 3), np.uint8)
    made = outcomes(length, success) if known else None
    return DemoEpisode(images, state, actions, "reach the red square", "reach-red", number, success, made)


def write(directory: Path, style: str, *episodes: DemoEpisode, rewards: object = None) -> None:
    writer = RawWriter(directory) if style == "raw" else LeRobotWriter(directory, ["base_camera"], 20, 0, "toy")
    for each in episodes:
        writer.add(each)
    writer.close({"robot_type": "toy", "rewards": reward_settings(config()) if rewards is None else rewards})


def config(*arguments: str) -> Config:
    base = ["env=toy", "model=mlp", "algorithm=sac", "env.state=full", "env.cameras=[{height: 16, width: 16}]"]
    return load_config([*base, *arguments]).config
