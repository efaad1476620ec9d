"""The critic: an MLP on a hidden state of the language model."""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LAST_LAYER_STD = 0.02


class DrawnHead(nn.Module, ABC):
    """A head that draws its own initial weights."""

    @abstractmethod
    def init_weights(self, generator: torch.Generator) -> None:
        """Draw new weights."""


class ValueHead(DrawnHead):
    """GELU MLP without bias in its last layer, always in float32; ``input_dim`` is D, ``output_dim`` values per row."""

    def __init__(self, input_dim: int, hidden_sizes: Sequence[int], output_dim: int) -> None:
        super().__init__()
        sizes = [input_dim, *hidden_sizes]
        self.hidden = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))
        self.out = nn.Linear(sizes[-1], output_dim, bias=False)

    def init_weights(self, generator: torch.Generator) -> None:
        """Draw hidden weights with variance 1/fan_in and output weights with standard deviation 0.02."""
        for layer in self.hidden:
            assert isinstance(layer, nn.Linear)
            layer.weight.data.normal_(0.0, 1.0 / math.sqrt(layer.in_features), generator=generator)
            layer.bias.data.zero_()
        self.out.weight.data.normal_(0.0, LAST_LAYER_STD, generator=generator)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map ``[B,D]`` to ``float32[B,output_dim]``."""
        with torch.autocast(hidden.device.type, enabled=False):
            x = hidden.float()
            for layer in self.hidden:
                x = F.gelu(layer(x))
            return self.out(x)


class FeatureTap(ValueHead):
    """Stands in for a value head and returns its input: ``float32[B,D]``."""

    def __init__(self) -> None:
        # Skips the layers of a value head.
        nn.Module.__init__(self)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden.float()


# A context variable, since several threads compute micro-batches concurrently.
_prefix: ContextVar[list[tuple[Tensor, Tensor | None]] | None] = ContextVar("prefix", default=None)


@contextmanager
def keep_prefix() -> Iterator[list[tuple[Tensor, Tensor | None]]]:
    """Yield a list that collects the inputs of ``masked_mean`` during the block.

    Every family reads the prompt-mean value through it, so the last entry holds the prefix states.
    """
    kept: list[tuple[Tensor, Tensor | None]] = []
    token = _prefix.set(kept)
    try:
        yield kept
    finally:
        _prefix.reset(token)


def masked_mean(hidden: Tensor, mask: Tensor | None) -> Tensor:
    """Return the mean ``float32[B,D]`` of ``[B,S,D]`` over tokens with nonzero ``mask [B,S]``; None for all."""
    if (kept := _prefix.get()) is not None:
        kept.append((hidden, mask))
    hidden = hidden.float()
    if mask is None:
        return hidden.mean(dim=1)
    weight = mask[..., None].float()
    return (hidden * weight).sum(dim=1) / weight.sum(dim=1)
