"""Experts for DAgger and interventions: those of simulators, or a policy.

Shapes: B environments, A action dimensions, S state dimensions.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from embodrl.config.policy_card import read_card
from embodrl.config.schema import Config
from embodrl.config.schema.tagged import model_settings
from embodrl.envs.pool.pool import EnvPool
from embodrl.errors import EmbodrlError
from embodrl.fields import read_fields
from embodrl.models import registry
from embodrl.models.base import VLAPolicy
from embodrl.models.common.config_file import CONFIG_FILE
from embodrl.specs import families_of
from embodrl.types import Observation
from embodrl.workers.policy import resolve_device

logger = logging.getLogger(__name__)


class Labeller(Protocol):
    """Name an action for every environment; both methods raise EnvWorkerDied or EnvTimeout if a process was lost."""

    def restart(self, rows: NDArray[np.int64]) -> None:
        """Fresh episodes begin in ``rows``."""
        ...

    def actions(self, observation: Observation) -> NDArray[np.float32]:
        """Return actions ``float32[B,A]`` for observations."""
        ...


class ScriptedExperts:
    """The experts of simulators, which see the state and remember their episode."""

    def __init__(self, pool: EnvPool) -> None:
        self._pool = pool

    def restart(self, rows: NDArray[np.int64]) -> None:
        self._pool.expert_reset(rows)

    def actions(self, observation: Observation) -> NDArray[np.float32]:
        return self._pool.expert_actions()


class PolicyExperts:
    """A policy's most probable actions; of a chunk only the first one is asked for.

    Args:
        source: its directory, for messages.
        state_dim: S of the states that it was trained on; None if unknown.
    """

    def __init__(self, policy: VLAPolicy, source: str, state_dim: int | None) -> None:
        self._policy = policy
        self._source = source
        self._state_dim = state_dim

    def restart(self, rows: NDArray[np.int64]) -> None:
        """Do nothing: it remembers nothing of an episode."""

    def actions(self, observation: Observation) -> NDArray[np.float32]:
        """Return actions; raises EmbodrlError if it was trained on states of another size."""
        seen = observation.state.shape[1]
        if self._state_dim not in (None, seen):
            raise EmbodrlError(
                f"{self._source} was trained on states of {self._state_dim} numbers, and this environment gives {seen}",
                "give the environment of its training (env.state, env.include_state)",
                code="expert-state",
            )
        chunks = self._policy.predict(observation.images, observation.instruction, observation.state)
        return chunks[:, 0].astype(np.float32)


def load_experts(config: Config) -> PolicyExperts:
    """Load the policy of ``algorithm.dagger.expert``, with the sizes and statistics in its directory.

    Raises:
        CheckpointError: it does not load, or has another number of action dimensions.
    """
    source = config.algorithm.dagger.expert
    assert source is not None
    directory = Path(source)
    card = read_card(directory) or {}
    found = families_of(read_fields(directory / CONFIG_FILE).content)
    family = config.model.model_type if config.model.model_type in found else found[0]
    model = model_settings(family).model_validate(
        {
            "model_type": family,
            "model_path": str(directory),
            "num_action_chunks": card.get("num_action_chunks", config.model.num_action_chunks),
            "action_dim": config.model.action_dim,
            "add_value_head": False,
        }
    )
    try:
        policy, report = registry.build_policy(model, device=resolve_device(config), dtype=torch.float32, seed=0)
    except EmbodrlError as error:
        error.add(f"while loading algorithm.dagger.expert={source}")
        raise
    logger.info("expert: %s", report.describe(limit=10))
    policy.condition = card.get("condition")
    state_dim = card.get("state_dim")
    return PolicyExperts(policy.eval(), source, state_dim if isinstance(state_dim, int) else None)
