"""How pi0.5's prompts were written in training: in a setting, the checkpoint's files, or the name of its dataset."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from embodrl.errors import CheckpointError
from embodrl.fields import Fields
from embodrl.models.common.config_file import CONFIG_FILE, OWN_SECTION, read_file
from embodrl.models.pi.config import JOINTS_OF_TWO_ARMS, STATELESS, PiConfig
from embodrl.models.pi.spec import PiArchitectureConfig
from embodrl.models.pi.stats import LEROBOT_FILE, lerobot_steps

TRAIN_FILE = "train_config.json"
LEROBOT_STEP = "relative_actions_processor"
_SETTING = "setting model.pi."

logger = logging.getLogger(__name__)


def with_conventions(
    config: PiConfig, settings: PiArchitectureConfig, fields: Fields, key: str, directory: Path
) -> tuple[PiConfig, dict[str, str]]:
    """Return the configuration with the conventions of a checkpoint, and where each came from.

    Args:
        config: as config.json has it.
        settings: may override them.
        fields: of config.json.
        key: name of the statistics, which is that of the dataset.
        directory: of the checkpoint.

    Raises:
        CheckpointError: actions of the dataset mean what is not converted here.
    """
    origins: dict[str, str] = {}
    if OWN_SECTION not in fields:
        if key in JOINTS_OF_TWO_ARMS or "aloha" in key.lower():
            raise CheckpointError(
                f"{directory}: actions of '{key}' are joints of two arms, relative to the state (adapt_to_pi and"
                " DeltaActions), which are not converted",
                "choose statistics of another robot with model.unnorm_key, or another checkpoint",
                code="pi-joints",
            )
        config = config.with_data_set(key)
        if config.relative_dims:
            origins["action dimensions relative to the state"] = f"{config.relative_dims} (dataset {key})"
    layout = "lerobot" if OWN_SECTION not in fields else CONFIG_FILE
    if settings.antialias is not None:
        config = replace(config, antialias=settings.antialias)
        origins["antialiased resizing"] = f"{_word(config.antialias)} ({_SETTING}antialias)"
    elif not config.antialias:
        origins["antialiased resizing"] = f"no ({layout})"
    if config.raw_instruction:
        origins["instructions cleaned"] = f"no ({layout})"
    if config.variant != "pi05":
        return config, origins
    discrete, origin = _state_in_prompt(config, settings.discrete_state, fields, key)
    origins["state in prompt"] = f"{_word(discrete)} ({origin})"
    padded = config.padded_state_in_prompt
    if discrete:
        padded, origin = state_is_padded(padded, settings.padded_state_in_prompt, fields, directory)
        origins["padding of the state in prompt"] = f"{_word(padded)} ({origin})"
    return replace(config, discrete_state=discrete, padded_state_in_prompt=padded), origins


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


def state_is_padded(
    own: bool, setting: bool | None, fields: Fields, directory: Path, section: str = "model.pi"
) -> tuple[bool, str]:
    """Tell whether the state in the prompt is padded, and what says so.

    lerobot padded it until 0.4.4 and no longer does since 0.5.0; openpi never did. 0.5.0 is distinguished from 0.4 by
    train_config.json alone; 0.5.1 and later by fields and steps of relative actions.

    Args:
        own: what embodrl's part of config.json says.
        setting: overrides the files.
        fields: of config.json.
        directory: of the checkpoint.
        section: of the setting.
    """
    if setting is not None:
        return setting, f"setting {section}.padded_state_in_prompt"
    if OWN_SECTION in fields:
        return own, CONFIG_FILE
    if "type" not in fields:
        return False, "openpi"
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
    logger.warning(
        "%s: lerobot 0.4.2 to 0.4.4 pads the state in the prompt, 0.5.0 does not, and without %s the files do not say"
        " which it was: 0.4 is assumed; set %s.padded_state_in_prompt=false for 0.5.0",
        directory,
        TRAIN_FILE,
        section,
    )
    return True, f"assumed: lerobot 0.4.2 to 0.5.0; set {section}.padded_state_in_prompt=false for 0.5.0"


def _word(value: bool) -> str:
    return "yes" if value else "no"
