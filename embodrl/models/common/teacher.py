"""A teacher that is no copy of the policy: of another size or family, or whole where the policy trains adapters.

It stands beside the policy in every process that trains, and reads the inputs that the policy's rollouts recorded. A
teacher of the policy's own shapes takes the place of the engine's reference instead (``trainer.teacher``).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from embodrl.config.policy_card import read_card
from embodrl.config.schema import Config, ModelConfig
from embodrl.config.schema.tagged import model_settings
from embodrl.errors import EmbodrlError
from embodrl.fields import read_fields
from embodrl.models import registry
from embodrl.models.common.config_file import CONFIG_FILE
from embodrl.specs import families_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from embodrl.models.base import VLAPolicy

_PICTURES = 5
"""Axes of ``images uint8[B,V,H,W,3]``."""
_NO_PLACES = {"warm_start": None, "stats_path": None, "lora_path": None, "add_value_head": False, "trainable": "all"}


def is_apart(config: Config) -> bool:
    """Return whether ``algorithm.teacher`` is a network of its own, by its directory and the policy's settings.

    False for a resumed run whose teacher is gone: checkpoints have the weights of teachers that are no such networks.
    """
    algorithm, path = config.algorithm, config.model.model_path
    if algorithm.teacher is None or not algorithm.kl.coef:
        return False
    if not (_directory(config) / CONFIG_FILE).is_file() or (path is not None and not Path(path).expanduser().is_dir()):
        return False
    teacher = teacher_model(config)
    if config.model.trainable == "lora" or teacher.model_type != config.model.model_type:
        return True
    return _shapes(config.model.model_copy(update=_NO_PLACES)) != _shapes(teacher)


def teacher_num_bytes(config: Config, dtype: torch.dtype) -> int:
    """Return the bytes of a teacher that ``is_apart``."""
    policy, _ = registry.build_policy(teacher_model(config), device="meta", dtype=dtype, seed=0)
    return sum(tensor.numel() * tensor.element_size() for tensor in policy.state_dict().values())


def build_teacher(config: Config, device: torch.device | str, dtype: torch.dtype) -> VLAPolicy:
    """Return the teacher, frozen, with the sizes and statistics of its directory.

    Raises:
        EmbodrlError: it can't be loaded.
    """
    try:
        policy, _ = registry.build_policy(teacher_model(config), device=device, dtype=dtype, seed=0)
    except EmbodrlError as error:
        error.add(f"while loading algorithm.teacher={config.algorithm.teacher}")
        raise
    policy.condition = config.model.condition
    return policy.eval().requires_grad_(False)


def _directory(config: Config) -> Path:
    assert config.algorithm.teacher is not None
    return Path(config.algorithm.teacher).expanduser()


def inputs_for(teacher: VLAPolicy, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a policy's inputs as a teacher reads them: pictures of one camera have an axis for it, or none."""
    images = inputs.get("images")
    if images is None or (images.ndim == _PICTURES) == teacher.reads_cameras:
        return inputs
    if teacher.reads_cameras:
        return {**inputs, "images": images.unsqueeze(1)}
    return {**inputs, "images": images.squeeze(1)} if images.shape[1] == 1 else inputs


def teacher_model(config: Config) -> ModelConfig:
    """Return section ``model`` of the teacher: the policy's, as far as its family has the same settings."""
    directory = _directory(config)
    found = families_of(read_fields(directory / CONFIG_FILE).content)
    own = config.model
    # Public files do not distinguish OpenVLA from OpenVLA-OFT; the card of a policy does.
    carded = (read_card(directory) or {}).get("model_type")
    family = carded if carded in found else own.model_type if own.model_type in found or not found else found[0]
    if family == own.model_type:
        return own.model_copy(update={**_NO_PLACES, "model_path": str(directory)})
    settings = model_settings(family)
    mine, theirs = type(own).model_fields, settings.model_fields
    shared = {n: getattr(own, n) for n in theirs if n in mine and mine[n].annotation == theirs[n].annotation}
    return settings.model_validate({**shared, **_NO_PLACES, "model_type": family, "model_path": str(directory)})


def _shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    import torch

    policy, _ = registry.build_policy(model, device="meta", dtype=torch.float32, seed=0)
    return {name: tuple(tensor.shape) for name, tensor in policy.state_dict().items()}
