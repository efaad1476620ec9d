"""Autoregressive decoding of action tokens on Llama's weights, without the per-call overhead of generic classes.

Images and prompt run once; each further token uses static key-value buffers, and only the lm_head rows of action tokens
are computed. Results equal transformers' forward pass (tested).
Shapes: B batch, P prefix (image and prompt tokens), N action tokens, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from embodrl.models.common.attention import attention
from embodrl.models.common.llama import LlamaLayer, causal_mask, last_rows, rotary, token_positions
from embodrl.models.common.merging import adapter_factors, linear_weight
from embodrl.models.openvla.modeling import OpenVLAModel

FUSE_BELOW_HIDDEN = 1024

Choose = Callable[[Tensor, int], Tensor]
"""Map action logits ``float32[B,256]`` and the token's index in the chunk to token ids ``int64[B]``."""


@dataclass
class _Layer:
    norm1: Tensor
    norm2: Tensor
    qkv: Callable[[Tensor], Tensor]
    out: Callable[[Tensor], Tensor]
    gate_up: Callable[[Tensor], Tensor]
    down: Callable[[Tensor], Tensor]
    keys: Tensor
    values: Tensor


class ActionDecoder:
    """Holds weights in the compute dtype and key-value buffers for ``max_length`` = P + N tokens of one batch."""

    def __init__(self, model: OpenVLAModel, batch: int, max_length: int) -> None:
        self.model = model
        llama = model.language_model
        spec = llama.spec
        self.spec = spec
        self.eps = spec.rms_norm_eps
        self.head_dim = spec.head_dim
        self.heads = spec.num_attention_heads
        self.kv_heads = spec.num_key_value_heads
        embedding = llama.model.embed_tokens.weight
        kind = embedding.device.type
        self.dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else embedding.dtype
        # On CPU, single-query products with the keys are several times faster in float32 with transposed keys.
        self.cache_dtype = torch.float32 if kind == "cpu" else self.dtype
        # As a tensor, since a number would be made one in every product.
        self.scale = torch.tensor(self.head_dim**-0.5, dtype=self.cache_dtype)
        self._fuse = spec.hidden_size < FUSE_BELOW_HIDDEN
        shape = (batch, self.kv_heads, max_length, self.head_dim)
        self.layers = [
            self._layer(cast(LlamaLayer, layer), *self._cache(shape, embedding.device)) for layer in llama.model.layers
        ]
        self.final_norm = llama.model.norm.weight

    def run(
        self, prefix: Tensor, attention_mask: Tensor | None, num_tokens: int, choose: Choose, first: int = 0
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Decode a chunk.

        Args:
            prefix: embeddings ``[B,P,D]``.
            attention_mask: ``int64[B,P]``, or None without padding; the last column must not be padding.
            num_tokens: N.
            choose: function that picks each token.
            first: first image or prompt token whose hidden state is returned.

        Returns:
            ``tokens int64[B,N]``, ``logits float32[B,N,256]`` and hidden states ``[B,P-first,D]`` of images and prompt.
        """
        length = prefix.shape[1]
        cos, sin = self._rotary(prefix, attention_mask, num_tokens)
        places = list(zip(cos.unbind(2), sin.unbind(2), strict=True))
        embed = self.model.language_model.model.embed_tokens
        with torch.autocast(prefix.device.type, enabled=False):
            prefix_hidden = self._forward(prefix, cos[:, :, :length], sin[:, :, :length], attention_mask, first)
            hidden = prefix_hidden[:, -1]
            hidden_mask = self._hidden_mask(attention_mask, num_tokens)
            head = self.model.action_weight()
            tokens = []
            logits = []
            for place in range(num_tokens):
                if place > 0:
                    at = length + place - 1
                    mask = None if hidden_mask is None else hidden_mask[..., : at + 1]
                    hidden = self._step(embed(tokens[-1]), *places[at], at + 1, mask)
                logits.append(F.linear(hidden.float(), head))
                tokens.append(choose(logits[-1], place))
        return torch.stack(tokens, dim=1), torch.stack(logits, dim=1), prefix_hidden

    def _forward(self, x: Tensor, cos: Tensor, sin: Tensor, attention_mask: Tensor | None, first: int) -> Tensor:
        """Run images and prompt ``[B,P,D]`` and fill the buffers with them; return ``[B,P-first,D]``."""
        batch, length, width = x.shape
        mask = None if attention_mask is None else causal_mask(attention_mask)
        for layer in self.layers:
            qkv = layer.qkv(self._norm(x, layer.norm1))
            qkv = qkv.view(batch, length, -1, self.head_dim).transpose(1, 2)
            q, k, v = self._split(qkv, cos, sin)
            layer.keys[:, :, :length] = k
            layer.values[:, :, :length] = v
            if first and layer is self.layers[-1]:
                q = q[:, :, first:]
                x = x[:, first:]
                mask = last_rows(mask, length, first, x.device)
            attended = attention(q.to(self.dtype), k.to(self.dtype), v, mask, causal=mask is None)
            x = self._finish(layer, x, attended.transpose(1, 2).reshape(batch, -1, width))
        return _rms_norm(x, self.final_norm, self.eps)

    def _step(self, x: Tensor, cos: Tensor, sin: Tensor, end: int, mask: Tensor | None) -> Tensor:
        """Run one token ``[B,D]``, the ``end``-th, whose cosines and sines are ``[B or 1,1,E]``; return ``[B,D]``.

        At small sizes the number of operations decides the time, hence no general attention and no dimension of tokens.
        """
        batch, width = x.shape
        for layer in self.layers:
            qkv = layer.qkv(self._norm(x, layer.norm1)).view(batch, -1, self.head_dim)
            q, k, v = self._split(qkv, cos, sin)
            layer.keys.select(2, end - 1).copy_(k)
            layer.values.select(2, end - 1).copy_(v)
            attended = self._attend(q, layer.keys.narrow(2, 0, end), layer.values.narrow(2, 0, end), mask)
            x = self._finish(layer, x, attended.reshape(batch, width))
        return _rms_norm(x, self.final_norm, self.eps)

    def _split(self, qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries and keys, both rotated, and values, of all heads ``[B,H+2G,...]``."""
        turned = self.heads + self.kv_heads
        qk = _rotate(qkv[:, :turned], cos, sin)
        return qk[:, : self.heads], qk[:, self.heads :], qkv[:, turned:]

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """Return ``[B,H,E]`` of one query ``[B,H,E]`` each; ``mask`` is what ``_hidden_mask`` makes."""
        q = q.to(self.cache_dtype)
        if keys.device.type != "cpu":
            return attention(q[:, :, None], keys, values, mask)[:, :, 0]
        # Query heads that share keys are the rows of a product.
        rows = (q * self.scale).view(-1, self.heads // self.kv_heads, self.head_dim)
        scores = torch.bmm(rows, keys.flatten(0, 1).transpose(1, 2))
        if mask is not None:
            scores = (scores.view(len(q), self.heads, -1) + mask).view(scores.shape)
        return torch.bmm(scores.softmax(dim=-1), values.flatten(0, 1)).view(q.shape)

    def _hidden_mask(self, attention_mask: Tensor | None, num_tokens: int) -> Tensor | None:
        """Return what hides padding from single tokens, of all P + N: added to scores on a CPU, else a boolean."""
        if attention_mask is None:
            return None
        visible = F.pad(attention_mask.bool(), (0, num_tokens), value=True)[:, None]
        if visible.device.type != "cpu":
            return visible[:, None]
        return torch.zeros_like(visible, dtype=self.cache_dtype).masked_fill_(~visible, -torch.inf)

    def _finish(self, layer: _Layer, x: Tensor, attended: Tensor) -> Tensor:
        """Return a layer's output from its input and its heads, both ``[B,...,D]``."""
        x = x + layer.out(attended.to(self.dtype))
        gate, up = layer.gate_up(self._norm(x, layer.norm2)).chunk(2, dim=-1)
        return x + layer.down(F.silu(gate) * up)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return _rms_norm(x, weight, self.eps).to(self.dtype)

    def _rotary(self, prefix: Tensor, attention_mask: Tensor | None, num_tokens: int) -> tuple[Tensor, Tensor]:
        length = prefix.shape[1]
        if attention_mask is None:
            positions = torch.arange(length + num_tokens, device=prefix.device)[None]
        else:
            positions = token_positions(F.pad(attention_mask, (0, num_tokens), value=1))
        cos, sin = rotary(positions, self.spec, prefix.dtype)
        first, second = sin.chunk(2, dim=-1)
        sin = torch.cat((-first, second), dim=-1)
        return cos[:, None], sin[:, None]

    def _cache(self, shape: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
        values = torch.empty(shape, dtype=self.cache_dtype, device=device)
        if device.type != "cpu":
            return torch.empty_like(values), values
        return torch.empty_like(values.transpose(-1, -2), memory_format=torch.contiguous_format).transpose(
            -1, -2
        ), values

    def _layer(self, layer: LlamaLayer, keys: Tensor, values: Tensor) -> _Layer:
        attention = layer.self_attn
        mlp = layer.mlp
        return _Layer(
            layer.input_layernorm.weight,
            layer.post_attention_layernorm.weight,
            self._several(attention.q_proj, attention.k_proj, attention.v_proj),
            self._one(attention.o_proj),
            self._several(mlp.gate_proj, mlp.up_proj),
            self._one(mlp.down_proj),
            keys,
            values,
        )

    def _one(self, module: nn.Linear) -> Callable[[Tensor], Tensor]:
        bias = None if module.bias is None else module.bias.to(self.dtype)
        factors = adapter_factors(module)
        if factors is None or self._fuse:
            merged = linear_weight(module).to(self.dtype)
            return lambda x: F.linear(x, merged, bias)
        # Merging copies the weights, which for large weights costs more than two thin products.
        weight, down, up = (part.to(self.dtype) for part in (module.weight, *factors))
        return lambda x: F.linear(x, weight, bias) + F.linear(F.linear(x, down), up)

    def _several(self, *modules: nn.Linear) -> Callable[[Tensor], Tensor]:
        """Return concatenated outputs, in one product where copying the weights is cheap."""
        if not self._fuse or any(module.bias is not None for module in modules):
            functions = [self._one(module) for module in modules]
            return lambda x: torch.cat([function(x) for function in functions], dim=-1)
        weight = torch.cat([linear_weight(module).to(self.dtype) for module in modules])
        return lambda x: F.linear(x, weight)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if x.device.type == "cpu" and x.dtype == weight.dtype == torch.float32:  # the same bits, in fewer calls
        return F.rms_norm(x, weight.shape, weight, eps)
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary positions; ``sin`` includes the sign of the swapped halves."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)
