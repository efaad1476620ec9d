"""The pictures of GR00T N1.6: SigLIP 2 of any grid, and the connector that makes one token of four patches.

As NVIDIA's Eagle-Block2A-2B-v2: patches are flattened row by row with colours last, the learned positions of a square
grid are resampled to that of the picture, and every block sees all of it. Shapes: B pictures, N patches, D width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from embodrl.models.common.init import init_linears
from embodrl.models.common.patches import SiglipSpec
from embodrl.models.flow.siglip import SiglipTower
from embodrl.models.gr00t.qwen3_vl import VisionSpec


class FlatPatches(nn.Module):
    """Patches of a picture of any size to vectors, plus positions."""

    def __init__(self, spec: VisionSpec) -> None:
        super().__init__()
        self.spec = spec
        self.patch_embedding = nn.Linear(3 * spec.patch_size**2, spec.width)
        self.position_embedding = nn.Embedding(spec.num_positions, spec.width)

    def forward(self, pixels: Tensor) -> Tensor:
        """``[B,3,H,W]`` to ``[B,N,D]``."""
        size = self.spec.patch_size
        weight = self.patch_embedding.weight
        split = pixels.unflatten(3, (-1, size)).unflatten(2, (-1, size))  # B, 3, rows, row, columns, column
        patches = split.permute(0, 2, 4, 3, 5, 1)
        rows, columns = patches.shape[1:3]
        return self.patch_embedding(patches.flatten(3).flatten(1, 2).to(weight.dtype)) + self.positions(rows, columns)

    def positions(self, rows: int, columns: int) -> Tensor:
        """Return the positions ``[rows x columns,D]``, resampled bilinearly with antialiasing, in float32."""
        side = round(self.spec.num_positions**0.5)
        table = self.position_embedding.weight
        if (rows, columns) == (side, side):
            return table
        grid = table.float().T.unflatten(1, (side, side))[None]
        resampled = F.interpolate(grid, (rows, columns), mode="bilinear", align_corners=False, antialias=True)
        return resampled[0].flatten(1).T.to(table.dtype)


class Eagle3Tower(SiglipTower):
    """SigLIP 2 with ``FlatPatches``; the pooling head is stored and never run."""

    def __init__(self, spec: VisionSpec, pooling_head: bool) -> None:
        side = round(spec.num_positions**0.5) * spec.patch_size
        super().__init__(
            SiglipSpec(side, spec.patch_size, spec.width, spec.depth, spec.num_heads, spec.mlp_dim), pooling_head
        )
        setattr(self.vision_model, "embeddings", FlatPatches(spec))  # noqa: B010 - of another type there


def connector(spec: VisionSpec, width: int) -> nn.Sequential:
    """Return the layers that make tokens of ``width`` from the patches of a tile."""
    tile = spec.width * spec.merge_size**2
    return nn.Sequential(nn.LayerNorm(tile), nn.Linear(tile, width), nn.GELU(), nn.Linear(width, width))


def init_connector(layers: nn.Sequential, generator: torch.Generator) -> None:
    """Draw weights for training from scratch."""
    init_linears(layers, generator)
    norm = layers[0]
    assert isinstance(norm, nn.LayerNorm)
    nn.init.ones_(norm.weight)
    nn.init.zeros_(norm.bias)


def merged(patches: Tensor, side: int, merge_size: int) -> Tensor:
    """Return ``[B,N/m^2,D m^2]`` of ``[B,N,D]``: a tile of m x m patches, channel by channel, becomes one vector.

    Args:
        patches: of a square picture.
        side: patches along a side.
        merge_size: m.
    """
    grid = patches.transpose(1, 2).unflatten(2, (side, side))
    return F.pixel_unshuffle(grid, merge_size).flatten(2).transpose(1, 2)
