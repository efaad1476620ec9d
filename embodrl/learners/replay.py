"""Data of an off-policy run: its replay buffer, and demonstrations as transitions."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embodrl.config.schema import Config
from embodrl.data.demos import RECORDED, REWARDS, Demos, Outcomes
from embodrl.data.facts import RAW_INDEX
from embodrl.data.imitation import load_checked_demos, observed
from embodrl.data.lerobot import ACTION, OWN_META
from embodrl.data.lerobot_info import read_info
from embodrl.data.lerobot_outcomes import missing_outcomes, outcome_columns
from embodrl.data.load import is_lerobot
from embodrl.data.replay import EXPERT, INPUT, ReplayBuffer, ReplayStores
from embodrl.data.store_shards import is_store, shards_of
from embodrl.errors import EmbodrlError, FileDamagedError
from embodrl.fields import read_fields
from embodrl.models.base import VLAPolicy
from embodrl.types import Observation
from embodrl.workers.learned_reward import LearnedReward

logger = logging.getLogger(__name__)

GB = 10**9
ROWS_AT_ONCE = 256
_SINCE = {"ignore_terminations"}
"""Settings that older demonstrations do not record."""


def reward_settings(config: Config) -> dict[str, object]:
    """Return the settings that determine an environment's rewards."""
    env = config.env
    algorithm = config.algorithm
    settings: dict[str, object] = {"reward_mode": env.reward_mode, "success_bonus": env.success_bonus}
    if env.reward_mode == "dense":  # what is paid after success
        settings |= {"ignore_terminations": env.train.ignore_terminations}
    if env.reward_mode == "potential":
        settings |= {"gamma": algorithm.gamma, "reward_type": algorithm.reward_type}
    return settings


def with_data(config: Config, directory: str) -> Config:
    """Return the configuration with another dataset, read with ``sft``'s keys, cameras and robot."""
    return config.model_copy(update={"sft": config.sft.model_copy(update={"data_dir": directory})})


def make_stores(config: Config, policy: VLAPolicy, state_dim: int | None = None) -> ReplayStores:
    """Return an empty replay buffer, and the configured demonstrations, which must have ``state_dim`` numbers of state.

    Raises:
        EmbodrlError: the demonstrations come from another environment, or have missing or different rewards.
    """
    settings = config.algorithm.off_policy
    online = ReplayBuffer(settings.capacity, int(settings.memory_gb * GB))
    if settings.demos is None:
        return ReplayStores(online)
    return ReplayStores(online, demo_buffer(config, policy, state_dim), settings.interventions)


def demo_buffer(config: Config, policy: VLAPolicy, state_dim: int | None = None) -> ReplayBuffer:
    """Return ``algorithm.off_policy.demos`` as transitions, with room for interventions where they are learned from.

    Args:
        config: run configuration.
        policy: preprocesses the observations.
        state_dim: numbers in the environment's state; None if it is not known.

    Raises:
        EmbodrlError: the demonstrations come from another environment, or have missing or different rewards.
    """
    settings = config.algorithm.off_policy
    source = settings.demos
    assert source is not None, "the configuration was checked"
    config = with_data(config, source)
    if config.reward.model is None:
        check_rewards(Path(source).expanduser(), config)
    demos = load_checked_demos(config)
    known = demos.state.shape[1]
    if config.env.include_state and state_dim not in (None, known):
        raise EmbodrlError(
            f"states in {source} have {known} numbers, but the environment has {state_dim}",
            "collect demonstrations with the same env.state",
            code="demos-other-state",
        )
    if demos.outcomes is None:
        raise no_rewards(source)
    demos = rewarded(demos, config)
    assert demos.outcomes is not None
    frames = demo_frames(observed(demos, config), demos.outcomes, policy)
    count = len(frames["acted"])
    more = settings.interventions
    size = sum(column.nbytes for column in frames.values())
    kept = ReplayBuffer(count + settings.capacity * more, size + int(settings.memory_gb * GB) * more)
    kept.add_frames(frames)
    logger.info("%d demonstrations: %d chunks, %.0f MB", len(demos.tasks), len(kept), kept.num_bytes / 2**20)
    return kept


