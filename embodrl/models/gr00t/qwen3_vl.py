"""GR00T N1.7's vision-language model: Qwen3-VL with the first layers of its language model.

Bai et al., "Qwen3-VL Technical Report", 2025, built from transformers' modules. As in the training of N1.7's public
checkpoints, the action head reads the last kept layer before the final norm, which is stored but never run.
Shapes: B batch, V cameras, G tokens along an image side, N = G x G tokens of an image, S tokens of images and prompt,
E hidden size of the language model, D width of the vision transformer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig, Qwen3VLVisionConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import (
    Qwen3VLTextModel,
    Qwen3VLTextRMSNorm,
    Qwen3VLTextRotaryEmbedding,
    Qwen3VLVisionAttention,
    Qwen3VLVisionModel,
    Qwen3VLVisionPatchEmbed,
    Qwen3VLVisionRotaryEmbedding,
    apply_rotary_pos_emb_vision,
)

from embodrl.models.common.attention import attention, with_attention
from embodrl.models.common.init import QUERY_KEY_GAIN, init_linears, init_matrix, sincos_2d
from embodrl.models.common.llama import causal_mask
from embodrl.models.flow.recompute import recompute_layers
from embodrl.models.gr00t.config import QwenSpec

STILL_FRAMES = 2
"""Qwen treats an image as a video of two equal frames."""


@dataclass(frozen=True)
class VisionSpec:
    """Dimensions of a vision transformer that merges patches into tokens.

    Attributes:
        width, depth, num_heads, mlp_dim: dimensions of the blocks.
        patch_size: side in pixels.
        merge_size: patches along each side of a token.
        num_positions: rows of the position embedding, a square grid that is resampled to the image's.
    """

    width: int
    depth: int
    num_heads: int
    mlp_dim: int
    patch_size: int
    merge_size: int
    num_positions: int

    @property
    def deepstack(self) -> list[int]:
        """Blocks at a quarter, half and three quarters of the depth, whose features are added to prompt layers."""
        return sorted({block for part in (1, 2, 3) if (block := self.depth * part // 4 - 1) >= 0})


class VisionAttention(Qwen3VLVisionAttention):
    """Attention within images of one size, all at once."""

    def forward(
        self,
        hidden_states: Tensor,
        cu_seqlens: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        max_seqlen: int | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Map ``[images x patches,D]`` to the same shape; ``cu_seqlens`` has one more entry than there are images."""
        assert position_embeddings is not None
        qkv = self.qkv(hidden_states).unflatten(-1, (3, self.num_heads, -1))
        query, key, value = qkv.unbind(1)
        query, key = apply_rotary_pos_emb_vision(query, key, *position_embeddings)

        def by_image(part: Tensor) -> Tensor:
            return part.unflatten(0, (len(cu_seqlens) - 1, -1)).transpose(1, 2)

        out = attention(by_image(query), by_image(key), by_image(value))
        return self.proj(out.transpose(1, 2).flatten(2).flatten(0, 1))


class QwenPatchEmbed(Qwen3VLVisionPatchEmbed):
    """Patches to vectors: a convolution whose stride equals its kernel, written as a matrix product."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Map ``[patches,values]`` to ``[patches,D]``."""
        weight = self.proj.weight.flatten(1)
        return F.linear(hidden_states.to(weight.dtype), weight, self.proj.bias)


class QwenVL(nn.Module):
    """Vision transformer and language model."""

    def __init__(self, vision: VisionSpec, text: QwenSpec) -> None:
        super().__init__()
        config = vision_config(vision, text.hidden_size)
        self.visual = Qwen3VLVisionModel(config)
        self.visual.patch_embed = QwenPatchEmbed(config)
        for block in cast("Iterable[Any]", self.visual.blocks):
            block.attn = VisionAttention(config)
        self.language_model = Qwen3VLTextModel(text_config(text))


class Qwen(nn.Module):
    """Checkpoint nesting around ``QwenVL``, with the output layer, which is stored but never run."""

    def __init__(self, vision: VisionSpec, text: QwenSpec, lm_head: bool) -> None:
        super().__init__()
        self.model = QwenVL(vision, text)
        if lm_head:
            self.lm_head = nn.Linear(text.hidden_size, text.vocab_size, bias=False)


