"""Gemma's decoder with its checkpoints' parameter names, as prefix encoder and as action expert.

transformers' GemmaModel does not fit: it has no adaptive norms, its tokens can't attend to another network's keys and
values, and it always runs the last layer; forward and backward of the prefix at width 128 take 52 ms here, 69 ms there.
Gemma Team, "Gemma: Open Models Based on Gemini Research and Technology", 2024. The expert of pi0.5 conditions its norms
on the noise level (adaptive RMSNorm, after Peebles and Xie, "Scalable Diffusion Models with Transformers", 2023).
Shapes: B batch, S tokens, P tokens before them, W width, G key-value heads, E head dimension, T condition size.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from embodrl.models.common.attention import attention
from embodrl.models.common.init import QUERY_KEY_GAIN, init_linears

RMS_NORM_EPS = 1e-6
ROPE_THETA = 10000.0

Rotary = tuple[Tensor, Tensor]
"""Cosines and sines ``[B,1,S,E/2]`` (B may be 1)."""

KeysValues = tuple[Tensor, Tensor]
"""Rotated keys and values ``[B,G,S,E]`` of one layer."""


@dataclass(frozen=True)
class GemmaSpec:
    """Dimensions of a Gemma-like decoder; ``num_kv_heads`` divides ``num_heads``."""

    width: int
    depth: int
    mlp_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int


GEMMA_2B = GemmaSpec(2048, 18, 16384, 8, 1, 256)
GEMMA_300M = GemmaSpec(1024, 18, 4096, 8, 1, 256)


def rotary(positions: Tensor, head_dim: int, dtype: torch.dtype) -> Rotary:
    """Return the rotary embedding of ``positions int64[B,S]`` (Su et al., "RoFormer", 2021)."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
    angle = positions[:, None, :, None].float() * ROPE_THETA**-exponent
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x: Tensor, rope: Rotary) -> Tensor:
    """Rotate coordinate i of ``[B,*,S,E]`` with coordinate i + E/2."""
    cos, sin = rope
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def full_precision(x: Tensor) -> torch.autocast:
    """Return a context in which linear layers compute in their weights' dtype, even under autocast."""
    return torch.autocast(x.device.type, enabled=False)


class GemmaRMSNorm(nn.Module):
    """Root-mean-square norm whose weight is an offset from 1."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor, condition: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Return the normed ``[B,S,W]``, and no gate."""
        return (_normalized(x) * (1.0 + self.weight.float())).to(x.dtype), None


class AdaptiveRMSNorm(nn.Module):
    """Root-mean-square norm with scale, shift and branch gate computed from a condition."""

    def __init__(self, width: int, condition_dim: int) -> None:
        super().__init__()
        self.dense = nn.Linear(condition_dim, 3 * width)

    def forward(self, x: Tensor, condition: Tensor) -> tuple[Tensor, Tensor]:
        """Return normed ``[B,S,W]`` and gate ``[B,1,W]`` or ``[B,S,W]``; condition ``[B,T]`` or ``[B,S,T]``."""
        with full_precision(condition):
            modulation = self.dense(condition.to(self.dense.weight.dtype))
        scale, shift, gate = per_token(modulation).chunk(3, dim=-1)
        normed = _normalized(x) * (1.0 + scale.float()) + shift.float()
        return normed.to(x.dtype), gate.to(x.dtype)


def per_token(condition: Tensor) -> Tensor:
    """Return a shared condition ``[B,T]`` as ``[B,1,T]``; a per-token one ``[B,S,T]`` is unchanged."""
    return condition[:, None] if condition.dim() == 2 else condition


def _normalized(x: Tensor) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + RMS_NORM_EPS)


