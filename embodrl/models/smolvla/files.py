"""SmolVLA checkpoints in lerobot's layout: weight names, statistics, processor files, tokenizer.

lerobot from 0.4 keeps statistics in files named by policy_preprocessor.json; before, they were buffers among the
weights (``normalize_inputs.buffer_observation_state.mean``), some with the robot in the name.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from embodrl.fields import Fields
from embodrl.models.common import checkpoint
from embodrl.models.common.config_file import CONFIG_FILE, OWN_SECTION, fields_of
from embodrl.models.common.limits import check_vocabulary
from embodrl.models.flow.fetched_tokenizer import fetch_tokenizer
from embodrl.models.openpi.config import Normalization
from embodrl.models.openpi.stats import (
    LEROBOT_AFTER_FILE,
    LEROBOT_FILE,
    LEROBOT_KEY,
    PiStats,
    read_lerobot,
    write_pipeline,
)
from embodrl.models.openpi.tokenizer import JSON_FILE, JsonTokenizer, TextTokenizer
from embodrl.models.smolvla.config import SmolVlaConfig
from embodrl.storage.tensor_files import open_tensors

PREFIX = "model."
LEROBOT_EPS = 1e-8
_VISION = "vlm_with_expert.vlm.model.vision_model."
_TOWER = "vlm_with_expert.vlm.model.vision_tower.vision_model."
_LM_HEAD = "vlm_with_expert.vlm.lm_head.weight"
_COMPILED = "_orig_mod."
_BUFFER = re.compile(
    r"(?:un)?normalize_(?:inputs|targets|outputs)\.(?:(?P<robot>so\d+(?:-\w+)?)_)?"
    r"buffer_(?P<part>observation_state|action)\.(?P<field>mean|std)"
)


def aliases_and_ignored(stored: Collection[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return aliases (checkpoint name -> name here) and ignored checkpoint names with reasons."""
    aliases: dict[str, str] = {}
    ignore: dict[str, str] = {}
    for name in stored:
        target = name.replace(_COMPILED, "").removeprefix(PREFIX)
        if target.startswith(("normalize_", "unnormalize_")):
            ignore[name] = "statistics"
        elif target == _LM_HEAD:
            ignore[name] = "the policy writes no text"
        elif target.startswith(_VISION):
            aliases[name] = _TOWER + target.removeprefix(_VISION)
        elif target != name:
            aliases[name] = target
    return aliases, ignore


def layers(config: SmolVlaConfig) -> dict[str, int]:
    """Return the number of layers by tensor name prefix."""
    return {
        f"{_TOWER}encoder.layers.": config.siglip.depth,
        "vlm_with_expert.vlm.model.text_model.layers.": config.vlm.depth,
        "vlm_with_expert.lm_expert.layers.": config.expert.depth,
    }


def public_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return weights under lerobot's names."""
    return {public_name(name): tensor for name, tensor in state.items()}


def public_name(name: str) -> str:
    """Return lerobot's name of a weight or module."""
    return PREFIX + name.replace(_TOWER, _VISION)


def read_stats(directory: Path, files: Sequence[Path]) -> tuple[dict[str, Fields], Normalization]:
    """Return the sets of statistics by name (openpi's layout of a set), and their normalisation methods.

    Raises ``CheckpointError`` if a file is corrupt or names an unsupported method.
    """
    sets, methods = read_lerobot(directory)
    if methods is not None:
        return sets, methods
    return _buffers(files), Normalization("mean_std", "mean_std", LEROBOT_EPS)


def _buffers(files: Sequence[Path]) -> dict[str, Fields]:
    sets: dict[str, dict[str, dict[str, object]]] = {}
    for path in files:
        with checkpoint.readable(path), open_tensors(path) as reader:
            for name in reader.keys():  # noqa: SIM118 - a reader is not a mapping
                if match := _BUFFER.fullmatch(name):
                    part = "actions" if match["part"] == "action" else "state"
                    entry = sets.setdefault(match["robot"] or LEROBOT_KEY, {}).setdefault(part, {})
                    entry[match["field"]] = reader.get_tensor(name).double().tolist()
    return {robot: fields_of(entry, f"{files[0]}, {robot}") for robot, entry in sets.items()}


