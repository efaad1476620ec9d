"""What every node of a pipeline gets. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from embodrl.config.schema import Config
from embodrl.errors import PipelineError

if TYPE_CHECKING:
    import torch

    from embodrl.data.imitation import DemoDraws
    from embodrl.data.offline import OfflineData
    from embodrl.data.replay import ReplayStores
    from embodrl.hybrid_engines.base import TrainEngine
    from embodrl.learners.records import RecordLearner
    from embodrl.workers.collector import Collector
    from embodrl.workers.reward import RewardWorker


@dataclass(frozen=True)
class PipelineContext:
    """The parts of a run, for one iteration.

    Attributes:
        config: the run.
        iteration: updates done so far.
        engine: trains, and knows the reference policy.
        rollout: gathers experience.
        rewards: judges episodes.
        shuffle: on the CPU; shuffles the chunks of an update. Part of every checkpoint.
        replay: of off-policy and offline runs; see ``stores`` and ``dataset``. Of others what draws demonstrations.
        record_learner: of off-policy and offline runs; see ``learn``.
    """

    config: Config
    iteration: int
    engine: TrainEngine
    rollout: Collector
    rewards: RewardWorker
    shuffle: torch.Generator
    replay: ReplayStores | OfflineData | DemoDraws | None = None
    record_learner: RecordLearner | None = None

    def learn(self) -> dict[str, float | None]:
        """Update the weights by what is recorded; return metrics.

        Raises:
            PipelineError: ``algorithm.loss_type`` learns from rollouts.
        """
        if self.record_learner is None:
            raise PipelineError(
                "the run has no records to learn from",
                "set algorithm.loss_type to an off-policy or offline loss",
                code="records-missing",
            )
        return self.record_learner.learn(self.shuffle)

    @property
    def stores(self) -> ReplayStores:
        """What an off-policy run learns from.

        Raises:
            PipelineError: ``algorithm.loss_type`` is not off-policy.
        """
        from embodrl.data.replay import ReplayStores

        if not isinstance(self.replay, ReplayStores):
            raise PipelineError(
                "the run has no replay buffer", "set algorithm.loss_type to an off-policy loss", code="replay-missing"
            )
        return self.replay

    @property
    def dataset(self) -> OfflineData:
        """What an offline run learns from.

        Raises:
            PipelineError: ``algorithm.loss_type`` is not offline.
        """
        from embodrl.data.offline import OfflineData

        if not isinstance(self.replay, OfflineData):
            raise PipelineError(
                "the run has no dataset", "set algorithm.loss_type to an offline loss", code="dataset-missing"
            )
        return self.replay
