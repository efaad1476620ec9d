"""The policy that imitation trains: its statistics, its vision, and its action range."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from embodrl.config import LoadedConfig
from embodrl.config.schema import Config, SftConfig
from embodrl.data.demos import Demos
from embodrl.data.facts import data_directory, read_facts
from embodrl.data.statistics import UNNAMED, RobotStatistics, dimension_stats, read_statistics
from embodrl.errors import EmbodrlError, StatisticsMissingError
from embodrl.models.base import VLAPolicy
from embodrl.models.common.gripper import Convention, to_model
from embodrl.models.common.norm_stats import is_constant
from embodrl.specs import ENVS
from embodrl.types import Observation
from embodrl.workers.policy import build_policy


def with_model(config: Config, **changes: object) -> Config:
    """Return a configuration with updated settings of the section ``model``."""
    return config.model_copy(update={"model": config.model.model_copy(update=changes)})


def with_vision(loaded: LoadedConfig) -> LoadedConfig:
    """Return a configuration whose vision trains, unless the user has frozen it.

    A configuration loaded without a verb may have it frozen, following a warm start that learns from reward.
    """
    if loaded.config.model.freeze_vision and loaded.origins["model.freeze_vision"].kind == "preset":
        return replace(loaded, config=with_model(loaded.config, freeze_vision=False))
    return loaded


def policy_with_statistics(
    config: Config, demos: Demos, path: Path, tell: Callable[[str], None], resumed: bool = False
) -> tuple[Config, VLAPolicy]:
    """Build the policy with the statistics of ``sft.stats``, and return it with its configuration.

    Args:
        config: run configuration.
        demos: demonstrations for the statistics.
        path: file to write the statistics to, unless they are the checkpoint's.
        tell: called with a line that names the statistics.
        resumed: a run continues, with its original statistics.

    Raises:
        CheckpointError: see the family's builder.
    """
    model = config.model
    if resumed and path.is_file():
        config = with_model(config, stats_path=str(path))
        return config, build_policy(config)
    choice = config.sft.stats
    path.unlink(missing_ok=True)  # from an earlier start that failed
    if choice == "auto" and model.stats_path is not None:
        choice = model.stats_path
    if choice == "auto" and not ENVS.entry(config.env.env_type).simulates and model.model_path is None:
        choice = "auto" if model.warm_start is not None else "data"
    if choice in ("auto", "checkpoint"):
        try:
            return config, build_policy(config)
        except StatisticsMissingError as error:
            if choice == "checkpoint":
                raise
            tell(f"{error.message}: statistics are computed from the demonstrations")
            choice = "data"
    if choice == "data":
        statistics, narrow = demo_statistics(demos, config.sft.data_dir, model.gripper, config.env.include_state)
        if narrow:
            tell(f"q01 and q99 of action dimensions {narrow} equal their minimum and maximum: they hardly ever move")
    else:
        statistics = read_statistics(Path(choice).expanduser())
    _tell_constant(statistics, tell)
    statistics.write(path)
    tell(f"statistics of {'the demonstrations' if choice == 'data' else choice}, as in {path}")
    config = with_model(config, stats_path=str(path))
    return config, build_policy(config)


def _tell_constant(statistics: RobotStatistics, tell: Callable[[str], None]) -> None:
    if constant := constant_dimensions(statistics.state):
        tell(f"state dimensions {constant} are constant: they are normalised by 1")
    if constant := constant_dimensions(statistics.action):
        tell(f"action dimensions {constant} are constant: the policy will hold them still")


def demo_statistics(
    demos: Demos, data_dir: str | Path, gripper: Convention, include_state: bool
) -> tuple[RobotStatistics, list[int]]:
    """Return the statistics of demonstrations, and the action dimensions that hardly move (``dimension_stats``).

    The robot that ``data_dir`` states names the statistics; actions are converted to the policy's ``gripper``
    convention.
    """
    action, narrow = dimension_stats(to_model(demos.actions.astype(np.float64), gripper))
    state = dimension_stats(demos.state)[0] if include_state and demos.state.shape[1] else None
    name = read_facts(data_directory(str(data_dir))).robot_type or UNNAMED
    return RobotStatistics(name, action, state, gripper, len(demos.actions), demos.num_episodes), narrow


def constant_dimensions(stats: Mapping[str, object] | None) -> list[int]:
    """Return the dimensions whose deviation does not exceed rounding."""
    if stats is None or not {"mean", "std"} <= stats.keys():
        return []
    mean, std = (np.array(stats[name], np.float64) for name in ("mean", "std"))
    return np.flatnonzero(is_constant(std, mean, mean)).tolist()


def check_instructions(policy: VLAPolicy, demos: Demos) -> None:
    """Encode every instruction once, with the first observation it was given for.

    Raises:
        EmbodrlError: an instruction does not fit into the policy's prompt.
    """
    frames = np.unique(demos.instruction, return_index=True)[1]
    for frame in frames.astype(np.int64):
        rows = np.array([frame])
        policy.preprocess(Observation(demos.images[rows], demos.state[rows], demos.said(rows), np.zeros(1, np.int32)))


def check_range(policy: VLAPolicy, demos: Demos, settings: SftConfig) -> None:
    """Reject demonstrations with actions that the policy cannot express.

    Raises:
        EmbodrlError: names each dimension with more values out of range than ``sft.max_clipped``, and their share.
    """
    shares = policy.out_of_range(demos.actions, demos.state).mean(axis=0)
    wrong = [f"{share:.0%} of dimension {index}" for index, share in enumerate(shares) if share > settings.max_clipped]
    if wrong:
        low = demos.actions.min()
        high = demos.actions.max()
        raise EmbodrlError(
            f"actions in {settings.data_dir} ({low:g} to {high:g}) are out of the policy's range: {', '.join(wrong)}",
            "sft.stats=data normalises them by statistics of the demonstrations; sft.max_clipped=1 trains anyway",
            code="sft-actions-out-of-range",
        )
