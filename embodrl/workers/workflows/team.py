"""What a workflow's episode returns: the trajectory of the policy, or one for each of several agents.

Shapes: B episodes, N agents.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from embodrl.errors import WorkflowError
from embodrl.workers.outcomes import EpisodeStats
from embodrl.workers.workflows.workflow import Chunk, EpisodeTask, Trajectory

Played = tuple[Trajectory, ...]
"""The trajectories of one episode: a single one, or one for each agent, in the order of ``RolloutWorkflow.agents``."""


class TeamOutcome(NamedTuple):
    """Outcome of an episode: every agent that acted succeeded, the mean of their returns, the sum of their actions."""

    success: bool
    episode_return: float
    length: int


def checked(returned: object, agents: Sequence[str], task: EpisodeTask, name: str) -> Played:
    """Return what ``run_episode`` of the workflow ``name`` returned, None excluded, as trajectories.

    If one was lost with its simulator, all are: what an agent did is worth nothing without the others.

    Raises:
        WorkflowError: it is no trajectory, does not fit ``agents``, has no chunk or too many (``workflow-trajectory``).
    """
    if agents:
        hint = f"return a dict with a Trajectory for each of {', '.join(agents)}, or None to reject the episode"
        named = returned if isinstance(returned, Mapping) else {}
        played = tuple(named.get(agent) for agent in agents) if set(named) == set(agents) else ()
    else:
        hint = "return a Trajectory with at least one chunk, or None to reject the episode"
        played = (returned,)
    trajectories = tuple(each for each in played if isinstance(each, Trajectory))
    if len(trajectories) < max(len(agents), 1) or not acted(trajectories):
        raise WorkflowError(f"{name}.run_episode returned {returned!r:.100}", hint, code="workflow-trajectory")
    longest = max(len(trajectory.chunks) for trajectory in trajectories)
    if longest > task.max_chunks:
        raise WorkflowError(
            f"an episode has {longest} chunks; the limit is {task.max_chunks}",
            "stop at task.max_chunks; in training env.train.max_steps_per_rollout_epoch sets it",
            code="workflow-trajectory",
        )
    if is_lost(trajectories):
        for trajectory in acted(trajectories):
            if not trajectory.lost:
                trajectory.chunks[-1] = _lost_chunk(trajectory.chunks[-1])
    return trajectories


def _lost_chunk(chunk: Chunk) -> Chunk:
    nothing = torch.zeros_like(chunk.valid)
    truncated = nothing.clone()
    truncated[0] = True
    rewards = torch.zeros_like(chunk.rewards)
    return replace(chunk, rewards=rewards, valid=nothing, terminated=nothing, truncated=truncated, success=False)


def acted(played: Played) -> Played:
    """Return the trajectories with a chunk."""
    return tuple(trajectory for trajectory in played if trajectory.chunks)


def is_lost(played: Played) -> bool:
    """Return whether a simulator fault ended the episode."""
    return any(trajectory.lost for trajectory in played)


def outcome_of(played: Played) -> TeamOutcome:
    """Return the outcome of an episode that was not lost."""
    there = acted(played)
    return TeamOutcome(
        all(trajectory.success for trajectory in there),
        sum(trajectory.total_reward for trajectory in there) / len(there),
        sum(trajectory.num_actions for trajectory in there),
    )


def columns_of(
    episodes: Sequence[Played | None], num_agents: int, group_id: Tensor
) -> tuple[list[Trajectory | None], Tensor]:
    """Return the columns ``[B*N]`` of B episodes, None where one is missing, and their groups ``int64[B*N]``.

    A group of episodes becomes a group for each agent, numbered ``group * N + agent``; groups stay neighbours.

    Args:
        episodes: with N trajectories each.
        num_agents: N.
        group_id: ``int64[B]``.
    """
    order = sorted(
        (group * num_agents + agent, row, agent)
        for row, group in enumerate(group_id.tolist())
        for agent in range(num_agents)
    )
    columns = [None if (played := episodes[row]) is None else played[agent] for _, row, agent in order]
    return columns, torch.tensor([group for group, _, _ in order])


def count(
    episodes: Sequence[Played | None], tasks: Sequence[str], agents: Sequence[str], num_steps: int
) -> EpisodeStats:
    """Return what is known of episodes of at most ``num_steps`` chunks; those without an end have no outcome."""
    stats = EpisodeStats.of(tasks, agents)
    for played in episodes:
        if played is None:
            continue
        if is_lost(played):
            stats.lost += 1
        elif all(trajectory.done or len(trajectory.chunks) < num_steps for trajectory in played):
            outcome = outcome_of(played)
            stats.episodes += 1
            stats.successes += outcome.success
            stats.add_to_task(played[0].task.name, outcome.success)
            stats.returns += outcome.episode_return
            stats.solved_returns += outcome.episode_return * outcome.success
            stats.lengths += outcome.length
            for agent, trajectory in zip(agents, played, strict=True) if agents else ():
                if trajectory.chunks:
                    stats.add_to_agent(agent, *outcome_of((trajectory,)))
    return stats