def load_tokenizer(directory: Path, config: SmolVlaConfig) -> TextTokenizer:
    """Return a checkpoint's tokenizer, or its VLM's from the hub: lerobot omits it.

    Raises ``CheckpointError`` if it is corrupt, another model's, or missing and can't be fetched.
    """
    path = directory / JSON_FILE
    if not path.is_file():
        hint = f"put {JSON_FILE} of {config.vlm_name} in {directory}"
        path = fetch_tokenizer(config.vlm_name, [JSON_FILE], directory, hint) / JSON_FILE
    tokenizer = JsonTokenizer(path)
    hint = f"use the tokenizer of {config.vlm_name}"
    check_vocabulary(path.parent, tokenizer.vocab_size, config.vocab_size, hint)
    return tokenizer


def write_config(
    directory: Path, config: SmolVlaConfig, action_dim: int, state_dim: int, own_section: bool = True
) -> None:
    """Write config.json with lerobot's keys, and optionally ``embodrl`` with everything, which lerobot refuses."""
    size = config.siglip.image_size
    cameras = config.cameras or ("observation.images.camera1",)
    inputs: dict[str, object] = {name: {"type": "VISUAL", "shape": [3, size, size]} for name in cameras}
    content = {
        "type": "smolvla",
        "n_obs_steps": 1,
        "chunk_size": config.action_horizon,
        "n_action_steps": config.action_horizon,
        "input_features": {**inputs, "observation.state": {"type": "STATE", "shape": [state_dim]}},
        "output_features": {"action": {"type": "ACTION", "shape": [action_dim]}},
        "normalization_mapping": {"VISUAL": "IDENTITY", "STATE": "MEAN_STD", "ACTION": "MEAN_STD"},
        "max_state_dim": config.max_state_dim,
        "max_action_dim": config.max_action_dim,
        "resize_imgs_with_padding": [size, size],
        "tokenizer_max_length": config.max_prompt_tokens,
        "num_steps": config.num_steps,
        "vlm_model_name": config.vlm_name,
        "load_vlm_weights": False,
        "attention_mode": "cross_attn" if config.cross_attention else "self_attn",
        "num_expert_layers": config.expert.depth,
        "num_vlm_layers": config.vlm.depth,
        "self_attn_every_n_layers": config.self_attention_every or -1,
        "expert_width_multiplier": config.expert.width / config.vlm.width,
    }
    content |= {OWN_SECTION: config.to_dict()} if own_section else {}
    checkpoint.write_json(directory / CONFIG_FILE, content)


def write_processors(directory: Path, config: SmolVlaConfig, stats: PiStats, action_dim: int, state_dim: int) -> None:
    """Write policy_preprocessor.json and policy_postprocessor.json with their statistics."""
    features = {
        "observation.state": {"type": "STATE", "shape": [state_dim]},
        "action": {"type": "ACTION", "shape": [action_dim]},
    }
    modes = {"VISUAL": "IDENTITY", "STATE": "MEAN_STD", "ACTION": "MEAN_STD"}
    normalizer = {"eps": LEROBOT_EPS, "features": features, "norm_map": modes}
    tokenizer = {
        "max_length": config.max_prompt_tokens,
        "task_key": "task",
        "padding_side": "right",
        "padding": "longest",
        "truncation": True,
        "tokenizer_name": config.vlm_name,
    }
    to_cpu = {"device": "cpu", "float_dtype": None}
    steps: list[tuple[str, dict[str, object]]] = [
        ("rename_observations_processor", {"rename_map": {}}),
        ("to_batch_processor", {}),
        ("smolvla_new_line_processor", {}),
        ("tokenizer_processor", tokenizer),
        ("device_processor", to_cpu),
        ("normalizer_processor", normalizer),
    ]
    write_pipeline(directory, LEROBOT_FILE, steps, stats)
    write_pipeline(
        directory,
        LEROBOT_AFTER_FILE,
        [("unnormalizer_processor", normalizer), ("device_processor", to_cpu)],
        stats,
    )
