"""Builds a SmolVLA policy from a ModelConfig: a checkpoint in lerobot's layout, or the tiny size."""

from __future__ import annotations

import torch

from embodrl.models.common import checkpoint
from embodrl.models.common.config_file import CONFIG_FILE, fields_of
from embodrl.models.common.heads import build_value_head
from embodrl.models.common.init import new_generator
from embodrl.models.common.norm_stats import given_sets
from embodrl.models.flow.noise_head import build_noise_head
from embodrl.models.load_report import LoadReport
from embodrl.models.openpi.config import Normalization
from embodrl.models.openpi.stats import choose, identity_set
from embodrl.models.openpi.tokenizer import tiny_tokenizer
from embodrl.models.smolvla import files
from embodrl.models.smolvla.config import SmolVlaConfig
from embodrl.models.smolvla.modeling import SmolVlaModel
from embodrl.models.smolvla.policy import SmolVlaPolicy
from embodrl.models.smolvla.processing import SmolProcessor
from embodrl.models.smolvla.spec import SmolVlaModelConfig

TINY_STATS_KEY = "maniskill"
_SIZES = ("siglip", "vlm", "expert", "scale_factor", "max_action_dim", "action_horizon")


def build_smolvla(
    config: SmolVlaModelConfig, *, device: torch.device | str, dtype: torch.dtype, seed: int
) -> tuple[SmolVlaPolicy, LoadReport]:
    """Build the configured policy; see ``models.registry.build_policy``."""
    device = torch.device(device)
    directory, report = checkpoint.locate(config)
    tokenizer = tiny_tokenizer()
    model_config = SmolVlaConfig.from_architecture(config.smolvla, tokenizer.vocab_size)
    methods = Normalization("mean_std", "mean_std", files.LEROBOT_EPS)
    sets = {TINY_STATS_KEY: fields_of(identity_set(config.action_dim), "built-in statistics")}
    weights = []
    aliases = {}
    ignore = {}
    if directory is not None:
        tiny = model_config
        settings = checkpoint.place_of(CONFIG_FILE, directory, report)
        model_config = SmolVlaConfig.read(settings / CONFIG_FILE)
        if config.model_path is None:
            checkpoint.check_size(model_config, tiny, _SIZES, directory, "model.smolvla")
        weights = checkpoint.weight_files(directory)
        sets, found = files.read_stats(settings, weights)
        methods = methods if config.stats_path is not None and found.actions == "identity" else found
        tokenizer = files.load_tokenizer(directory, model_config)
        if report.adapters is not None:
            report.adapters.rename(files.aliases_and_ignored)
        names = checkpoint.stored_shapes(weights)
        aliases, ignore = files.aliases_and_ignored(names)
        checkpoint.check_layers([aliases.get(name, name) for name in names], files.layers(model_config), directory)
    sets = given_sets(config, "openpi") or sets
    stats = choose(sets, config.unnorm_key, methods, config.action_dim, report.source)
    generator = new_generator(device, seed)
    with torch.device("meta"):
        model = SmolVlaModel(model_config)
    checkpoint.fill(
        model,
        weights,
        report,
        lambda: model.init_weights(generator),
        device=device,
        dtype=dtype,
        aliases=aliases,
        ignore=ignore,
    )
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
