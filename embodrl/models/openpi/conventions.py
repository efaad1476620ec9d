"""Training-time preparation of images, prompts and actions, from settings, files or the dataset name."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from embodrl.errors import CheckpointError
from embodrl.fields import Fields
from embodrl.models.common.checkpoint import stored_shapes, weight_files
from embodrl.models.common.config_file import CONFIG_FILE, OWN_SECTION, read_file
from embodrl.models.openpi.config import KNOWN_DATASETS, STATELESS, PiConfig, two_arms_of
from embodrl.models.openpi.settings import PiArchitectureConfig
from embodrl.models.openpi.stats import LEROBOT_FILE, lerobot_steps
from embodrl.models.openpi.weights import EMBEDDING, LEROBOT_PREFIX, TIED_TO_EMBEDDING

TRAIN_FILE = "train_config.json"
LEROBOT_STEP = "relative_actions_processor"
_SETTING = "setting model.pi."

logger = logging.getLogger(__name__)


def with_conventions(
    config: PiConfig,
    settings: PiArchitectureConfig,
    fields: Fields,
    key: str,
    directory: Path,
    weights: Path | None = None,
    own_statistics: bool = False,
) -> tuple[PiConfig, dict[str, str]]:
    """Return the configuration with a checkpoint's conventions, and the source of each.

    Args:
        config: configuration from config.json.
        settings: settings that may override the conventions.
        fields: fields of config.json.
        key: name of the statistics, which is the dataset's.
        directory: directory of the checkpoint, or of adapters with their own config.json.
        weights: directory of the weights described by config.json; None for adapters.
        own_statistics: whether statistics are the user's, of unconverted actions.

    Raises:
        CheckpointError: nothing says what the actions of two arms mean (``pi-joints``).
    """
    origins: dict[str, str] = {}
    if OWN_SECTION not in fields:
        if key == "trossen_mobile" and settings.relative_dims is None:
            raise CheckpointError(
                f"{directory}: no published configuration says which joints of '{key}' are relative to the state",
                "set model.pi.relative_dims, absolute_dims and aloha_units as its TrainConfig, or choose other"
                " statistics with model.unnorm_key",
                code="pi-joints",
            )
        config = config.with_data_set(key)
    known = OWN_SECTION in fields or "type" in fields or key in KNOWN_DATASETS or own_statistics
    config, origin = _with_relative_dims(config, settings, key, known or two_arms_of(key) is not None, directory)
    if origin:
        but = f" but {', '.join(map(str, config.absolute_dims))}" if config.absolute_dims else ""
        origins["action dimensions relative to the state"] = f"{config.relative_dims}{but} ({origin})"
    if settings.aloha_units is not None:
        config = replace(config, aloha_units=settings.aloha_units)
    if config.aloha_units:
        said = f"dataset {key}" if settings.aloha_units is None else f"{_SETTING}aloha_units"
        origins["states and actions"] = f"ALOHA's, converted to openpi's ({said})"
    layout = "lerobot" if OWN_SECTION not in fields else CONFIG_FILE
    if settings.antialias is not None:
        config = replace(config, antialias=settings.antialias)
        origins["antialiased resizing"] = f"{_word(config.antialias)} ({_SETTING}antialias)"
    elif not config.antialias:
        origins["antialiased resizing"] = f"no ({layout})"
    if config.raw_instruction:
        origins["instructions cleaned"] = f"no ({layout})"
    if config.variant == "pi05":
        discrete, origin = _state_in_prompt(config, settings.discrete_state, fields, key)
        origins["state in prompt"] = f"{_word(discrete)} ({origin})"
        config = replace(config, discrete_state=discrete)
    config, more = with_lerobots_age(config, settings, fields, directory, weights)
    return config, origins | more


def _with_relative_dims(
    config: PiConfig, settings: PiArchitectureConfig, key: str, known: bool, directory: Path
) -> tuple[PiConfig, str]:
    """Apply openpi's DeltaActions, a choice of its training configuration that no checkpoint file records."""
    if settings.relative_dims is not None:
        of_data = tuple(dim for dim in config.absolute_dims if dim < settings.relative_dims)
        config = replace(config, relative_dims=settings.relative_dims, absolute_dims=of_data)
    if settings.absolute_dims is not None:
        config = replace(config, absolute_dims=settings.absolute_dims)
    if settings.relative_dims is not None:
        return config, f"{_SETTING}relative_dims"
    if known:
        return config, f"dataset {key}" if config.relative_dims else ""
    logger.warning(
        "%s: whether actions of '%s' are relative to the state (openpi's DeltaActions) is not in the files: absolute"
        " ones are assumed; set model.pi.relative_dims=6 if the TrainConfig has extra_delta_transform=True, else 0",
        directory,
        key,
    )
    return config, f"assumed, of the unknown dataset {key}; model.pi.relative_dims overrides it"


