"""Data of an offline run: a dataset of `embodrl collect`, with the outcomes of its chunks.

Shapes: N frames, C actions in a chunk, n chunks of a return.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from embodrl.algorithms.off_policy import chunk_return, n_step_return
from embodrl.config.schema import AlgorithmConfig, Config
from embodrl.data.demos import Demos, Outcomes
from embodrl.data.imitation import load_checked_demos, observed
from embodrl.data.labels import read_indicator
from embodrl.data.offline import ChunkOutcomes, OfflineData
from embodrl.errors import EmbodrlError
from embodrl.learners.offline.settings import offline_settings
from embodrl.learners.replay import check_rewards, no_rewards, rewarded, with_data
from embodrl.models.base import VLAPolicy
from embodrl.models.common.observation_model import network_inputs
from embodrl.models.common.observation_net import LARGEST_IMAGE, ObservationSpec

logger = logging.getLogger(__name__)

RECAP = "recap"


def load_offline(config: Config, policy: VLAPolicy) -> tuple[OfflineData, ObservationSpec | None]:
    """Return the dataset ``algorithm.off_policy.demos``, and the critics' observations if there are critics.

    Raises:
        EmbodrlError: the dataset comes from another environment, has missing or different rewards, or lacks its labels.
        FileDamagedError: the labels belong to other data.
    """
    source = config.algorithm.off_policy.demos
    assert source is not None, "the configuration was checked"
    config = with_data(config, source)
    directory = Path(source).expanduser()
    conditions = config.algorithm.loss_type == RECAP
    if not conditions and config.reward.model is None:
        check_rewards(directory, config)
    demos = load_checked_demos(config)
    if demos.outcomes is None:
        raise no_rewards(source)
    demos = rewarded(demos, config)
    assert demos.outcomes is not None
    known = [success for success in demos.success if success is not None]
    rate = f", {sum(known)} of {len(known)} successful" if known else ""
    logger.info("%d episodes, %d frames%s from %s", len(demos.tasks), len(demos.actions), rate, source)
    chunk = policy.num_action_chunks
    executed = replace(observed(demos, config), actions=demos.outcomes.executed)
    if conditions:
        positive = read_indicator(directory, offline_settings(config.algorithm).tag, demos)
        return OfflineData(executed, chunk, {}, positive=positive), None
    led = chunk_outcomes(demos, demos.outcomes, chunk, config.algorithm)
    if not bool(led.known.any()):
        raise EmbodrlError(
            f"{source} has no chunk of {chunk} actions whose outcome is recorded",
            "use longer episodes, or a smaller model.num_action_chunks",
            code="offline-no-chunks",
        )
    spec = observation_spec(config, demos)
    seen = small_inputs(demos, sorted(demos.instruction_table), spec)
    return OfflineData(executed, chunk, seen, led), spec


def observation_spec(config: Config, demos: Demos) -> ObservationSpec:
    """Return the critics' observations: images and state, as provided by the environment, and the instruction."""
    cameras = demos.images.shape[1] if config.env.include_images else 0
    state = demos.state.shape[1] if config.env.include_state else 0
    side = min(LARGEST_IMAGE, demos.images.shape[2]) if cameras else LARGEST_IMAGE
    return ObservationSpec(cameras, state, len(demos.instruction_table), side)


def small_inputs(demos: Demos, instructions: Sequence[str], spec: ObservationSpec) -> dict[str, Tensor]:
    """Return the inputs of an ``ObservationNet`` for all frames, ``[N,...]`` by name."""
    numbers = np.array([instructions.index(text) for text in demos.instruction_table], np.int64)
    return network_inputs(spec, demos.images, demos.state, torch.from_numpy(numbers[demos.instruction]))


def chunk_outcomes(demos: Demos, outcomes: Outcomes, chunk: int, algorithm: AlgorithmConfig) -> ChunkOutcomes:
    """Return n-step returns of the chunks that begin at each frame; n is ``off_policy.n_step``."""
    frames = np.arange(len(demos.last))
    last = demos.last
    starts = frames[:, None] + chunk * np.arange(algorithm.off_policy.n_step)  # [N,n]
    ends = np.minimum(starts + chunk - 1, last[:, None])
    terminated = (starts <= last[:, None]) & outcomes.terminated[ends]
    acted = (starts <= last[:, None]) & (terminated | (starts + chunk <= last[:, None]))
    index = starts[..., None] + np.arange(chunk)
    valid = (index <= last[:, None, None]) & acted[..., None]
    rewards = torch.from_numpy(outcomes.rewards[np.minimum(index, last[:, None, None])])
    per_action = algorithm.reward_type == "action_level"
    sums, lengths = chunk_return(rewards, torch.from_numpy(valid), algorithm.gamma, per_action)
    known = torch.from_numpy(acted)
    found = n_step_return(sums, lengths, torch.from_numpy(terminated), known, algorithm.gamma)
    following = (torch.from_numpy(frames) + chunk * found.offset).clamp(max=len(frames) - 1)
    return ChunkOutcomes(found.returns, found.discount, following, known[:, 0])
