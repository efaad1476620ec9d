"""Low-rank adapters (Hu et al., "LoRA", 2021) on a policy's linear layers, through peft.

A layer with weight ``W [out,in]`` then computes ``W x + scale * up (down x)`` with ``scale = alpha / rank``. Code that
reads weights instead of calling layers uses ``linear_weight``.
"""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor, nn

from embodrl.config.schema import LoraConfig
from embodrl.errors import EmbodrlError, MissingDependencyError
from embodrl.hub import parse
from embodrl.models.base import VLAPolicy
from embodrl.models.common.adapters import ADAPTER_CONFIG, ADAPTER_WEIGHTS, Adapters, adapter_names
from embodrl.models.common.checkpoint import tied_parameters
from embodrl.models.common.init import new_generator
from embodrl.models.common.merging import ADAPTER, adapter_factors
from embodrl.storage.atomic import atomic_directory
from embodrl.storage.files import write_safetensors
from embodrl.storage.integrity import write_checksums

MAX_DEFAULT_ALPHA = 16
NETWORK = "model."
"""Name prefix, within a policy, of the network of public checkpoints."""
OWN_HEADS = ("value_head", "noise_head")


def add_adapters(policy: VLAPolicy, config: LoraConfig, *, seed: int, freeze_vision: bool = False) -> list[str]:
    """Add float32 adapters to linear layers and return their names; only adapters train afterwards.

    The first factor is normal with standard deviation 1/rank, the second 0, so outputs do not change yet. Parameters of
    adapted layers are renamed ``NAME.base_layer.weight``.

    Raises:
        MissingDependencyError: peft is not installed.
        EmbodrlError: a target matches no linear layer that affects an output.
    """
    peft = _peft()
    names = target_names(policy, config.target_modules, freeze_vision)
    # The default alpha is OpenVLA's fine-tuning value.
    alpha = min(config.rank, MAX_DEFAULT_ALPHA) if config.alpha is None else config.alpha
    settings = peft.LoraConfig(r=config.rank, lora_alpha=alpha, lora_dropout=0.0, bias="none", target_modules=names)
    device = policy.device
    is_meta = device.type == "meta"
    peft.inject_adapter_in_model(settings, policy, ADAPTER, low_cpu_mem_usage=is_meta)  # peft builds them on the CPU
    generator = new_generator(device, seed)
    for name in names:
        layer: Any = policy.get_submodule(name)
        for factor in (layer.lora_A[ADAPTER], layer.lora_B[ADAPTER]):
            factor.float()
        if not is_meta:
            # peft drew them from torch's global generator.
            layer.lora_A[ADAPTER].weight.data.normal_(0.0, 1.0 / config.rank, generator=generator)
    return names


@torch.no_grad()
def continue_adapters(policy: VLAPolicy, adapters: Adapters) -> None:
    """Continue training a checkpoint's kept adapters in the policy's own; merge those of other layers.

    A different scale is folded into the second factor, so outputs match the checkpoint.
    """
    own: dict[nn.Module, Any] = {
        cast(nn.Module, layer.base_layer): layer for layer in policy.modules() if adapter_factors(layer) is not None
    }
    for module, adapter in list(adapters.kept.items()):
        weight = cast(Tensor, module.weight)
        if module not in own:
            # The policy has no adapter there to continue it, so it counts as merged.
            del adapters.kept[module]
            adapters.num_merged += 1
            if not weight.is_meta:
                weight.copy_(weight.float() + adapters.delta(adapter).to(weight.device))
        elif not weight.is_meta:
            down, up = adapters.factors(adapter)
            own[module].lora_A[ADAPTER].weight.copy_(down)
            own[module].lora_B[ADAPTER].weight.copy_(up * (adapter.scale / own[module].scaling[ADAPTER]))


