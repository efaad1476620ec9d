"""Builds a pi0-FAST policy from a ModelConfig: a checkpoint in lerobot's layout, or the tiny size."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from embodrl.models.common import checkpoint
from embodrl.models.common.config_file import CONFIG_FILE, fields_of, read_file
from embodrl.models.common.heads import build_value_head
from embodrl.models.common.init import new_generator
from embodrl.models.common.norm_stats import given_sets
from embodrl.models.load_report import LoadReport
from embodrl.models.openpi.conventions import with_lerobots_age
from embodrl.models.openpi.stats import PiStats, choose, identity_set, read_lerobot
from embodrl.models.openpi.tokenizer import load_tokenizer, tiny_tokenizer
from embodrl.models.openpi.weights import EMBEDDING, LANGUAGE, TOWER, in_float32
from embodrl.models.pi0_fast import files
from embodrl.models.pi0_fast.codec import TINY_CODEC, read_codec
from embodrl.models.pi0_fast.config import FastConfig
from embodrl.models.pi0_fast.modeling import FastModel
from embodrl.models.pi0_fast.policy import FastPolicy
from embodrl.models.pi0_fast.processing import FastProcessor
from embodrl.models.pi0_fast.spec import Pi0FastModelConfig

TINY_STATS_KEY = "maniskill"
SECTION = "model.pi0_fast"
_SIZES = ("siglip", "vlm", "max_action_dim", "action_horizon", "num_images")


def build_pi0_fast(
    config: Pi0FastModelConfig, *, device: torch.device | str, dtype: torch.dtype, seed: int
) -> tuple[FastPolicy, LoadReport]:
    """Build the configured policy; see ``models.registry.build_policy``."""
    device = torch.device(device)
    directory, report = checkpoint.locate(config)
    tokenizer = tiny_tokenizer()
    codec = read_codec(TINY_CODEC)
    model_config = FastConfig.from_architecture(config.pi0_fast, tokenizer.vocab_size + codec.num_codes)
    weights = []
    renamed = {}
    if directory is None:
        identity = {TINY_STATS_KEY: fields_of(identity_set(config.action_dim), "built-in statistics")}
        methods = model_config.inputs.normalization
        sets = given_sets(config, "openpi") or identity
        stats = choose(sets, config.unnorm_key, methods, config.action_dim, report.source)
    else:
        tiny = model_config.inputs
        model_config, stats = _read(directory, config, report)
        if config.model_path is None:
            checkpoint.check_size(model_config.inputs, tiny, _SIZES, directory, SECTION)
        tokenizer = load_tokenizer(directory, model_config.inputs.vocab_size)
        codec = files.find_codec(directory, model_config)
        weights = checkpoint.weight_files(directory)
        names = checkpoint.stored_shapes(weights)
        renamed = files.aliases(names)
        model_config = replace(model_config, tied=files.is_tied(names))
        depths = {
            f"{TOWER}vision_model.encoder.layers.": model_config.inputs.siglip.depth,
            f"{LANGUAGE}layers.": model_config.inputs.vlm.depth,
        }
        checkpoint.check_layers([renamed.get(name, name) for name in names], depths, directory)
        if report.adapters is not None:
            # with the embedding, so that adapters of the output layer are not taken for its own
            report.adapters.rename(lambda names: (files.aliases([*names, EMBEDDING]), {}))
    generator = new_generator(device, seed)
    with torch.device("meta"):
        model = FastModel(model_config)
    checkpoint.fill(
        model,
        weights,
        report,
        lambda: model.init_weights(generator),
        device=device,
        dtype=dtype,
        aliases=renamed,
        in_float32=in_float32,
    )
    processor = FastProcessor(tokenizer, model_config.inputs, stats.state)
    width = model_config.inputs.vlm.width
    value_head = build_value_head(config, width, directory, report, device, generator)
    return FastPolicy(model, processor, codec, stats, config, value_head), report


def _read(directory: Path, config: Pi0FastModelConfig, report: LoadReport) -> tuple[FastConfig, PiStats]:
    """Return a checkpoint's configuration, with overrides from settings, and its statistics."""
    settings = config.pi0_fast
    place = checkpoint.place_of(CONFIG_FILE, directory, report)
    known = FastConfig.read(place / CONFIG_FILE)
    sets, methods = read_lerobot(place)
    given = given_sets(config, "openpi")
    inputs = known.inputs
    if methods is not None and not (given and methods.actions == "identity"):
        inputs = replace(inputs, normalization=methods)
    stats = choose(given or sets, config.unnorm_key, inputs.normalization, config.action_dim, str(place))
    weights = directory if place == directory else None
    inputs, conventions = with_lerobots_age(inputs, settings, read_file(place / CONFIG_FILE), place, weights, SECTION)
    report.conventions |= conventions
    if settings.antialias is not None:
        inputs = replace(inputs, antialias=settings.antialias)
        report.conventions["antialiased resizing"] = f"{'yes' if settings.antialias else 'no'} ({SECTION}.antialias)"
    return replace(known, inputs=inputs, max_action_tokens=settings.max_action_tokens or known.max_action_tokens), stats
