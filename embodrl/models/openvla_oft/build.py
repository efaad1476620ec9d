"""Builds an OpenVLA-OFT policy from a ModelConfig: a public checkpoint, or the tiny size."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from embodrl.errors import CheckpointError
from embodrl.models.common.config_file import CONFIG_FILE, OWN_SECTION, read_file
from embodrl.models.load_report import LoadReport
from embodrl.models.openvla.build import ModelParts, build_parts, resize_filter
from embodrl.models.openvla_oft.components import (
    ACTION_HEAD,
    NOISY_ACTIONS,
    PROPRIO,
    VISION,
    component_file,
    film_tensors,
    load_component,
)
from embodrl.models.openvla_oft.config import (
    TINY_PROPRIO_DIM,
    check_choices,
    check_components,
    choose_action_stats,
    choose_proprio_stats,
    normalization_of,
)
from embodrl.models.openvla_oft.modeling import ActionHead, DiffusionHead, NoisyActionProjector, ProprioProjector
from embodrl.models.openvla_oft.policy import OpenVLAOFTDiffusionPolicy, OpenVLAOFTPolicy, OpenVLAOFTRegressionPolicy
from embodrl.models.openvla_oft.processing import OpenVLAOFTProcessor, ProprioInput
from embodrl.models.openvla_oft.spec import OpenVlaOftConfig

Component = TypeVar("Component", ActionHead, DiffusionHead, NoisyActionProjector, ProprioProjector)


def build_openvla_oft(
    config: OpenVlaOftConfig, *, device: torch.device | str, dtype: torch.dtype, seed: int
) -> tuple[OpenVLAOFTPolicy, LoadReport]:
    """Build the configured policy; see ``models.registry.build_policy``.

    The number of images and the chunk length are not part of a checkpoint: they follow the observation and
    ``num_action_chunks``. OpenVLA weights also fit; fine-tuning turns them into an OpenVLA-OFT. Raises
    ``CheckpointError`` for parts of a checkpoint that the settings omit.
    """
    device = torch.device(device)
    parts = build_parts(config, False, device, dtype, seed, config.use_film, partial(_components, config))
    ends = normalization_of(config)
    model = parts.model.config
    # Only embodrl's tiny size leaves actions and states unchanged.
    is_public = parts.directory is not None and OWN_SECTION not in model.raw
    if is_public or ends[0] in model.norm_stats[parts.stats.key].fields("action"):
        parts.stats = choose_action_stats(model.norm_stats, parts.stats, ends)
        origin = "model.normalization" if config.normalization else "the number of action dimensions"
        parts.report.conventions["normalization"] = f"{' and '.join(ends)}, from {origin}"
    projector, proprio = _proprio(config, parts, is_public, device, dtype)
    processor = OpenVLAOFTProcessor(
        parts.tokenizer,
        model.image_size,
        config.architecture.max_prompt_tokens,
        model.pad_token_id,
        config.center_crop,
        proprio,
        resize_filter(config, parts),
    )
    arguments = (parts.model, processor, parts.stats, config, parts.value_head, projector)
    return _with_head(config, parts, arguments, device, dtype), parts.report


def _components(
    config: OpenVlaOftConfig, directory: Path, report: LoadReport, device: torch.device
) -> dict[str, Tensor]:
    check_components(directory, config)
    check_choices(read_file(directory / CONFIG_FILE).fields(OWN_SECTION, {}), config, str(directory))
    path = component_file(directory, VISION)
    return {} if path is None else film_tensors(path, report, device)


def _with_head(
    config: OpenVlaOftConfig, parts: ModelParts, arguments: tuple[Any, ...], device: torch.device, dtype: torch.dtype
) -> OpenVLAOFTPolicy:
    """Return the policy of ``model.action_head``, with ``arguments``."""
    if config.action_head == "tokens":
        return OpenVLAOFTPolicy(*arguments)
    width = parts.model.config.llama.hidden_size
    at = ("action_head", parts, device, dtype, config.new_components)
    if config.action_head == "l1":
        l1 = _component(lambda: ActionHead(width, config.action_dim), ACTION_HEAD, *at)
        return OpenVLAOFTRegressionPolicy(*arguments, action_head=l1)
    head = _component(lambda: DiffusionHead(width, config.action_dim), ACTION_HEAD, *at)
    projector = _component(lambda: NoisyActionProjector(width), NOISY_ACTIONS, *at)
    return OpenVLAOFTDiffusionPolicy(
        *arguments,
        action_head=head,
        noisy_action_projector=projector,
        diffusion_steps=config.diffusion_steps,
        denoising_steps=config.denoising_steps,
    )


def _proprio(
    config: OpenVlaOftConfig, parts: ModelParts, is_public: bool, device: torch.device, dtype: torch.dtype
) -> tuple[ProprioProjector | None, ProprioInput | None]:
    """Return the state projector and the object that prepares its input."""
    if not config.use_proprio:
        return None, None
    norm_stats = parts.model.config.norm_stats
    stats = None
    if is_public or norm_stats[parts.stats.key].content.get("proprio"):
        stats = choose_proprio_stats(norm_stats, parts.stats.key, parts.report.source, normalization_of(config))
    dim = TINY_PROPRIO_DIM if stats is None else len(stats.q01)
    width = parts.model.config.llama.hidden_size
    at = ("use_proprio", parts, device, dtype, config.new_components)
    projector = _component(lambda: ProprioProjector(dim, width), PROPRIO, *at)
    return projector, ProprioInput(dim, stats)


def _component(
    make: Callable[[], Component],
    name: str,
    setting: str,
    parts: ModelParts,
    device: torch.device,
    dtype: torch.dtype,
    may_be_new: bool,
) -> Component:
    """Return a component with random or checkpoint weights; raise ``CheckpointError`` if missing or unfit."""
    path = None if parts.directory is None else component_file(parts.directory, name)
    if parts.directory is None or (path is None and may_be_new):
        module = make().to(device, dtype)
        module.init_weights(parts.generator)
        random = (f"{name}.{key}" for key in module.state_dict())
        reason = "random weights were requested" if parts.directory is None else "not in the checkpoint"
        parts.report.initialized.update(dict.fromkeys(random, reason))
        return module
    if path is None:
        raise CheckpointError(
            f"{parts.directory} has no {name}.safetensors or {name}--*.pt",
            f"leave out model.{setting}, use a checkpoint that was trained with it, or train one: `embodrl sft` with"
            " model.new_components=true",
            code="oft-component-missing",
        )
    with torch.device("meta"):
        module = make()
    load_component(module, path, parts.report, device=device, dtype=dtype)
    return module