def target_names(policy: VLAPolicy, targets: tuple[str, ...] = (), freeze_vision: bool = False) -> list[str]:
    """Return the full names of linear layers that can have adapters, in a policy without adapters.

    Args:
        policy: policy without adapters.
        targets: last name parts to select; empty for all but the value and noise heads and layers with tied weights.
        freeze_vision: exclude the vision backbone.

    Raises:
        EmbodrlError: a target matches no such layer; lists the nearest.
    """
    parts = policy.parts()
    left_out = [parts[name] for name in OWN_HEADS if name in parts]
    if freeze_vision and "vision" in parts:
        left_out.append(parts["vision"])
    excluded = {id(parameter) for module in left_out for parameter in module.parameters()}
    # An adapter would not reach the other layers that share the weight, and merging it would untie them.
    excluded |= {id(policy.get_parameter(first)) for first, *_ in tied_parameters(policy)}
    # No output depends on these, so an adapter would never get a gradient.
    excluded |= {id(parameter) for parameter in policy.unused_parameters()}
    names = [
        name
        for name, module in policy.named_modules()
        if isinstance(module, nn.Linear) and id(module.weight) not in excluded
    ]
    known = sorted({_last(name) for name in names})
    for target in targets:
        if target not in known:
            near = difflib.get_close_matches(target, known, n=3, cutoff=0.3)
            raise EmbodrlError(
                f"model.lora.target_modules: no linear layer that trains is called '{target}'; there are "
                + ", ".join(known),
                f"did you mean {' or '.join(near)}?" if near else "choose from these, or leave it empty for all",
                code="lora-target",
            )
    return [name for name in names if not targets or _last(name) in targets]


def rounds_when_merged(policy: VLAPolicy) -> bool:
    """Return whether adapters lie over half-precision weights, so that merging would round most of them away."""
    return any(
        factors is not None and cast(Tensor, layer.weight).dtype.itemsize < factors[0].dtype.itemsize
        for layer in policy.modules()
        if (factors := adapter_factors(layer)) is not None
    )


def save_adapters(policy: VLAPolicy, directory: Path, base: str) -> None:
    """Write adapters in peft's layout, and the value and noise heads, for ``model.lora_path``.

    ``base`` becomes ``base_model_name_or_path``.

    Raises:
        EmbodrlError: the policy has no adapters, or some outside of its public network.
        OutputError: the directory can't be written.
    """
    adapted = {name: layer for name, layer in policy.named_modules() if adapter_factors(layer) is not None}
    outside = [name for name in adapted if not name.startswith(NETWORK)]
    if outside or not adapted:
        problem = f"{outside[0]}, with an adapter, is not part of the public network" if outside else "no adapters"
        raise EmbodrlError(
            problem,
            "export with --adapters merged",
            code="adapters-not-apart",
        )
    tensors: dict[str, Tensor] = {}
    modules: list[str] = []
    scale = 0.0
    rank = 0
    for name, layer in cast(dict[str, Any], adapted).items():
        modules.append(policy.public_name(name.removeprefix(NETWORK)))
        down, up = adapter_names(modules[-1])
        tensors |= {down: layer.lora_A[ADAPTER].weight.detach(), up: layer.lora_B[ADAPTER].weight.detach()}
        scale = float(layer.scaling[ADAPTER])
        rank = int(layer.r[ADAPTER])
    on_hub = None if Path(base).expanduser().exists() else parse(base)
    settings = {
        "peft_type": "LORA",
        "base_model_name_or_path": base if on_hub is None else on_hub.repository,
        "revision": None if on_hub is None else on_hub.revision,
        "r": rank,
        "lora_alpha": scale * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(modules),
        "inference_mode": True,
    }
    with atomic_directory(directory) as staging:
        write_safetensors(staging / ADAPTER_WEIGHTS, tensors, {"format": "pt"})
        (staging / ADAPTER_CONFIG).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        for role in OWN_HEADS:
            head: nn.Module | None = getattr(policy, role, None)
            if head is not None:
                write_safetensors(staging / f"{role}.safetensors", head.state_dict())
        write_checksums(staging)


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _peft() -> ModuleType:
    try:
        import peft
    except ImportError as error:
        raise MissingDependencyError(
            f"model.trainable=lora needs peft, which can't be imported: {error}",
            "pip install 'embodrl[lora]', or choose another model.trainable",
        ) from error
    return peft
