"""Training memory: exact for what can be counted, near what torch keeps for what can't."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from expect import raises_code
from inference import FULL
from safetensors.torch import load_file, save_file
from tiny_families import FLOW_FAMILIES, NETWORKS, observation, tiny_config
from torch import Tensor, nn
from toy_policy import ToyPolicy

from embodrl.config.schema import ModelConfig, model_settings
from embodrl.errors import CheckpointError
from embodrl.models.base import VLAPolicy
from embodrl.models.registry import build_policy
from embodrl.preflight.training_memory import estimate, estimate_training_memory, token_counts

GB = 10**9


def test_by_hand() -> None:
    """ToyPolicy: body 6 -> 8, norm of 8, head 8 -> 42, value 8 -> 1; five positions, and one for the value."""
    policy = ToyPolicy()
    parts = policy.parts()
    tokens = [(parts["language"], 5), (parts["value_head"], 1)]
    found = estimate(policy, tokens, micro_batch_size=3)
    parameters = (6 * 8 + 8) + (8 + 8) + (8 * 42 + 42) + (8 * 1 + 1)
    assert found.weights == found.gradients == 4 * parameters
    assert found.optimizer == 2 * 4 * parameters
    assert found.activations == 3 * 4 * (5 * (6 + 8) + 5 * 2 * 8 + 5 * (8 + 42) + (8 + 1))
    assert found.total == found.weights + found.gradients + found.optimizer + found.activations
    # The same with bfloat16 copies of the three matrices; norms stay in float32.
    half = estimate(policy, tokens, 3, torch.bfloat16)
    assert half.weights == 4 * parameters + 2 * (6 * 8 + 8 * 42 + 8 * 1)
    assert half.activations == 3 * (2 * 5 * (6 + 8) + 4 * 5 * 2 * 8 + 2 * 5 * (8 + 42) + 2 * (8 + 1))
    # What comes before the first layer that trains keeps nothing.
    policy.body.requires_grad_(False)
    policy.norm.requires_grad_(False)
    frozen = estimate(policy, tokens, 1)
    assert frozen.activations == 4 * (5 * (8 + 42) + (8 + 1))
    assert frozen.gradients == 4 * (8 * 42 + 42 + 8 * 1 + 1)


class Blocks(ToyPolicy):
    """Four blocks of 8 -> 16 -> 8."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8)) for _ in range(4))

    def parts(self) -> dict[str, nn.Module]:
        return {"language": self.blocks}


def test_checkpointing_by_hand() -> None:
    """Each block keeps its input of 8 numbers, and one block at a time all of its own."""
    policy = Blocks()
    block = 4 * 7 * ((8 + 16) + (16 + 8))
    assert estimate(policy, [(policy.blocks, 7)], 2).activations == 2 * 4 * block
    found = estimate(policy, [(policy.blocks, 7)], 2, gradient_checkpointing=True)
    assert found.activations == 2 * (4 * 4 * 7 * 8 + block)


