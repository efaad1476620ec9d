"""Dimensions and patch embeddings of vision transformers. Avoids transformers, whose models take 2.5 s to import.

Shapes: B images, N patches, D width.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F

LAYER_NORM_EPS = 1e-6


@dataclass(frozen=True)
class SiglipSpec:
    """Dimensions of a SigLIP vision transformer; ``patch_size`` divides ``image_size`` (pixels)."""

    image_size: int
    patch_size: int
    width: int
    depth: int
    num_heads: int
    mlp_dim: int

    @property
    def grid(self) -> int:
        """Patches per side."""
        return self.image_size // self.patch_size

    @property
    def num_patches(self) -> int:
        """N."""
        return self.grid**2


SO400M_224 = SiglipSpec(224, 14, 1152, 27, 16, 4304)
"""Alabdulmohsin et al., "Getting ViT in Shape", 2023, at 224 pixels with patches of 14."""


def embed_patches(pixels: Tensor, convolution: nn.Conv2d) -> Tensor:
    """Apply ``convolution``, whose stride equals its kernel, to ``[B,3,H,W]``; return ``[B,N,D]``.

    As a matrix product it is several times faster on CPU.
    """
    size = convolution.kernel_size[0]
    batch, channels, height, width = pixels.shape
    patches = pixels.view(batch, channels, height // size, size, width // size, size)
    patches = patches.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
    return F.linear(patches, convolution.weight.flatten(1), convolution.bias)
