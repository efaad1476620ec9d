"""Any lerobot policy in a separate interpreter: settings, facts and rules. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Iterator

from pydantic import Field

from embodrl.config.rules.base import Context, path_kind
from embodrl.config.schema import ModelConfig, PathText, PositiveFloat
from embodrl.rule_set import Finding, RuleSet
from embodrl.specs import ModelSpec


class LeRobotConfig(ModelConfig):
    """A lerobot policy for evaluation only."""

    python: PathText | None = Field(default=None, description="Python interpreter of an environment with lerobot")
    lerobot_cameras: tuple[str, ...] = Field(
        default=(),
        description="lerobot's image names, in the order of env.cameras; empty: names in config.json",
    )
    answer_timeout_s: PositiveFloat = Field(default=900.0, description="timeout for loading the policy, and per chunk")


RULES = RuleSet()


@RULES.rule("model.model_type", "model.model_path", "model.python")
def lerobot_policy_is_there(context: Context) -> Iterator[Finding]:
    """A lerobot policy has a checkpoint, and an interpreter with lerobot."""
    model = context.model(LeRobotConfig)
    if model.model_path is None:
        hint = "give the directory or hub id of a policy that lerobot trained"
        yield Finding("model.model_path", "lerobot's policies have no tiny size", hint, "a directory, or OWNER/NAME")
    python = model.python
    if python is None:
        hint = (
            "make an environment for it (python -m venv DIR; DIR/bin/pip install lerobot): model.python=DIR/bin/python"
        )
        yield Finding("model.python", "no interpreter with lerobot is configured", hint, "the path of an interpreter")
    elif not (path_kind(python) == "file" and os.access(python, os.X_OK)):
        hint = "give the path of a Python interpreter with lerobot"
        yield Finding("model.python", f"'{python}' is not an executable program", hint, "the path of an interpreter")


@RULES.rule("model.model_type", "model.stats_path", "model.unnorm_key")
def lerobot_policy_brings_its_statistics(context: Context) -> Iterator[Finding]:
    """lerobot's processors normalise, with the statistics in their own files."""
    for name in ("stats_path", "unnorm_key"):
        if getattr(context.config.model, name) is not None:
            message = "has no effect: lerobot's own processors normalise for this policy"
            hint = "remove it; other statistics go into policy_preprocessor.json and policy_postprocessor.json"
            yield Finding(f"model.{name}", message, hint, "null", others=("model.model_type",))


SPEC = ModelSpec(
    name="lerobot",
    target="embodrl.models.lerobot_policy.policy:build_lerobot",
    description="any lerobot policy (ACT, xVLA, ...) in a separate interpreter, for eval only",
    recognizes=lambda raw: isinstance(raw.get("type"), str) and "input_features" in raw,
    settings=LeRobotConfig,
    rules=(RULES,),
    value_head=False,
    sizes="as lerobot has it",
    actions="as lerobot has it",
    checkpoint="lerobot's: config.json, model.safetensors, processor files",
    rl="none: no gradients",
    only_acts="in a separate interpreter",
)