def _state_in_prompt(config: PiConfig, setting: bool | None, fields: Fields, key: str) -> tuple[bool, str]:
    if setting is not None:
        return setting, f"{_SETTING}discrete_state"
    if OWN_SECTION in fields:
        return config.discrete_state, CONFIG_FILE
    if "discrete_state_input" in fields:  # RLinf's converter writes it
        return fields.flag("discrete_state_input"), CONFIG_FILE
    if key in STATELESS:
        return config.discrete_state, f"dataset {key}"
    return config.discrete_state, "default of pi0.5"


class LerobotSettings(Protocol):
    """Settings for behaviour that lerobot changed in 0.5."""

    padded_state_in_prompt: bool | None
    dark_bars: bool | None


def with_lerobots_age(
    config: PiConfig,
    settings: LerobotSettings,
    fields: Fields,
    directory: Path,
    weights: Path | None,
    section: str = "model.pi",
) -> tuple[PiConfig, dict[str, str]]:
    """Return the configuration with the behaviour that lerobot changed in 0.5, and the source of each value.

    Up to 0.4.4 lerobot padded the state in the prompts of pi0.5 and pi0-FAST, and padded non-square images with -3;
    since 0.5.0 it does neither, and openpi never did. Settings (of ``section``) override the files; see
    ``with_conventions``.
    """
    foreign = "type" in fields and OWN_SECTION not in fields
    padded = settings.padded_state_in_prompt
    bars = settings.dark_bars
    old = False
    origin = "openpi"
    if OWN_SECTION in fields:
        origin = CONFIG_FILE
    elif foreign and None in (padded if config.discrete_state else False, bars):
        old, origin = _is_before_0_5(fields, directory, weights, section)
    if foreign:
        config = replace(config, padded_state_in_prompt=old, dark_bars=old)
    origins: dict[str, str] = {}
    if config.discrete_state:
        found = config.padded_state_in_prompt if padded is None else padded
        config = replace(config, padded_state_in_prompt=found)
        said = origin if padded is None else f"setting {section}.padded_state_in_prompt"
        origins["padding of the state in prompt"] = f"{_word(found)} ({said})"
    found = config.dark_bars if bars is None else bars
    if foreign or found:
        said = origin if bars is None else f"setting {section}.dark_bars"
        origins["bars beside pictures that are not square"] = f"{'-3' if found else 'black'} ({said})"
    return replace(config, dark_bars=found), origins


def _is_before_0_5(fields: Fields, directory: Path, weights: Path | None, section: str) -> tuple[bool, str]:
    """Return whether lerobot older than 0.5 wrote the files, and the evidence.

    0.5.0 differs from 0.4 in train_config.json or the weights; 0.5.1 and later also in relative actions. In 0.4
    PaliGemma's output layer is the embedding, and safetensors stores one of them; 0.5 creates another embedding after
    tying them, and stores both: lerobot v0.5.0, src/lerobot/policies/pi_gemma.py.
    """
    steps = [step.text("registry_name", "") for step in lerobot_steps(directory)]
    train = directory / TRAIN_FILE
    if "use_relative_actions" in fields:
        return False, f"use_relative_actions in {CONFIG_FILE}: lerobot 0.5.1 or later"
    if LEROBOT_STEP in steps:
        return False, f"{LEROBOT_STEP} in {LEROBOT_FILE}: lerobot 0.5.1 or later"
    if train.is_file():
        if "cudnn_deterministic" in read_file(train):
            return False, f"cudnn_deterministic in {TRAIN_FILE}: lerobot 0.5.0 or later"
        return True, f"no cudnn_deterministic in {TRAIN_FILE}: lerobot 0.4"
    if "rtc_config" not in fields:
        return True, f"no rtc_config in {CONFIG_FILE}: lerobot before 0.4.2"
    if weights is not None:
        names = {name.removeprefix(LEROBOT_PREFIX) for name in stored_shapes(weight_files(weights))}
        if {EMBEDDING, TIED_TO_EMBEDDING} <= names:
            return False, "embedding and output layer are stored separately: lerobot 0.5.0 or later"
        return True, "embedding and output layer are one: lerobot 0.4"
    keys = f"{section}.padded_state_in_prompt=false {section}.dark_bars=false"
    logger.warning(
        "%s: lerobot 0.4.2 to 0.4.4 pads the state in the prompt of pi0.5 and pi0-FAST and puts -3 next to images that"
        " are not square, 0.5.0 does neither, and without %s the files do not say which it was: 0.4 is assumed; for"
        " 0.5.0 set %s",
        directory,
        TRAIN_FILE,
        keys,
    )
    return True, f"assumed: lerobot 0.4.2 to 0.5.0; for 0.5.0 set {keys}"


def _word(value: bool) -> str:
    return "yes" if value else "no"
