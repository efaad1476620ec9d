"""pi0 and pi0.5 in lerobot's layout.

From github.com/huggingface/lerobot 0.6: src/lerobot/policies/pi05/{configuration,modeling,processor}_pi05.py, the same
files of pi0, and src/lerobot/processor/{pipeline,normalize_processor}.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from embodrl.errors import EmbodrlError
from embodrl.models.common import checkpoint
from embodrl.models.common.config_file import CONFIG_FILE, fields_of
from embodrl.models.flow.expert_policy import ExpertPolicy
from embodrl.models.openpi.config import PUBLIC
from embodrl.models.openpi.processing import PiProcessor
from embodrl.models.openpi.stats import LEROBOT_AFTER_FILE, LEROBOT_FILE, PiStats, write_pipeline
from embodrl.models.openpi.tokenizer import PALIGEMMA
from embodrl.models.openpi.weights import EMBEDDING, LEROBOT_PREFIX, TIED_TO_EMBEDDING
from embodrl.models.pi.modeling import PiModel

STATE = "observation.state"
ACTION = "action"
IMAGES = "observation.images."
_CODE = "lerobot-can-not-express"
Step = tuple[str, dict[str, object]]
Policy = ExpertPolicy[PiModel, PiProcessor]


def save_lerobot(
    policy: Policy, state: dict[str, Tensor], stats: PiStats, directory: Path, cameras: Sequence[str]
) -> list[str]:
    """Write lerobot's layout (0.5 and later); see ``VLAPolicy.save_lerobot``. Value and noise heads are omitted.

    ``state`` has the weights by public names, ``stats`` the statistics of the robot.
    """
    _check(policy)
    config = policy.model.config
    with checkpoint.policy_directory(directory) as staging:
        state[TIED_TO_EMBEDDING] = state.pop(EMBEDDING)  # lerobot derives the embedding from it
        named = {LEROBOT_PREFIX + name: tensor for name, tensor in state.items()}
        checkpoint.save_weights(named, staging, one_file=True)
        checkpoint.write_json(staging / CONFIG_FILE, _config(policy, stats, cameras))
        _write_processors(policy, stats, staging)
        policy.processor.tokenizer.save(staging)
    size = config.siglip.image_size
    notes = [f"lerobot reads the images {', '.join(IMAGES + name for name in cameras)}, in this order"]
    if config.antialias:
        notes.append(f"lerobot resizes images that are not {size} x {size} without antialiasing, unlike in training")
    if not (config.adaptive_norm or config.raw_instruction):
        notes.append("lerobot's pi0 keeps '_' and line feeds of instructions: give it spaces in their place")
    if (config.vlm, config.expert) != (PUBLIC[config.variant].vlm, PUBLIC[config.variant].expert):
        notes.append("lerobot's code supports only the public sizes: change it to load this one")
    return notes


def _check(policy: Policy) -> None:
    config = policy.model.config
    problems = {
        f"its actions are relative to {config.relative_dims} dimensions of the state": config.relative_dims,
        "its states and actions are converted from ALOHA's": config.aloha_units,
        "its prompt has no state": config.adaptive_norm and not config.discrete_state,
        "its prompt includes the state's padding": config.discrete_state and config.padded_state_in_prompt,
        "the bars of its padded images are not black": config.dark_bars,
        f"its gripper is converted (model.gripper={policy.gripper})": policy.gripper != "as_is",
    }
    wrong = [problem for problem, holds in problems.items() if holds]
    if wrong:
        raise EmbodrlError(
            f"lerobot's {config.variant} can't act as this policy: {'; '.join(wrong)}",
            "export it in openpi's layout (--layout public)",
            code=_CODE,
        )


def _features(policy: Policy, robot_stats: PiStats) -> tuple[dict[str, object], dict[str, object]]:
    stats = fields_of(robot_stats.raw, robot_stats.key).fields("state", {})
    lengths = [len(stats.items(name)) for name in ("mean", "q01") if name in stats]
    state_dim = min([*lengths, policy.model.config.max_action_dim])
    state: dict[str, object] = {STATE: {"type": "STATE", "shape": [state_dim]}}
    return state, {ACTION: {"type": "ACTION", "shape": [policy.action_dim]}}


def _config(policy: Policy, robot_stats: PiStats, cameras: Sequence[str]) -> dict[str, object]:
    config = policy.model.config
    (state, action) = _features(policy, robot_stats)
    size = config.siglip.image_size
    pictures = {IMAGES + name: {"type": "VISUAL", "shape": [3, size, size]} for name in cameras}
    return {
        "type": config.variant,
        "n_obs_steps": 1,
        "input_features": {**pictures, **state},
        "output_features": action,
        "normalization_mapping": _modes(policy),
        "paligemma_variant": "gemma_2b",
        "action_expert_variant": "gemma_300m",
        "dtype": str(policy.model.dtype).removeprefix("torch."),
        "chunk_size": config.action_horizon,
        "n_action_steps": policy.num_action_chunks,
        "max_state_dim": config.max_action_dim,
        "max_action_dim": config.max_action_dim,
        "num_inference_steps": policy.flow.num_steps,
        "use_relative_actions": False,  # tells readers that the state is not padded in the prompt
        "image_resolution": [size, size],
        "tokenizer_max_length": config.max_prompt_tokens,
    }


def _modes(policy: Policy) -> dict[str, str]:
    methods = policy.model.config.normalization
    return {"VISUAL": "IDENTITY", "STATE": methods.state.upper(), "ACTION": methods.actions.upper()}


def _write_processors(policy: Policy, robot_stats: PiStats, directory: Path) -> None:
    config = policy.model.config
    (state, action) = _features(policy, robot_stats)
    modes = _modes(policy)
    normalizer: dict[str, object] = {
        "eps": config.normalization.eps,
        "features": {**state, **action},
        "norm_map": modes,
    }
    tokenizer: dict[str, object] = {
        "max_length": config.max_prompt_tokens,
        "task_key": "task",
        "padding_side": "right",
        "padding": "max_length",
        "truncation": True,
        "tokenizer_name": PALIGEMMA,
    }
    begin: list[Step] = [("rename_observations_processor", {"rename_map": {}}), ("to_batch_processor", {})]
    normalize: Step = ("normalizer_processor", normalizer)
    tokenize: Step = ("tokenizer_processor", tokenizer)
    move: Step = ("device_processor", {"device": "cpu", "float_dtype": None})
    if config.adaptive_norm:
        steps = [*begin, normalize, ("pi05_prepare_state_tokenizer_processor_step", {}), tokenize, move]
    else:
        steps = [*begin, ("pi0_new_line_processor", {}), tokenize, move, normalize]
    stats = _with_range_eps(robot_stats, config.normalization.eps)
    write_pipeline(directory, LEROBOT_FILE, steps, stats)
    unnormalize: Step = ("unnormalizer_processor", normalizer | {"features": action})
    write_pipeline(directory, LEROBOT_AFTER_FILE, [unnormalize, move], stats)


def _with_range_eps(stats: PiStats, eps: float) -> PiStats:
    """Add openpi's eps to the ranges themselves: lerobot only uses it for empty ranges."""
    raw: dict[str, object] = {}
    for part in stats.raw:
        fields = fields_of(stats.raw, stats.key).fields(part)
        raw[part] = dict(fields.content)
        if "q99" in fields:
            raw[part] = {**fields.content, "q99": [value + eps for value in fields.numbers("q99")]}
    return replace(stats, raw=raw)