def check_rewards(directory: Path, config: Config) -> None:
    """Reject demonstrations whose rewards differ from the run's settings; accept other datasets' rewards unchecked."""
    if is_store(directory):
        for shard in shards_of(directory):
            check_rewards(shard, config)
        return
    path = directory / (OWN_META if is_lerobot(directory) else RAW_INDEX)
    if not path.is_file() and not is_lerobot(directory):
        raise no_rewards(str(directory))
    found: Mapping[str, object] = RECORDED
    if path.is_file():
        made = read_fields(path, FileDamagedError, "re-collect the demonstrations")
        found = (made if is_lerobot(directory) else made.fields("meta", {})).fields(REWARDS, {}).content
    if not found:
        raise no_rewards(str(directory))
    if found == RECORDED:
        logger.warning("%s: recorded rewards are used unchanged; the environment's may differ", directory)
        return
    wanted = reward_settings(config)
    if {**wanted, **found} != wanted or not wanted.keys() - found.keys() <= _SINCE:
        raise EmbodrlError(
            f"the rewards of {directory} differ from the run's: {dict(found)} instead of {wanted}",
            "collect demonstrations with the same env.reward_mode, env.success_bonus and, where the reward is dense,"
            " env.train.ignore_terminations, or train with theirs",
            code="demos-other-rewards",
        )


def rewarded(demos: Demos, config: Config) -> Demos:
    """Return recorded episodes with the rewards of ``reward.model``, or unchanged without one.

    Raises:
        EmbodrlError: the model is invalid, or was trained for another environment.
    """
    model = config.reward.model
    return demos if model is None else LearnedReward(model, config.model.num_action_chunks).relabel(demos)


def no_rewards(source: str) -> EmbodrlError:
    """Return the error for a dataset that can only be imitated."""
    problem = "does not record rewards and executed actions"
    directory = Path(source).expanduser()
    if is_lerobot(directory):
        features = read_info(directory).features
        if missing := missing_outcomes(features.keys()):
            found = ", ".join(name for name in (ACTION, *outcome_columns(features.keys())) if name in features)
            problem = f"has no column {', no '.join(missing)} (found: {found or 'none'})"
    return EmbodrlError(
        f"{source} {problem}, so that it can only be imitated",
        "collect with this version of `embodrl collect` or `embodrl store collect`, or imitate them (`embodrl sft`)",
        code="demos-no-rewards",
    )


def demo_frames(demos: Demos, outcomes: Outcomes, policy: VLAPolicy) -> dict[str, Tensor]:
    """Return demonstrations as frames of a replay buffer, with a chunk from every frame on.

    An episode of L frames becomes C episodes, which begin at its first C frames and advance by chunks: every frame is
    kept once. The last chunk of an episode that was not terminated is unused: its outcome is not recorded.
    """
    size = policy.num_action_chunks
    order = np.concatenate([*_every_offset(demos.last, size)])
    last = demos.last[order]
    terminated = outcomes.terminated[last] & (order + size > last)
    acted = terminated | (order + size <= last)
    index = order[:, None] + np.arange(size)
    valid = (index <= last[:, None]) & acted[:, None]
    index = np.minimum(index, last[:, None])
    frames = {
        "actions": torch.from_numpy(outcomes.executed[index]),
        "labels": torch.from_numpy(demos.actions[index]),
        "rewards": torch.from_numpy(outcomes.rewards[index] * valid),
        "valid": torch.from_numpy(valid),
        "terminated": torch.from_numpy(terminated),
        "acted": torch.from_numpy(acted),
        "source": torch.full((len(order),), EXPERT, dtype=torch.int8),
    }
    parts = [_inputs(demos, rows, policy) for rows in np.array_split(order, -(-len(order) // ROWS_AT_ONCE))]
    return frames | {INPUT + name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _every_offset(last: NDArray[np.int64], size: int) -> Iterator[NDArray[np.int64]]:
    """Yield every ``size``-th frame of each episode, starting at each of its first ``size`` frames."""
    first = 0
    while first < len(last):
        end = int(last[first])
        for offset in range(min(size, end + 1 - first)):
            yield np.arange(first + offset, end + 1, size)
        first = end + 1


def _inputs(demos: Demos, rows: NDArray[np.int64], policy: VLAPolicy) -> dict[str, Tensor]:
    observation = Observation(demos.images[rows], demos.state[rows], demos.said(rows), np.zeros(len(rows), np.int32))
    return {name: tensor.cpu() for name, tensor in policy.preprocess(observation).items()}
