"""The planner's network, Llama, with keys and values kept while it writes.

Shapes: B batch, S new tokens, N tokens so far, D hidden size, E head dimension.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from embodrl.models.common import checkpoint
from embodrl.models.common.attention import attention
from embodrl.models.common.config_file import CONFIG_FILE, OWN_SECTION
from embodrl.models.common.fused import split_heads
from embodrl.models.common.init import init_linears, init_matrix
from embodrl.models.common.llama import Llama, LlamaLayer, causal_mask, compute_dtype, rotary, token_positions
from embodrl.models.common.merging import merged_state_dict
from embodrl.models.planner.network import Network, Reader
from embodrl.models.planner.spec import FAMILY
from embodrl.models.planner.tokenizer import END, PAD


class Writer:
    """Runs a batch through the network piece by piece; each piece sees the earlier ones."""

    def __init__(self, model: Llama) -> None:
        self.model = model
        self._cache: list[tuple[Tensor, Tensor]] = []
        self._mask: Tensor | None = None

    def run(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Return the hidden state ``[B,D]`` after the last of the tokens ``int64[B,S]``; ``mask bool[B,S]``."""
        before = self._mask
        self._mask = mask if before is None else torch.cat([before, mask], dim=1)
        length = ids.shape[1]
        spec, model = self.model.spec, self.model.model
        x = model.embed_tokens(ids)
        rope = rotary(token_positions(self._mask)[:, -length:], spec, x.dtype)
        seen = causal_mask(self._mask)[:, :, -length:]
        for number, module in enumerate(model.layers):
            layer = cast(LlamaLayer, module)
            dtype = compute_dtype(x, layer.mlp.down_proj.weight)
            part = layer.self_attn
            h = layer.input_layernorm(x, dtype)
            q, k, v = (
                split_heads(project(h), spec.head_dim, (heads,), rope if turned else None, turned)[0]
                for project, heads, turned in (
                    (part.q_proj, spec.num_attention_heads, 1),
                    (part.k_proj, spec.num_key_value_heads, 1),
                    (part.v_proj, spec.num_key_value_heads, 0),
                )
            )
            if before is None:
                self._cache.append((k, v))
            else:
                keys, values = self._cache[number]
                k, v = torch.cat([keys, k], dim=2), torch.cat([values, v], dim=2)
                self._cache[number] = k, v
            x = x + part.o_proj(attention(q, k, v, seen).transpose(1, 2).flatten(2))
            x = x + layer.mlp(layer.post_attention_layernorm(x, dtype))
        return model.norm(x[:, -1])


class LlamaNetwork(Network):
    """The Llama of ``models.common``."""

    model: Llama

    @property
    def hidden_size(self) -> int:
        return self.model.spec.hidden_size

    @property
    def cached(self) -> tuple[int, int]:
        spec = self.model.spec
        return spec.num_hidden_layers, spec.num_key_value_heads * spec.head_dim

    def reader(self) -> Reader:
        return Writer(self.model).run

    def states(self, ids: Tensor, mask: Tensor, first: int) -> Tensor:
        inner = self.model.model
        return inner(inner.embed_tokens(ids), causal_mask(mask), token_positions(mask), first)

    def recompute(self) -> None:
        self.model.model.gradient_checkpointing = True

    def public_config(self) -> dict[str, Any]:
        spec = self.model.spec
        return {
            **{"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
            **{name: value for name, value in asdict(spec).items() if name != "rope_theta"},
            **{"rope_parameters": {"rope_type": "default", "rope_theta": spec.rope_theta}},
            **{"tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": END, "pad_token_id": PAD},
            OWN_SECTION: {"family": FAMILY},
        }

    def public_weights(self) -> dict[str, Tensor]:
        return merged_state_dict(self.model)

    def save(self, directory: Path) -> None:
        checkpoint.save_weights(merged_state_dict(self.model, deferred=True), directory)
        checkpoint.write_json(directory / CONFIG_FILE, self.public_config())


def init_weights(model: Llama, generator: torch.Generator) -> None:
    """Draw new weights: those of ``models.common.init``, embeddings of standard deviation 1."""
    init_linears(model, generator, ("o_proj", "down_proj"), model.spec.num_hidden_layers)
    model.model.embed_tokens.weight.data.normal_(0.0, 1.0, generator=generator)
    # Small, so that a new policy chooses about evenly.
    init_matrix(model.lm_head.weight, generator, 0.1)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            nn.init.ones_(parameter)
