"""Two robots without hardware: one with the methods of lerobot's Robot, and one that is a subclass of it.

The second one is there where lerobot is; lerobot makes it of its registered name.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

JOINTS = ("shoulder.pos", "elbow.pos", "gripper.pos")


class Arm:
    """Joints that go where they are sent, and a camera whose picture shows the first one's position."""

    observation_features: ClassVar = {**dict.fromkeys(JOINTS, float), "front": (12, 16, 3)}
    action_features: ClassVar = dict.fromkeys(JOINTS, float)
    is_calibrated = True

    def __init__(self, start: float = 10.0) -> None:
        self.at = dict.fromkeys(JOINTS, start)
        self.is_connected = False

    def connect(self, calibrate: bool = True) -> None:
        self.is_connected = True

    def disconnect(self) -> None:
        self.is_connected = False

    def get_observation(self) -> dict:
        assert self.is_connected
        return {**self.at, "front": np.full((12, 16, 3), round(self.at[JOINTS[0]]), np.uint8)}

    def send_action(self, action: dict) -> dict:
        assert self.is_connected and tuple(action) == JOINTS
        self.at = dict(action)
        return action


def is_there(observation: dict) -> bool:
    return observation[JOINTS[0]] >= 30


with contextlib.suppress(ImportError):
    from lerobot.robots import Robot, RobotConfig

    @RobotConfig.register_subclass("stub_arm")
    @dataclass(kw_only=True)
    class StubArmConfig(RobotConfig):
        start: float = 10.0

    class StubArm(Robot):
        config_class, name = StubArmConfig, "stub_arm"
        observation_features, action_features = Arm.observation_features, Arm.action_features

        def __init__(self, config: StubArmConfig) -> None:
            super().__init__(config)
            self.arm = Arm(config.start)

        is_calibrated = True

        @property
        def is_connected(self) -> bool:
            return self.arm.is_connected

        def connect(self, calibrate: bool = True) -> None:
            self.arm.connect(calibrate)

        def calibrate(self) -> None: ...
        def configure(self) -> None: ...

        def get_observation(self) -> dict:
            return self.arm.get_observation()

        def send_action(self, action: dict) -> dict:
            return self.arm.send_action(action)

        def disconnect(self) -> None:
            self.arm.disconnect()
