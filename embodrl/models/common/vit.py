"""DINOv2 (registers) and SigLIP vision transformers with the parameter names of timm checkpoints.

transformers' Dinov2WithRegistersModel does not fit: public OpenVLA checkpoints fuse queries, keys and values, and the
last block is never needed; forward and backward at width 96 take 22 ms here, 37 ms there (one core).
Oquab et al., "DINOv2", 2023; Darcet et al., "Vision Transformers Need Registers", 2023; Zhai et al., "Sigmoid Loss for
Language Image Pre-Training", 2023. Shapes: B images, N patches, D width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from embodrl.models.common.attention import attention
from embodrl.models.common.fused import split_heads
from embodrl.models.common.patches import LAYER_NORM_EPS, SiglipSpec, embed_patches


@dataclass(frozen=True)
class VitSpec(SiglipSpec):
    """Dimensions of SigLIP's vision transformer, plus DINOv2's extras."""

    num_registers: int = 0
    class_token: bool = False
    layer_scale: bool = False
    attention_pool: bool = False


class PatchEmbed(nn.Module):
    """Square patches to vectors."""

    def __init__(self, spec: VitSpec) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, spec.width, spec.patch_size, stride=spec.patch_size)

    def forward(self, pixels: Tensor) -> Tensor:
        """Map ``[B,3,H,W]`` to ``[B,N,D]``."""
        return embed_patches(pixels, self.proj)


class VitAttention(nn.Module):
    """Multi-head self-attention."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = split_heads(self.qkv(x), x.shape[-1] // self.num_heads, (self.num_heads,) * 3)
        return self.proj(attention(q, k, v).transpose(1, 2).flatten(2))


class VitMlp(nn.Module):
    """Two layers with an exact GELU in between."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class LayerScale(nn.Module):
    """A learned factor per channel of a residual branch."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale_factor = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale_factor


class Block(nn.Module):
    """A pre-norm transformer block.

    With ``film_dim`` an instruction embedding of that size modulates features between attention and MLP by FiLM (Perez
    et al., 2018, eq. 1 with 1 + gamma, as in OpenVLA-OFT).
    """

    def __init__(self, spec: VitSpec, film_dim: int | None = None) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(spec.width, eps=LAYER_NORM_EPS)
        self.attn = VitAttention(spec.width, spec.num_heads)
        self.norm2 = nn.LayerNorm(spec.width, eps=LAYER_NORM_EPS)
        self.mlp = VitMlp(spec.width, spec.mlp_dim)
        self.ls1: nn.Module = LayerScale(spec.width) if spec.layer_scale else nn.Identity()
        self.ls2: nn.Module = LayerScale(spec.width) if spec.layer_scale else nn.Identity()
        self.scale = None if film_dim is None else nn.Linear(film_dim, spec.width)
        self.shift = None if film_dim is None else nn.Linear(film_dim, spec.width)

    def forward(self, x: Tensor, instruction: Tensor | None = None) -> Tensor:
        """Map ``[B,N,D]`` and, with FiLM, ``[B,E]`` to ``[B,N,D]``."""
        x = x + self.ls1(self.attn(self.norm1(x)))
        if self.scale is not None and self.shift is not None:
            x = x * (1.0 + self.scale(instruction)[:, None]) + self.shift(instruction)[:, None]
        return x + self.ls2(self.mlp(self.norm2(x)))


class AttentionPool(nn.Module):
    """SigLIP's pooling head. OpenVLA reads patch features, so it is stored but never run."""

    def __init__(self, spec: VitSpec) -> None:
        super().__init__()
        self.latent = nn.Parameter(torch.zeros(1, 1, spec.width))
        self.q = nn.Linear(spec.width, spec.width)
        self.kv = nn.Linear(spec.width, 2 * spec.width)
        self.proj = nn.Linear(spec.width, spec.width)
        self.norm = nn.LayerNorm(spec.width, eps=LAYER_NORM_EPS)
        self.mlp = VitMlp(spec.width, spec.mlp_dim)


class VisionTransformer(nn.Module):
    """Patch features from the second-to-last block, without the final norm and prefix tokens.

    The last block, the norm and the pooling head exist only so that public checkpoints load strictly and save
    unchanged. For ``film_dim`` see ``Block``.
    """

    def __init__(self, spec: VitSpec, film_dim: int | None = None) -> None:
        super().__init__()
        self.spec = spec
        self.gradient_checkpointing = False
        self.patch_embed = PatchEmbed(spec)
        self.pos_embed = nn.Parameter(torch.zeros(1, spec.num_patches, spec.width))
        if spec.class_token:
            self.cls_token = nn.Parameter(torch.zeros(1, 1, spec.width))
        if spec.num_registers:
            self.reg_token = nn.Parameter(torch.zeros(1, spec.num_registers, spec.width))
        self.blocks = nn.ModuleList(Block(spec, film_dim) for _ in range(spec.depth))
        self.norm = nn.LayerNorm(spec.width, eps=LAYER_NORM_EPS)
        if spec.attention_pool:
            self.attn_pool = AttentionPool(spec)

    def forward(self, pixels: Tensor, instruction: Tensor | None = None) -> Tensor:
        """Map normalised ``[B,3,H,W]`` and, with FiLM, an instruction embedding ``[B,E]`` to features ``[B,N,D]``."""
        x = self.patch_embed(pixels) + self.pos_embed
        prefix = [
            token.expand(len(x), -1, -1)
            for token in (getattr(self, "cls_token", None), getattr(self, "reg_token", None))
            if token is not None
        ]
        x = torch.cat([*prefix, x], dim=1)
        for block in self.blocks[:-1]:
            if self.gradient_checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, instruction, use_reentrant=False)
            else:
                x = block(x, instruction)
        return x[:, x.shape[1] - self.spec.num_patches :]

    def unused_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that affect no output."""
        pool = self.attn_pool.parameters() if self.spec.attention_pool else ()
        return [*self.blocks[-1].parameters(), *self.norm.parameters(), *pool]
