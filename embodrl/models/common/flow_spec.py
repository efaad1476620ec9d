"""What the specs of flow-matching families share: facts and rules. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from embodrl.config.model_schema import FlowModelConfig
from embodrl.config.rules.base import Context, Finding, RuleSet

VALUE_INPUTS = ("prefix", "suffix")
TRAINABLE = ("all", "lora", "action_expert", "head")
RL = "Gaussian log-probs of denoising steps: flow_sde, flow_noise"
ACTIONS = "continuous chunk by flow matching"

FLOW = RuleSet()


@FLOW.rule("model.flow.noise_std_min", "model.flow.noise_std_max")
def noise_range_is_not_empty(context: Context) -> Iterator[Finding]:
    """The learned noise has a range."""
    flow = context.model(FlowModelConfig).flow
    if flow.noise_std_min >= flow.noise_std_max:
        yield Finding(
            "model.flow.noise_std_min",
            f"{flow.noise_std_min} is not below model.flow.noise_std_max = {flow.noise_std_max}",
            "set it to half of noise_std_max",
            f"above 0, below {flow.noise_std_max}",
            others=("model.flow.noise_std_max",),
        )


@FLOW.note("model.model_type", "sft.label_smoothing_bins", "algorithm.sampling")
def settings_of_token_policies(context: Context) -> Iterator[Finding]:
    """Temperatures and bins belong to policies with action tokens."""
    for key in ("algorithm.sampling.temperature", "algorithm.sampling.top_k", "sft.label_smoothing_bins"):
        if context.by_user(key):
            message = f"has no effect: {context.config.model.model_type} does not read it"
            yield Finding(key, message, "leave it out")


@FLOW.note("model.flow")
def noise_of_the_other_method(context: Context) -> Iterator[Finding]:
    """Each sampling method has its own noise."""
    method = context.model(FlowModelConfig).flow.method
    for name in ("noise_std_min", "noise_std_max") if method == "flow_sde" else ("noise_level",):
        if context.by_user(f"model.flow.{name}"):
            yield Finding(f"model.flow.{name}", f"has no effect: model.flow.method is {method}", "leave it out")


@FLOW.note("model.model_type", "model.model_path", "env.include_state")
def checkpoint_sees_the_state(context: Context) -> Iterator[Finding]:
    """A public flow checkpoint was trained with the robot's state."""
    config, family = context.config, context.family
    reads = family is not None and family.uses_state is True
    if config.model.model_path is not None and reads and not config.env.include_state:
        message = f"{config.model.model_type} reads the robot's state, and gets zeros: env.include_state is false"
        yield Finding("model.model_path", message, "set env.include_state=true", others=("env.include_state",))
