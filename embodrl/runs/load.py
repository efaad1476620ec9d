"""Load the configuration of a run: the rules of the configuration and those of the pipeline, in one report."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from embodrl.config import load as config_load
from embodrl.config.load import LoadedConfig
from embodrl.pipelines.select import PIPELINE_RULE


def load_config(
    overrides: list[str],
    config_file: Path | Mapping[str, object] | None = None,
    planning: bool = False,
    collecting: bool = False,
    evaluating: bool = False,
    trust: bool = False,
) -> LoadedConfig:
    """As ``embodrl.config.load_config``, and check the pipeline; imports no torch.

    Raises:
        ConfigError: with every problem found.
    """
    return config_load.load_config(overrides, config_file, planning, collecting, evaluating, (PIPELINE_RULE,), trust)


def load_run(
    path: Path,
    overrides: list[str] | None = None,
    resuming: bool = False,
    evaluating: bool = False,
    trust: bool = False,
    text: str | None = None,
) -> LoadedConfig:
    """As ``embodrl.config.load_run``, and check the pipeline.

    Raises:
        ConfigError: with every problem found.
    """
    return config_load.load_run(path, overrides, resuming, evaluating, (PIPELINE_RULE,), trust, text)
