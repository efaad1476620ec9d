"""Options of a run's train engine."""

from __future__ import annotations

from dataclasses import dataclass

from embodrl.config.schema import ActorConfig, Config

VALUE_GROUP = "value_head"
"""Groups of ``VLAPolicy.trainable_groups`` that train with ``actor.optim.value_lr``."""


@dataclass(frozen=True)
class EngineOptions:
    """Settings of an engine.

    Attributes:
        config: precision, optimizer, and batch sizes; all batch sizes are global except the per-process
            ``micro_batch_size``.
        total_iterations: length of the run, for the learning-rate schedule.
        keep_reference: keep the initial trained weights, which a teacher's may replace; each process keeps its part.
            False for a teacher that is a network of its own.
        may_be_stale: rollouts may come from older policies; every update then reports their age.
    """

    config: ActorConfig
    total_iterations: int
    keep_reference: bool = False
    may_be_stale: bool = False

    @classmethod
    def of(cls, config: Config) -> EngineOptions:
        """Return the options of a run."""
        from embodrl.models.common.teacher import is_apart  # models are only built where there is a teacher

        kept = config.algorithm.kl.coef > 0 and not is_apart(config)
        stale = config.runner.max_staleness > 0
        return cls(config.actor, config.runner.max_iterations, kept, stale)
