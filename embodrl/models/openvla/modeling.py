"""The OpenVLA network with the parameter names of its public checkpoints (Kim et al., "OpenVLA", 2024).

Shapes: B batch, V cameras, N image patches of a camera, L prompt tokens, D hidden size.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from embodrl.models.common.init import QUERY_KEY_GAIN, init_linears, init_matrix, sincos_2d
from embodrl.models.common.llama import Attention as LlamaAttention
from embodrl.models.common.llama import Llama, causal_mask, token_positions
from embodrl.models.common.llama import RMSNorm as LlamaRMSNorm
from embodrl.models.common.merging import linear_weight
from embodrl.models.common.vit import Block, LayerScale, VisionTransformer, VitAttention
from embodrl.models.openvla.config import OpenVLAConfig

HEAD_STD = 0.02


class VisionBackbone(nn.Module):
    """Parallel DINOv2 and SigLIP with features concatenated channel-wise."""

    def __init__(self, config: OpenVLAConfig, film: bool = False) -> None:
        super().__init__()
        film_dim = config.llama.hidden_size if film else None
        self.featurizer = VisionTransformer(config.dino, film_dim)
        self.fused_featurizer = VisionTransformer(config.siglip, film_dim)

    def forward(self, pixels: Tensor, instruction: Tensor | None = None) -> Tensor:
        """Map ``[B,6V,H,W]``, three channels each normalised for DINOv2 and SigLIP, to ``[B,V*N,D1+D2]``.

        With FiLM the features also depend on the instruction embedding ``[B,D]``.
        """
        dino, siglip = pixels.unflatten(1, (-1, 2, 3)).flatten(0, 1).unbind(1)
        if instruction is not None:
            instruction = instruction.repeat_interleave(len(dino) // len(pixels), dim=0)
        features = torch.cat([self.featurizer(dino, instruction), self.fused_featurizer(siglip, instruction)], dim=-1)
        return features.unflatten(0, (len(pixels), -1)).flatten(1, 2)


class Projector(nn.Module):
    """Projects vision features to language embeddings."""

    def __init__(self, vision_dim: int, hidden_size: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(vision_dim, 4 * vision_dim)
        self.fc2 = nn.Linear(4 * vision_dim, hidden_size)
        self.fc3 = nn.Linear(hidden_size, hidden_size)

    def forward(self, features: Tensor) -> Tensor:
        """Map ``[B,N,D1+D2]`` to ``[B,N,D]``."""
        return self.fc3(F.gelu(self.fc2(F.gelu(self.fc1(features)))))


class OpenVLAModel(nn.Module):
    """Vision backbone, projector and Llama.

    Args:
        config: dimensions.
        causal: a token sees no later one. False as in OpenVLA-OFT: every token sees every other (Kim et al.,
            "Fine-Tuning Vision-Language-Action Models: Optimizing Speed and Success", 2025).
        film: the vision backbone reads the instruction, as in OpenVLA-OFT+ (same paper).
    """

    def __init__(self, config: OpenVLAConfig, causal: bool = True, film: bool = False) -> None:
        super().__init__()
        self.config = config
        self.causal = causal
        self.vision_backbone = VisionBackbone(config, film)
        self.projector = Projector(config.dino.width + config.siglip.width, config.llama.hidden_size)
        self.language_model = Llama(config.llama, causal)

    def embed_prefix(
        self, pixels: Tensor, input_ids: Tensor, state: Tensor | None = None, instruction: Tensor | None = None
    ) -> Tensor:
        """Return the embeddings ``[B,V*N+L,D]`` of BOS, image patches and the rest of the prompt.

        Args:
            pixels: ``[B,6V,H,W]``.
            input_ids: ``int64[B,L]``, BOS first.
            state: additional embeddings ``[B,E,D]`` after the patches.
            instruction: ``[B,D]`` input of FiLM.
        """
        return self.join_prefix(self.vision_backbone(pixels, instruction), input_ids, state)

    def join_prefix(self, patches: Tensor, input_ids: Tensor, state: Tensor | None = None) -> Tensor:
        """Like ``embed_prefix``, from the vision backbone's features ``[B,V*N,D1+D2]``."""
        middle = [self.projector(patches.to(self.projector.fc1.weight.dtype))]
        if state is not None:
            middle.append(state)
        text = self.language_model.model.embed_tokens(input_ids)
        return torch.cat([text[:, :1], *(part.to(text.dtype) for part in middle), text[:, 1:]], dim=1)

    def hidden_states(self, embeddings: Tensor, attention_mask: Tensor | None, first: int = 0) -> Tensor:
        """Return the hidden states ``[B,S-first,D]`` after Llama's final norm, of tokens ``first`` onwards.

        Args:
            embeddings: ``[B,S,D]``.
            attention_mask: ``int64[B,S]``, 0 at padding, which may be anywhere; None without padding.
            first: first token whose hidden state is needed; earlier tokens are still attended to.
        """
        positions = None
        bias = None
        if attention_mask is not None:
            positions = token_positions(attention_mask)
            bias = causal_mask(attention_mask) if self.causal else attention_mask.bool()[:, None, None]
        return self.language_model.model(embeddings, bias, positions, first)

    def action_logits(self, hidden: Tensor) -> Tensor:
        """Return the ``float32[...,256]`` logits of the action ids, in order; no other lm_head rows are computed."""
        with torch.autocast(hidden.device.type, enabled=False):
            return F.linear(hidden.float(), self.action_weight())

    def action_weight(self) -> Tensor:
        """Return lm_head's rows ``float32[256,D]`` of the action ids, in order, adapter included."""
        first = self.config.first_action_id
        return linear_weight(self.language_model.lm_head, slice(first, first + self.config.n_action_bins)).float()


