"""Gradient checkpointing of the language models that transformers provides."""

from __future__ import annotations

from typing import Any

from torch import nn


def recompute_layers(decoder: Any) -> None:
    """Recompute the activations of every layer of a transformers decoder in the backward pass.

    transformers does so only in layers that are in training mode, while a policy is never in it: rollout and update
    must be one distribution. Only the layers themselves are switched, none of the modules in them that a mode changes.

    Args:
        decoder: with ``layers``, e.g. a LlamaModel or Qwen3Model.
    """
    decoder.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in decoder.layers:
        assert isinstance(layer, nn.Module)
        layer.training = True
