"""Updates from the rollouts of several controllers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from embodrl.algorithms.advantages import Advantages
from embodrl.algorithms.losses import LossCounts
from embodrl.config.schema import Config
from embodrl.data.batch import shuffled
from embodrl.data.trajectory import TrajectoryBatch
from embodrl.hybrid_engines.training.data_parallel import ControllerEngine
from embodrl.learners.objective import SOLVED, counts_of
from embodrl.learners.on_policy import OnPolicyUpdate

UPDATE = f"{__name__}:SharedUpdate"


class SharedUpdate(OnPolicyUpdate):
    """Trains on the rollouts of all controllers, each of which has its own part of every minibatch.

    A minibatch has equal parts, drawn from each controller's rows, so that only its counts pass between them.
    """

    engine: ControllerEngine

    def __init__(
        self, engine: ControllerEngine, config: Config, on_step: Callable[[int, int], None] | None = None
    ) -> None:
        super().__init__(engine, config, on_step)
        self.totals = engine.controllers

    def rows(
        self, batch: TrajectoryBatch, advantages: Advantages, trained: Tensor, weights: Tensor | None
    ) -> TrajectoryBatch:
        if bool(trained.any()):
            found = super().rows(batch, advantages, trained, weights)
            self.engine.spare = found[:1]
            return found
        # All rows are without a valid action or an advantage.
        found = super().rows(batch, advantages, torch.ones_like(trained), weights)
        self.engine.spare = found[:1]
        return found[:0]

    def minibatches(self, chunks: TrajectoryBatch, generator: torch.Generator) -> tuple[int, Iterator[TrajectoryBatch]]:
        controllers = self.engine.controllers
        size = self.engine.config.global_batch_size // controllers.count
        most = max(controllers.exchange("rows", len(chunks)))
        # One number of the run's generator, whatever the rows: it stays the same in all controllers.
        seed = int(torch.randint(2**62, (1,), generator=generator))
        mine = torch.Generator().manual_seed(seed)
        epochs = self.algorithm.update_epoch
        per_epoch = -(-most // size)

        def parts() -> Iterator[TrajectoryBatch]:
            for _ in range(epochs if most else 0):
                whole = next(shuffled(len(chunks), max(len(chunks), 1), 1, mine), torch.zeros(0, dtype=torch.int64))
                for rows in whole.tensor_split(per_epoch):
                    yield chunks[rows]

        return epochs * per_epoch, parts()

    def counts(self, minibatch: TrajectoryBatch) -> LossCounts:
        mine = counts_of(minibatch, self.algorithm, self.engine.device)
        # Counts are at least 1, to divide by; an empty minibatch must not add that 1 to the sum.
        drawn = minibatch.drawn
        values = {name: value for name, value in vars(mine).items() if value is not None}
        known = {name: float(value) * bool(drawn.any()) for name, value in values.items()}
        if SOLVED in minibatch and not bool((drawn & minibatch[SOLVED].unsqueeze(-1)).any()):
            known["solved"] = 0.0
        total = self.engine.controllers.sum(torch.tensor(list(known.values()), dtype=torch.float64)).clamp_min(1)
        summed = dict(zip(known, total.float().to(self.engine.device), strict=True))
        return dataclasses.replace(mine, **summed)
