"""The files of a run besides its checkpoints and metrics."""

from __future__ import annotations

import logging
import shutil
import time
from pathlib import Path

from embodrl.config import load_run
from embodrl.config.schema import Config
from embodrl.deployment import Deployment
from embodrl.errors import CheckpointError, OutputError
from embodrl.hybrid_engines.training.sharded_checkpoint import read_whole
from embodrl.hybrid_engines.weight_sync.disk import VERSIONS_KEPT
from embodrl.models.base import VLAPolicy
from embodrl.runs.lock import run_lock
from embodrl.storage.checkpoint import Checkpoint, CheckpointManager
from embodrl.workers.policy import build_policy

logger = logging.getLogger(__name__)

CONFIG_FILE = "config.yaml"
LOG_FILE = "logs/embodrl.log"
POLICY_DIR = "policy"
REPORT_FILE = "report.html"
# Asked for before the policy is built and its size known.
LEAST_FREE_BYTES = 64 * 2**20


def run_directory(config: Config) -> Path:
    """Return the directory of a new run."""
    runner = config.runner
    if runner.output_dir != "auto":
        return Path(runner.output_dir)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    name = runner.name
    if name == "auto":
        algorithm = config.algorithm.adv_type.replace(":", "-")
        name = f"{config.env.env_type}-{config.model.model_type}-{algorithm}-{stamp}"
    return Path("outputs") / name


def has_results(run_dir: Path) -> bool:
    """Tell whether a run has written what it ends with."""
    return (run_dir / POLICY_DIR).is_dir() and (run_dir / REPORT_FILE).is_file()


def num_bytes_on_disk(config: Config, deployment: Deployment, policy: VLAPolicy, state_num_bytes: int) -> int:
    """Return what a run writes: its checkpoints, one more while it is written, and weights that travel by disk."""
    total = (config.runner.keep_last_n + 1) * state_num_bytes
    if deployment.rolls_out_in_processes and config.rollout.weight_sync == "disk":
        weights = sum(t.numel() * t.element_size() for t in policy.state_dict().values())
        total += (VERSIONS_KEPT + 1) * weights
    return total


def export_policy(policy: VLAPolicy, directory: Path) -> None:
    """Write the policy in its public layout; a directory of that name holds a whole one.

    Raises:
        OutputError: the directory can't be written.
    """
    partial = directory.with_name(f".{directory.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        policy.save_pretrained(partial)
        if directory.exists():
            shutil.rmtree(directory)
        partial.replace(directory)
    except OSError as error:
        raise OutputError(
            f"{directory} can't be written: {error}", "free some room, then `embodrl resume` the run"
        ) from error


def write_config(run_dir: Path, config_yaml: str) -> None:
    """Keep the resolved configuration of a run.

    Raises:
        OutputError: the directory can't be written.
    """
    partial = run_dir / f".{CONFIG_FILE}.partial"
    try:
        partial.write_text(config_yaml)
        partial.replace(run_dir / CONFIG_FILE)
    except OSError as error:
        raise OutputError(
            f"{run_dir} can't be written: {error}", "set runner.output_dir to a directory of yours"
        ) from error


def how_to_go_on(run_dir: Path) -> str:
    """Say what the user can do with a run that an error has ended."""
    checkpoint, _ = CheckpointManager(run_dir, 1).latest_good()
    if checkpoint is None:
        return "start it again: there is no checkpoint"
    return f"`embodrl resume {run_dir}` goes on from {checkpoint.path}"


def what_is_left(run_dir: Path, iteration: int) -> str:
    """Say where a run goes on whose last save, after ``iteration``, failed."""
    checkpoint, _ = CheckpointManager(run_dir, 1).latest_good()
    where = "start over: there is no checkpoint" if checkpoint is None else f"go on from {checkpoint.path}"
    return (
        f"iteration {iteration}, the last, could not be saved;"
        f" once there is room, `embodrl resume {run_dir}` would {where}"
    )


def without_lost_warm_start(config: Config) -> Config:
    """Start from random weights where the warm start is gone; the checkpoint replaces them all."""
    model = config.model
    if model.model_path is not None or model.warm_start in (None, "builtin"):
        return config
    if (Path(model.warm_start).expanduser() / "config.json").is_file():
        return config
    logger.warning(
        "the warm start %s is gone: weights come from the checkpoint, vocabulary and action statistics are the"
        " tiny size's own",
        model.warm_start,
    )
    return config.model_copy(update={"model": model.model_copy(update={"warm_start": None})})


def export_checkpoint(run_dir: Path, directory: Path, overrides: list[str]) -> Checkpoint:
    """Write the policy of a run's newest good checkpoint in its public layout; read on the CPU.

    Args:
        run_dir: of the run.
        directory: a new one.
        overrides: of the run's configuration.

    Returns:
        the checkpoint.

    Raises:
        CheckpointError: this is no run, or it has no good checkpoint.
        OutputError: the directory exists or can't be written, or the run is going on.
    """
    path = run_dir / CONFIG_FILE
    if not path.is_file():
        raise CheckpointError(f"{run_dir} is not the directory of a run: it has no {CONFIG_FILE}", "look in outputs/")
    if directory.exists():
        raise OutputError(f"{directory} exists", "give a new directory")
    config = load_run(path, overrides, resuming=True).with_absolute_paths().config
    with run_lock(run_dir):  # looking for checkpoints removes what an interrupted save has left
        checkpoint, problems = CheckpointManager(run_dir, 1).latest_good()
        if checkpoint is None:
            why = "; ".join(problems) or "none was written"
            raise CheckpointError(f"{run_dir} has no good checkpoint: {why}", f"`embodrl resume {run_dir}` goes on")
        on_cpu = {"cluster": config.cluster.model_copy(update={"device": "cpu"})}
        policy = build_policy(without_lost_warm_start(config).model_copy(update=on_cpu))
        if checkpoint.state.get("sharded"):
            read_whole(checkpoint.path, "policy", policy.state_dict())
        else:
            policy.load_state_dict(checkpoint.tensors("policy"))
        export_policy(policy, directory)
    return checkpoint
