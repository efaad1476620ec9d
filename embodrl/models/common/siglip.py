"""SigLIP's vision transformer with the parameter names of its Hugging Face checkpoints.

Zhai et al., "Sigmoid Loss for Language Image Pre-Training", 2023. It has no pooling head: what reads it takes the
features of the patches. (OpenVLA's SigLIP, whose checkpoints have timm's names, is in ``vit.py``.)
Legend: B images, N patches, D width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from embodrl.models.common.attention import attention
from embodrl.models.common.init import QUERY_KEY_GAIN, init_linears, init_matrix, sincos_2d

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
        """Patches along a side."""
        return self.image_size // self.patch_size

    @property
    def num_patches(self) -> int:
        """N."""
        return self.grid**2


SO400M_224 = SiglipSpec(224, 14, 1152, 27, 16, 4304)
"""Alabdulmohsin et al., "Getting ViT in Shape", 2023, with 224 pixels and patches of 14."""


class SiglipEmbeddings(nn.Module):
    """Square patches to vectors, plus a learned position for each."""

    def __init__(self, spec: SiglipSpec) -> None:
        super().__init__()
        self.patch_embedding = nn.Conv2d(3, spec.width, spec.patch_size, stride=spec.patch_size)
        self.position_embedding = nn.Embedding(spec.num_patches, spec.width)

    def forward(self, pixels: Tensor) -> Tensor:
        """``[B,3,H,W]`` to ``[B,N,D]``.

        A convolution whose stride is its kernel is a matrix product; written as one it is several times faster on CPU.
        """
        size = self.patch_embedding.kernel_size[0]
        batch, channels, height, width = pixels.shape
        patches = pixels.view(batch, channels, height // size, size, width // size, size)
        patches = patches.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
        embedded = F.linear(patches, self.patch_embedding.weight.flatten(1), self.patch_embedding.bias)
        return embedded + self.position_embedding.weight


class SiglipAttention(nn.Module):
    """Multi-head self-attention."""

    def __init__(self, spec: SiglipSpec) -> None:
        super().__init__()
        self.num_heads = spec.num_heads
        self.q_proj = nn.Linear(spec.width, spec.width)
        self.k_proj = nn.Linear(spec.width, spec.width)
        self.v_proj = nn.Linear(spec.width, spec.width)
        self.out_proj = nn.Linear(spec.width, spec.width)

    def forward(self, x: Tensor) -> Tensor:
        """``[B,N,D]`` to ``[B,N,D]``."""
        q, k, v = (
            part(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.out_proj(attention(q, k, v).transpose(1, 2).flatten(2))


class SiglipMlp(nn.Module):
    """Two layers with the tanh approximation of GELU between them."""

    def __init__(self, spec: SiglipSpec) -> None:
        super().__init__()
        self.fc1 = nn.Linear(spec.width, spec.mlp_dim)
        self.fc2 = nn.Linear(spec.mlp_dim, spec.width)

    def forward(self, x: Tensor) -> Tensor:
        """``[...,D]`` to ``[...,D]``."""
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


class SiglipLayer(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, spec: SiglipSpec) -> None:
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(spec.width, eps=LAYER_NORM_EPS)
        self.self_attn = SiglipAttention(spec)
        self.layer_norm2 = nn.LayerNorm(spec.width, eps=LAYER_NORM_EPS)
        self.mlp = SiglipMlp(spec)

    def forward(self, x: Tensor) -> Tensor:
        """``[B,N,D]`` to ``[B,N,D]``."""
        x = x + self.self_attn(self.layer_norm1(x))
        return x + self.mlp(self.layer_norm2(x))


class SiglipEncoder(nn.Module):
    """The blocks."""

    def __init__(self, spec: SiglipSpec) -> None:
        super().__init__()
        self.gradient_checkpointing = False
        self.layers = nn.ModuleList(SiglipLayer(spec) for _ in range(spec.depth))

    def forward(self, x: Tensor) -> Tensor:
        """``[B,N,D]`` to ``[B,N,D]``."""
        for layer in self.layers:
            if self.gradient_checkpointing and torch.is_grad_enabled():
                x = checkpoint(layer, x, use_reentrant=False)
            else:
                x = layer(x)
        return x


class SiglipVisionTransformer(nn.Module):
    """Embeddings, blocks and the final norm."""

    def __init__(self, spec: SiglipSpec) -> None:
        super().__init__()
        self.embeddings = SiglipEmbeddings(spec)
        self.encoder = SiglipEncoder(spec)
        self.post_layernorm = nn.LayerNorm(spec.width, eps=LAYER_NORM_EPS)

    def forward(self, pixels: Tensor, post_norm: bool = True) -> Tensor:
        """Normalised ``[B,3,H,W]`` to features ``[B,N,D]``, after the final norm or before it."""
        features = self.encoder(self.embeddings(pixels))
        return self.post_layernorm(features) if post_norm else features


class SiglipVisionModel(nn.Module):
    """The level of names that checkpoints have around the transformer."""

    def __init__(self, spec: SiglipSpec) -> None:
        super().__init__()
        self.spec = spec
        self.vision_model = SiglipVisionTransformer(spec)

    def forward(self, pixels: Tensor, post_norm: bool = True) -> Tensor:
        """See SiglipVisionTransformer."""
        return self.vision_model(pixels, post_norm)

    def enable_gradient_checkpointing(self) -> None:
        """Recompute the activations of every block in the backward pass."""
        self.vision_model.encoder.gradient_checkpointing = True

    def init_weights(self, generator: torch.Generator) -> None:
        """Draw weights for training from scratch, by the rules of ``common/init.py``."""
        vision = self.vision_model
        init_linears(vision, generator, residual=("out_proj", "fc2"), blocks=self.spec.depth)
        init_matrix(vision.embeddings.patch_embedding.weight, generator)
        bias = vision.embeddings.patch_embedding.bias
        assert bias is not None
        nn.init.zeros_(bias)
        vision.embeddings.position_embedding.weight.data.copy_(sincos_2d(self.spec.grid, self.spec.width)[0])
        for module in vision.modules():
            if isinstance(module, nn.LayerNorm):
                nn.init.ones_(module.weight)
                nn.init.zeros_(module.bias)
            elif isinstance(module, SiglipAttention):
                module.q_proj.weight.data *= QUERY_KEY_GAIN
                module.k_proj.weight.data *= QUERY_KEY_GAIN
