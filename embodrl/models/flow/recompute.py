"""Gradient checkpointing of transformers' networks."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from transformers import PreTrainedModel


def recompute_layers(model: PreTrainedModel, layers: Iterable[nn.Module]) -> None:
    """Recompute the activations of ``layers``, the blocks of a transformers model, in the backward pass.

    transformers does so only for layers in training mode, but policies always stay in eval mode, so that rollout and
    update are one distribution. Only the layers themselves are switched, not their submodules, whose behaviour depends
    on the mode.
    """
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in layers:
        layer.training = True
