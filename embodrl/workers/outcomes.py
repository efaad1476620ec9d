"""Outcomes of the episodes of rollouts, and their metrics.

Shapes: B environments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from embodrl.envs.pool.pool import EnvPool
from embodrl.types import EnvStep, Observation
from embodrl.workers.play import PlayedChunk, Recorder


@dataclass
class EpisodeStats:
    """Outcomes of the episodes that ended in a rollout.

    Attributes:
        successes, episodes: counts without lost episodes.
        cut: number of episodes cut off by the end of the rollout, before an outcome.
        returns, lengths: sums of rewards and of environment steps, over ``episodes``.
        solved_returns: sum of rewards over ``successes``.
        by_task: task -> [successes, episodes], for all tasks that could have been run.
        by_agent: agent -> [episodes in which it acted, its successes, returns, actions], for a workflow's agents.
    """

    successes: int = 0
    episodes: int = 0
    lost: int = 0
    cut: int = 0
    returns: float = 0.0
    solved_returns: float = 0.0
    lengths: int = 0
    by_task: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    by_agent: dict[str, list[float]] = field(default_factory=dict[str, list[float]])

    @staticmethod
    def of(tasks: Sequence[str], agents: Sequence[str] = ()) -> EpisodeStats:
        """Return zero counts."""
        return EpisodeStats(by_task={task: [0, 0] for task in tasks}, by_agent={agent: [0.0] * 4 for agent in agents})

    def add(self, step: EnvStep, acted: NDArray[np.bool_], tasks: Sequence[str]) -> None:
        """Count the chunk's ended episodes, lost ones only as lost; ``acted bool[B]`` ran ``tasks``."""
        done = step.done & acted
        lost = done & ~step.valid.any(axis=1)
        ended = done & ~lost
        self.lost += int(lost.sum())
        self.episodes += int(ended.sum())
        self.successes += int(step.success[ended].sum())
        # Float64 sums do not depend on the order in which rollout processes add their parts.
        self.returns += float(step.episode_return[ended].sum(dtype=np.float64))
        self.solved_returns += float(step.episode_return[ended & step.success].sum(dtype=np.float64))
        self.lengths += int(step.episode_length[ended].sum())
        for row in np.flatnonzero(ended).tolist():
            self.add_to_task(tasks[row], bool(step.success[row]))

    def add_to_task(self, task: str, success: bool) -> None:
        """Count an episode under its task."""
        successes, episodes = self.by_task.get(task, (0, 0))
        self.by_task[task] = [successes + success, episodes + 1]

    def add_to_agent(self, agent: str, success: bool, episode_return: float, length: int) -> None:
        """Count an episode in which an agent acted."""
        added = (1, success, episode_return, length)
        self.by_agent[agent] = [float(a + b) for a, b in zip(self.by_agent[agent], added, strict=True)]

    def merge(self, other: EpisodeStats) -> None:
        """Add the counts of another rollout."""
        for agent, sums in other.by_agent.items():
            self.by_agent[agent] = [a + b for a, b in zip(self.by_agent.get(agent, [0.0] * 4), sums, strict=True)]
        for name, value in vars(other).items():
            if name not in ("by_task", "by_agent"):
                setattr(self, name, getattr(self, name) + value)
        for task, counts in other.by_task.items():
            self.by_task[task] = [a + b for a, b in zip(self.by_task.get(task, (0, 0)), counts, strict=True)]

    def as_dict(self) -> dict[str, Any]:
        """Return a plain-value copy; ``EpisodeStats(**values)`` restores it."""
        return asdict(self)

    def metrics(self) -> dict[str, float | None]:
        """Return means over the ended episodes, also per task if there are several, and per agent of a workflow.

        They are None without ended episodes.
        """
        count = self.episodes
        started = self.episodes + self.cut
        failed = self.episodes - self.successes
        result = {
            "rollout/success_rate": self.successes / count if count else None,
            "rollout/return": self.returns / count if count else None,
            "rollout/return_solved": self.solved_returns / self.successes if self.successes else None,
            "rollout/return_failed": (self.returns - self.solved_returns) / failed if failed else None,
            "rollout/episode_length": self.lengths / count if count else None,
            "rollout/episodes": float(count),
            "rollout/lost_episodes": float(self.lost),
            "rollout/cut_episodes": float(self.cut),
            "rollout/success_rate_started": self.successes / started if started else None,
        }
        if len(self.by_task) > 1:
            for task, (successes, episodes) in self.by_task.items():
                result[f"rollout/{task}/success_rate"] = successes / episodes if episodes else None
                result[f"rollout/{task}/episodes"] = float(episodes)
        for agent, (episodes, *sums) in self.by_agent.items():
            for name, value in zip(("success_rate", "return", "episode_length"), sums, strict=True):
                result[f"rollout/agent/{agent}/{name}"] = value / episodes if episodes else None
        return result


class EndedEpisode(NamedTuple):
    """Outcome of an episode.

    Attributes:
        row: its environment.
        number: how many episodes of the environment the rollout had before it; 0 for the one that the rollout began.
        seed, task: reset seed and index of the task.
    """

    row: int
    number: int
    seed: int
    task: int
    success: bool


class OutcomeRecorder(Recorder):
    """Counts the episodes that end, and the ones that the end of a rollout cuts off.

    Attributes:
        ended: episodes that ended by themselves or at the step limit, in order.
    """

    def __init__(self, pool: EnvPool) -> None:
        self.pool = pool
        self.stats = EpisodeStats()
        self.ended: list[EndedEpisode] = []
        self._numbers: NDArray[np.int64] = np.zeros(0, np.int64)

    def begin(self, seeds: NDArray[np.int64], observation: Observation) -> None:
        self.stats = EpisodeStats.of(self.pool.spec.tasks)
        self.ended = []
        self._numbers = np.zeros(len(seeds), np.int64)

    def after(self, chunk: PlayedChunk) -> None:
        tasks = [self.pool.spec.tasks[task] for task in chunk.task_id.tolist()]
        self.stats.add(chunk.step, chunk.active, tasks)
        step = chunk.step
        for row in np.flatnonzero(chunk.ended).tolist():
            about = (int(self._numbers[row]), int(step.episode_seed[row]), int(chunk.task_id[row]))
            self.ended.append(EndedEpisode(row, *about, bool(step.success[row])))
        self._numbers += chunk.active & step.done

    def end(self, last: PlayedChunk) -> None:
        self.stats.cut += int(last.going.sum())
