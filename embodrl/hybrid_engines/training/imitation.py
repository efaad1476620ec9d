"""Imitation of an expert's labels in a growing store (DAgger), by the policy's own supervised loss."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import numpy as np
import torch

from embodrl.config.schema import AlgorithmConfig
from embodrl.data.batch import Batch
from embodrl.data.replay import ReplayBuffer, ReplayStores, decode_words
from embodrl.hybrid_engines.base import Counters
from embodrl.hybrid_engines.training.native import NativeTrainEngine
from embodrl.hybrid_engines.training.policy_engine import EngineOptions
from embodrl.hybrid_engines.training.schedule import learning_rates
from embodrl.models.base import VLAPolicy
from embodrl.types import Observation


class ImitationEngine(NativeTrainEngine):
    """Trains any policy on observations with the expert's actions.

    Args:
        policy, options, device, num_threads: see ``NativeTrainEngine``.
        label_smoothing_bins: see ``VLAPolicy.sft_loss``.

    Attributes:
        num_updates: optimizer steps so far.
    """

    def __init__(
        self,
        policy: VLAPolicy,
        options: EngineOptions,
        device: torch.device | str,
        num_threads: int = 1,
        label_smoothing_bins: float = 0.0,
    ) -> None:
        super().__init__(policy, options, device, num_threads)
        self.label_smoothing_bins = label_smoothing_bins
        self.num_updates = 0

    def learn(
        self, stores: ReplayStores, algorithm: AlgorithmConfig, generator: torch.Generator
    ) -> dict[str, float | None]:
        self.onload()
        settings, optim = algorithm.off_policy, self.config.optim
        rates = learning_rates(optim, self.version, self.options.total_iterations, 0)
        self._set_learning_rates(rates, train_policy=True)
        due = int(settings.utd * max(0, stores.online.stored - settings.warm_up)) - self.num_updates
        totals: dict[str, float] = defaultdict(float)
        for _ in self.steps(due if len(stores.online) else 0):
            batch = self._draw(stores.online, generator)
            for name, value in self.imitation_step(batch, self.label_smoothing_bins).items():
                totals[name] += value
            self.num_updates += 1
        self.version += 1
        self._check_weights()
        result: dict[str, float | None] = {f"train/{name}": total / due for name, total in totals.items()}
        return result | {"train/num_updates": float(max(0, due)), "train/lr": rates.policy}

    def _draw(self, buffer: ReplayBuffer, generator: torch.Generator) -> Batch:
        places = buffer.draw(self.config.global_batch_size, generator)
        seen, labels = buffer.inputs(places), buffer.column("labels", places)
        observation = Observation(
            seen["images"].numpy(),
            seen["state"].numpy(),
            decode_words(seen["words"].numpy()),
            np.zeros(len(places), np.int32),
        )
        mask = torch.ones(labels.shape[:2], dtype=torch.bool)
        return Batch(self.policy.sft_inputs(observation, labels) | {"action_mask": mask})

    def counters(self) -> Counters:
        return super().counters() | {"num_updates": self.num_updates}

    def set_counters(self, state: Mapping[str, int]) -> None:
        super().set_counters(state)
        self.num_updates = int(state["num_updates"])
