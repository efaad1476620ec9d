"""DAgger: imitation of an expert's labels in a growing store, with the policy's own supervised loss.

Ross et al. 2011, "A Reduction of Imitation Learning and Structured Prediction to No-Regret Online Learning", arXiv
1011.0686.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import numpy as np
import torch

from embodrl.config.schema import Config
from embodrl.data.batch import Batch
from embodrl.data.replay import ReplayBuffer, decode_words
from embodrl.hybrid_engines.base import TrainEngine
from embodrl.hybrid_engines.training.schedule import learning_rates
from embodrl.learners.base import LearnerState
from embodrl.learners.imitation_update import UPDATE, ImitationUpdate
from embodrl.learners.records import ReplayUpdater
from embodrl.models.base import VLAPolicy
from embodrl.storage.checkpoint import Checkpoint
from embodrl.types import Observation


class DaggerUpdater(ReplayUpdater):
    """Trains any policy on observations with the expert's actions, on any engine.

    There are ``utd`` updates for each chunk stored since the last call, none before ``warm_up`` chunks.
    """

    def __init__(
        self,
        config: Config,
        policy: VLAPolicy,
        engine: TrainEngine,
        store: ReplayBuffer,
        on_step: Callable[[int, int], None] | None = None,
    ) -> None:
        super().__init__(on_step)
        self.config = config
        self.policy = policy
        self.engine = engine
        self.store = store
        self.update: ImitationUpdate = engine.attach(UPDATE, config)
        self.num_updates = 0

    def learn(self, generator: torch.Generator) -> dict[str, float | None]:
        config = self.config
        engine = self.engine
        settings = config.algorithm.off_policy
        rate = learning_rates(config.actor.optim, engine.version, config.runner.max_iterations, 0).policy
        due = int(settings.utd * max(0, self.store.stored - settings.warm_up)) - self.num_updates
        totals: dict[str, float] = defaultdict(float)
        for _ in self.steps(due if len(self.store) else 0):
            metrics = self.update.step(self._draw(generator), rate, config.sft.label_smoothing_bins)
            for name, value in metrics.items():
                totals[name] += value
            self.num_updates += 1
        self.update.complete()
        result: dict[str, float | None] = {f"train/{name}": total / due for name, total in totals.items()}
        return result | {"train/num_updates": float(max(0, due)), "train/lr": rate}

    def _draw(self, generator: torch.Generator) -> Batch:
        places = self.store.draw(self.config.actor.global_batch_size, generator)
        seen = self.store.inputs(places)
        labels = self.store.column("labels", places)
        observation = Observation(
            seen["images"].numpy(),
            seen["state"].numpy(),
            decode_words(seen["words"].numpy()),
            np.zeros(len(places), np.int32),
        )
        inputs = self.policy.sft_inputs(observation, labels)
        inputs = {name: tensor.cpu() for name, tensor in inputs.items()}
        return Batch(inputs | {"action_mask": torch.ones(labels.shape[:2], dtype=torch.bool)})

    def state(self) -> LearnerState:
        return LearnerState({"num_updates": self.num_updates})

    def load_state(self, checkpoint: Checkpoint) -> None:
        state = checkpoint.state
        # Older checkpoints of native engines keep it among the engine's counters.
        self.num_updates = (state if "num_updates" in state else state.fields("engine")).integer("num_updates")
