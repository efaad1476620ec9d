"""Interventions on an acting policy, by a person or by a stand-in with HG-DAgger's rule.

Shapes: B environments, A action dimensions.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from embodrl.algorithms.dagger import dagger, distance
from embodrl.config.schema import DEVICES, Config, DaggerConfig
from embodrl.data.replay import EXPERT, HUMAN, POLICY
from embodrl.envs.pool.pool import EnvPool
from embodrl.envs.real_time.devices import Device, open_device, show, wanted_action
from embodrl.envs.robot.spec import EXPERT as SCRIPTED
from embodrl.errors import EnvTimeout, EnvWorkerDied, UsageError
from embodrl.hybrid_engines.rollout.base import RolloutEngine
from embodrl.runs.policies import find_policy
from embodrl.types import Observation
from embodrl.workers.parts import make_acting, prepare_acting

logger = logging.getLogger(__name__)

Actions = NDArray[np.float32]
Corrected = tuple[Actions, NDArray[np.int64]]


class Intervention(Protocol):
    """Decides at every step who acts."""

    def begin(self, rows: NDArray[np.int64]) -> None:
        """Handle the start of episodes in ``rows``."""
        ...

    def correct(self, observation: Observation, actions: Actions) -> Corrected:
        """Return the actions to execute ``float32[B,A]``, and their sources ``int64[B]``: see ``ReplayBuffer``."""
        ...

    def close(self) -> None: ...


class Gate:
    """Stand-in for a person: the expert takes over for some steps where the policy's action differs too much from its
    own.

    Args:
        settings: section ``algorithm.dagger``.
        num_envs: number of environments, B.
        actions: returns the expert's current actions, ``float32[B,A]``.
        begin: called for rows whose episodes start.
    """

    def __init__(
        self,
        settings: DaggerConfig,
        num_envs: int,
        actions: Callable[[Observation], Actions],
        begin: Callable[[NDArray[np.int64]], None] = lambda rows: None,
    ) -> None:
        assert settings.gate_threshold is not None, "checked by a configuration rule"
        self._threshold = settings.gate_threshold
        self._steps = settings.gate_steps
        self._actions = actions
        self._begin = begin
        self._held: NDArray[np.int64] = np.zeros(num_envs, np.int64)
        self._is_lost = False

    def begin(self, rows: NDArray[np.int64]) -> None:
        self._held[rows] = 0
        self._is_lost = not self._asked(lambda: self._begin(rows))

    def correct(self, observation: Observation, actions: Actions) -> Corrected:
        labels = actions

        def ask() -> None:
            nonlocal labels
            labels = self._actions(observation)

        if self._is_lost or not self._asked(ask):
            return actions, np.full(len(actions), POLICY)
        far = distance(actions[:, None], labels[:, None]) > self._threshold
        self._held = dagger(far, self._held, self._steps)
        acts = self._held > 0
        return np.where(acts[:, None], labels, actions), np.where(acts, EXPERT, POLICY)

    def _asked(self, ask: Callable[[], None]) -> bool:
        try:
            ask()
        except (EnvWorkerDied, EnvTimeout) as error:  # the next step restarts the process and ends its episodes
            logger.warning("no expert until the next episodes: %s", error.message)
            return False
        return True

    def close(self) -> None:
        """Nothing to free."""


class Person:
    """A person, who acts as long as a device is used."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def begin(self, rows: NDArray[np.int64]) -> None:
        """Do nothing: a person sees the start of an episode."""

    def correct(self, observation: Observation, actions: Actions) -> Corrected:
        show(self._device, observation)
        wanted = wanted_action(self._device, actions.shape[-1])
        if wanted is None:
            return actions, np.full(len(actions), POLICY)
        return np.broadcast_to(wanted, actions.shape).copy(), np.full(len(actions), HUMAN)

    def close(self) -> None:
        self._device.close()


def make_intervention(name: str | None, config: Config, pool: EnvPool) -> Intervention | None:
    """Return the intervention by a device, ``expert``, or the policy in a directory; None for None.

    Raises:
        UsageError: the policy does not exist, or is for another robot.
        MissingDependencyError: the package of a device is not installed.
    """
    spec = pool.spec
    if name is None:
        return None
    if name in DEVICES:
        return Person(open_device(name, spec.action_dim, config.env.real_time.control_dir))
    if name == SCRIPTED:
        return Gate(config.algorithm.dagger, spec.num_envs, lambda _: pool.expert_actions(), pool.expert_reset)
    engine = _policy_engine(config, Path(name))  # only the first action of its chunks is used
    return Gate(config.algorithm.dagger, spec.num_envs, lambda seen: engine.decide(seen, "greedy").actions[:, 0])


def _policy_engine(config: Config, path: Path) -> RolloutEngine:
    source = find_policy(path)
    loaded = source.load_config([], verb="serve")
    theirs = loaded.config
    for key in ("action_dim",):
        if getattr(theirs.model, key) != getattr(config.model, key):
            raise UsageError(
                f"the policy {path} has model.{key}={getattr(theirs.model, key)}, the run {getattr(config.model, key)}",
                "name a policy for the same robot",
                code="intervention-other-robot",
            )
    prepare_acting(theirs, loaded.deployment, simulates=False)
    return make_acting(theirs, source.make_policy(theirs))
