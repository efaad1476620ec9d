"""Policies on disk (runs, checkpoints, exported directories), found and loaded with their configuration."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from embodrl.config import LoadedConfig
from embodrl.config.compose import assignment
from embodrl.config.policy_card import ADAPTER_CONFIG, BUILTIN
from embodrl.config.schema import Config
from embodrl.config.schema.readers import reads
from embodrl.data.statistics import STATISTICS_FILE
from embodrl.errors import CheckpointError, UsageError
from embodrl.hub import parse
from embodrl.models.base import VLAPolicy
from embodrl.pipelines.load import load_config
from embodrl.storage.checkpoint import BEST, Checkpoint, newest_checkpoint, open_checkpoint
from embodrl.trainer.files import ADAPTERS_DIR, BEST_POLICY_DIR, POLICY_DIR, base_of, drop_missing_warm_start
from embodrl.trainer.settings import STATE_DIM, is_run, load_saved
from embodrl.workers.policy import build_policy

logger = logging.getLogger(__name__)

STEP = re.compile(r"step_\d+")


@dataclass(frozen=True)
class PolicySource:
    """A policy on disk.

    Attributes:
        policy_dir: directory of the policy in its public layout; None if it is in ``checkpoint``.
        checkpoint: checkpoint of a run; None if the policy is in ``policy_dir``.
        run_dir: run whose configuration applies; None for a policy outside of runs.
    """

    policy_dir: Path | None
    checkpoint: Checkpoint | None
    run_dir: Path | None

    def load_config(
        self, overrides: list[str], trust: bool = False, verb: Literal["eval", "record", "sft", "serve"] = "eval"
    ) -> LoadedConfig:
        """Return the run's configuration, or for a policy elsewhere a composed one, with this policy.

        Raises:
            ConfigError: the configuration is invalid; lists every problem found.
            CheckpointError: the run's settings are lost.
        """
        if self.run_dir is None:
            return load_config(self.arguments(overrides), verb=verb)
        own_dir = [assignment("runner.output_dir", self.run_dir)] if reads(verb, "runner.output_dir") else []
        texts = [*own_dir, *overrides]
        statistics = self.run_dir / STATISTICS_FILE
        if self.policy_dir is None and statistics.is_file():  # of `embodrl sft`; a policy has them in its own files
            texts.insert(0, assignment("model.stats_path", statistics.absolute()))
        if self.policy_dir is not None:
            texts.insert(0, "model.stats_path=null")
            own, _ = load_saved(self.run_dir, overrides, verb, self.checkpoint, True, trust)
            texts += _weights_of(own.config, self.policy_dir, statistics.is_file())
        resuming = self.checkpoint is not None
        return load_saved(self.run_dir, texts, verb, self.checkpoint, resuming, trust)[0]

    def arguments(self, overrides: list[str]) -> list[str]:
        """Return overrides starting with this policy, for a configuration other than its run's."""
        return overrides if self.policy_dir is None else [assignment("model.warm_start", self.policy_dir), *overrides]

    def make_policy(self, config: Config, device: torch.device | None = None) -> VLAPolicy:
        """Build the policy of a configuration from ``load_config``; ``device=None`` uses the configured device.

        Raises:
            CheckpointError: the weights do not match the settings.
        """
        if self.checkpoint is None:
            return build_policy(config, device)
        policy = build_policy(drop_missing_warm_start(config), device)
        policy.seen_state_dim = self.checkpoint.state.integer(STATE_DIM, None)
        if self.checkpoint.state.flag("sharded", False):
            from embodrl.hybrid_engines.training.sharded_checkpoint import read_whole  # see sharding

            read_whole(self.checkpoint.path, "policy", policy.state_dict())
        else:
            tensors = self.checkpoint.tensors("policy")
            try:
                policy.load_state_dict(tensors)
            except RuntimeError as error:
                message = f"the policy in {self.checkpoint.path} does not match its settings: {error}"
                raise CheckpointError(message, "use another checkpoint", code="checkpoint-mismatch") from error
        return policy


def find_policy(path: Path) -> PolicySource:
    """Return the policy in ``RUN``, ``RUN/policy``, ``RUN/policy_best``, ``RUN/checkpoints/step_N`` (or the link
    ``best``), or an exported directory.

    Finished runs have exported their policy; for other runs the newest checkpoint is used.

    Raises:
        UsageError: there is no policy.
        CheckpointError: the checkpoint is damaged.
    """
    path = path.expanduser()
    if path.name == BEST and path.is_symlink():
        path = path.parent / path.readlink()
    run_dir = path.parent.parent if STEP.fullmatch(path.name) and path.parent.name == "checkpoints" else None
    if run_dir is not None and is_run(run_dir):
        return PolicySource(None, open_checkpoint(path), run_dir)
    if (path / "config.json").is_file():
        of_run = path.name in (POLICY_DIR, BEST_POLICY_DIR) and is_run(path.parent)
        return PolicySource(path, None, path.parent if of_run else None)
    if is_run(path):
        if (path / POLICY_DIR / "config.json").is_file():
            return PolicySource(path / POLICY_DIR, None, path)
        return PolicySource(None, newest_checkpoint(path), path)
    what = f"{path} holds no policy" if path.exists() else f"{path} does not exist"
    raise UsageError(
        what,
        "give a run directory (RUN), a checkpoint (RUN/checkpoints/step_N), or a policy directory that"
        " `embodrl train`, `sft` or `export` wrote (RUN/policy)",
        code="policy-not-found",
    )


def _weights_of(config: Config, policy_dir: Path, has_statistics: bool = False) -> list[str]:
    """Return the overrides with which a run's policy acts as in training.

    Separate adapters are applied to their base model if it still exists and the run has no statistics of its own, which
    the base lacks; otherwise the merged policy is used.
    """
    model = config.model
    apart = policy_dir / ADAPTERS_DIR
    key = "warm_start" if model.model_path is None else "model_path"
    base = base_of(config)
    own_statistics = has_statistics or model.stats_path is not None
    if model.trainable == "lora" and base and not own_statistics and (apart / ADAPTER_CONFIG).is_file():
        if base == BUILTIN or Path(base).expanduser().is_dir() or parse(base) is not None:
            return [assignment("model.lora_path", apart)]
        logger.warning("the base model %s is missing: using the merged and rounded adapters of %s", base, policy_dir)
    texts = [assignment(f"model.{key}", policy_dir)]
    return texts if model.lora_path is None else [*texts, "model.lora_path=null"]  # the weights include the adapters
