"""Updates by rollouts as a test calls them: on an engine, with an algorithm."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from embodrl.algorithms.advantages import Advantages
from embodrl.config.schema import AlgorithmConfig, Config
from embodrl.data.batch import Batch
from embodrl.data.trajectory import TrajectoryBatch
from embodrl.hybrid_engines.base import TrainEngine
from embodrl.learners.on_policy import UPDATE, OnPolicyUpdate


def on_policy(
    engine: TrainEngine, config: Config | AlgorithmConfig, on_step: Callable[[int, int], None] | None = None
) -> OnPolicyUpdate:
    """Return the update of a run, or of an algorithm where one process trains, where the engine is."""
    if isinstance(config, AlgorithmConfig):
        config = Config().model_copy(update={"algorithm": config})
    return engine.attach(UPDATE, config, on_step)


def update(
    engine: TrainEngine,
    batch: TrajectoryBatch,
    advantages: Advantages,
    algorithm: AlgorithmConfig,
    generator: torch.Generator,
    demos: list[Batch] | None = None,
) -> dict[str, float]:
    """Train on a rollout; return the metrics."""
    return on_policy(engine, algorithm).update(batch, advantages, generator, demos)


def proximal(
    engine: TrainEngine, batch: TrajectoryBatch, algorithm: AlgorithmConfig, every_chunk: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Return log-probs and values of the present weights."""
    return on_policy(engine, algorithm).proximal(batch, every_chunk)


def reference_logprobs(engine: TrainEngine, batch: TrajectoryBatch, algorithm: AlgorithmConfig) -> Tensor:
    """Return log-probs under the policy that the run began with."""
    return on_policy(engine, algorithm).reference_logprobs(batch)
