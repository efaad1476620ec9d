"""Llama's decoder with the parameter names of transformers' LlamaForCausalLM.

transformers' class computes the last layer for every token, used or not, and makes many passes over activations larger
than a core's cache; at width 128 its forward and backward take twice as long. Results are equal up to rounding
(tested). Touvron et al., "Llama 2: Open Foundation and Fine-Tuned Chat Models", 2023. Shapes: B batch, S tokens, D
hidden size, H query heads, G key and value heads, E head dimension, M MLP units.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from embodrl.models.common.attention import attention
from embodrl.models.common.fused import rms_norm, split_heads, swiglu

if TYPE_CHECKING:
    from transformers import LlamaConfig

FUSE_BELOW_WIDTH = 1024
"""Below this width, concatenating weights for one product instead of several pays off."""


@dataclass(frozen=True)
class LlamaSpec:
    """Dimensions of the language model."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0

    @property
    def head_dim(self) -> int:
        """E."""
        return self.hidden_size // self.num_attention_heads

    def public(self, causal: bool = True) -> LlamaConfig:
        """Return the transformers configuration."""
        from transformers import LlamaConfig

        sizes: dict[str, Any] = asdict(self) | {"is_causal": causal}
        rope = {"rope_type": "default", "rope_theta": sizes.pop("rope_theta")}
        return LlamaConfig(**sizes, rope_parameters=rope, tie_word_embeddings=False)