def init_weights(model: OpenVLAModel, generator: torch.Generator) -> None:
    """Draw weights for training from scratch.

    Follows ``common/init.py``; in addition LayerScale starts at 1 rather than 1e-5, and embeddings of action bins vary
    smoothly with the bin.
    """
    for vit in (model.vision_backbone.featurizer, model.vision_backbone.fused_featurizer):
        _init_vit(vit, generator)
    init_linears(model.projector, generator)
    _init_llama(model, generator)
    for module in model.modules():
        if isinstance(module, LayerScale):
            nn.init.ones_(module.scale_factor)
        elif isinstance(module, nn.LayerNorm):
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)
        elif isinstance(module, LlamaRMSNorm):
            nn.init.ones_(module.weight)


def _init_vit(vit: VisionTransformer, generator: torch.Generator) -> None:
    init_linears(vit, generator, residual=("attn.proj", "mlp.fc2"), blocks=vit.spec.depth)
    init_matrix(vit.patch_embed.proj.weight, generator)
    assert vit.patch_embed.proj.bias is not None
    nn.init.zeros_(vit.patch_embed.proj.bias)
    vit.pos_embed.data.copy_(sincos_2d(vit.spec.grid, vit.spec.width))
    for module in vit.modules():
        if isinstance(module, VitAttention):
            module.qkv.weight.data[: 2 * vit.spec.width] *= QUERY_KEY_GAIN
        elif isinstance(module, Block) and module.scale is not None and module.shift is not None:
            nn.init.zeros_(module.scale.weight)
            nn.init.zeros_(module.shift.weight)
    for name in ("cls_token", "reg_token"):
        if hasattr(vit, name):
            getattr(vit, name).data.normal_(0.0, 0.02, generator=generator)
    if vit.spec.attention_pool:
        vit.attn_pool.latent.data.normal_(0.0, 0.02, generator=generator)


def _init_llama(model: OpenVLAModel, generator: torch.Generator) -> None:
    llama = model.language_model
    init_linears(llama, generator, residual=("o_proj", "down_proj"), blocks=len(llama.model.layers))
    for module in llama.model.modules():
        if isinstance(module, LlamaAttention):
            module.q_proj.weight.data *= QUERY_KEY_GAIN
            module.k_proj.weight.data *= QUERY_KEY_GAIN
    llama.model.embed_tokens.weight.data.normal_(0.0, 1.0, generator=generator)
    llama.lm_head.weight.data.normal_(0.0, HEAD_STD, generator=generator)
    config = model.config
    rows = slice(config.first_action_id, config.first_action_id + config.n_action_bins)
    bins = smooth_bins(config.n_action_bins, config.llama.hidden_size, generator)
    llama.model.embed_tokens.weight.data[rows] = bins
    llama.lm_head.weight.data[rows] = HEAD_STD * bins


def smooth_bins(num_bins: int, width: int, generator: torch.Generator) -> Tensor:
    """Return ``float32[num_bins,width]`` of unit variance with similar neighbouring rows.

    Random Fourier features (Rahimi and Recht, 2007) of the bin's position in [-1, 1], with log-uniform frequencies from
    a quarter wave to about twenty waves over the range.
    """
    device = generator.device
    place = torch.linspace(-1.0, 1.0, num_bins, device=device)[:, None]
    frequency = 1.5 * torch.exp(math.log(40.0) * torch.rand(1, width, generator=generator, device=device))
    phase = 2.0 * math.pi * torch.rand(1, width, generator=generator, device=device)
    return math.sqrt(2.0) * torch.sin(frequency * place + phase)
