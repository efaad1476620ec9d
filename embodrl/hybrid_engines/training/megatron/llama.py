"""Llama on megatron-core's parallel layers: heads, MLP units and vocabulary are sharded over the tensor group.

Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism", 2019. Shapes: B
batch, S tokens, D hidden size, H query heads, G key and value heads, E head dimension, R processes.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from embodrl.errors import EmbodrlError
from embodrl.hybrid_engines.training.megatron.core import ParallelConfig, megatron, parallel_config, tensor_group
from embodrl.models.common.attention import attention
from embodrl.models.common.llama import Llama, LlamaSpec, rotary


def check_divisible(spec: LlamaSpec, size: int) -> None:
    """Reject a model that cannot be divided evenly.

    Raises:
        EmbodrlError: lists all dimensions that do not divide.
    """
    cut = {
        "attention heads": spec.num_attention_heads,
        "key and value heads": spec.num_key_value_heads,
        "MLP units": spec.intermediate_size,
        "token ids": spec.vocab_size,
    }
    uneven = [f"{number} {name}" for name, number in cut.items() if number % size]
    if uneven:
        raise EmbodrlError(
            f"actor.tensor_parallel_size={size} does not divide the language model's {', '.join(uneven)}",
            "set it to a divisor of all of them",
            code="tensor-parallel-size",
        )


def run(layer: nn.Module, x: Tensor) -> Tensor:
    """Return the output of a parallel layer ``[...,out]`` for ``x [...,in]``, in the autocast type.

    The layers' own backward pass supports autocast on CUDA only; input and weight of equal type need none.
    """
    weight = layer.get_parameter("weight")
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
    with torch.autocast(kind, enabled=False):
        if dtype == weight.dtype:
            return layer(x.to(dtype))[0]
        return functional_call(layer, {"weight": weight.to(dtype)}, (x.to(dtype),))[0]


class ParallelAttention(nn.Module):
    """Attention with rotary positions; a process has H/R query heads and G/R heads of keys and values.

    The rows of ``linear_qkv`` are, for every key-value head, its H/G query heads, then the key and value heads.
    """

    def __init__(self, llama: LlamaSpec, parallel: ParallelConfig, causal: bool) -> None:
        super().__init__()
        layers = megatron("tensor_parallel.layers")
        size = tensor_group().size()
        heads = llama.num_attention_heads
        groups = llama.num_key_value_heads
        self.groups = groups // size
        self.heads_of_group = heads // groups
        self.head_dim = llama.hidden_size // heads
        self.causal = causal
        common: dict[str, object] = {"config": parallel, "init_method": nn.init.zeros_, "bias": False}
        rows = (heads + 2 * groups) * self.head_dim
        self.linear_qkv = layers.ColumnParallelLinear(llama.hidden_size, rows, gather_output=False, **common)
        self.linear_proj = layers.RowParallelLinear(
            heads * self.head_dim, llama.hidden_size, input_is_parallel=True, skip_bias_add=False, **common
        )

    def forward(self, x: Tensor, mask: Tensor | None, cos: Tensor, sin: Tensor) -> Tensor:
        """``[B,S,D]`` to ``[B,S,D]``; ``mask bool[B,1,S,S]`` or None, ``cos`` and ``sin`` ``[B,S,E]``."""
        batch, length, _ = x.shape
        rows = run(self.linear_qkv, x).view(batch, length, self.groups, self.heads_of_group + 2, self.head_dim)
        q = rows[:, :, :, : self.heads_of_group].flatten(2, 3).transpose(1, 2)
        k = rows[:, :, :, -2].transpose(1, 2)
        v = rows[:, :, :, -1].transpose(1, 2)
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        attended = attention(q, k, v, mask, causal=mask is None and self.causal)
        return run(self.linear_proj, attended.transpose(1, 2).reshape(batch, length, -1))


class ParallelMLP(nn.Module):
    """SwiGLU; the rows of ``linear_fc1`` are the process's gates, then its units."""

    def __init__(self, llama: LlamaSpec, parallel: ParallelConfig) -> None:
        super().__init__()
        layers = megatron("tensor_parallel.layers")
        common: dict[str, object] = {"config": parallel, "init_method": nn.init.zeros_, "bias": False}
        width = llama.hidden_size
        units = llama.intermediate_size
        self.linear_fc1 = layers.ColumnParallelLinear(width, 2 * units, gather_output=False, **common)
        self.linear_fc2 = layers.RowParallelLinear(units, width, input_is_parallel=True, skip_bias_add=False, **common)

    def forward(self, x: Tensor) -> Tensor:
        """``[B,S,D]`` to ``[B,S,D]``."""
        gate, up = run(self.linear_fc1, x).chunk(2, dim=-1)
        return run(self.linear_fc2, F.silu(gate) * up)


