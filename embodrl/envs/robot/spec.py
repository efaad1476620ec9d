"""A robot: settings, facts and rules. Imports no robot."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import Field

from embodrl.config.rules.base import Context
from embodrl.config.schema import EnvConfig, PositiveFloat
from embodrl.rule_set import Finding, RuleSet
from embodrl.specs import SimulatorSpec

EXPERT = "expert"
"""Possible sources of corrections besides a person at a device and another policy."""


class RobotConfig(EnvConfig):
    """A robot with the interface of lerobot's ``Robot`` class."""

    robot: str | None = Field(
        default=None, description="name of a lerobot robot, e.g. so101_follower, or a module:function returning one"
    )
    robot_settings: dict[str, Any] = Field(
        default={},
        description="settings of the robot's configuration class (port, id, cameras), or arguments of that function",
    )
    robot_module: str | None = Field(
        default=None, description="module to import first, which registers the robot with lerobot"
    )
    action_low: tuple[float, ...] = Field(
        default=(), description="value of -1 in the robot's units, for each of its action_features"
    )
    action_high: tuple[float, ...] = Field(default=(), description="the same of 1")
    relative_actions: bool = Field(
        default=False, description="actions change the last command by up to max_change instead of being commands"
    )
    max_change: PositiveFloat = Field(
        default=0.1,
        le=2,
        description="change by a relative action of 1, as a fraction of half the range from action_low to action_high",
    )
    state_keys: tuple[str, ...] = Field(
        default=(), description="numbers of observation_features that form the state; empty: all"
    )
    instruction: str | None = Field(default=None, description="language instruction for the policy")
    reset_fn: str | None = Field(
        default=None, description="module:function, called with the robot and the seed before each episode"
    )
    success_fn: str | None = Field(
        default=None,
        description="module:function, maps an observation to whether the task is solved; null: a person decides, by a"
        " file in env.real_time.control_dir",
    )


RULES = RuleSet()


@RULES.rule("env.env_type", "env.robot", "env.instruction", "env.reset_fn", "env.success_fn")
def robot_is_named(context: Context) -> Iterator[Finding]:
    """Robot and instruction are given, and functions are module:function."""
    env = context.env(RobotConfig)
    if not env.robot:
        hint = "set env.robot, e.g. env.robot=so101_follower"
        yield Finding("env.robot", "is missing: which robot?", hint, "a lerobot robot, or module:function")
    if not env.instruction:
        hint = 'set it, e.g. env.instruction="put the cube into the box"'
        yield Finding("env.instruction", "is missing: a robot provides no language instruction", hint, "a sentence")
    hint = "write my_module:my_function"
    for name in ("reset_fn", "success_fn"):
        value = getattr(env, name)
        if value is not None and value.count(":") != 1:
            yield Finding(f"env.{name}", f"'{value}' is not of the form module:function", hint, "module:function, null")


@RULES.rule("env.action_low", "env.action_high", "model.action_dim", "env.real_time.safety")
def ranges_are_those_of_the_actions(context: Context) -> Iterator[Finding]:
    """Every number of an action has a range."""
    env = context.env(RobotConfig)
    wanted = context.config.model.action_dim
    for name in ("action_low", "action_high"):
        if len(getattr(env, name)) != wanted:
            message = f"has {len(getattr(env, name))} numbers, but model.action_dim is {wanted}"
            hint = "set one number for each of the robot's action_features, and their count as model.action_dim"
            yield Finding(f"env.{name}", message, hint, f"{wanted} numbers", others=("model.action_dim",))
            return
    wrong = [i for i, (low, high) in enumerate(zip(env.action_low, env.action_high, strict=True)) if low >= high]
    if wrong:
        message = f"number {wrong[0]}: {env.action_low[wrong[0]]:g} is not below {env.action_high[wrong[0]]:g}"
        yield Finding("env.action_low", message, "exchange them", others=("env.action_high",))


@RULES.rule("env.real_time", "env.success_fn")
def robot_has_a_clock_of_its_own(context: Context) -> Iterator[Finding]:
    """A robot has a control rate and no simulated delays, and a function or person judges success."""
    env = context.env(RobotConfig)
    real_time = context.config.env.real_time
    if real_time.control_hz is None:
        yield Finding(
            "env.real_time.control_hz", "is missing: the number of commands per second", "set it, e.g. to 10", "above 0"
        )
    for name in ("latency_s", "dropped_frames", "state_noise", "action_noise"):
        if getattr(real_time, name):
            yield Finding(f"env.real_time.{name}", "is of a simulated robot; a robot has its own", "leave it out", "0")
    if real_time.speed != 1:
        yield Finding("env.real_time.speed", "a robot's clock is the wall clock", "leave it out", "1")
    if env.success_fn is None and real_time.control_dir is None:
        message = "neither a function nor a person could report success"
        hint = "set it, or env.real_time.control_dir for a person to make DIR/success"
        yield Finding("env.success_fn", message, hint, "module:function", others=("env.real_time.control_dir",))


SPEC = SimulatorSpec(
    name="robot",
    target="embodrl.envs.robot.env:RobotVectorEnv",
    description="a robot with the interface of lerobot's Robot class, in wall-clock time",
    settings=RobotConfig,
    rules=(RULES,),
    reads=("cameras", "include_images", "success_bonus"),
    reward_modes=("sparse",),
    camera_poses=False,
    actions="numbers of action_features or changes of them, mapped from -1 to 1",
    camera_list="images of observation_features, resized to the camera's size",
    expert_tasks=(),
    demonstrations="`embodrl store collect store.intervention=keyboard`",
    verified="no real robot: only stubs, and lerobot's mock_robot",
)
