"""SigLIP's vision transformer: transformers' network with faster patch embeddings and no pooling head.

Zhai et al., "Sigmoid Loss for Language Image Pre-Training", 2023. Parameter names follow the public checkpoints;
OpenVLA's SigLIP, with timm's names, is in ``vit.py``. Shapes: B images, N patches, D width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import SiglipVisionConfig, SiglipVisionModel
from transformers.models.siglip.modeling_siglip import (
    SiglipAttention,
    SiglipMultiheadAttentionPoolingHead,
    SiglipVisionEmbeddings,
)

from embodrl.models.common.attention import with_attention
from embodrl.models.common.init import QUERY_KEY_GAIN, init_linears, init_matrix, sincos_2d
from embodrl.models.common.patches import LAYER_NORM_EPS, SiglipSpec, embed_patches
from embodrl.models.flow.recompute import recompute_layers


class PatchEmbeddings(SiglipVisionEmbeddings):
    """Square patches to vectors, plus a learned position embedding."""

    def __init__(self, config: SiglipVisionConfig) -> None:
        super().__init__(config)
        del self.position_ids  # not in checkpoints: in a model built on the meta device it would never get memory

    def forward(self, pixel_values: Tensor, interpolate_pos_encoding: bool = False) -> Tensor:
        """Map ``[B,3,H,W]`` to ``[B,N,D]``, in the embeddings' dtype."""
        pixel_values = pixel_values.to(self.patch_embedding.weight.dtype)
        return embed_patches(pixel_values, self.patch_embedding) + self.position_embedding.weight


class SiglipTower(nn.Module):
    """SigLIP below the nesting of checkpoint names; ``pooling_head`` is kept for checkpoints and never run."""

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
            # Queries first: parameter order is the order of random draws and of sums over all gradients.
            for name in ("k_proj", "v_proj", "out_proj"):
                module = getattr(attention, name)
                delattr(attention, name)
                setattr(attention, name, module)
        if pooling_head:
            self.vision_model.head = SiglipMultiheadAttentionPoolingHead(config)

    def forward(self, pixels: Tensor) -> Tensor:
        """Map normalised ``[B,3,H,W]`` to features ``[B,N,D]`` after the final norm."""
        vision = self.vision_model
        blocks = next(vision.encoder.parameters()).dtype  # pi0's embeddings are more precise
        hidden = vision.encoder(inputs_embeds=vision.embeddings(pixels).to(blocks)).last_hidden_state
        return vision.post_layernorm(hidden)

    def enable_gradient_checkpointing(self) -> None:
        recompute_layers(self.vision_model, self.vision_model.encoder.layers)

    def init_weights(self, generator: torch.Generator) -> None:
        """Draw weights for training from scratch; see ``common/init.py``."""
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
