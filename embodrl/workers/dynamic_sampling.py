"""DAPO's dynamic sampling: groups that all succeed or all fail carry no signal, so they are replaced.

Shapes: T policy steps, B environments, C actions in a chunk.
"""

from __future__ import annotations

import torch
from torch import Tensor

from embodrl.algorithms.episodes import split_episodes
from embodrl.data.trajectory import TrajectoryBatch
from embodrl.workers.collector import Collector


def sample_mixed_groups(
    rollout: Collector, batch: TrajectoryBatch, iteration: int
) -> tuple[TrajectoryBatch, dict[str, float | None]]:
    """Return ``[T,B]`` of groups with both successes and failures, from further rollouts if needed, and metrics.

    DAPO: Yu et al. 2025, arXiv 2503.14476, sec. 3.2. There are as many groups as in ``batch``, or fewer if
    the groups of ``algorithm.filter.max_resamples`` further rollouts do not suffice. Surplus groups are dropped.

    Raises:
        InterruptedError: the run is stopping.
    """
    algorithm = rollout.config.algorithm
    size = algorithm.group_size
    epoch = algorithm.rollout_epoch
    wanted = len(batch) // size
    of_a_rollout = wanted // algorithm.rollout_epoch
    most = wanted + algorithm.filter.max_resamples * of_a_rollout
    seen = 0
    parts: list[TrajectoryBatch] = []
    kept = 0
    env_steps = 0
    metrics: dict[str, float | None] = {}
    while True:
        rates = group_success_rates(batch, size)
        mixed = (rates > algorithm.filter.min_rate) & (rates < algorithm.filter.max_rate)
        chosen = mixed.nonzero().squeeze(-1)[: wanted - kept]
        kept = kept + len(chosen)
        seen = seen + len(rates)
        env_steps = env_steps + int(batch.meta["env_steps"])
        parts.append(batch[(chosen.unsqueeze(1) * size + torch.arange(size)).flatten()])
        parts[-1].meta.pop("env_steps")
        if kept == wanted or seen >= most:
            break
        batch, metrics = rollout.gather_more(iteration, epoch, min(wanted - kept, most - seen))
        epoch += 1
    selected = TrajectoryBatch.concat(parts)
    selected.meta["env_steps"] = env_steps
    return selected, metrics | {
        "rollout/groups_kept": float(kept),
        "rollout/groups_dropped": float(seen - kept),
        "rollout/groups_missing": float(wanted - kept),
        "rollout/resamples": (seen - wanted) / of_a_rollout,
    }


def group_success_rates(batch: TrajectoryBatch, group_size: int) -> Tensor:
    """Return success rates of groups, ``float32[B / group_size]``, without lost episodes; 0 without episodes."""
    assert batch.success is not None
    episodes = split_episodes(batch.valid, batch.terminated, batch.truncated)
    known = ~episodes.lost
    group = episodes.column[known] // group_size
    count = torch.zeros(batch.success.shape[1] // group_size)
    successes = count.clone().index_add_(0, group, episodes.of(batch.success)[known].float())
    return successes / count.index_add_(0, group, torch.ones(len(group))).clamp_min(1)