class GemmaAttention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, spec: GemmaSpec) -> None:
        super().__init__()
        self.head_dim = spec.head_dim
        self.q_proj = nn.Linear(spec.width, spec.num_heads * spec.head_dim, bias=False)
        self.k_proj = nn.Linear(spec.width, spec.num_kv_heads * spec.head_dim, bias=False)
        self.v_proj = nn.Linear(spec.width, spec.num_kv_heads * spec.head_dim, bias=False)
        self.o_proj = nn.Linear(spec.num_heads * spec.head_dim, spec.width, bias=False)

    def keys_values(self, x: Tensor, rope: Rotary, past: KeysValues | None) -> KeysValues:
        """Return keys and values ``[B,G,P+S,E]`` of the past and of ``[B,S,W]``."""
        keys = rotate(self._heads(self.k_proj(x)), rope)
        values = self._heads(self.v_proj(x))
        if past is None:
            return keys, values
        return torch.cat([past[0], keys], dim=2), torch.cat([past[1], values], dim=2)

    def forward(self, x: Tensor, rope: Rotary, known: KeysValues, mask: Tensor | None) -> Tensor:
        """Map ``[B,S,W]`` to ``[B,S,W]``, attending to ``known``."""
        queries = rotate(self._heads(self.q_proj(x)), rope)
        return self.o_proj(attention(queries, *known, mask).transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class GemmaMlp(nn.Module):
    """Two layers gated by the tanh approximation of GELU."""

    def __init__(self, spec: GemmaSpec) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(spec.width, spec.mlp_dim, bias=False)
        self.up_proj = nn.Linear(spec.width, spec.mlp_dim, bias=False)
        self.down_proj = nn.Linear(spec.mlp_dim, spec.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.gelu(self.gate_proj(x), approximate="tanh") * self.up_proj(x))


class GemmaLayer(nn.Module):
    """A pre-norm decoder layer; a condition gates its branches."""

    def __init__(self, spec: GemmaSpec, condition_dim: int | None) -> None:
        super().__init__()
        self.input_layernorm = _norm(spec.width, condition_dim)
        self.self_attn = GemmaAttention(spec)
        self.post_attention_layernorm = _norm(spec.width, condition_dim)
        self.mlp = GemmaMlp(spec)

    def keys_values(
        self, x: Tensor, rope: Rotary, past: KeysValues | None = None, condition: Tensor | None = None
    ) -> KeysValues:
        """Return only the keys and values, for a layer whose output is unused."""
        return self.self_attn.keys_values(self.input_layernorm(x, condition)[0], rope, past)

    def forward(
        self,
        x: Tensor,
        rope: Rotary,
        mask: Tensor | None = None,
        past: KeysValues | None = None,
        condition: Tensor | None = None,
    ) -> tuple[Tensor, KeysValues]:
        """Return the output ``[B,S,W]`` and the keys and values ``[B,G,P+S,E]``.

        Args:
            x: ``[B,S,W]``.
            rope: rotary embedding of the tokens.
            mask: ``bool``, broadcastable to ``[B,1,S,P+S]``; None lets tokens see everything.
            past: keys and values of earlier tokens.
            condition: condition ``[B,T]`` or ``[B,S,T]`` of adaptive norms.
        """
        normed, gate = self.input_layernorm(x, condition)
        known = self.self_attn.keys_values(normed, rope, past)
        x = _residual(x, self.self_attn(normed, rope, known, mask), gate)
        normed, gate = self.post_attention_layernorm(x, condition)
        return _residual(x, self.mlp(normed), gate), known


class LayerStack(nn.Module, ABC):
    """Optional embedding, layers, and a final norm set by a subclass; experts read no text (``vocab_size`` None)."""

    norm: nn.Module

    def __init__(self, spec: GemmaSpec, vocab_size: int | None, layers: Iterable[nn.Module]) -> None:
        super().__init__()
        self.spec = spec
        self.gradient_checkpointing = False
        if vocab_size is not None:
            self.embed_tokens = nn.Embedding(vocab_size, spec.width)
        self.layers = nn.ModuleList(layers)

    def run(self, layer: nn.Module, *arguments: Any) -> tuple[Tensor, KeysValues]:
        """Run a layer; recompute its activations in the backward pass if enabled."""
        if self.gradient_checkpointing and torch.is_grad_enabled():
            return checkpoint(layer, *arguments, use_reentrant=False)
        return layer(*arguments)

    def init_weights(self, generator: torch.Generator) -> None:
        """Draw weights for training from scratch; see ``common/init.py``."""
        init_linears(self, generator, residual=("o_proj", "down_proj"), blocks=len(self.layers))
        if hasattr(self, "embed_tokens"):
            self.embed_tokens.weight.data.normal_(0.0, 1.0 / math.sqrt(self.spec.width), generator=generator)
        for module in self.modules():
            self.init_module(module)

    @abstractmethod
    def init_module(self, module: nn.Module) -> None:
        """Initialise what the common rules leave out: norms, and the scale of queries and keys."""


class GemmaModel(LayerStack):
    """Gemma, with adaptive norms if ``condition_dim`` (T) is not None."""

    def __init__(self, spec: GemmaSpec, vocab_size: int | None = None, condition_dim: int | None = None) -> None:
        super().__init__(spec, vocab_size, (GemmaLayer(spec, condition_dim) for _ in range(spec.depth)))
        self.norm = _norm(spec.width, condition_dim)

    def embed(self, ids: Tensor) -> Tensor:
        """Return the scaled embeddings ``[B,S,W]`` of ``int64[B,S]``."""
        return self.embed_tokens(ids) * math.sqrt(self.spec.width)

    def encode(
        self, x: Tensor, rope: Rotary, mask: Tensor | None = None, past: Sequence[KeysValues] | None = None
    ) -> tuple[list[KeysValues], Tensor]:
        """Return keys and values for later tokens, and the last layer's input ``[B,S,W]`` for ``finish``.

        The last layer computes no more than that. Arguments as in ``GemmaLayer.forward``; ``past``, one pair per layer,
        is included in the result.
        """
        cache: list[KeysValues] = []
        for index, layer in enumerate(self.layers[:-1]):
            x, known = self.run(layer, x, rope, mask, None if past is None else past[index])
            cache.append(known)
        last = self.layers[-1]
        assert isinstance(last, GemmaLayer)
        cache.append(last.keys_values(x, rope, None if past is None else past[-1]))
        return cache, x

    def finish(self, x: Tensor, rope: Rotary, mask: Tensor | None = None) -> Tensor:
        """Return the hidden states ``[B,S,W]`` after the last layer and the final norm, from that layer's input."""
        x, _ = self.run(self.layers[-1], x, rope, mask)
        return self.norm(x)[0]

    def decode(
        self,
        x: Tensor,
        rope: Rotary,
        cache: Sequence[KeysValues | None],
        mask: Tensor | None = None,
        condition: Tensor | None = None,
    ) -> Tensor:
        """Return the hidden states ``[B,S,W]`` of tokens that see ``cache`` and each other.

        Arguments as in ``GemmaLayer.forward``; ``cache`` has one pair of keys and values per layer, or None.
        """
        for layer, past in zip(self.layers, cache, strict=True):
            x, _ = self.run(layer, x, rope, mask, past, condition)
        return self.norm(x, condition)[0]

    def init_module(self, module: nn.Module) -> None:
        """Initialise adaptive norms as plain ones with open gates and a noticeable dependence on the condition.

        With gates at zero the expert would stay a linear map of its input until they open.
        """
        if isinstance(module, GemmaRMSNorm):
            nn.init.zeros_(module.weight)
        elif isinstance(module, AdaptiveRMSNorm):
            module.dense.bias.data[2 * self.spec.width :] = 1.0
        elif isinstance(module, GemmaAttention):
            module.q_proj.weight.data *= QUERY_KEY_GAIN
            module.k_proj.weight.data *= QUERY_KEY_GAIN


def _norm(width: int, condition_dim: int | None) -> nn.Module:
    return GemmaRMSNorm(width) if condition_dim is None else AdaptiveRMSNorm(width, condition_dim)


def _residual(x: Tensor, branch: Tensor, gate: Tensor | None) -> Tensor:
    return x + branch if gate is None else x + branch * gate
