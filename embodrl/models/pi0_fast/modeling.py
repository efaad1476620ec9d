"""pi0-FAST's network with lerobot's parameter names: PaliGemma whose last ids stand for action tokens.

Images, prompt and the initial BOS see each other; written tokens see them and earlier written tokens.
Shapes: B batch, V cameras, P images and prompt, S written tokens, K choices of an action token, W width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from embodrl.models.common.init import init_linears
from embodrl.models.common.merging import linear_weight
from embodrl.models.flow.gemma import GemmaLayer, GemmaModel, KeysValues, Rotary, full_precision, rotary
from embodrl.models.openpi.paligemma import PaliGemmaModel, token_places
from embodrl.models.pi0_fast.config import FastConfig

HEAD_STD = 0.02

Choose = Callable[[Tensor, int], Tensor]
"""Map logits ``float32[B,K]`` and the token's index in the chunk to choices ``int64[B]``."""


class PaliGemmaWithHead(nn.Module):
    """PaliGemma and, unless tied to the embedding, the output layer."""

    def __init__(self, config: FastConfig) -> None:
        super().__init__()
        sizes = config.inputs
        self.model = PaliGemmaModel(sizes.siglip, sizes.vlm, sizes.vocab_size)
        if not config.tied:
            self.lm_head = nn.Linear(sizes.vlm.width, sizes.vocab_size, bias=False)


class WithoutExpert(nn.Module):
    """Nesting level of parameter names."""

    def __init__(self, config: FastConfig) -> None:
        super().__init__()
        self.paligemma = PaliGemmaWithHead(config)


