"""Advantages of the tasks of a run, each by an estimator of its own (``algorithm.by_task``).

Shapes: T policy steps (chunks), B environments, K values per chunk (1 or C).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from embodrl.algorithms.advantages import Advantages, compute_advantages, estimate, kl_weights, penalized_rewards
from embodrl.algorithms.totals import WHOLE, Totals
from embodrl.config.schema import AlgorithmConfig, TaskAlgorithmConfig
from embodrl.data.trajectory import TrajectoryBatch
from embodrl.errors import EmbodrlError

_COLUMNS = (
    *("rewards", "values", "end_values", "valid", "terminated", "truncated", "bootstrap_values", "task_id"),
    *("success", "group_id"),
)
"""Columns that estimators read."""


def advantages_by_task(
    batch: TrajectoryBatch, config: AlgorithmConfig, tasks: Sequence[str], totals: Totals = WHOLE
) -> tuple[Advantages, dict[str, float | None]]:
    """Return the advantages of a rollout and, with ``algorithm.by_task``, metrics of each task.

    With it, each task is estimated and normalised as if the rollout had no other one. The metrics are named
    ``advantage/TASK/...``: ``chunks`` (with a simulated action), and over its values the mean return and the standard
    deviation of the advantages that the loss reads; None without values.

    Args:
        batch: rollout.
        config: section ``algorithm``.
        tasks: names of the tasks, by ``task_id``.
        totals: as for ``compute_advantages``; read without ``algorithm.by_task``.

    Raises:
        EmbodrlError: as ``compute_advantages``; estimators return values per chunk for one task, and per action for
            another; or a chunk is of none of the tasks.
    """
    if not config.by_task:
        return compute_advantages(batch, config, totals), {}
    if len(batch) and int(batch.task_id.max()) >= len(tasks):
        raise EmbodrlError(
            f"a chunk has the task {int(batch.task_id.max())}, and env.tasks has {len(tasks)}",
            "name every task that the environment plays in env.tasks, or leave algorithm.by_task out",
            code="task-unknown",
        )
    batch = batch.replace(rewards=penalized_rewards(batch, config, kl_weights(batch, config, tasks)))
    columns = batch.select(*(name for name in _COLUMNS if name in batch))
    own = {each.task: each for each in config.by_task}
    whole: Advantages | None = None
    metrics: dict[str, float | None] = {}
    for number, task in enumerate(tasks):
        there = columns.task_id == number
        rows = there.any(0).nonzero().squeeze(-1)
        if not len(rows):
            metrics |= _metrics(task, batch.rewards[:0], batch.rewards[:0], 0)
            continue
        part = _only(columns[rows], there[:, rows])
        found = _estimate(part, config, own.get(task))
        if whole is None:
            shape = (*batch.rewards.shape[:2], found.valid.shape[-1])
            whole = Advantages(torch.zeros(shape), torch.zeros(shape), torch.zeros(shape, dtype=torch.bool))
        if whole.valid.shape[-1] != found.valid.shape[-1]:
            raise EmbodrlError(
                f"the estimator of {task} returned {found.valid.shape[-1]} values to a chunk, that of another task"
                f" {whole.valid.shape[-1]}",
                "choose estimators in algorithm.by_task that agree on values per chunk or per action",
                code="advantage-result",
            )
        # An environment may play several tasks: only this one's chunks are written.
        for name, column in vars(whole).items():
            column[:, rows] = torch.where(found.valid, getattr(found, name), column[:, rows])
        metrics |= _metrics(
            task, found.advantages[found.valid], found.returns[found.valid], int(part.valid.any(-1).sum())
        )
    return estimate(batch, config) if whole is None else whole, metrics


def _estimate(part: TrajectoryBatch, config: AlgorithmConfig, settings: TaskAlgorithmConfig | None) -> Advantages:
    if settings is None:
        return estimate(part, config)
    found = estimate(part, config.model_copy(update=settings.arguments()))
    return replace(found, advantages=found.advantages * settings.weight)


def _only(part: TrajectoryBatch, there: torch.Tensor) -> TrajectoryBatch:
    """Return the rows without the chunks of other tasks; ``there bool[T,b]`` are the task's."""
    mine = there.unsqueeze(-1)
    names = ("valid", "terminated", "truncated")
    return part.replace(**{name: part[name] & mine for name in names})


def _metrics(task: str, advantages: torch.Tensor, returns: torch.Tensor, num_chunks: int) -> dict[str, float | None]:
    name = f"advantage/{task}"
    some = bool(len(returns))
    return {
        f"{name}/chunks": float(num_chunks),
        f"{name}/mean_return": float(returns.double().mean()) if some else None,
        f"{name}/std": float(advantages.double().std(correction=0)) if some else None,
    }
