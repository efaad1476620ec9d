"""From a ModelConfig to a SmolVLA policy: a checkpoint in lerobot's layout, or the tiny size."""

from __future__ import annotations

from pathlib import Path

import torch

from embodrl.models.base import LoadReport
from embodrl.models.common import checkpoint
from embodrl.models.common.heads import build_noise_head, build_value_head
from embodrl.models.common.init import new_generator
from embodrl.models.pi.config import Normalization
from embodrl.models.pi.stats import choose, identity_set
from embodrl.models.pi.tokenizer import tiny_tokenizer
from embodrl.models.smolvla import files
from embodrl.models.smolvla.config import SmolVlaConfig
from embodrl.models.smolvla.modeling import SmolVlaModel, init_weights
from embodrl.models.smolvla.policy import SmolVlaPolicy
from embodrl.models.smolvla.processing import SmolProcessor
from embodrl.models.smolvla.spec import SmolVlaModelConfig

TINY_STATS_KEY = "maniskill"
RANDOM_SOURCE = "random weights"
_SIZES = ("siglip", "vlm", "expert", "scale_factor", "max_action_dim", "action_horizon")


def build_smolvla(
    config: SmolVlaModelConfig, *, device: torch.device | str, dtype: torch.dtype, seed: int
) -> tuple[SmolVlaPolicy, LoadReport]:
    """Build the policy that a configuration asks for.

    With ``model_path`` it is a checkpoint in lerobot's layout, from a directory or the Hugging Face hub. Without, it
    has the dimensions of ``smolvla`` and the weights of ``warm_start``; random ones are a function of ``seed`` and
    ``device``.

    Args:
        config: the section ``model``.
        device: where the policy lives.
        dtype: of its weights; value and noise heads are always float32.
        seed: of weights that come from no checkpoint.

    Raises:
        CheckpointError: no such checkpoint, or it does not fit.
    """
    device = torch.device(device)
    directory = checkpoint.source(config)
    report = LoadReport(RANDOM_SOURCE if directory is None else str(directory))
    tokenizer = tiny_tokenizer()
    model_config = SmolVlaConfig.from_architecture(config.smolvla, tokenizer.vocab_size)
    methods = Normalization("mean_std", "mean_std", files.LEROBOT_EPS)
    sets = {TINY_STATS_KEY: identity_set(config.action_dim)}
    weights: list[Path] = []
    if directory is not None:
        tiny = model_config
        model_config = SmolVlaConfig.read(directory / "config.json")
        if config.model_path is None:
            checkpoint.check_size(model_config, tiny, _SIZES, directory, "model.smolvla")
        weights = checkpoint.weight_files(directory)
        sets, methods = files.read_stats(directory, weights)
        tokenizer = files.load_tokenizer(directory, model_config)
    stats = choose(sets, config.unnorm_key, methods, config.action_dim, report.source)
    generator = new_generator(device, seed)
    # Without memory first, so that a large model is never held twice.
    with torch.device("meta"):
        model = SmolVlaModel(model_config)
    if directory is None:
        model.to(dtype).to_empty(device=device)
        init_weights(model, generator)
        report.initialized = dict.fromkeys(model.state_dict(), "random weights were asked for")
    else:
        aliases, ignore = files.aliases_and_ignored(checkpoint.stored_names(weights))
        checkpoint.load_strict(model, weights, report, device=device, dtype=dtype, aliases=aliases, ignore=ignore)
    feature_dim = model_config.expert.width
    value_dim = feature_dim if config.value_head.input == "suffix" else model_config.vlm.width
    policy = SmolVlaPolicy(
        model,
        SmolProcessor(tokenizer, model_config, stats.state),
        stats,
        config,
        build_value_head(config, value_dim, directory, report, device, generator),
        build_noise_head(config, feature_dim, model_config.max_action_dim, directory, report, device, generator),
    )
    return policy, report
