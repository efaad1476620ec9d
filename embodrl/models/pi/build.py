"""Builds a pi0 or pi0.5 policy from a ModelConfig: a public checkpoint, or the tiny size."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from embodrl.errors import CheckpointError, PolicyFileError
from embodrl.fields import Fields
from embodrl.models.common import checkpoint
from embodrl.models.common.config_file import CONFIG_FILE, OWN_SECTION, fields_of, read_file
from embodrl.models.common.heads import build_value_head
from embodrl.models.common.init import new_generator
from embodrl.models.common.norm_stats import given_sets
from embodrl.models.flow.noise_head import build_noise_head
from embodrl.models.load_report import LoadReport
from embodrl.models.openpi.aloha import NUM_DIMS
from embodrl.models.openpi.config import Normalization, PiConfig, Variant
from embodrl.models.openpi.conventions import with_conventions
from embodrl.models.openpi.processing import PiProcessor
from embodrl.models.openpi.stats import PiStats, choose, identity_set, read_lerobot, read_openpi
from embodrl.models.openpi.tokenizer import load_tokenizer, tiny_tokenizer
from embodrl.models.openpi.weights import (
    EMBEDDING,
    EXPERT,
    LANGUAGE,
    TOWER,
    aliases_and_ignored,
    in_float32,
    variant_of,
)
from embodrl.models.pi.modeling import PiModel
from embodrl.models.pi.policy import PiPolicy, default_value_input
from embodrl.models.pi.spec import MISSING_CONFIG, PiModelConfig

TINY_STATS_KEY = "maniskill"

_SIZES = ("siglip", "vlm", "expert", "max_action_dim", "action_horizon", "num_images")


def build_pi0(
    config: PiModelConfig, *, device: torch.device | str, dtype: torch.dtype, seed: int
) -> tuple[PiPolicy, LoadReport]:
    """Build a pi0 policy; see ``build_pi``."""
    return build_pi(config, "pi0", torch.device(device), dtype, seed)


def build_pi05(
    config: PiModelConfig, *, device: torch.device | str, dtype: torch.dtype, seed: int
) -> tuple[PiPolicy, LoadReport]:
    """Build a pi0.5 policy; see ``build_pi``."""
    return build_pi(config, "pi05", torch.device(device), dtype, seed)


def build_pi(
    config: PiModelConfig, variant: Variant, device: torch.device, dtype: torch.dtype, seed: int
) -> tuple[PiPolicy, LoadReport]:
    """Build the configured policy; see ``models.registry.build_policy``.

    Raises ``MissingDependencyError`` if the tokenizer needs a package that is not installed.
    """
    directory, report = checkpoint.locate(config)
    tokenizer = tiny_tokenizer()
    model_config = PiConfig.from_architecture(config.pi, variant, tokenizer.vocab_size)
    files = []
    aliases = {}
    ignore = {}
    if directory is None:
        identity = {TINY_STATS_KEY: fields_of(identity_set(config.action_dim), "built-in statistics")}
        sets = given_sets(config, "openpi") or identity
        stats = choose(sets, config.unnorm_key, model_config.normalization, config.action_dim, report.source)
    else:
        tiny = model_config
        model_config, stats = _read(directory, variant, config, report)
        if config.model_path is None:
            checkpoint.check_size(model_config, tiny, _SIZES, directory, "model.pi")
        tokenizer = load_tokenizer(directory, model_config.vocab_size)
        files = checkpoint.weight_files(directory)
        aliases, ignore = _names(model_config, files, directory)
        if report.adapters is not None:
            report.adapters.rename(lambda names: aliases_and_ignored([*names, EMBEDDING]))  # lm_head is not used
    _check_arms(model_config, config.action_dim)
    if config.stats_path is not None and (model_config.relative_dims or model_config.aloha_units):
        raise CheckpointError(
            f"{report.source} acts relative to the state, or in openpi's units, but the statistics of"
            f" {config.stats_path} are of absolute actions in the environment's",
            "use the checkpoint's statistics (sft.stats=checkpoint, model.stats_path=null), or another checkpoint",
            code="statistics-relative",
        )
    generator = new_generator(device, seed)
    with torch.device("meta"):
        model = PiModel(model_config)
    checkpoint.fill(
        model,
        files,
        report,
        lambda: model.init_weights(generator),
        device=device,
        dtype=dtype,
        aliases=aliases,
        ignore=ignore,
        in_float32=in_float32,
    )
    feature_dim = model_config.expert.width
    chosen = config.value_head.input
    value_input = default_value_input(variant, config.flow.method) if chosen == "auto" else chosen
    value_dim = model_config.vlm.width if value_input == "prefix" else feature_dim
    policy = PiPolicy(
        model,
        PiProcessor(tokenizer, model_config, stats.state),
        stats,
        config,
        build_value_head(config, value_dim, directory, report, device, generator),
        build_noise_head(config, feature_dim, model_config.max_action_dim, directory, report, device, generator),
    )
    return policy, report


def _check_arms(config: PiConfig, action_dim: int) -> None:
    """Refuse dimensions that an action lacks, or that are absolute anyway."""
    last = min(config.relative_dims, action_dim)
    problem = ""
    if wrong := [dim for dim in config.absolute_dims if dim >= last]:
        problem = f"dimension {wrong[0]} is absolute anyway: {last} are relative to the state"
    elif config.aloha_units and action_dim < NUM_DIMS:
        problem = f"ALOHA's actions have {NUM_DIMS} numbers, not {action_dim}"
    if problem:
        raise CheckpointError(
            problem,
            "set model.pi.absolute_dims, model.pi.aloha_units and model.action_dim as the policy was trained",
            code="pi-joints",
        )


def _read(directory: Path, variant: Variant, config: PiModelConfig, report: LoadReport) -> tuple[PiConfig, PiStats]:
    settings = checkpoint.place_of(CONFIG_FILE, directory, report)  # with lerobot's adapters, all but the weights
    path = settings / CONFIG_FILE
    if not path.exists() and (directory / checkpoint.SINGLE_FILE).is_file():
        raise PolicyFileError(f"{path} does not exist", MISSING_CONFIG)
    fields = read_file(path)
    model_config = PiConfig.from_dict(fields.content, variant, fields.source)
    sets, methods = _statistics(settings, fields)
    given = given_sets(config, "openpi")
    if methods is not None and not (given and methods.actions == "identity"):
        model_config = replace(model_config, normalization=methods)
    sets = given or sets
    stats = choose(sets, config.unnorm_key, model_config.normalization, config.action_dim, str(settings))
    weights = directory if settings == directory else None
    model_config, conventions = with_conventions(
        model_config, config.pi, fields, stats.key, settings, weights, own_statistics=bool(given)
    )
    report.conventions |= conventions
    return model_config, stats


def _statistics(directory: Path, fields: Fields) -> tuple[dict[str, Fields], Normalization | None]:
    """Return the sets of config.json's layout, else of the other layout."""
    if "type" in fields and OWN_SECTION not in fields:
        sets, methods = read_lerobot(directory)
        if sets:
            return sets, methods
    openpi = read_openpi(directory)
    return (openpi, None) if openpi or OWN_SECTION in fields else read_lerobot(directory)


def _names(config: PiConfig, files: list[Path], directory: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Return aliases and ignored names, after checking that the weights match the configuration."""
    names = checkpoint.stored_shapes(files)
    found = variant_of(names)
    if found is not None and found != config.variant:
        raise CheckpointError(
            f"the weights in {directory} are those of a '{found}' model, not '{config.variant}'",
            f"set model.model_type={found}",
            code="checkpoint-family",
        )
    aliases, ignore = aliases_and_ignored(names)
    here = [aliases.get(name, name) for name in names]
    layers = {
        f"{TOWER}vision_model.encoder.layers.": config.siglip.depth,
        f"{LANGUAGE}layers.": config.vlm.depth,
        f"{EXPERT}layers.": config.expert.depth,
    }
    checkpoint.check_layers(here, layers, directory)
    return aliases, ignore
