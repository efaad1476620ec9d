"""`embodrl export`: the policy of a checkpoint in its public layout."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Literal

import torch

from embodrl.config import LoadedConfig
from embodrl.config.compose import assignment
from embodrl.config.nodes import parse_yaml
from embodrl.config.schema import Config
from embodrl.data.statistics import STATISTICS_FILE
from embodrl.errors import EmbodrlError, OutputError, UsageError
from embodrl.models.common.lora import save_adapters
from embodrl.runs.policies import STEP, PolicySource
from embodrl.specs import MODELS, SERVE_PROTOCOLS
from embodrl.storage.atomic import ELSEWHERE
from embodrl.storage.checkpoint import Checkpoint, newest_checkpoint, open_checkpoint
from embodrl.trainer.files import base_of, export_policy
from embodrl.trainer.settings import CONFIG_FILE, STATE_KEY, is_run, load_saved, not_a_run

logger = logging.getLogger(__name__)


def export_checkpoint(
    source: Path,
    directory: Path,
    overrides: list[str],
    trust: bool = False,
    adapters: Literal["merged", "apart"] = "merged",
    layout: Literal["public", "lerobot"] = "public",
) -> tuple[Checkpoint, Config]:
    """Write the policy of a checkpoint in its public layout; return the checkpoint and the run's configuration.

    The checkpoint is read on the CPU; the run may still be training.

    Args:
        source: a run, whose newest intact checkpoint is used, or ``RUN/checkpoints/step_N``.
        directory: new directory.
        overrides: overrides of the run's configuration.
        trust: the run's settings may run code though another user started it.
        layout: the family's published layout, or lerobot's.
        adapters: merge low-rank adapters into the weights, or write them separately in peft's layout.

    Raises:
        CheckpointError: not a run, or no intact checkpoint.
        OutputError: the directory exists or can't be written.
        EmbodrlError: adapters are to be written separately, but there are none, or their base is not available.
    """
    is_step = STEP.fullmatch(source.name) is not None and source.parent.name == "checkpoints"
    run_dir = source.parent.parent if is_step else source
    if not is_run(run_dir):
        raise not_a_run(source)
    if directory.exists():
        raise OutputError(f"{directory} exists", "give a new directory", code="output-exists")
    checkpoint = open_checkpoint(source) if is_step else newest_checkpoint(run_dir)
    loaded = _load(run_dir, checkpoint, overrides, trust).with_absolute_paths()
    on_cpu = loaded.config.cluster.model_copy(update={"device": "cpu"})
    config = loaded.config.model_copy(update={"cluster": on_cpu})
    policy = PolicySource(None, checkpoint, run_dir).make_policy(config, torch.device("cpu"))
    if layout == "lerobot":
        if adapters == "apart":
            hint = "leave out --adapters apart: they are merged"
            raise UsageError("lerobot's layout has no separate adapters", hint, code="export-layout")
        for line in policy.save_lerobot(directory, [camera.name for camera in config.env.cameras]):
            logger.warning(line)
        return checkpoint, config
    if adapters == "merged":
        export_policy(policy, directory, config, elsewhere=ELSEWHERE, iteration=checkpoint.step)
        return checkpoint, config
    base = base_of(config)
    if base is None:
        raise EmbodrlError(
            "the run began from random weights, or from further adapters (model.lora_path), so its adapters have"
            " no base model",
            "export with --adapters merged",
            code="adapters-not-apart",
        )
    save_adapters(policy, directory, base)
    return checkpoint, config


def _load(run_dir: Path, checkpoint: Checkpoint, overrides: list[str], trust: bool) -> LoadedConfig:
    """Load the configuration of a run, with the statistics computed by `embodrl sft`, which its base lacks."""
    statistics = run_dir / STATISTICS_FILE
    if statistics.is_file():
        overrides = [assignment("model.stats_path", statistics.absolute()), *overrides]
    # Nothing is served, but the settings are read as if: a policy of messages has protocols of its own.
    values, _ = parse_yaml(checkpoint.state.text(STATE_KEY), CONFIG_FILE)
    if _writes_text(values.plain()):
        overrides = [
            f"serve.protocols=[{next(one.name for one in SERVE_PROTOCOLS.all() if one.serves_text)}]",
            *overrides,
        ]
    return load_saved(run_dir, overrides, "serve", checkpoint, True, trust)[0]


def _writes_text(settings: Any) -> bool:
    """Return whether saved settings are of a family that writes text."""
    family = settings["model"]["model_type"]
    return family in MODELS and MODELS.entry(family).kind == "text"
