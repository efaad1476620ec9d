"""pi0-FAST checkpoints in lerobot's layout: weight names, processor files, the action tokenizer."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from torch import Tensor

from embodrl.errors import CheckpointError
from embodrl.models.common.config_file import fields_of
from embodrl.models.flow.fetched_tokenizer import fetch_tokenizer
from embodrl.models.openpi.stats import LEROBOT_AFTER_FILE, LEROBOT_FILE, PiStats, lerobot_steps, write_pipeline
from embodrl.models.openpi.weights import EMBEDDING, LEROBOT_PREFIX, TIED_TO_EMBEDDING, with_tower_level
from embodrl.models.pi0_fast.codec import SETTINGS_FILE, TOKENIZER_FILE, ActionCodec, read_codec
from embodrl.models.pi0_fast.config import FastConfig

CODEC_DIRECTORY = "action_tokenizer"
"""Directory of a policy's action tokenizer in lerobot."""


def is_tied(stored: Collection[str]) -> bool:
    """Return whether one tensor is both embedding and output layer.

    lerobot from 0.5 trains and stores them separately; before, and in embodrl's training, they are tied.
    """
    plain = {name.removeprefix(LEROBOT_PREFIX) for name in stored}
    return not {EMBEDDING, TIED_TO_EMBEDDING} <= plain


def aliases(stored: Collection[str]) -> dict[str, str]:
    """Return aliases: checkpoint name -> name here."""
    tied = is_tied(stored)
    renamed = {}
    for name in stored:
        target = with_tower_level(name.removeprefix(LEROBOT_PREFIX))
        if target == TIED_TO_EMBEDDING and tied:
            target = EMBEDDING
        if target != name:
            renamed[name] = target
    return renamed


def public_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return weights under lerobot's names; a tied embedding is stored as the output layer."""
    tied = TIED_TO_EMBEDDING not in state
    return {
        LEROBOT_PREFIX + (TIED_TO_EMBEDDING if tied and name == EMBEDDING else name): tensor
        for name, tensor in state.items()
    }


def find_codec(directory: Path, config: FastConfig) -> ActionCodec:
    """Return a checkpoint's action tokenizer, or the one on the hub that its files name.

    Raises ``CheckpointError`` if it is corrupt, or missing and can't be fetched.
    """
    if (directory / CODEC_DIRECTORY).is_dir():
        return read_codec(directory / CODEC_DIRECTORY)
    named = [step.fields("config", {}).text("action_tokenizer_name", "") for step in lerobot_steps(directory)]
    repository = next((name for name in named if name), config.action_tokenizer)
    hint = f"put {TOKENIZER_FILE} and {SETTINGS_FILE} of {repository} in {directory / CODEC_DIRECTORY}"
    if repository.count("/") != 1:
        missing = f"{directory} has no {CODEC_DIRECTORY}, and its files name '{repository}'"
        raise CheckpointError(missing, hint, code="hub-missing")
    return read_codec(fetch_tokenizer(repository, [TOKENIZER_FILE, SETTINGS_FILE], directory, hint))


def state_dims(stats: PiStats) -> int:
    """Return the number of state dimensions in statistics; 0 without a state."""
    raw = fields_of(stats.raw, stats.key)
    if "state" not in raw:
        return 0
    return max(len(values) for values in raw.fields("state").content.values() if isinstance(values, list))


def write_processors(directory: Path, config: FastConfig, stats: PiStats, action_dim: int, state_dim: int) -> None:
    """Write policy_preprocessor.json and policy_postprocessor.json with their statistics."""
    inputs = config.inputs
    methods = config.inputs.normalization
    features = {
        "observation.state": {"type": "STATE", "shape": [state_dim]},
        "action": {"type": "ACTION", "shape": [action_dim]},
    }
    modes = {"VISUAL": "IDENTITY", "STATE": methods.state.upper(), "ACTION": methods.actions.upper()}
    normalizer: dict[str, object] = {"eps": methods.eps, "features": features, "norm_map": modes}
    text: dict[str, object] = {
        "max_length": inputs.max_prompt_tokens,
        "task_key": "task",
        "padding_side": "right",
        "padding": "max_length",
        "truncation": True,
        "tokenizer_name": config.text_tokenizer,
    }
    actions: dict[str, object] = {
        "trust_remote_code": True,
        "max_action_tokens": config.max_action_tokens,
        "fast_skip_tokens": config.skip_tokens,
        "paligemma_tokenizer_name": config.text_tokenizer,
        "action_tokenizer_name": config.action_tokenizer,
    }
    to_cpu: dict[str, object] = {"device": "cpu", "float_dtype": None}
    steps: list[tuple[str, dict[str, object]]] = [
        ("rename_observations_processor", {"rename_map": {}}),
        ("to_batch_processor", {}),
        ("normalizer_processor", normalizer),
        ("pi0_fast_prepare_state_tokenizer_processor_step", {}),
        ("tokenizer_processor", text),
        ("action_tokenizer_processor", actions),
        ("device_processor", to_cpu),
    ]
    write_pipeline(directory, LEROBOT_FILE, steps, stats)
    after = [("unnormalizer_processor", normalizer), ("device_processor", to_cpu)]
    write_pipeline(directory, LEROBOT_AFTER_FILE, after, stats)
