"""SigLIP's vision transformer: transformers' network behind faster patch embeddings, without the pooling head.

Zhai et al., "Sigmoid Loss for Language Image Pre-Training", 2023. Parameter names are those of the public checkpoints;
OpenVLA's SigLIP, whose checkpoints have timm's names, is in ``vit.py``. Shapes: B images, N patches, D width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import SiglipVisionConfig, SiglipVisionModel
from transformers.models.siglip.modeling_siglip import (
    SiglipAttention,
    SiglipMultiheadAttentionPoolingHead,
    SiglipVisionEmbeddings,
)

from embodrl.models.common.attention import with_attention
from embodrl.models.common.init import QUERY_KEY_GAIN, init_linears, init_matrix, sincos_2d
from embodrl.models.common.recompute import recompute_layers

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


def embed_patches(pixels: Tensor, convolution: nn.Conv2d) -> Tensor:
    """Return ``convolution``, whose stride is its kernel, of ``[B,3,H,W]`` as ``[B,N,D]``.

    Such a convolution is a matrix product; written as one it is several times faster on CPU.
    """
    size = convolution.kernel_size[0]
    batch, channels, height, width = pixels.shape
    patches = pixels.view(batch, channels, height // size, size, width // size, size)
    patches = patches.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
    return F.linear(patches, convolution.weight.flatten(1), convolution.bias)


class PatchEmbeddings(SiglipVisionEmbeddings):
    """Square patches to vectors, plus a learned position for each."""

    def __init__(self, config: SiglipVisionConfig) -> None:
        super().__init__(config)
        del self.position_ids  # not in checkpoints: it would stay without memory in a model built on the meta device

    def forward(self, pixel_values: Tensor, interpolate_pos_encoding: bool = False) -> Tensor:
        """``[B,3,H,W]`` to ``[B,N,D]``, in the type of the embeddings."""
        pixel_values = pixel_values.to(self.patch_embedding.weight.dtype)
        return embed_patches(pixel_values, self.patch_embedding) + self.position_embedding.weight


class SiglipTower(nn.Module):
    """SigLIP below the level of names that checkpoints have around it.

    Args:
        spec: dimensions.
        pooling_head: hold SigLIP's attention pooling, for checkpoints that have it; it is stored and never run.
    """

    def __init__(self, spec: SiglipSpec, pooling_head: bool = False) -> None:
        super().__init__()
        self.spec = spec
        config = SiglipVisionConfig(
            hidden_size=spec.width,
            intermediate_size=spec.mlp_dim,
            num_hidden_layers=spec.depth,
            num_attention_heads=spec.num_heads,
            image_size=spec.image_size,
            patch_size=spec.patch_size,
            layer_norm_eps=LAYER_NORM_EPS,
            hidden_act="gelu_pytorch_tanh",
            **with_attention(vision_use_head=False, is_causal=False),
        )
        self.vision_model = SiglipVisionModel(config)
        self.vision_model.embeddings = PatchEmbeddings(config)
        for attention in self._attentions():
            # Queries first: the order of parameters is the order of random draws and of sums over all gradients.
            for name in ("k_proj", "v_proj", "out_proj"):
                module = getattr(attention, name)
                delattr(attention, name)
                setattr(attention, name, module)
        if pooling_head:
            self.vision_model.head = SiglipMultiheadAttentionPoolingHead(config)

    def forward(self, pixels: Tensor) -> Tensor:
        """Normalised ``[B,3,H,W]`` to features ``[B,N,D]`` after the final norm."""
        vision = self.vision_model
        blocks = next(vision.encoder.parameters()).dtype  # pi0 has more precise embeddings
        hidden = vision.encoder(inputs_embeds=vision.embeddings(pixels).to(blocks)).last_hidden_state
        return vision.post_layernorm(hidden)

    def enable_gradient_checkpointing(self) -> None:
        """Recompute the activations of every block in the backward pass."""
        recompute_layers(self.vision_model, self.vision_model.encoder.layers)

    def init_weights(self, generator: torch.Generator) -> None:
        """Draw weights for training from scratch, by the rules of ``common/init.py``."""
        vision = self.vision_model
        init_linears(vision, generator, residual=("out_proj", "fc2"), blocks=self.spec.depth)
        patches = vision.embeddings.patch_embedding
        init_matrix(patches.weight, generator)
        assert patches.bias is not None
        nn.init.zeros_(patches.bias)
        vision.embeddings.position_embedding.weight.data.copy_(sincos_2d(self.spec.grid, self.spec.width)[0])
        for module in vision.modules():
            if isinstance(module, nn.LayerNorm):
                nn.init.ones_(module.weight)
                nn.init.zeros_(module.bias)
        for attention in self._attentions():
            attention.q_proj.weight.data *= QUERY_KEY_GAIN
            attention.k_proj.weight.data *= QUERY_KEY_GAIN

    def _attentions(self) -> list[SiglipAttention]:
        return [part for part in self.vision_model.encoder.modules() if isinstance(part, SiglipAttention)]
