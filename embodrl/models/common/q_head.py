"""Critics of off-policy algorithms: an ensemble of MLPs on features and an action chunk.

Shapes: E critics, B batch, F features, C actions in a chunk, A action dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class QEnsemble(nn.Module):
    """``num_q`` (E) parallel ReLU MLPs in float32, with input size F + C A.

    ``layer_norm`` normalises each ReLU's input, as in RLPD (arXiv 2302.02948, 4.2).
    """

    def __init__(self, num_q: int, input_dim: int, hidden_sizes: Sequence[int], layer_norm: bool) -> None:
        super().__init__()
        sizes = [*pairwise((input_dim, *hidden_sizes, 1))]
        self.weights = nn.ParameterList(torch.zeros(num_q, a, b) for a, b in sizes)
        self.biases = nn.ParameterList(torch.zeros(num_q, 1, b) for _, b in sizes)
        hidden = hidden_sizes if layer_norm else ()
        self.scales = nn.ParameterList(torch.ones(num_q, 1, size) for size in hidden)
        self.shifts = nn.ParameterList(torch.zeros(num_q, 1, size) for size in hidden)

    def init_weights(self, generator: torch.Generator) -> None:
        """Draw each critic independently: weights and biases uniform in +-1/sqrt(fan_in), torch's linear default."""
        for weight, bias in zip(self.weights, self.biases, strict=True):
            bound = 1.0 / math.sqrt(weight.shape[1])
            weight.data.uniform_(-bound, bound, generator=generator)
            bias.data.uniform_(-bound, bound, generator=generator)

    def forward(self, features: Tensor, actions: Tensor, chosen: Tensor | None = None) -> Tensor:
        """Map ``float32[B,F]`` and ``float32[B,C,A]`` to values ``float32[E,B]``; only ``chosen`` critics, if given."""

        def part(parameter: Tensor) -> Tensor:
            return parameter if chosen is None else parameter[chosen]

        x = torch.cat([features, actions.flatten(1)], -1)
        x = x.expand(len(self.weights[0]) if chosen is None else len(chosen), -1, -1)
        last = len(self.weights) - 1
        for index, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            x = torch.baddbmm(part(bias), x, part(weight))
            if index == last:
                break
            if len(self.scales):
                x = torch.addcmul(part(self.shifts[index]), F.layer_norm(x, x.shape[-1:]), part(self.scales[index]))
            x = F.relu(x)
        return x.squeeze(-1)
