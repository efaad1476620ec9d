"""Small observation networks: encoders of critics, value functions and reward models.

Shapes: B batch, V cameras, H image side, S state dimensions, F features.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from embodrl.models.common.init import init_matrix

IMAGES = "images"
STATE = "state"
TASK = "task"
"""Input names of ``ObservationNet``."""


class Cnn(nn.Module):
    """Stride-2 convolutions, a linear layer and a norm: ``uint8[B,V,H,H,3]`` to ``float32[B,feature_dim]``."""

    def __init__(self, num_cameras: int, image_size: int, channels: Sequence[int], feature_dim: int) -> None:
        super().__init__()
        sizes = (3 * num_cameras, *channels)
        side = image_size
        self.convs = nn.ModuleList(nn.Conv2d(a, b, 3, stride=2, padding=1) for a, b in pairwise(sizes))
        for _ in channels:
            side = (side + 1) // 2
        self.proj = nn.Linear(sizes[-1] * side * side, feature_dim)
        self.norm = nn.LayerNorm(feature_dim)

    def forward(self, images: Tensor) -> Tensor:
        # In place: each new tensor of this size costs more than what it is computed by.
        x = images.permute(0, 1, 4, 2, 3).flatten(1, 2).float().div_(255.0).sub_(0.5)
        for conv in self.convs:
            x = F.relu(conv(x))
        return torch.tanh(self.norm(self.proj(x.flatten(1))))


LARGEST_IMAGE = 64
"""Images larger than this are scaled to this H."""


@dataclass(frozen=True)
class ObservationSpec:
    """Dimensions of an ``ObservationNet``'s inputs.

    Attributes:
        num_cameras: V; 0 for no images.
        state_dim: S.
        num_tasks: number of distinct instructions.
        image_size: H, to which images are resized.
    """

    num_cameras: int
    state_dim: int
    num_tasks: int
    image_size: int = LARGEST_IMAGE


class ObservationNet(nn.Module):
    """CNN image features, the raw state and a task embedding, concatenated: ``float32[B,F]``, F = ``num_features``.

    Inputs are ``images uint8[B,V,H,H,3]`` (with cameras), ``state float32[B,S]`` and ``task int64[B]``.
    """

    channels = (16, 32, 64, 64)
    vision_dim = 128
    task_dim = 16

    def __init__(self, spec: ObservationSpec) -> None:
        super().__init__()
        self.spec = spec
        size = (spec.num_cameras, spec.image_size, self.channels, self.vision_dim)
        self.vision = Cnn(*size) if spec.num_cameras else None
        self.task = nn.Embedding(spec.num_tasks, self.task_dim) if spec.num_tasks > 1 else None
        seen = self.vision_dim if self.vision is not None else 0
        self.num_features = spec.state_dim + seen + (self.task_dim if self.task is not None else 0)

    def init_weights(self, generator: torch.Generator) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Conv2d):
                init_matrix(module.weight, generator, math.sqrt(2.0))
                nn.init.zeros_(module.bias) if module.bias is not None else None
            elif isinstance(module, nn.Embedding):
                module.weight.data.normal_(generator=generator)

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        parts = [inputs[STATE].float()]
        if self.vision is not None:
            parts.append(self.vision(inputs[IMAGES]))
        if self.task is not None:
            parts.append(self.task(inputs[TASK]))
        return torch.cat(parts, -1)
