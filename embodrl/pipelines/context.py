"""The context passed to every node of a pipeline. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from embodrl.config.schema import Config
from embodrl.errors import PipelineError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from embodrl.algorithms.advantages import Advantages
    from embodrl.algorithms.totals import Totals
    from embodrl.data.batch import Batch
    from embodrl.data.offline import OfflineData
    from embodrl.data.replay import ReplayStores
    from embodrl.data.trajectory import TrajectoryBatch
    from embodrl.hybrid_engines.base import TrainEngine
    from embodrl.workers.collector import Collector
    from embodrl.workers.reward import RewardWorker


class LearnsFromRollouts(Protocol):
    """Updates from rollouts; ``learners.on_policy.OnPolicyUpdate`` documents the methods."""

    def update(
        self,
        batch: TrajectoryBatch,
        advantages: Advantages,
        generator: torch.Generator,
        demos: Iterator[Batch] | list[Batch] | None = None,
        loss: Callable[..., object] | str | None = None,
    ) -> dict[str, float]: ...
    def proximal(self, batch: TrajectoryBatch, every_chunk: bool = False) -> tuple[Tensor, Tensor | None]: ...
    def reference_logprobs(self, batch: TrajectoryBatch) -> Tensor: ...


class Imitated(Protocol):
    """Demonstrations; ``learners.on_policy.Demonstrations`` documents the method."""

    def draws(self, batch: TrajectoryBatch, advantages: Advantages) -> Iterator[Batch]: ...


class LearnsFromRecords(Protocol):
    """Updates from records; ``learners.records.ReplayUpdater`` documents the method."""

    def learn(self, generator: torch.Generator) -> dict[str, float | None]: ...


@dataclass(frozen=True)
class PipelineContext:
    """The parts of a run, for one iteration.

    Attributes:
        config: run configuration.
        iteration: updates done so far.
        engine: holds the trained weights.
        rollout: gathers experience.
        rewards: judges episodes.
        shuffle: shuffles the chunks of an update, on the CPU. Part of every checkpoint.
        on_policy: for runs that learn from rollouts; see ``updates``.
        imitated: demonstrations that updates from rollouts also imitate.
        from_records: for off-policy and offline runs; see ``learn``.
        replay: for off-policy runs; see ``stores``.
        recorded: for offline runs; see ``dataset``.
        totals: sums statistics over the rollouts of several controllers; None for one.
    """

    config: Config
    iteration: int
    engine: TrainEngine
    rollout: Collector
    rewards: RewardWorker
    shuffle: torch.Generator
    on_policy: LearnsFromRollouts | None = None
    imitated: Imitated | None = None
    from_records: LearnsFromRecords | None = None
    replay: ReplayStores | None = None
    recorded: OfflineData | None = None
    totals: Totals | None = None

    @property
    def updates(self) -> LearnsFromRollouts:
        """Updates from rollouts.

        Raises:
            PipelineError: ``algorithm.loss_type`` learns from records.
        """
        if self.on_policy is None:
            raise PipelineError(
                "the run does not learn from its rollouts alone",
                "set algorithm.loss_type to an on-policy loss",
                code="rollouts-unused",
            )
        return self.on_policy

    def learn(self) -> dict[str, float | None]:
        """Update the weights from records; return metrics.

        Raises:
            PipelineError: ``algorithm.loss_type`` learns from rollouts.
        """
        if self.from_records is None:
            raise PipelineError(
                "the run has no records to learn from",
                "set algorithm.loss_type to an off-policy or offline loss",
                code="records-missing",
            )
        return self.from_records.learn(self.shuffle)

    @property
    def stores(self) -> ReplayStores:
        """Replay buffer and demonstrations of an off-policy run.

        Raises:
            PipelineError: ``algorithm.loss_type`` is not off-policy.
        """
        if self.replay is None:
            raise PipelineError(
                "the run has no replay buffer", "set algorithm.loss_type to an off-policy loss", code="replay-missing"
            )
        return self.replay

    @property
    def dataset(self) -> OfflineData:
        """Dataset of an offline run.

        Raises:
            PipelineError: ``algorithm.loss_type`` is not offline.
        """
        if self.recorded is None:
            raise PipelineError(
                "the run has no dataset", "set algorithm.loss_type to an offline loss", code="dataset-missing"
            )
        return self.recorded
