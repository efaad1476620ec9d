"""Section ``env.real_time``: a robot's clock, its limits, and what a simulated robot lacks of a perfect one."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from embodrl.config.schema.section import Decay, NonNegativeFloat, PathText, PositiveFloat, PositiveInt, Section, Seed

_EACH = "; one number for all dimensions or one for each, null for no limit"


class SafetyConfig(Section):
    """Limits of the commands that reach the robot, in its own units (of a simulator: -1 to 1)."""

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


DEVICES = ("keyboard", "spacemouse")
"""What a person corrects a policy with."""


class RealTimeConfig(Section):
    """A robot acts in wall-clock time, simulated or not; with control_hz=null there is no clock."""

    control_hz: PositiveFloat | None = Field(
        default=None,
        description="commands per second: each waits for its time; null: no clock, environments step as fast as they"
        " can",
    )
    speed: PositiveFloat = Field(
        default=1.0, description="of a simulated robot's clock: 2 is twice as fast as wall-clock time"
    )
    latency_s: NonNegativeFloat = Field(
        default=0.0, description="age of a simulated robot's observations when the policy gets them, in its time"
    )
    dropped_frames: Decay = Field(
        default=0.0, description="fraction of a simulated robot's pictures that are lost: the last one is seen again"
    )
    state_noise: NonNegativeFloat = Field(
        default=0.0, description="standard deviation of the noise in a simulated robot's state"
    )
    action_noise: NonNegativeFloat = Field(
        default=0.0, description="standard deviation of the noise in what a simulated robot does, of actions -1 to 1"
    )
    seed: Seed = Field(default=0, description="of noise and dropped pictures, with the seed of the episode")
    max_dropped_frames: PositiveInt = Field(
        default=10, description="observations in a row that a robot may fail to give before the run ends"
    )
    wait_for_person: bool = Field(
        default=False, description="an episode begins when a person says that the scene is ready; see control_dir"
    )
    control_dir: PathText | None = Field(
        default=None,
        description="directory in which a person, a button or a script makes files for the robot: stop and pause hold"
        " while they are there; ready, success and failure count once",
    )
    safety: SafetyConfig = Field(default=SafetyConfig(), description="limits of the commands")
