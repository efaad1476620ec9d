"""Memory of training a policy, from shapes alone: nothing is allocated, no weight is read.

Weights, gradients and AdamW's moments are counted exactly. Activations are estimated as the tensors that the backward
pass keeps of linear layers and norms, nearly all of them with fused attention. Not counted: attention scores (kept on a
CPU), logits and allocator overhead. Shapes: B micro-batch, in and out: features of a linear layer.
"""

from __future__ import annotations

import torch
from torch import nn

from embodrl.config.schema import ModelConfig
from embodrl.hybrid_engines.figures import TrainingMemory
from embodrl.models.base import VLAPolicy
from embodrl.models.memory import FLOAT32_BYTES, state_memory
from embodrl.models.registry import build_policy

NORM_COPIES = 2
"""A norm keeps its input and the normalised values, in float32."""


def estimate_training_memory(
    config: ModelConfig,
    *,
    micro_batch_size: int,
    num_cameras: int = 1,
    param_dtype: torch.dtype = torch.float32,
    compute_dtype: torch.dtype = torch.float32,
    gradient_checkpointing: bool = False,
    master_weights: bool = True,
) -> TrainingMemory:
    """Estimate the memory of ``embodrl train`` or ``sft`` for a model.

    Of a checkpoint in section ``model`` only config.json and the shapes are read. ``compute_dtype`` is bfloat16 with
    autocast; the other arguments are keys of ``actor``.

    Raises:
        CheckpointError: see the family's builder.
    """
    policy, _ = build_policy(config, device="meta", dtype=param_dtype, seed=0)
    counts = token_counts(policy, num_cameras)
    return estimate(policy, counts, micro_batch_size, compute_dtype, gradient_checkpointing, master_weights)


def estimate(
    policy: VLAPolicy,
    tokens: list[tuple[nn.Module, int]],
    micro_batch_size: int,
    compute_dtype: torch.dtype = torch.float32,
    gradient_checkpointing: bool = False,
    master_weights: bool = True,
) -> TrainingMemory:
    """Estimate the memory of an existing policy, on any device, with ``requires_grad`` set as for training.

    ``tokens`` are modules and their number of positions per row; later entries take precedence. With gradient
    checkpointing, blocks keep only their input, and are recomputed one at a time; with master weights, trained
    half-precision weights have a float32 copy.
    """
    kept = _Kept(policy, tokens, compute_dtype)
    activations = kept.checkpointed() if gradient_checkpointing else kept.all()
    return TrainingMemory(*state_memory(policy, compute_dtype, master_weights), micro_batch_size * activations)


def token_counts(policy: VLAPolicy, num_cameras: int) -> list[tuple[nn.Module, int]]:
    """Return modules of a policy and their number of positions per row; see ``VLAPolicy.positions``."""
    return [*((part, 1) for part in policy.parts().values()), *policy.positions(num_cameras)]


class _Kept:
    """Tensors kept by the backward pass for one row, by layer, in the order of the forward pass."""

    def __init__(self, policy: VLAPolicy, tokens: list[tuple[nn.Module, int]], compute_dtype: torch.dtype) -> None:
        self.policy = policy
        self.width = compute_dtype.itemsize
        positions = {id(module): count for part, count in tokens for module in part.modules()}
        unused = {id(parameter) for parameter in policy.unused_parameters()}
        self.layers: list[tuple[nn.Module, int]] = []
        seen: set[int] = set()
        for part in policy.parts().values():
            for name, module in part.named_modules():
                runs = not any(id(p) in unused for p in module.parameters(recurse=False))
                layer = (isinstance(module, nn.Linear) and not name.endswith("base_layer")) or _is_norm(module)
                if layer and runs and id(module) not in seen:
                    self.layers.append((module, positions.get(id(module), 1)))
                    seen.add(id(module))
        first = next((i for i, (layer, _) in enumerate(self.layers) if _trains(layer)), len(self.layers))
        # Nothing before the first trained layer is differentiated.
        self.layers = self.layers[first:]
        self.positions = positions

    def all(self) -> int:
        return sum(self._layer(layer, count) for layer, count in self.layers)

    def checkpointed(self) -> int:
        """Return bytes with one stored input for each block, and the largest block recomputed."""
        kept = {id(layer): self._layer(layer, count) for layer, count in self.layers}
        total = sum(kept.values())
        largest = 0
        for blocks in self.policy.modules():
            if not isinstance(blocks, nn.ModuleList):
                continue
            for block in blocks:
                layers = [layer for layer in block.modules() if id(layer) in kept]
                linear = [layer for layer in layers if isinstance(layer, nn.Linear)]
                if len(linear) < 2:  # not a block
                    continue
                inside = sum(kept[id(layer)] for layer in layers)
                total += self.positions.get(id(block), 1) * linear[0].in_features * self.width - inside
                largest = max(largest, inside)
        return total + largest

    def _layer(self, layer: nn.Module, positions: int) -> int:
        if not isinstance(layer, nn.Linear):
            return positions * NORM_COPIES * FLOAT32_BYTES * next(layer.parameters(recurse=False)).numel()
        # The input is kept for the weight's gradient, the output for the next layer.
        features = layer.out_features + (layer.in_features if layer.weight.requires_grad else 0)
        return positions * features * self.width


def _is_norm(module: nn.Module) -> bool:
    return type(module).__name__.endswith("Norm") and any(True for _ in module.parameters(recurse=False))


def _trains(layer: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in layer.parameters(recurse=False))
