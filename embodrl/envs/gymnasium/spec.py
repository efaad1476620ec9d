"""Gymnasium: settings, facts and rules. Imports no simulator."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from pydantic import Field

from embodrl.config.rules.base import Context
from embodrl.config.schema import EnvConfig
from embodrl.envs.axes import COMMON
from embodrl.rule_set import Finding, RuleSet
from embodrl.specs import EXAMPLE_CAMERA, SimulatorSpec


class GymnasiumConfig(EnvConfig):
    """An environment registered with Gymnasium."""

    id: str | None = Field(default=None, description="Gymnasium id, e.g. Reacher-v5 or module:Name-v0")
    instruction: str | None = Field(default=None, description="language instruction for the policy")
    success_key: str | None = Field(
        default=None,
        description="key of Gymnasium's info, or return; null uses success or is_success if present",
    )
    success_threshold: float = Field(
        default=0.5, description="success is a value of success_key at or above this threshold"
    )


RULES = RuleSet()


def fill(given: object) -> tuple[str, dict[str, object]]:
    """Return a truncation bootstrap where rewards are dense: the task may be endless."""
    env: dict[str, Any] = cast(dict[str, Any], given).get("env") or {}
    endless = env.get("reward_mode") == "dense"
    return "env.reward_mode", {"algorithm.bootstrap_type": "truncation"} if endless else {}


@RULES.rule("env.env_type", "env.id", "env.instruction")
def gymnasium_needs_id(context: Context) -> Iterator[Finding]:
    """Gymnasium needs an id and provides no language instruction."""
    env = context.env(GymnasiumConfig)
    if not env.id:
        yield Finding(
            "env.id", "is missing: which environment of Gymnasium?", "set env.id, e.g. env.id=Reacher-v5", "an id"
        )
    if not env.instruction:
        hint = 'set it, e.g. env.instruction="move the finger to the ball"'
        yield Finding("env.instruction", "is missing: Gymnasium provides no language instruction", hint, "a sentence")
    elif env.id and context.by_user("env.id") and not context.by_user("env.instruction"):
        hint = 'set env.instruction="...": the language instruction for the policy'
        message = f"'{env.instruction}' is the instruction of another environment, not of {env.id}"
        yield Finding("env.instruction", message, hint, "a sentence", others=("env.id",))


SPEC = SimulatorSpec(
    name="gymnasium",
    target="embodrl.envs.gymnasium.env:GymnasiumVectorEnv",
    description="any environment registered with Gymnasium: env.id, env.instruction, model.action_dim",
    settings=GymnasiumConfig,
    fill=fill,
    rules=(RULES,),
    reads=("cameras", "include_images", "reward_mode", "success_bonus", "action_dim", "render_detail", "video"),
    reward_modes=("dense", "sparse"),
    camera_poses=False,
    max_cameras=1,
    needs=("gymnasium", "PIL"),
    extra="gymnasium",
    example={"tasks": ["task"], "id": "Reacher-v5", "instruction": "reach", "cameras": [EXAMPLE_CAMERA]},
    axes=COMMON,
    actions="a Box, mapped from -1 to 1; Discrete, by the largest of n numbers (model.gaussian.categorical)",
    camera_list="one: the image of render_mode=rgb_array, resized to the camera's size",
    expert_tasks=(),
    own_settings="to set a constructor argument, register an id with it and use that id as env.id:"
    " gymnasium.register(id=..., entry_point=..., kwargs={{'{name}': VALUE}})",
    verified="Reacher-v5, Hopper-v5 and Pendulum-v1 on a CPU",
)
