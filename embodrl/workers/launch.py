"""From the configuration to the processes of a run."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from embodrl.config.rules.actor import has_own_process
from embodrl.config.rules.rollout_processes import has_rollout_processes
from embodrl.config.schema import Config
from embodrl.scheduler.launchers.base import Launcher
from embodrl.scheduler.launchers.process import ProcessLauncher
from embodrl.scheduler.placement import solve
from embodrl.workers.rollouts import LocalRollouts, Rollouts


def make_launcher(config: Config) -> Launcher | None:
    """Return what brings up the actor and rollout processes of a run; None if the main process does all of it.

    Raises:
        MissingDependencyError: Ray is asked for, and not installed.
        EmbodrlError: Ray has not got the resources.
    """
    acts, trains = has_rollout_processes(config), has_own_process(config)
    if not (acts or trains):
        return None
    if config.cluster.launcher == "process":
        return ProcessLauncher()
    from embodrl.scheduler.launchers.ray import RayLauncher

    placement = solve(config)
    places = [*(placement.of("actor") if trains else ()), *(placement.of("rollout") if acts else ())]
    simulators = Counter(place.node for place in placement.of("env")) if acts else None
    return RayLauncher(places, config.cluster.ray_address, children=simulators)


def make_rollouts(config: Config, run_dir: Path, launcher: Launcher | None) -> Rollouts:
    """Return who plays, not yet started.

    Args:
        config: the run.
        run_dir: of the run.
        launcher: of ``make_launcher``.
    """
    if not has_rollout_processes(config):
        return LocalRollouts(config, run_dir / "logs")
    from embodrl.workers.rollout_group import RolloutGroup

    assert launcher is not None
    return RolloutGroup(config, solve(config), launcher, run_dir)
