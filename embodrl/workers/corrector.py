"""Correctors label the policy's observations and act in its place: experts, or a person at a device.

Shapes: B environments, C = 1 action in a chunk, A action dimensions, V cameras, H x W image, S state dimensions.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embodrl.algorithms.dagger import beta_of, dagger, distance
from embodrl.config.schema import DaggerConfig
from embodrl.data.replay import EXPERT, HUMAN, POLICY, encode_words
from embodrl.envs.real_time.devices import Device, show, wanted_action
from embodrl.errors import EnvTimeout, EnvWorkerDied
from embodrl.types import EnvStep, Observation, PolicyOutput
from embodrl.workers.experts import Labeller

logger = logging.getLogger(__name__)


Corrected = tuple[PolicyOutput, dict[str, Tensor]]
"""The output with the actions to execute, and the columns to learn from."""


class Corrector(Protocol):
    """Decides at every policy step who acts."""

    def begin(self, seeds: NDArray[np.int64]) -> None:
        """Fresh episodes begin in all environments, with ``seeds int64[B]``."""
        ...

    def correct(self, observation: Observation, output: PolicyOutput) -> Corrected:
        """Return the actions to execute, and columns including ``source int8[B]``; see ``ReplayBuffer``."""
        ...

    def after(self, step: EnvStep) -> None:
        """The step was executed."""
        ...

    def close(self) -> None:
        """Release resources."""
        ...


class PersonCorrector:
    """A person takes over while an input device is in use; the corrector closes the device."""

    def __init__(self, device: Device) -> None:
        self.device = device

    def begin(self, seeds: NDArray[np.int64]) -> None:
        """Do nothing: the person sees that an episode begins."""

    def correct(self, observation: Observation, output: PolicyOutput) -> Corrected:
        show(self.device, observation)
        wanted = wanted_action(self.device, output.actions.shape[-1])
        source = torch.full((len(output.actions),), POLICY if wanted is None else HUMAN, dtype=torch.int8)
        if wanted is not None:
            output = replace(output, actions=np.broadcast_to(wanted, output.actions.shape).copy())
        return output, {"source": source}

    def after(self, step: EnvStep) -> None:
        """Do nothing."""

    def close(self) -> None:
        self.device.close()


class ExpertCorrector:
    """Queries experts of ``num_envs`` environments once per policy step."""

    def __init__(self, settings: DaggerConfig, experts: Labeller, num_envs: int) -> None:
        self.settings = settings
        self.experts = experts
        size = num_envs
        self._rng = np.random.default_rng(0)
        self._known: NDArray[np.bool_] = np.zeros(size, np.bool_)
        self._held: NDArray[np.int64] = np.zeros(size, np.int64)

    def begin(self, seeds: NDArray[np.int64]) -> None:
        """Start the experts of fresh episodes; the seeds determine who acts when."""
        self._rng = np.random.default_rng(seeds.tolist())
        self._start(np.arange(len(seeds)))

    def _start(self, rows: NDArray[np.int64]) -> None:
        self._held[rows] = 0
        self._known[rows] = True
        try:
            self.experts.restart(rows)
        except (EnvWorkerDied, EnvTimeout) as error:  # the next step restarts the process and ends its episodes
            logger.warning("no expert in %d environments until their next episodes: %s", len(rows), error.message)
            self._known[rows] = False

    def correct(self, observation: Observation, output: PolicyOutput) -> Corrected:
        """Return the output with the actions to execute, and the columns to learn from.

        Columns: ``images uint8[B,V,H,W,3]``, ``state float32[B,S]``, ``words uint8[B,W]`` (``encode_words``), ``labels
        float32[B,1,A]``, ``chosen bool[B]`` (store the label), ``source int8[B]``.
        """
        known = self._known
        try:
            labels = self.experts.actions(observation)[:, None]
        except (EnvWorkerDied, EnvTimeout) as error:
            logger.warning("no labels for one step: %s", error.message)
            labels = np.zeros_like(output.actions, np.float32)
            known = np.zeros_like(known)
        threshold = self.settings.gate_threshold
        draws = self._rng.random(len(labels))
        if threshold is None:
            beta = beta_of(self.settings.beta, self.settings.beta_decay, output.version)
            acts = known & (draws < beta)
            chosen = known
        else:
            far = known & (distance(output.actions, labels) > threshold)
            self._held = dagger(far, self._held, self.settings.gate_steps)
            acts = chosen = known & (self._held > 0)
        columns = {
            "images": torch.from_numpy(observation.images.copy()),
            "state": torch.from_numpy(observation.state.copy()),
            "words": torch.from_numpy(encode_words(observation.instruction)),
            "labels": torch.from_numpy(labels),
            "chosen": torch.from_numpy(chosen.copy()),
            "source": torch.from_numpy(np.where(acts, EXPERT, POLICY).astype(np.int8)),
        }
        return replace(output, actions=np.where(acts[:, None, None], labels, output.actions)), columns

    def after(self, step: EnvStep) -> None:
        """Start the experts of the episodes that began when others ended."""
        ended = np.flatnonzero(step.done)
        if len(ended):
            self._start(ended)

    def close(self) -> None:
        """Do nothing."""
