"""Gradient checkpointing of the networks that transformers provides."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from transformers import PreTrainedModel


def recompute_layers(model: PreTrainedModel, layers: Iterable[nn.Module]) -> None:
    """Recompute the activations of every layer of a transformers model in the backward pass.

    transformers does so only in layers that are in training mode, while a policy is never in it: rollout and update
    must be one distribution. Only the layers themselves are switched, none of the modules in them that a mode changes.

    Args:
        model: e.g. a LlamaModel or SiglipVisionModel.
        layers: its transformer blocks.
    """
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in layers:
        layer.training = True