class QwenBackbone(nn.Module):
    """Checkpoint nesting around the vision-language model."""

    def __init__(self, vision: VisionSpec, text: QwenSpec, lm_head: bool) -> None:
        super().__init__()
        self.spec = vision
        self.model = Qwen(vision, text, lm_head)

    @property
    def visual(self) -> Qwen3VLVisionModel:
        return self.model.model.visual

    @property
    def language_model(self) -> Qwen3VLTextModel:
        return self.model.model.language_model

    def forward(self, pixels: Tensor, input_ids: Tensor, image_token_id: int, mask: Tensor | None) -> Tensor:
        """Return the hidden states ``[B,S,E]`` after the last kept layer, before the final norm.

        Args:
            pixels: ``[B,V,3,H,W]``.
            input_ids: ``int64[B,S]``, with N ids ``image_token_id`` per camera, in order.
            image_token_id: placeholder id of an image token.
            mask: ``bool[B,S]``, False at padding, which may be anywhere; None without padding.
        """
        images = pixels.flatten(0, 1)
        patches, side = patchify(images, self.spec.patch_size, self.spec.merge_size)
        grid = torch.tensor([[1, side, side]], device=pixels.device).expand(len(images), 3)
        seen = self.visual(patches, grid_thw=grid)
        language = self.language_model
        embeddings = language.embed_tokens(input_ids)
        at_images = input_ids == image_token_id
        place = at_images[..., None]
        hidden = embeddings.masked_scatter(place, seen.pooler_output.to(embeddings.dtype))
        positions = rope_positions(at_images, side // self.spec.merge_size, mask)
        rotary = language.rotary_emb(hidden, positions)
        bias = None if mask is None else causal_mask(mask.long())
        for number, layer in enumerate(language.layers):
            hidden = layer(hidden, attention_mask=bias, position_embeddings=rotary)
            if number < len(seen.deepstack_features):
                added = seen.deepstack_features[number].to(hidden.dtype)
                hidden = hidden + torch.zeros_like(hidden).masked_scatter(place, added)
        return hidden

    def reset_buffers(self, device: torch.device) -> None:
        """Recompute the buffers that no checkpoint holds, after building on the meta device."""
        language = self.language_model
        visual = self.visual
        language.rotary_emb = Qwen3VLTextRotaryEmbedding(language.config).to(device)
        visual.rotary_pos_emb = Qwen3VLVisionRotaryEmbedding(visual.config).to(device)

    def unused_parameters(self) -> list[nn.Parameter]:
        """Return the parameters of the final norm and the output layer, which affect no output."""
        head = getattr(self.model, "lm_head", None)
        return [*self.language_model.norm.parameters(), *([] if head is None else head.parameters())]

    def enable_gradient_checkpointing(self) -> None:
        recompute_layers(self.visual, self.visual.blocks)
        recompute_layers(self.language_model, self.language_model.layers)

    def init_weights(self, generator: torch.Generator) -> None:
        """Draw weights for training from scratch; see ``Gr00tModel``."""
        visual = self.visual
        language = self.language_model
        init_linears(visual.blocks, generator, residual=("attn.proj", "linear_fc2"), blocks=self.spec.depth)
        for merger in (visual.merger, visual.deepstack_merger_list):
            init_linears(merger, generator)
        init_matrix(visual.patch_embed.proj.weight, generator)
        nn.init.zeros_(cast(Tensor, visual.patch_embed.proj.bias))
        side = round(self.spec.num_positions**0.5)
        visual.pos_embed.weight.data.copy_(sincos_2d(side, self.spec.width)[0])
        for block in cast("Iterable[Any]", visual.blocks):
            block.attn.qkv.weight.data[: 2 * self.spec.width] *= QUERY_KEY_GAIN
        init_linears(language, generator, residual=("o_proj", "down_proj"), blocks=len(language.layers))
        language.embed_tokens.weight.data.normal_(0.0, 1.0, generator=generator)
        for module in self.modules():
            if isinstance(module, nn.LayerNorm | Qwen3VLTextRMSNorm):
                nn.init.ones_(module.weight)
            if isinstance(module, nn.LayerNorm):
                nn.init.zeros_(module.bias)


def patchify(images: Tensor, patch_size: int, merge_size: int) -> tuple[Tensor, int]:
    """Return images ``[B, 3, H, W]`` as Qwen's patches ``[B x patches, 3 x 2 x P x P]``, and H / P.

    Patches of one token are consecutive; a patch is colours x frames x rows x columns.
    """
    side = images.shape[-1] // patch_size
    split = (side // merge_size, merge_size, patch_size)
    parts = images.unflatten(3, split).unflatten(2, split)  # B, 3, tile row, row, P, tile column, column, P
    ordered = parts.permute(0, 2, 5, 3, 6, 1, 4, 7)[..., None, :, :]
    return ordered.expand(*ordered.shape[:6], STILL_FRAMES, -1, -1).flatten(5).flatten(0, 4), side


def rope_positions(at_images: Tensor, side: int, mask: Tensor | None) -> Tensor:
    """Return position ids ``int64[3,B,S]`` (time, row, column) of text and images of one size ("MRoPE").

    A text token has the same position on all three axes. All tokens of an image share the time after the preceding
    text; their rows and columns are offsets from it. The text after an image starts at their maximum plus 1.

    Args:
        at_images: ``bool[B,S]``, True at image tokens, consecutive per image.
        side: G.
        mask: ``bool[B,S]``, False at padding, whose positions are meaningless; None without padding.
    """
    text = ~at_images if mask is None else ~at_images & mask
    before = text.cumsum(1) - text.long()
    count = at_images.cumsum(1) - at_images.long()
    within = torch.where(at_images, count % side**2, 0)
    start = before + count // side**2 * side
    return torch.stack([start, start + within // side, start + within % side])


def vision_config(spec: VisionSpec, out_width: int) -> Qwen3VLVisionConfig:
    """Return the transformers configuration of the vision transformer, whose tokens have ``out_width``."""
    return Qwen3VLVisionConfig(
        depth=spec.depth,
        hidden_size=spec.width,
        hidden_act="gelu_pytorch_tanh",
        intermediate_size=spec.mlp_dim,
        num_heads=spec.num_heads,
        patch_size=spec.patch_size,
        spatial_merge_size=spec.merge_size,
        temporal_patch_size=STILL_FRAMES,
        out_hidden_size=out_width,
        num_position_embeddings=spec.num_positions,
        deepstack_visual_indexes=spec.deepstack,
        **with_attention(),
    )


def text_config(spec: QwenSpec) -> Qwen3VLTextConfig:
    """Return the transformers configuration of the language model."""
    sizes = asdict(spec)
    section = 5 * spec.head_dim // 32  # 24, 20, 20 of 64 pairs in the public size
    rope = {
        "rope_type": "default",
        "rope_theta": sizes.pop("rope_theta"),
        "mrope_section": [spec.head_dim // 2 - 2 * section, section, section],
        "mrope_interleaved": True,
    }
    return Qwen3VLTextConfig(**sizes, rope_parameters=rope, **with_attention())