def kept_bytes(policy: VLAPolicy, family: str, batch: int) -> int:
    """Bytes that torch keeps for the backward pass of imitation, without the weights."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in policy.parameters()}
    kept: dict[int, tuple[int, Tensor]] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)  # held, so that its place is not used again
        return tensor

    actions = torch.zeros(batch, policy.action_horizon, 7)
    inputs = policy.sft_inputs(observation(family, batch, texts=("lift the cube " * 2,)), actions)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        policy.sft_loss(inputs)
    return sum(size for size, _ in kept.values())


@pytest.mark.parametrize("family", NETWORKS)
def test_the_tiny_presets(family: str) -> None:
    """Counted: exactly. Activations: at most twice what torch keeps, since prompts count at their greatest length."""
    config = model_settings(family)(model_type=family, warm_start=None)
    found = estimate_training_memory(config, micro_batch_size=3)
    policy, _ = build_policy(config, device="cpu", dtype=torch.float32, seed=0)
    tensors = [*policy.parameters(), *policy.buffers()]
    assert found.weights == sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    assert found.gradients == sum(parameter.numel() * 4 for parameter in trained)
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    optimizer = torch.optim.AdamW(trained)
    optimizer.step()
    moments = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    assert found.optimizer == sum(moment.numel() * moment.element_size() for moment in moments)
    real = kept_bytes(policy, family, 3)
    assert real < found.activations < 2 * real
    policy.enable_gradient_checkpointing()
    checkpointed = estimate_training_memory(config, micro_batch_size=3, gradient_checkpointing=True)
    assert kept_bytes(policy, family, 3) < checkpointed.activations < 0.5 * found.activations


def parsed(options: dict[str, Any]) -> ModelConfig:
    return model_settings(options["model_type"]).model_validate(options)


@pytest.mark.long
@pytest.mark.parametrize("family", FULL)
def test_the_public_size_takes_no_memory_to_estimate(family: str) -> None:
    options = {"model_type": family, "warm_start": None, **FULL[family]}
    sizes = {"micro_batch_size": 1, "param_dtype": torch.bfloat16, "compute_dtype": torch.bfloat16}
    found = estimate_training_memory(parsed(options), **sizes)
    limits = {"openvla": (14, 16), "openvla_oft": (14, 16), "smolvla": (0.7, 1.0)}.get(family, (4, 8))
    low, high = (limit * GB for limit in limits)
    assert low < found.weights < high
    # Two moments and a copy in float32, 12 bytes where the gradient has 2. What is float32 itself, the value head and
    # pi05's modulated norms (about 4 % of it), needs no copy: 8 bytes where the gradient has 4.
    least = 5.6 if family == "pi05" else 5.9
    assert least * found.gradients < found.optimizer < 6 * found.gradients and found.gradients > 0.9 * found.weights
    rounded = estimate_training_memory(parsed(options), master_weights=False, **sizes)
    assert rounded.optimizer == 2 * found.gradients
    lora = estimate_training_memory(parsed({**options, "trainable": "lora"}), **sizes)
    assert lora.gradients < 0.15 * found.gradients and lora.weights > found.weights
    less = estimate_training_memory(parsed(options), gradient_checkpointing=True, **sizes)
    assert less.activations < 0.2 * found.activations and less.weights == found.weights
    more = estimate_training_memory(parsed(options), **{**sizes, "micro_batch_size": 5})
    assert more.activations == 5 * found.activations and more.optimizer == found.optimizer


def positions(policy: VLAPolicy, layer: nn.Module) -> int:
    return [count for part, count in token_counts(policy, 1) if any(module is layer for module in part.modules())][-1]


@pytest.mark.parametrize("family", FLOW_FAMILIES)
def test_flow_noise_keeps_every_denoising_step(family: str) -> None:
    found = {}
    for method in ("flow_sde", "flow_noise"):
        policy, _ = build_policy(tiny_config(family, method), device="meta", dtype=torch.float32, seed=0)
        for part in ("language", "action_expert"):
            linear = next(module for module in policy.parts()[part].modules() if isinstance(module, nn.Linear))
            found[part, method] = positions(policy, linear)
    assert found["action_expert", "flow_noise"] == 3 * found["action_expert", "flow_sde"]
    assert found["language", "flow_noise"] == found["language", "flow_sde"] >= 4


@pytest.mark.parametrize("family", NETWORKS)
def test_of_a_checkpoint_names_and_shapes_are_enough(family: str, tmp_path: Path) -> None:
    policy, _ = build_policy(tiny_config(family), device="cpu", dtype=torch.float32, seed=0)
    policy.save_pretrained(tmp_path)
    config = tiny_config(family, model_path=str(tmp_path))
    built, report = build_policy(config, device="meta", dtype=torch.bfloat16, seed=0)
    assert all(tensor.is_meta for tensor in built.parameters()) and report.ok
    assert estimate_training_memory(config, micro_batch_size=1) == estimate_training_memory(
        tiny_config(family), micro_batch_size=1
    )
    [path] = tmp_path.rglob("model.safetensors")
    tensors = load_file(path)
    name = sorted(name for name in tensors if name.endswith("fc1.weight"))[0]
    save_file({key: value for key, value in tensors.items() if key != name}, path)
    with raises_code("weights-mismatch", CheckpointError):
        estimate_training_memory(config, micro_batch_size=1)
