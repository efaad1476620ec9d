"""Section ``env.real_time``: a robot's clock and limits, and the imperfections of a simulated robot."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from embodrl.config.schema.section import Decay, NonNegativeFloat, PathText, PositiveFloat, PositiveInt, Section, Seed

_EACH = "; one number for all dimensions or one for each, null for no limit"


class SafetyConfig(Section):
    """Limits of the robot commands, in the robot's units (for simulators: -1 to 1)."""

    low: tuple[float, ...] | None = Field(default=None, description="lowest command" + _EACH)
    high: tuple[float, ...] | None = Field(default=None, description="highest command" + _EACH)
    max_step: tuple[PositiveFloat, ...] | None = Field(
        default=None, description="largest change from one command to the next" + _EACH
    )
    max_velocity: tuple[PositiveFloat, ...] | None = Field(
        default=None, description="largest change per second" + _EACH
    )
    on_violation: Literal["clip", "stop"] = Field(
        default="clip", description="clip: send the nearest command within the limits; stop: send none, end the episode"
    )


DEVICES = ("keyboard", "spacemouse", "browser")
"""Devices with which a person corrects a policy."""


class RealTimeConfig(Section):
    """Wall-clock control of a real or simulated robot; with control_hz=null there is no clock."""

    control_hz: PositiveFloat | None = Field(
        default=None,
        description="commands per second, each sent on time; null: no clock, environments step as fast as they can",
    )
    speed: PositiveFloat = Field(
        default=1.0, description="clock of a simulated robot relative to wall-clock time: 2 is twice as fast"
    )
    latency_s: NonNegativeFloat = Field(
        default=0.0, description="age of a simulated robot's observations when the policy gets them, in simulated time"
    )
    dropped_frames: Decay = Field(
        default=0.0, description="fraction of a simulated robot's images that are lost; the last image is repeated"
    )
    state_noise: NonNegativeFloat = Field(
        default=0.0, description="standard deviation of the noise on a simulated robot's state"
    )
    action_noise: NonNegativeFloat = Field(
        default=0.0,
        description="standard deviation of the noise on a simulated robot's executed actions, which range from -1 to 1",
    )
    seed: Seed = Field(default=0, description="seed of noise and dropped images, combined with the seed of the episode")
    max_dropped_frames: PositiveInt = Field(
        default=10, description="consecutive observations that a robot may fail to return before the run ends"
    )
    wait_for_person: bool = Field(
        default=False, description="start an episode when a person signals that the scene is ready; see control_dir"
    )
    control_dir: PathText | None = Field(
        default=None,
        description="directory of control files for the robot, created by a person, a button or a script: stop and"
        " pause apply as long as they exist; ready, success and failure once",
    )
    safety: SafetyConfig = Field(default=SafetyConfig(), description="limits of the commands")
