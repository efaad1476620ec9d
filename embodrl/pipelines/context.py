"""What every node of a pipeline gets. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from embodrl.config.schema import Config

if TYPE_CHECKING:
    import torch

    from embodrl.hybrid_engines.base import TrainEngine
    from embodrl.workers.collector import Collector
    from embodrl.workers.reward import RewardWorker


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
    rollout: Collector
    rewards: RewardWorker
    shuffle: torch.Generator
