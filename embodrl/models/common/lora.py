"""Low-rank adapters (Hu et al., "LoRA", 2021) on the linear layers of a policy, by way of peft.

A layer with weight ``W [out,in]`` then computes ``W x + scale * up (down x)`` with ``scale = alpha / rank``. Code that
reads weights instead of calling layers takes them from ``linear_weight``.
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
from embodrl.storage.atomic import atomic_directory
from embodrl.storage.files import Deferred, write_safetensors
from embodrl.storage.integrity import write_checksums

ADAPTER = "default"
MAX_DEFAULT_ALPHA = 16
NETWORK = "model."
"""Where a policy has the network of public checkpoints."""
OWN_HEADS = ("value_head", "noise_head")


def add_adapters(policy: VLAPolicy, config: LoraConfig, *, seed: int, freeze_vision: bool = False) -> list[str]:
    """Put float32 adapters on linear layers; nothing else trains afterwards, and outputs do not change yet.

    Args:
        policy: changed in place; its parameters of adapted layers are called ``NAME.base_layer.weight`` from then on.
        config: rank, alpha, targets.
        seed: seed of the adapters' first factor, normal with a standard deviation of 1/rank; the second one is 0.
        freeze_vision: leave the vision backbone without adapters.

    Returns:
        Names of the adapted layers.

    Raises:
        MissingDependencyError: peft is not installed.
        EmbodrlError: a target is not the name of a linear layer that an output depends on.
    """
    peft = _peft()
    names = target_names(policy, config.target_modules, freeze_vision)
    # The default alpha is that of OpenVLA's fine-tuning.
    alpha = min(config.rank, MAX_DEFAULT_ALPHA) if config.alpha is None else config.alpha
    settings = peft.LoraConfig(r=config.rank, lora_alpha=alpha, lora_dropout=0.0, bias="none", target_modules=names)
    device = policy.device
    is_meta = device.type == "meta"
    peft.inject_adapter_in_model(settings, policy, ADAPTER, low_cpu_mem_usage=is_meta)  # it builds them on the CPU
    generator = new_generator(device, seed)
    for name in names:
        layer: Any = policy.get_submodule(name)
        for factor in (layer.lora_A[ADAPTER], layer.lora_B[ADAPTER]):
            factor.float()
        if not is_meta:
            # peft has drawn them from torch's global generator.
            layer.lora_A[ADAPTER].weight.data.normal_(0.0, 1.0 / config.rank, generator=generator)
    return names


@torch.no_grad()
def continue_adapters(policy: VLAPolicy, adapters: Adapters) -> None:
    """Give a policy's adapters the values of a checkpoint's; those of other layers are added to the weights.

    A scale that differs goes into the second factor, so that outputs are those of the checkpoint.

    Args:
        policy: policy with adapters of its own.
        adapters: what their loading has ``kept``.
    """
    own: dict[nn.Module, Any] = {
        cast(nn.Module, layer.base_layer): layer for layer in policy.modules() if adapter_factors(layer) is not None
    }
    for module, adapter in list(adapters.kept.items()):
        weight = cast(Tensor, module.weight)
        if module not in own:
            # The policy has no adapter there that could continue it, so it counts as merged.
            del adapters.kept[module]
            adapters.num_merged += 1
            if not weight.is_meta:
                weight.copy_(weight.float() + adapters.delta(adapter).to(weight.device))
        elif not weight.is_meta:
            down, up = adapters.factors(adapter)
            own[module].lora_A[ADAPTER].weight.copy_(down)
            own[module].lora_B[ADAPTER].weight.copy_(up * (adapter.scale / own[module].scaling[ADAPTER]))


def target_names(policy: VLAPolicy, targets: tuple[str, ...] = (), freeze_vision: bool = False) -> list[str]:
    """Return the full names of linear layers that adapters can be added to.

    Args:
        policy: without adapters.
        targets: last parts of names to choose; empty for all but the value head and the noise head. Layers with tied
            weights have none.
        freeze_vision: leave the vision backbone out.

    Raises:
        EmbodrlError: a target is not the name of such a layer; lists the nearest.
    """
    parts = policy.parts()
    left_out = [parts[name] for name in OWN_HEADS if name in parts]
    if freeze_vision and "vision" in parts:
        left_out.append(parts["vision"])
    excluded = {id(parameter) for module in left_out for parameter in module.parameters()}
    # Adapters of a layer would not reach the others that share its weight, and merging them would untie it.
    excluded |= {id(policy.get_parameter(first)) for first, *_ in tied_parameters(policy)}
    # No output depends on these, so that an adapter would never get a gradient.
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


def adapter_factors(layer: nn.Module) -> tuple[Tensor, Tensor] | None:
    """Return the factors ``down [rank,in]`` and ``up [out,rank]``, the scale in the second; None without an adapter."""
    if not hasattr(layer, "lora_A"):
        return None
    adapted: Any = layer
    return adapted.lora_A[ADAPTER].weight, adapted.lora_B[ADAPTER].weight * adapted.scaling[ADAPTER]


def linear_weight(layer: nn.Module, rows: slice = slice(None)) -> Tensor:
    """Return rows of the weight that a linear layer multiplies with, its adapter included, with gradients.

    The result ``[rows,in]`` has the precision of the more precise of weight and adapter.
    """
    weight = cast(Tensor, layer.weight)[rows]
    factors = adapter_factors(layer)
    # W + scale * up @ down, the scale being part of the second factor.
    return weight if factors is None else weight + factors[1][rows] @ factors[0]


def merged_state_dict(module: nn.Module, deferred: bool = False) -> dict[str, Tensor]:
    """Return ``state_dict()`` with the names of plain layers and the adapters added to their weights.

    The module itself stays as it is. Merged weights are new tensors, on the CPU, and as precise as the more precise of
    weight and adapter: rounded to bfloat16, a product of std 3e-5 would leave a third of its elements in weights of
    0.02.

    Args:
        module: module with or without adapters.
        deferred: merge a weight when it is written: in float32, all at once take twice the memory of a bf16 network.
    """
    merge = _merged_later if deferred else _merged
    adapted = {name: part for name, part in module.named_modules() if adapter_factors(part) is not None}
    inside = {f"{name}.{key}" for name, part in adapted.items() for key in part.state_dict()}
    plain: dict[str, Tensor] = {}
    for name, tensor in module.state_dict().items():
        owner, inner, leaf = name.rpartition(".base_layer.")
        if inner and owner in adapted:
            plain[f"{owner}.{leaf}"] = merge(adapted[owner]) if leaf == "weight" else tensor
        elif name not in inside:
            plain[name] = tensor
    return plain


@torch.no_grad()
def _merged(layer: nn.Module) -> Tensor:
    return linear_weight(layer).cpu()


def _merged_later(layer: nn.Module) -> Tensor:
    weight = cast(Tensor, layer.weight)
    factors = adapter_factors(layer)
    assert factors is not None
    dtype = torch.promote_types(weight.dtype, factors[0].dtype)
    return Deferred.of(weight.shape, dtype, lambda: _merged(layer))


def rounds_when_merged(policy: VLAPolicy) -> bool:
    """Tell whether there are adapters over weights in half precision: added to these, most of them is lost."""
    return any(
        factors is not None and cast(Tensor, layer.weight).dtype.itemsize < factors[0].dtype.itemsize
        for layer in policy.modules()
        if (factors := adapter_factors(layer)) is not None
    )


def save_adapters(policy: VLAPolicy, directory: Path, base: str) -> None:
    """Write adapters in peft's layout, and the value and noise heads, for ``model.lora_path``.

    Args:
        policy: policy with adapters.
        directory: a new one.
        base: their base model, as ``base_model_name_or_path`` is to name it.

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