def rotary(positions: Tensor, spec: LlamaSpec, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cosines and sines ``[B,S,E]``, with equal halves, of ``positions int64[B,S]``.

    Su et al., "RoFormer", 2021, equation 15; computed in float32.
    """
    exponent = torch.arange(0, spec.head_dim, 2, dtype=torch.float32, device=positions.device) / spec.head_dim
    angle = positions[..., None].float() * (1.0 / spec.rope_theta**exponent)
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def compute_dtype(x: Tensor, weight: Tensor) -> torch.dtype:
    """Return the dtype in which a product with a weight is computed."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Normalise ``[...,D]``, in the given dtype; None for the dtype of ``x`` and the weight."""
        return rms_norm(x, self.weight, self.eps, dtype)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, spec: LlamaSpec) -> None:
        super().__init__()
        width = spec.hidden_size
        heads = spec.num_attention_heads
        groups = spec.num_key_value_heads
        self.head_dim = spec.head_dim
        self.q_proj = nn.Linear(width, heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(width, groups * self.head_dim, bias=False)
        self.v_proj = nn.Linear(width, groups * self.head_dim, bias=False)
        self.o_proj = nn.Linear(heads * self.head_dim, width, bias=False)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor | None, causal: bool, first: int) -> Tensor:
        """Map ``[B,S,D]`` to ``[B,S-first,D]``; see ``LlamaLayer``."""
        cos, sin = rope
        if first:
            (q,) = self._split((self.q_proj,), x[:, first:], (cos[:, first:], sin[:, first:]), 1)
            k, v = self._split((self.k_proj, self.v_proj), x, rope, 1)
        else:
            q, k, v = self._split((self.q_proj, self.k_proj, self.v_proj), x, rope, 2)
        return self.o_proj(attention(q, k, v, mask, causal=causal).transpose(1, 2).flatten(2))

    def _split(
        self, modules: tuple[nn.Linear, ...], x: Tensor, rope: tuple[Tensor, Tensor], turned: int
    ) -> tuple[Tensor, ...]:
        """Return each module's heads ``[B,H,S,E]``; the first ``turned`` modules get rotary positions."""
        if (weight := together(x, *modules)) is not None:
            counts = tuple(module.out_features // self.head_dim for module in modules)
            return split_heads(F.linear(x, weight), self.head_dim, counts, rope, turned)
        outputs = [module(x) for module in modules]  # with tensor parallelism, this process's share of the heads
        return tuple(
            split_heads(out, self.head_dim, (out.shape[-1] // self.head_dim,), rope, int(place < turned))[0]
            for place, out in enumerate(outputs)
        )


class Mlp(nn.Module):
    """Two layers gated by SiLU."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, hidden, bias=False)
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        weight = together(x, self.gate_proj, self.up_proj)
        if weight is None:
            return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return self.down_proj(swiglu(F.linear(x, weight)))


class LlamaLayer(nn.Module):
    """A pre-norm decoder layer."""

    def __init__(self, spec: LlamaSpec) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.self_attn = Attention(spec)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.mlp = Mlp(spec.hidden_size, spec.intermediate_size)

    def forward(
        self, x: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor | None, causal: bool, first: int = 0
    ) -> Tensor:
        """Return the outputs ``[B,S-first,D]`` of tokens ``first`` onwards.

        Args:
            x: ``[B,S,D]``.
            rope: cosines and sines ``[B,S,E]`` (B may be 1).
            mask: ``bool``, broadcastable to ``[B,1,S-first,S]``; None allows everything that ``causal`` allows.
            causal: without a mask, a token sees no later one; requires ``first`` = 0.
            first: first token to compute outputs for.
        """
        dtype = compute_dtype(x, self.mlp.down_proj.weight)
        attended = self.self_attn(self.input_layernorm(x, dtype), rope, mask, causal, first)
        x = x[:, first:] + attended
        return x + self.mlp(self.post_attention_layernorm(x, dtype))


class LlamaModel(nn.Module):
    """Embedding, layers and final norm; with ``causal`` a token sees no later one."""

    def __init__(self, spec: LlamaSpec, causal: bool) -> None:
        super().__init__()
        self.spec = spec
        self.causal = causal
        self.gradient_checkpointing = False
        # Left to the model's builder: initializing on the meta device would import torch's compiler.
        weight = torch.empty(spec.vocab_size, spec.hidden_size)
        self.embed_tokens = nn.Embedding(spec.vocab_size, spec.hidden_size, _weight=weight)
        self.layers = nn.ModuleList(LlamaLayer(spec) for _ in range(spec.num_hidden_layers))
        self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)

    def forward(
        self,
        inputs_embeds: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        first: int = 0,
    ) -> Tensor:
        """Return the hidden states ``[B,S-first,D]`` of tokens ``first`` onwards, after the final norm.

        Args:
            inputs_embeds: ``[B,S,D]``.
            attention_mask: ``bool[B,1,S or 1,S]``; None where all tokens see everything the model allows.
            position_ids: ``int64[B,S]``; None counts from 0.
            first: first token that the last layer computes.
        """
        x = inputs_embeds
        length = inputs_embeds.shape[1]
        if position_ids is None:
            position_ids = torch.arange(length, device=x.device)[None]
        rope = rotary(position_ids, self.spec, x.dtype)
        for layer in self.layers[:-1]:
            x = self._run(layer, x, rope, attention_mask, self.causal and attention_mask is None, 0)
        mask = attention_mask
        if first and (self.causal or mask is not None):
            mask = last_rows(mask, length, first, x.device)
        x = self._run(self.layers[-1], x, rope, mask, self.causal and mask is None, first)
        return self.norm(x)

    def _run(self, layer: nn.Module, *arguments: object) -> Tensor:
        if self.gradient_checkpointing and torch.is_grad_enabled():
            return cast(Tensor, checkpoint(layer, *arguments, use_reentrant=False))
        return layer(*arguments)


class Llama(nn.Module):
    """A language model; callers apply ``lm_head`` to the hidden states whose logits they need."""

    def __init__(self, spec: LlamaSpec, causal: bool = True) -> None:
        super().__init__()
        self.spec = spec
        self.model = LlamaModel(spec, causal)
        self.lm_head = nn.Linear(spec.hidden_size, spec.vocab_size, bias=False)


def last_rows(mask: Tensor | None, length: int, first: int, device: torch.device) -> Tensor:
    """Return the rows ``bool[B,1,S-first or 1,S]`` of ``mask`` from token ``first``; B may be 1.

    ``mask`` is ``bool[B,1,S or 1,S]``, or None for causal; ``length`` is S.
    """
    if mask is None:
        return torch.ones(length, length, dtype=torch.bool, device=device).tril()[None, None, first:]
    return mask if mask.shape[2] == 1 else mask[:, :, first:]


def together(x: Tensor, *modules: nn.Linear) -> Tensor | None:
    """Return the concatenated weights of linear layers that share ``x``; None if large, or not plain layers."""
    if x.shape[-1] >= FUSE_BELOW_WIDTH or not all(_is_plain(module) for module in modules):
        return None
    return torch.cat([module.weight for module in modules])


def _is_plain(module: nn.Module) -> bool:
    """Return whether a layer is just its weight: no adapters, hooks or shards in other processes."""
    hooked = module._forward_pre_hooks or module._forward_hooks
    return type(module) is nn.Linear and type(module.weight) is nn.Parameter and not hooked


def token_positions(attention_mask: Tensor) -> Tensor:
    """Return each token's index ``int64[B,S]`` among the non-padding tokens."""
    return (attention_mask.cumsum(dim=1) - 1).clamp(min=0)


def causal_mask(attention_mask: Tensor) -> Tensor:
    """Return ``bool[B,1,S,S]``, True where the row may see the column: neither later nor padding.

    A padding row sees itself, since a softmax over nothing is NaN.
    """
    length = attention_mask.shape[1]
    lower = torch.ones(length, length, dtype=torch.bool, device=attention_mask.device).tril()
    eye = torch.eye(length, dtype=torch.bool, device=attention_mask.device)
    return ((lower & attention_mask.bool()[:, None, :]) | eye)[:, None]
