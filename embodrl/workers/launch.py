"""From the configuration to the processes of a run."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from embodrl.config.schema import Config
from embodrl.deployment import Deployment
from embodrl.scheduler.launchers.base import Launcher
from embodrl.scheduler.launchers.process import ProcessLauncher
from embodrl.workers.rollouts import LocalRollouts, Rollouts


def make_launcher(config: Config, deployment: Deployment) -> Launcher | None:
    """Return what starts the actor and rollout processes of a run; None if the main process does all of it.

    Raises:
        MissingDependencyError: Ray is asked for, and not installed.
        EmbodrlError: Ray has not got the resources.
    """
    acts, trains = deployment.rolls_out_in_processes, deployment.trains_in_processes
    if not (acts or trains):
        return None
    if config.cluster.launcher == "process":
        return ProcessLauncher()
    from embodrl.scheduler.launchers.ray import RayLauncher

    places = [*(deployment.of("actor") if trains else ()), *(deployment.of("rollout") if acts else ())]
    simulators = Counter(place.node for place in deployment.of("env")) if acts else None
    return RayLauncher(places, config.cluster.ray_address, children=simulators)


def make_rollouts(config: Config, deployment: Deployment, run_dir: Path, launcher: Launcher | None) -> Rollouts:
    """Return the rollouts of a run, not yet started.

    Args:
        config: the run.
        deployment: where everything is.
        run_dir: of the run.
        launcher: of ``make_launcher``.
    """
    if not deployment.rolls_out_in_processes:
        return LocalRollouts(config, deployment, run_dir / "logs")
    from embodrl.workers.rollout_group import RolloutGroup

    assert launcher is not None
    return RolloutGroup(config, deployment, launcher, run_dir)
