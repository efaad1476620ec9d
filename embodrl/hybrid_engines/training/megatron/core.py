"""Lazy imports of megatron-core, and its process groups."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Protocol

import torch
import torch.distributed as dist

from embodrl.errors import EmbodrlError, MissingDependencyError

EXTRA = "megatron"


def megatron(name: str) -> ModuleType:
    """Return the module ``megatron.core.NAME``.

    Raises:
        MissingDependencyError: megatron-core is not installed.
    """
    try:
        return importlib.import_module(f"megatron.core.{name}")
    except ImportError as error:
        raise MissingDependencyError(
            f"actor.training_backend=megatron needs megatron-core, which can't be imported: {error}",
            f"pip install 'embodrl[{EXTRA}]', or set actor=native",
        ) from error


def start(tensor_parallel: int) -> None:
    """Create megatron-core's process groups; ``tensor_parallel`` consecutive ranks share a model's tensors.

    Raises:
        EmbodrlError: groups of another size exist already, or it does not divide the world size.
        MissingDependencyError: megatron-core is not installed.
    """
    state = megatron("parallel_state")
    if state.model_parallel_is_initialized():
        found = state.get_tensor_model_parallel_world_size()
        if found != tensor_parallel:
            raise EmbodrlError(
                f"this process takes part in tensor parallelism of size {found} already, and {tensor_parallel} is "
                "asked for",
                "call embodrl.hybrid_engines.training.megatron.core.stop first",
                code="tensor-parallel-size",
            )
        return
    if dist.get_world_size() % tensor_parallel:
        raise EmbodrlError(
            f"{dist.get_world_size()} training process(es) cannot be divided into groups of {tensor_parallel}",
            "set actor.tensor_parallel_size to a divisor of the number of processes",
            code="tensor-parallel-size",
        )
    state.initialize_model_parallel(tensor_model_parallel_size=tensor_parallel)


def stop() -> None:
    """Destroy the process groups that ``start`` created."""
    state = megatron("parallel_state")
    if state.model_parallel_is_initialized():
        state.destroy_model_parallel()


def tensor_group() -> dist.ProcessGroup:
    """Return the processes that each hold a part of the same layers."""
    return megatron("parallel_state").get_tensor_model_parallel_group()


def data_group() -> dist.ProcessGroup:
    """Return the processes that hold the same part of the layers, for different rows."""
    return megatron("parallel_state").get_data_parallel_group()


class ParallelConfig(Protocol):
    """megatron-core's ModelParallelConfig."""

    params_dtype: torch.dtype


def parallel_config(dtype: torch.dtype) -> ParallelConfig:
    """Return the ModelParallelConfig of layers that are created on the CPU and filled by the caller."""
    return megatron("model_parallel_config").ModelParallelConfig(
        tensor_model_parallel_size=tensor_group().size(),
        params_dtype=dtype,
        use_cpu_initialization=True,
        perform_initialization=False,
        gradient_accumulation_fusion=False,  # an apex CUDA kernel
    )
