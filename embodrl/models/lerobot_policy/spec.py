"""Any policy of lerobot, in an interpreter of its own: settings, facts and rules. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Iterator

from pydantic import Field

from embodrl.config.rules.base import Context, path_kind
from embodrl.config.schema import ModelConfig, PathText, PositiveFloat
from embodrl.rule_set import Finding, RuleSet
from embodrl.specs import ModelSpec


class LeRobotConfig(ModelConfig):
    """A lerobot policy that acts and does not learn."""

    python: PathText | None = Field(
        default=None, description="interpreter of the environment that lerobot is installed in"
    )
    lerobot_cameras: tuple[str, ...] = Field(
        default=(),
        description="lerobot's names of the pictures, in the order of env.cameras; empty: config.json's",
    )
    answer_timeout_s: PositiveFloat = Field(default=900.0, description="for the policy to load, and for each chunk")


RULES = RuleSet()


@RULES.rule("model.model_type", "model.model_path", "model.python")
def lerobot_policy_is_there(context: Context) -> Iterator[Finding]:
    """A policy of lerobot has a checkpoint, and an interpreter that has lerobot."""
    model = context.model(LeRobotConfig)
    if model.model_path is None:
        hint = "give the directory or hub id of a policy that lerobot trained"
        yield Finding("model.model_path", "lerobot's policies have no tiny size", hint, "a directory, or OWNER/NAME")
    python = model.python
    if python is None:
        hint = (
            "make an environment for it (python -m venv DIR; DIR/bin/pip install lerobot): model.python=DIR/bin/python"
        )
        yield Finding("model.python", "no interpreter that has lerobot is named", hint, "the path of an interpreter")
    elif not (path_kind(python) == "file" and os.access(python, os.X_OK)):
        hint = "give the path of the Python interpreter that has lerobot"
        yield Finding(
            "model.python", f"'{python}' is not a program that can be run", hint, "the path of an interpreter"
        )


@RULES.rule("model.model_type", "model.stats_path", "model.unnorm_key")
def lerobot_policy_brings_its_statistics(context: Context) -> Iterator[Finding]:
    """Its processors normalise, with the statistics in their own files."""
    for name in ("stats_path", "unnorm_key"):
        if getattr(context.config.model, name) is not None:
            message = "has no effect on a policy that lerobot's own processors normalise for"
            hint = "remove it; other statistics go into policy_preprocessor.json and policy_postprocessor.json"
            yield Finding(f"model.{name}", message, hint, "null", others=("model.model_type",))


SPEC = ModelSpec(
    name="lerobot",
    target="embodrl.models.lerobot_policy.policy:build_lerobot",
    description="any lerobot policy (ACT, xVLA, ...) in an interpreter of its own, for eval only",
    recognizes=lambda raw: isinstance(raw.get("type"), str) and "input_features" in raw,
    settings=LeRobotConfig,
    rules=(RULES,),
    value_head=False,
    sizes="as lerobot has it",
    actions="as lerobot has it",
    checkpoint="lerobot's: config.json, model.safetensors, processor files",
    rl="none: no gradients",
    only_acts="in an interpreter of its own",
)
