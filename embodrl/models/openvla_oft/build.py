"""From a ModelConfig to an OpenVLA-OFT policy: a public checkpoint with discrete actions, or the tiny size."""

from __future__ import annotations

import pickle
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

from embodrl.errors import CheckpointError
from embodrl.models.base import LoadReport
from embodrl.models.common import checkpoint
from embodrl.models.common.config_file import OWN_SECTION
from embodrl.models.openvla.build import Parts, build_parts
from embodrl.models.openvla_oft.config import (
    PROPRIO_FILE,
    PUBLIC_PROPRIO_FILES,
    TINY_PROPRIO_DIM,
    check_stop_token,
    choose_proprio_stats,
    reject_other_kinds,
)
from embodrl.models.openvla_oft.modeling import ProprioProjector
from embodrl.models.openvla_oft.policy import OpenVLAOFTPolicy
from embodrl.models.openvla_oft.processing import OpenVLAOFTProcessor, ProprioInput
from embodrl.models.openvla_oft.spec import OpenVlaOftConfig


def build_openvla_oft(
    config: OpenVlaOftConfig, *, device: torch.device | str, dtype: torch.dtype, seed: int
) -> tuple[OpenVLAOFTPolicy, LoadReport]:
    """Build the policy that a configuration asks for; see ``build_openvla``.

    The number of images and the length of the chunk are no part of a checkpoint: they follow the observation and
    ``num_action_chunks``. The weights of an OpenVLA fit, too; fine-tuning makes an OpenVLA-OFT of them.

    Args:
        config: the section ``model``.
        device: where the policy lives.
        dtype: of its weights; the value head is always float32.
        seed: of weights that come from no checkpoint.

    Raises:
        CheckpointError: no such checkpoint, or it does not fit, or its actions are not discrete.
    """
    device = torch.device(device)
    parts = build_parts(config, None, False, device, dtype, seed)
    if parts.directory is not None:
        reject_other_kinds(parts.directory)
        check_stop_token(parts.model.config.own, config.keep_stop_token, parts.report.source)
    projector, proprio = _proprio(config, parts, device, dtype)
    model = parts.model.config
    processor = OpenVLAOFTProcessor(
        parts.tokenizer,
        model.image_size,
        config.architecture.max_prompt_tokens,
        model.pad_token_id,
        config.center_crop,
        proprio,
    )
    return OpenVLAOFTPolicy(parts.model, processor, parts.stats, config, parts.value_head, projector), parts.report


def _proprio(
    config: OpenVlaOftConfig, parts: Parts, device: torch.device, dtype: torch.dtype
) -> tuple[ProprioProjector | None, ProprioInput | None]:
    """Return the projector of the state and what makes its input."""
    path = None if parts.directory is None else _projector_file(parts.directory)
    if not config.use_proprio:
        if path is not None:
            raise CheckpointError(
                f"{path} says that the checkpoint was trained with the robot's state, and model.use_proprio is false",
                "set model.use_proprio=true env.include_state=true; to fine-tune without the state, remove the file",
                code="proprio-unused",
            )
        return None, None
    width = parts.model.config.llama.hidden_size
    if parts.directory is None:
        projector = ProprioProjector(TINY_PROPRIO_DIM, width).to(device, dtype)
        projector.init_weights(parts.generator)
        names = (f"proprio_projector.{name}" for name in projector.state_dict())
        parts.report.initialized.update(dict.fromkeys(names, "random weights were asked for"))
        return projector, ProprioInput(TINY_PROPRIO_DIM, None)
    if path is None:
        raise CheckpointError(
            f"{parts.directory} has no {PROPRIO_FILE} and no {PUBLIC_PROPRIO_FILES}, which model.use_proprio needs",
            "set model.use_proprio=false, or use a checkpoint that was trained with the robot's state",
        )
    norm_stats, stats = parts.model.config.norm_stats, None
    # Only embodrl's tiny size leaves the state as it is.
    if OWN_SECTION not in parts.model.config.raw or norm_stats[parts.stats.key].content.get("proprio"):
        stats = choose_proprio_stats(norm_stats, parts.stats.key, parts.report.source)
    dim = TINY_PROPRIO_DIM if stats is None else len(stats.q01)
    with torch.device("meta"):
        projector = ProprioProjector(dim, width)
    _load_projector(projector, path, parts.report, device, dtype)
    return projector, ProprioInput(dim, stats)


def _projector_file(directory: Path) -> Path | None:
    """Return embodrl's own file, or else the one public file.

    Raises:
        CheckpointError: there are public files of several training steps.
    """
    if (directory / PROPRIO_FILE).is_file():
        return directory / PROPRIO_FILE
    public = sorted(directory.glob(PUBLIC_PROPRIO_FILES))
    if len(public) > 1:
        names = ", ".join(path.name for path in public)
        raise CheckpointError(f"{directory} has projectors of several training steps: {names}", "keep one of them")
    return public[0] if public else None


def _load_projector(
    projector: ProprioProjector, path: Path, report: LoadReport, device: torch.device, dtype: torch.dtype
) -> None:
    """Fill the projector; public files hold a pickled mapping of tensors, of which nothing but tensors is read.

    Raises:
        CheckpointError: corrupt, or it does not fit.
    """
    if path.suffix == ".safetensors":
        checkpoint.load_strict(projector, [path], report, device=device, dtype=dtype)
        return
    try:
        stored = torch.load(path, map_location="cpu", weights_only=True)
        tensors = {name.removeprefix("module."): value.contiguous() for name, value in stored.items()}
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, AttributeError) as error:
        raise CheckpointError(f"{path} can't be read: {error}", "fetch the checkpoint again") from error
    with tempfile.TemporaryDirectory() as folder:
        converted = Path(folder) / path.with_suffix(".safetensors").name
        save_file(tensors, converted)
        checkpoint.load_strict(projector, [converted], report, device=device, dtype=dtype)