class ParallelBlock(nn.Module):
    """A Llama layer; norms are whole in every process."""

    def __init__(self, llama: LlamaSpec, parallel: ParallelConfig, causal: bool) -> None:
        super().__init__()
        self.input_layernorm = LlamaRMSNorm(llama.hidden_size, llama.rms_norm_eps)
        self.self_attention = ParallelAttention(llama, parallel, causal)
        self.pre_mlp_layernorm = LlamaRMSNorm(llama.hidden_size, llama.rms_norm_eps)
        self.mlp = ParallelMLP(llama, parallel)
        self.to(parallel.params_dtype)

    def forward(self, x: Tensor, mask: Tensor | None, cos: Tensor, sin: Tensor) -> Tensor:
        """``[B,S,D]`` to ``[B,S,D]``."""
        x = x + self.self_attention(self.input_layernorm(x), mask, cos, sin)
        return x + self.mlp(self.pre_mlp_layernorm(x))


class ParallelDecoder(nn.Module):
    """The layers and the embedding; called like ``LlamaModel``.

    Args:
        parallel: result of ``parallel_config``.
        causal: tokens do not attend to later ones.
        recompute: recompute the activations of every layer in the backward pass.
    """

    def __init__(self, llama: LlamaSpec, parallel: ParallelConfig, causal: bool, recompute: bool) -> None:
        super().__init__()
        layers = megatron("tensor_parallel.layers")
        self.embed_tokens = layers.VocabParallelEmbedding(
            llama.vocab_size, llama.hidden_size, init_method=nn.init.zeros_, config=parallel
        )
        self.layers = nn.ModuleList(ParallelBlock(llama, parallel, causal) for _ in range(llama.num_hidden_layers))
        self.norm = LlamaRMSNorm(llama.hidden_size, llama.rms_norm_eps).to(parallel.params_dtype)
        self.spec = llama
        self.recompute = recompute

    def forward(
        self,
        inputs_embeds: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        first: int = 0,
    ) -> Tensor:
        """Return the hidden states ``[B,S-first,D]`` after the final norm.

        Args:
            inputs_embeds: ``[B,S,D]``.
            attention_mask: ``bool[B,1,S or 1,S]``; None if the model alone restricts attention.
            position_ids: ``int64[B,S]``; None counts from 0.
            first: first token of the output.
        """
        if position_ids is None:
            position_ids = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device)[None]
        cos, sin = rotary(position_ids, self.spec, inputs_embeds.dtype)
        x = inputs_embeds
        for layer in self.layers:
            if self.recompute and torch.is_grad_enabled():
                x = checkpoint(layer, x, attention_mask, cos, sin, use_reentrant=False)
            else:
                x = layer(x, attention_mask, cos, sin)
            assert isinstance(x, Tensor)
        return self.norm(x[:, first:])


class ParallelLlama(nn.Module):
    """This process's part of ``public``, whose weights are not copied (see ``layout.parallelize``).

    Raises:
        EmbodrlError: the dimensions cannot be divided evenly.
    """

    def __init__(self, public: Llama) -> None:
        super().__init__()
        self.spec = public.spec
        check_divisible(self.spec, tensor_group().size())
        parallel = parallel_config(public.lm_head.weight.dtype)
        recompute = public.model.gradient_checkpointing
        self.model = ParallelDecoder(self.spec, parallel, public.model.causal, recompute)
        layers = megatron("tensor_parallel.layers")
        self.lm_head = layers.ColumnParallelLinear(
            self.spec.hidden_size,
            self.spec.vocab_size,
            config=parallel,
            init_method=nn.init.zeros_,
            bias=False,
            gather_output=False,
        )
