"""Offline learning: weighted imitation of a dataset, with or without IQL critics, on any engine."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor

from embodrl.algorithms.offline import advantage_weights
from embodrl.config.schema import Config
from embodrl.data.batch import Batch
from embodrl.data.offline import OfflineData
from embodrl.hybrid_engines.base import TrainEngine
from embodrl.hybrid_engines.training.schedule import LearningRates, learning_rates
from embodrl.learners.base import LearnerState
from embodrl.learners.imitation_update import UPDATE, ImitationUpdate
from embodrl.learners.offline.iql import IqlCritics
from embodrl.learners.offline.settings import offline_settings
from embodrl.learners.records import ReplayUpdater
from embodrl.models.base import VLAPolicy
from embodrl.models.common.condition import Condition, conditioned
from embodrl.storage.checkpoint import Checkpoint

SECTION = "critics"
"""Checkpoint section of the tensors."""


class OfflineUpdater(ReplayUpdater):
    """Imitates the executed actions of a dataset, with a weight per chunk.

    The critics are small and train in this process; the engine, wherever it runs, receives their weights.

    Args:
        policy: this process's policy, which preprocesses frames; any with ``sft_loss``.
        critics: IQL critics, whose advantages define the weights; None: equal weights.
        on_step: called with the finished and the total number of optimizer steps of an update.
    """

    def __init__(
        self,
        config: Config,
        policy: VLAPolicy,
        engine: TrainEngine,
        data: OfflineData,
        critics: IqlCritics | None,
        on_step: Callable[[int, int], None] | None = None,
    ) -> None:
        super().__init__(on_step)
        self.config = config
        self.policy = policy
        self.engine = engine
        self.data = data
        self.critics = critics
        self.update: ImitationUpdate = engine.attach(UPDATE, config)

    def learn(self, generator: torch.Generator) -> dict[str, float | None]:
        config = self.config
        engine = self.engine
        settings = offline_settings(config.algorithm)
        rates = learning_rates(config.actor.optim, engine.version, config.runner.max_iterations, 0)
        totals: dict[str, float] = defaultdict(float)
        for _ in self.steps(settings.updates):
            for name, value in self._step(rates, generator).items():
                totals[name] += value
        self.update.complete()
        result: dict[str, float | None] = {f"train/{name}": x / settings.updates for name, x in totals.items()}
        counts = {"train/num_updates": float(settings.updates), "train/lr": rates.policy}
        return result | counts | ({} if self.critics is None else {"train/value_lr": rates.value})

    def _step(self, rates: LearningRates, generator: torch.Generator) -> dict[str, float]:
        data = self.data
        settings = offline_settings(self.config.algorithm)
        clip_grad = self.config.actor.optim.clip_grad
        frames = data.draw(self.config.actor.global_batch_size, generator)
        weights = torch.ones(len(frames))
        metrics = dict[str, float]()
        if self.critics is not None:
            found = self.critics.update(data, frames, self.config.algorithm, rates.value, clip_grad)
            weights = advantage_weights(found[0], settings.temperature, settings.max_weight).cpu()
            at_bound = float((weights >= settings.max_weight).float().mean())
            metrics = {**found[1], "weight_mean": float(weights.mean()), "weights_clipped": at_bound}
        words = (
            None
            if data.positive is None
            else advantage_instructions(data, frames, settings.condition_dropout, generator)
        )
        return metrics | self.imitate(frames, weights, rates.policy, words)

    def imitate(
        self, frames: Tensor, weights: Tensor, learning_rate: float, words: list[str] | None = None
    ) -> dict[str, float]:
        """Take one step on ``sum_i w_i loss_i / (number of actions)``; return metrics.

        ``frames int64[B]`` are indices, ``weights float32[B]``; ``words`` None uses the dataset's instructions.
        """
        actions, inside = self.data.actions(frames, self.policy.action_horizon)
        inputs = self.policy.sft_inputs(self.data.observation(frames, words), actions)
        batch = Batch(
            {name: tensor.cpu() for name, tensor in inputs.items()} | {"action_mask": inside * weights[:, None]}
        )
        smoothing = offline_settings(self.config.algorithm).label_smoothing_bins
        metrics = self.update.step(batch, learning_rate, smoothing, float(inside.sum()))
        return {"policy_loss": metrics.pop("loss")} | metrics

    # -- state ---------------------------------------------------------------------------------------------------------

    def state(self) -> LearnerState:
        return LearnerState({}, {} if self.critics is None else {SECTION: self.critics.tensors()})

    def load_state(self, checkpoint: Checkpoint) -> None:
        if self.critics is not None:
            self.critics.load(checkpoint.tensors(SECTION))


def advantage_instructions(data: OfflineData, frames: Tensor, dropout: float, generator: torch.Generator) -> list[str]:
    """Return the frames' instructions, all but a fraction of which state whether the advantage is positive."""
    index = frames.numpy()
    dropped = (torch.rand(len(frames), generator=generator) < dropout).tolist()
    assert data.positive is not None, "the data are labelled"
    signs: list[Condition] = ["positive" if flag else "negative" for flag in data.positive[index]]
    texts = data.demos.said(index)
    return [conditioned(text, None if drop else sign) for text, sign, drop in zip(texts, signs, dropped, strict=True)]
