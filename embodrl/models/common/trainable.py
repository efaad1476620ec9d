"""Selection of trainable parameters: ``model.trainable`` and ``model.freeze_vision``."""

from __future__ import annotations

from torch import nn

from embodrl.config.schema import ModelConfig
from embodrl.errors import EmbodrlError
from embodrl.models.base import VLAPolicy
from embodrl.models.common.lora import OWN_HEADS, add_adapters


def apply_trainable(policy: VLAPolicy, config: ModelConfig, *, seed: int) -> None:
    """Set ``requires_grad`` of every parameter, after adding adapters if ``trainable`` is ``lora``.

    Value and noise heads always train; parameters that affect no output never do. ``seed`` is for new adapters.

    Raises:
        MissingDependencyError: ``lora`` without peft.
        EmbodrlError: the policy lacks such a part, or a ``lora`` target matches no layer.
    """
    parts = policy.parts()
    unused = policy.unused_parameters()
    policy.requires_grad_(config.trainable == "all")
    if config.trainable == "lora":
        add_adapters(policy, config.lora, seed=seed, freeze_vision=config.freeze_vision)
    elif config.trainable == "action_expert":
        _part(parts, "action_expert", "model.trainable=action_expert", config).requires_grad_(True)
    elif config.trainable == "head":
        for parameter in policy.head_parameters():
            parameter.requires_grad_(True)
    for name in OWN_HEADS:
        if name in parts:
            parts[name].requires_grad_(True)
    if config.freeze_vision:
        _part(parts, "vision", "model.freeze_vision=true", config).requires_grad_(False)
    for parameter in unused:
        parameter.requires_grad_(False)


def _part(parts: dict[str, nn.Module], name: str, setting: str, config: ModelConfig) -> nn.Module:
    if name not in parts:
        raise EmbodrlError(
            f"{setting}: {config.model_type} has no part '{name}'; it has {', '.join(parts)}",
            "leave the setting at its default, or choose another model",
            code="model-part",
        )
    return parts[name]
