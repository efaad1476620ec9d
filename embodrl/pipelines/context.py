"""What every node of a pipeline gets. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from embodrl.config.schema import Config

if TYPE_CHECKING:
    import torch

    from embodrl.data.trajectory import TrajectoryBatch
    from embodrl.hybrid_engines.base import TrainEngine
    from embodrl.workers.reward import RewardWorker


class RolloutSource(Protocol):
    """Where experience comes from, e.g. a ``RolloutWorker``."""

    def gather(self, iteration: int) -> tuple[TrajectoryBatch, dict[str, float | None]]:
        """Return the batch of an iteration, with ``meta["env_steps"]``, and metrics.

        Raises:
            InterruptedError: the run is to stop.
        """
        ...

    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Act with these weights from now on."""
        ...


@dataclass(frozen=True)
class Context:
    """The parts of a run, for one iteration.

    Attributes:
        config: the run.
        iteration: updates done so far.
        engine: trains, and knows the reference policy.
        rollout: gathers experience.
        rewards: judges episodes.
        shuffle: on the CPU; shuffles the chunks of an update. Part of every checkpoint.
    """

    config: Config
    iteration: int
    engine: TrainEngine
    rollout: RolloutSource
    rewards: RewardWorker
    shuffle: torch.Generator