class FastModel(nn.Module):
    """pi0-FAST."""

    def __init__(self, config: FastConfig) -> None:
        super().__init__()
        self.config = config
        self.paligemma_with_expert = WithoutExpert(config)

    @property
    def paligemma(self) -> PaliGemmaModel:
        return self.paligemma_with_expert.paligemma.model

    @property
    def language(self) -> GemmaModel:
        return self.paligemma.language_model

    @property
    def output_layer(self) -> nn.Module:
        """Layer with weight ``[vocabulary,W]``; the embedding if tied."""
        return self.language.embed_tokens if self.config.tied else self.paligemma_with_expert.paligemma.lm_head

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of attention and MLP weights; norms are more precise."""
        return self._layer(0).self_attn.q_proj.weight.dtype

    def hidden_states(self, x: Tensor, valid: Tensor | None, written: Tensor) -> Tensor:
        """Return Gemma's final hidden states ``[B,P+S,W]``.

        Args:
            x: images and prompt ``[B,P,W]``, from ``PaliGemmaModel.embed_prefix``.
            valid: ``bool[B,P]``, False at padding; None without padding.
            written: ``int64[B,S]``; ids after the end of a chunk do not affect earlier ones.
        """
        length = x.shape[1]
        x = torch.cat([x, self.language.embed(written).to(x.dtype)], dim=1)
        positions = _positions(valid, length, written.shape[1], x.device)
        rope = rotary(positions, self.config.inputs.vlm.head_dim, x.dtype)
        mask = self._visible(valid, length, written)
        return self.language.decode(x, rope, [None] * len(self.language.layers), mask)

    def logits(self, hidden: Tensor, ids: Tensor | None = None) -> Tensor:
        """Return logits ``float32[...,K]`` of the ids ``int64[K]``; None for the whole vocabulary."""
        with full_precision(hidden):
            weight = linear_weight(self.output_layer)
            if ids is None:  # a copy of everything in float32 would be large
                return F.linear(hidden.to(weight.dtype), weight).float()
            return F.linear(hidden.float(), weight[ids].float())

    @torch.no_grad()
    def write(
        self, x: Tensor, valid: Tensor | None, begin: Tensor, choices: Tensor, end: int, limit: int, choose: Choose
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Write tokens autoregressively until each row has ended; later ones run on cached keys and values.

        Args:
            x: see ``hidden_states``.
            valid: see ``hidden_states``.
            begin: ``int64[S]``, initial ids of every row.
            choices: ``int64[K]``, ids that may follow.
            end: choice that ends a row.
            limit: M, the maximum number of tokens.
            choose: function that picks each token.

        Returns:
            Choices ``int64[B,M]``, 0 after the end, the mask of written ones ``bool[B,M]``, their logits
            ``float32[B,T,K]`` (T of the longest row), and the hidden states ``[B,P,W]`` of images and prompt.
        """
        batch, prefix = x.shape[:2]
        x = torch.cat([x, self.language.embed(begin).to(x.dtype).expand(batch, -1, -1)], dim=1)
        known = x.shape[1]
        positions = _positions(valid, prefix, len(begin) + limit, x.device)
        rope = rotary(positions, self.config.inputs.vlm.head_dim, x.dtype)
        seen = None if valid is None else F.pad(valid, (0, len(begin) + limit), value=True)[:, None, None]
        cache: list[KeysValues] = []
        hidden = self._extend(x, rope, cache, 0, self._visible(valid, prefix, begin[None]))
        of_prefix = hidden[:, :prefix]
        last = hidden[:, -1]
        tokens = torch.zeros(batch, limit, dtype=torch.int64, device=x.device)
        mask = torch.zeros_like(tokens, dtype=torch.bool)
        running = mask.new_ones(batch)
        logits: list[Tensor] = []
        for place in range(limit):
            logits.append(self.logits(last, choices))
            chosen = choose(logits[-1], place)
            tokens[:, place] = torch.where(running, chosen, 0)
            mask[:, place] = running
            running = running & (chosen != end)
            if place + 1 == limit or not bool(running.any()):
                break
            at = known + place
            step = self.language.embed(choices[chosen])[:, None].to(x.dtype)
            window = None if seen is None else seen[..., : at + 1]
            last = self._extend(step, rope, cache, at, window)[:, -1]
        return tokens, mask, torch.stack(logits, dim=1), of_prefix

    def init_weights(self, generator: torch.Generator) -> None:
        """Draw weights for training from scratch; see ``common/init.py``."""
        self.paligemma.vision_tower.init_weights(generator)
        init_linears(self.paligemma.multi_modal_projector, generator)
        self.language.init_weights(generator)
        if not self.config.tied:
            linear_weight(self.output_layer).data.normal_(0.0, HEAD_STD, generator=generator)

    def _visible(self, valid: Tensor | None, prefix: int, written: Tensor) -> Tensor:
        """Return ``bool[B,1,P+S,P+S]``, or ``[1,1,...]`` without padding: True where the row may see the column."""
        count = written.shape[1]
        together = prefix + min(count, int(self.config.bos_in_prompt))
        ordinal = torch.arange(prefix + count, device=written.device)
        visible = (ordinal[None] <= ordinal[:, None].clamp(min=together - 1))[None, None]
        return visible if valid is None else visible & F.pad(valid, (0, count), value=True)[:, None, None]

    def _layer(self, index: int) -> GemmaLayer:
        return cast(GemmaLayer, self.language.layers[index])

    def _extend(self, x: Tensor, rope: Rotary, cache: list[KeysValues], start: int, mask: Tensor | None) -> Tensor:
        """Return the final hidden states of tokens ``start`` onwards, and add their keys and values to the cache.

        The first call creates the cache with the capacity of ``rope``.
        """
        end = start + x.shape[1]
        turn = (rope[0][:, :, start:end], rope[1][:, :, start:end])
        for index in range(len(self.language.layers)):
            layer = self._layer(index)
            normed, _ = layer.input_layernorm(x)
            known = layer.self_attn.keys_values(normed, turn, None)
            if start == 0:
                batch, groups, _, width = known[0].shape
                shape = (batch, groups, rope[0].shape[2], width)
                cache.append((known[0].new_empty(shape), known[1].new_empty(shape)))
            keys, values = cache[index]
            keys[:, :, start:end], values[:, :, start:end] = known
            x = x + layer.self_attn(normed, turn, (keys[:, :, :end], values[:, :, :end]), mask)
            x = x + layer.mlp(layer.post_attention_layernorm(x)[0])
        return self.language.norm(x)[0]


def _positions(valid: Tensor | None, prefix: int, written: int, device: torch.device) -> Tensor:
    """Return ``int64[B,P+S]``, or ``[1,P+S]`` where rows agree; written tokens follow the prompt."""
    places = token_places(valid, prefix, device)
    return torch.cat([places, places[:, -1:] + 1 + torch.arange(written, device=device)], dim=1)
