"""megatron-core's distributed optimizer: AdamW's state and work are distributed over the processes of a data group.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020, stage 1. Gradients are
summed into one float32 buffer, and reduce-scattered; every process updates its stretch of the weights, and the
stretches are gathered. bf16 weights get a float32 copy of each stretch.

CUDA only: megatron-core allocates the buffers on ``torch.cuda.current_device()``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from embodrl.hybrid_engines.training.megatron.core import data_group, megatron, tensor_group


class DistributedAdamW:
    """Replaces a ``torch.optim.AdamW`` over all trained parameters of a module.

    The groups of ``adamw`` keep their settings, and hold stretches from then on.
    """

    def __init__(self, module: nn.Module, adamw: torch.optim.AdamW) -> None:
        self.parameters = [p for group in adamw.param_groups for p in group["params"]]
        self.touched: set[nn.Parameter] = set()
        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(self._touch)
        self.buffers = _data_parallel(module)
        config = megatron("optimizer.optimizer_config").OptimizerConfig(
            optimizer="adam",
            use_distributed_optimizer=True,
            bf16=any(p.dtype == torch.bfloat16 for p in self.parameters),
        )
        # Stretches are views of weights; with gradients enabled they would not be leaves, and torch warns about their
        # grad.
        with torch.no_grad():
            self.inner = megatron("optimizer.distrib_optimizer").DistributedOptimizer(
                adamw,
                config,
                grad_scaler=None,
                init_state_fn=None,
                model_chunks=[self.buffers],
                per_model_buffers={0: self.buffers.buffers},
                data_parallel_group=data_group(),
                data_parallel_group_gloo=None,
                data_parallel_group_idx=0,
                distributed_optimizer_instance_id=0,
            )
        self.stretches = self._find_stretches()
        self.zero_grad()

    def _touch(self, parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        self.touched.add(parameter)

    def _find_stretches(self) -> dict[nn.Parameter, nn.Parameter]:
        """Return the optimizer's flat tensor of each parameter; missing if this process has no part of it."""
        found: dict[nn.Parameter, nn.Parameter] = {}
        for models, mains in (
            (self.inner.model_fp32_groups, self.inner.shard_fp32_groups),
            (self.inner.model_float16_groups, self.inner.shard_fp32_from_float16_groups),
        ):
            for group, main in zip(models, mains, strict=True):
                found |= dict(zip(group, main, strict=True))
        return found

    @property
    def param_groups(self) -> list[dict[str, object]]:
        """Settings by group."""
        return self.inner.optimizer.param_groups

    @property
    def state(self) -> dict[Tensor, dict[str, Tensor]]:
        """Moments by stretch."""
        return self.inner.optimizer.state

    def reduce_gradients(self) -> None:
        """Sum the gradients over the data group into the ``grad`` of the stretches.

        A parameter without gradients gets none, as without buffers: AdamW then skips it.
        """
        self.buffers.finish_grad_sync()  # without overlap, this also starts the sum
        self.inner.prepare_grads()
        for parameter, stretch in self.stretches.items():
            if parameter not in self.touched:
                stretch.grad = None

    def step(self) -> None:
        """Update the weights, and gather them."""
        self.inner.step_with_ready_grads()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients."""
        self.inner.zero_grad(set_to_none)
        self.buffers.zero_grad_buffer()
        self.touched.clear()

    def take_weights(self) -> None:
        """Copy the loaded weights into the stretches."""
        self.inner.reload_model_params()

    def memory(self) -> Iterator[Tensor]:
        """Yield the buffers that megatron-core keeps for weights and gradients."""
        for buffer in self.buffers.buffers:
            yield from (data for data in (buffer.param_data, buffer.grad_data) if data is not None)

    def span(self, parameter: nn.Parameter) -> slice:
        """Return the elements of a parameter in this process's stretch; empty without one."""
        if parameter not in self.stretches:
            return slice(0, 0)
        found = self.inner._get_model_param_range_map(parameter)["param"]
        return slice(found.start, found.end)


def _data_parallel(module: nn.Module) -> Any:
    distributed = megatron("distributed")
    # No dimension is used. Losses are divided by their counts over all shares: gradients add up.
    config = megatron("transformer").TransformerConfig(
        num_layers=1,
        hidden_size=tensor_group().size(),
        num_attention_heads=tensor_group().size(),
        tensor_model_parallel_size=tensor_group().size(),
        calculate_per_token_loss=True,
    )
    settings = distributed.DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, overlap_grad_reduce=False, use_distributed_optimizer=True
    )
    return distributed.DistributedDataParallel(config, settings, module)
