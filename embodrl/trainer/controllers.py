"""The attempts of several controllers at a run: the first one writes its files, the others only logs of their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from embodrl.config import LoadedConfig
from embodrl.hybrid_engines.controllers import Controllers
from embodrl.reporting.metrics_file import METRICS_FILE
from embodrl.storage.checkpoint import Checkpoint
from embodrl.trainer.session import RunSession, run_directory_of, run_with_restarts
from embodrl.trainer.settings import last_settings

T = TypeVar("T")
CONTROLLERS_DIR = "controllers"
"""In a run directory: a directory for each controller other than the first, with its logs."""


def follow(
    loaded: LoadedConfig,
    run_dir: Path,
    controllers: Controllers,
    work: Callable[[RunSession], T],
    checkpoint: Checkpoint | None = None,
) -> T:
    """Work on a run as a controller other than the first; arguments as for ``run_with_restarts``.

    Raises:
        EmbodrlError: the run failed here, or in another controller.
    """
    mine = run_dir / CONTROLLERS_DIR / str(controllers.rank)
    with run_directory_of(mine) as lock:
        # Its times are not those of the first controller, whose rows are in the checkpoint.
        (mine / METRICS_FILE).unlink(missing_ok=True)
        old_settings = last_settings(mine)
        return run_with_restarts(_silent(loaded), mine, lock, work, checkpoint, old_settings, controllers)


def _silent(loaded: LoadedConfig) -> LoadedConfig:
    """Return the configuration without what the first controller does for all."""
    config = loaded.config
    off = {"tensorboard": False, "wandb_mode": "off", "mlflow_mode": "off", "swanlab_mode": "off", "console": "off"}
    runner = {"logger": config.runner.logger.model_copy(update=off), "keep_best": False}
    env = {"video": config.env.video.model_copy(update={"enabled": False})}
    parts = {
        "runner": config.runner.model_copy(update=runner),
        "env": config.env.model_copy(update=env),
    }
    return replace(loaded, config=config.model_copy(update=parts))
