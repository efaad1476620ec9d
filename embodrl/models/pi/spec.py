"""pi0 and pi0.5: settings, facts and rules. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pydantic import Field

from embodrl.config.rules.base import Context
from embodrl.models.common.config_file import own_section
from embodrl.models.flow.flow_spec import (
    WHOLE_PICTURES,
    FlowModelConfig,
    at_most,
    chunk_fits,
    even,
    flow_family,
    vlm_fits,
)
from embodrl.models.openpi.settings import PiArchitectureConfig
from embodrl.rule_set import Finding, RuleSet


class PiModelConfig(FlowModelConfig):
    """A pi0 or pi0.5."""

    pi: PiArchitectureConfig = Field(
        default=PiArchitectureConfig(), description="dimensions of the tiny size, and prompts"
    )


RULES = RuleSet()
OF_PI0 = RuleSet()

MISSING_CONFIG = (
    "openpi's train_pytorch.py writes none. Write config.json with the values of your TrainConfig's model, by default"
    ' {"action_dim": 32, "action_horizon": 50, "paligemma_variant": "gemma_2b", "action_expert_variant": "gemma_300m"}'
    ' and, for pi0.5, "discrete_state_input": true or false'
)


@RULES.rule(
    "model.model_type", "model.model_path", "model.pi", "model.num_action_chunks", "model.action_dim", "env.cameras"
)
def pi_dimensions_fit(context: Context) -> Iterator[Finding]:
    """In a tiny pi0 or pi0.5 patches tile the image, heads divide widths, and actions and cameras fit."""
    config = context.config
    base = "model.pi"
    if config.model.model_path is not None:
        return
    shape = context.model(PiModelConfig).pi
    yield from vlm_fits(base, shape)
    yield from even(f"{base}.expert_width", shape.expert_width, "the time embedding has as many sines as cosines")
    yield from chunk_fits(config.model, base, shape.action_horizon, shape.max_action_dim)
    cameras = len(config.env.cameras)
    yield from at_most("env.cameras", cameras, f"{base}.num_images", shape.num_images, "cameras")


@OF_PI0.note("model.model_type", "model.pi")
def discrete_state_is_of_pi05(context: Context) -> Iterator[Finding]:
    """Only pi0.5 writes the state into the prompt."""
    for key in ("model.pi.discrete_state", "model.pi.padded_state_in_prompt"):
        if context.by_user(key):
            yield Finding(key, "has no effect: pi0 does not read it", "leave it out")


EXPERT = "PaliGemma and a flow-matching action expert"
CHECKPOINT = "openpi's PyTorch conversion, or lerobot's {} layout"


def variant_of(raw: Mapping[str, object]) -> object:
    """Return the model that a config.json belongs to; openpi's own do not say."""
    variant = own_section(raw).get("variant", raw.get("type"))
    of_openpi = "paligemma_variant" in raw and raw.get("model_type") is None and not isinstance(raw.get("type"), str)
    return "either" if of_openpi and variant not in ("pi0", "pi05") else variant


PI0 = flow_family(
    "pi0",
    "embodrl.models.pi",
    f"pi0: {EXPERT}",
    PiModelConfig,
    (RULES, WHOLE_PICTURES, OF_PI0),
    lambda raw: variant_of(raw) in ("pi0", "either"),
    sizes="1.5 M (tiny), about 3.3 B",
    public_preset="pi0_3b",
    missing_config=MISSING_CONFIG,
    checkpoint=CHECKPOINT.format("pi0"),
)
PI05 = flow_family(
    "pi05",
    "embodrl.models.pi",
    f"pi0.5: {EXPERT}",
    PiModelConfig,
    (RULES, WHOLE_PICTURES),
    lambda raw: variant_of(raw) in ("pi05", "either"),
    uses_state="model.pi.discrete_state",
    sizes="1.7 M (tiny), about 3.3 B",
    public_preset="pi05_3b",
    missing_config=MISSING_CONFIG,
    checkpoint=CHECKPOINT.format("pi05"),
)
