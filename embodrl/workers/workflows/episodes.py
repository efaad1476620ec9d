"""Episodes that a script submits one by one and takes as they end."""

from __future__ import annotations

import inspect
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from embodrl.config.schema import Config
from embodrl.data.trajectory import TrajectoryBatch
from embodrl.envs.environment import Environment
from embodrl.envs.pool.pool import EnvPool
from embodrl.errors import EmbodrlError
from embodrl.hybrid_engines.rollout.base import RolloutEngine
from embodrl.hybrid_engines.rollout.batched import BatchedEngine
from embodrl.names import agents_of, nearest
from embodrl.workers.lockstep import Seconds, shard_meta
from embodrl.workers.recorders import Judging
from embodrl.workers.workflows.async_pool import AsyncPool
from embodrl.workers.workflows.runner import WorkflowRunner
from embodrl.workers.workflows.task_runner import AsyncTaskRunner
from embodrl.workers.workflows.workflow import EpisodeTask, RolloutWorkflow, Trajectory, stack_trajectories

_QUEUED = 64
"""Episodes that may wait for each environment."""
_SUBMITTED = 1
"""Keeps the random numbers of submitted episodes apart from those of shards."""
_SEEDS = 2**31


@dataclass(frozen=True)
class FinishedEpisode:
    """A submitted episode that has ended.

    Attributes:
        id: what ``EpisodePlayer.submit`` returned.
        task: the task that the workflow was given.
        trajectory: what the workflow returned; None if it rejected the episode or failed.
        error: why it failed; None if it did not.
    """

    id: str
    task: EpisodeTask
    trajectory: Trajectory | None
    error: BaseException | None


class EpisodePlayer:
    """Plays submitted episodes in a pool's environments, as many at once as there are; of ``embodrl.Session``.

    Every method is thread-safe. Each chunk is chosen by the weights of that moment, and carries their version.

    Args:
        pool: started pool without auto-reset, which nothing else uses while episodes run.
        judging: requirements of the rewards.
    """

    def __init__(self, config: Config, pool: EnvPool, engine: RolloutEngine, judging: Judging) -> None:
        self._runner = WorkflowRunner(config, pool, engine, judging)
        self._pool = AsyncPool(pool)
        self._engine = BatchedEngine(
            engine, self._runner.needs_values, pool.spec.num_envs, (config.runner.seed, _SUBMITTED)
        )
        self._free: deque[Environment] = deque(self._pool.environments())
        self._tasks: dict[str, EpisodeTask] = {}
        self._counted = Seconds()
        self._number = 0
        self._lock = threading.Lock()
        self._running = AsyncTaskRunner(len(self._free), _QUEUED * len(self._free), name="episodes")

    def submit(self, task: str | Mapping[str, Any] | None = None, workflow: RolloutWorkflow | None = None) -> str:
        """Queue an episode, which begins when an environment is free; return its id.

        Args:
            task: task name, or a mapping with ``task``, ``seed`` and anything else, which the workflow finds in
                ``task.data``. The default of ``task`` are ``env.tasks`` in turn, and of ``seed`` the next one:
                ``algorithm.group_size`` consecutive episodes share both.
            workflow: runs the episode; None for ``rollout.workflow``.

        Raises:
            EmbodrlError: there is no such task (``task-unknown``), or the seed is no integer from 0 on
                (``episode-seed``), or the workflow is none or has several agents (``workflow-class``).
            TaskQueueFull: too many episodes wait.
        """
        if workflow is not None and not inspect.iscoroutinefunction(getattr(workflow, "run_episode", None)):
            raise EmbodrlError(
                f"{workflow!r:.60} has no `async def run_episode(self, engine, env, task)`",
                "give an object of a subclass of embodrl.RolloutWorkflow",
                code="workflow-class",
            )
        if workflow is not None and agents_of(workflow):
            raise EmbodrlError(
                f"{type(workflow).__name__} has several agents, and a submitted episode has one trajectory",
                "train it by rollout.workflow, or give a workflow without `agents`",
                code="workflow-class",
            )
        data = {"task": task} if isinstance(task, str) else dict(task or {})
        with self._lock:
            made = self._task(data)
            name = self._running.submit(self._play, made, self._number, workflow, task_id=str(self._number), timeout=0)
            self._tasks[name] = made
            self._number += 1
        return name

    def wait(self, count: int = 1, timeout: float | None = None) -> list[FinishedEpisode]:
        """Return the next ``count`` episodes, in the order in which they ended.

        After ``timeout`` seconds it returns those so far; the others come with the next ``wait``.
        """
        results = self._running.wait(count, timeout)
        with self._lock:  # after ``submit`` has noted the task
            return [FinishedEpisode(each.id, self._tasks.pop(each.id), each.value, each.exception) for each in results]

    def pause(self) -> None:
        """Begin no more episodes; those that run go on."""
        self._running.pause()

    def resume(self) -> None:
        """Begin episodes again."""
        self._running.resume()

    @property
    def is_idle(self) -> bool:
        """Whether no episode runs, and none begins by itself."""
        health = self._running.health()
        return not health.running and (health.paused or not health.queued)

    def batch(self, episodes: Sequence[FinishedEpisode]) -> TrajectoryBatch:
        """Return episodes as columns ``[T,B]``, for ``Session.rollout``; those of a group are neighbours.

        One that failed or was rejected becomes the column of a lost episode, which is not trained on.

        Raises:
            EmbodrlError: none has a trajectory, or there are not ``algorithm.group_size`` episodes of each task and
                seed (``episode-groups``).
        """
        runner = self._runner
        size = runner.config.algorithm.group_size
        episodes = sorted(episodes, key=lambda each: (each.task.task_id, each.task.seed)) if size > 1 else episodes
        starts = [(each.task.task_id, each.task.seed) for each in episodes]
        if size > 1 and any(starts.count(start) != size for start in starts):
            raise EmbodrlError(
                f"the episodes do not form groups of {size} with one task and one seed",
                "submit all of a group, and wait for them; or set algorithm.group_size=1",
                code="episode-groups",
            )
        found = [each.trajectory for each in episodes]
        groups = torch.arange(len(found)) // size
        batch = stack_trajectories(found, runner.num_steps, groups, runner.bootstrap, runner.judging)
        failed = sum(each.error is not None for each in episodes)
        total = Seconds(self._pool.busy_s(), self._engine.busy_s)
        seconds = Seconds(total.env - self._counted.env, total.policy - self._counted.policy)
        self._counted = total
        batch.meta = shard_meta(batch, runner.count([each and (each,) for each in found]), seconds) | {
            "counts": {
                "workflow/failed_episodes": failed,
                "workflow/rejected_episodes": found.count(None) - failed,
            }
        }
        return batch

    def close(self) -> None:
        """Cancel the episodes that wait and run, and leave the pool."""
        self._running.close()
        self._engine.close()
        self._pool.close()

    def _task(self, data: dict[str, Any]) -> EpisodeTask:
        runner = self._runner
        config, names = runner.config, runner.pool.spec.tasks
        group = self._number // config.algorithm.group_size
        name = data.setdefault("task", names[group % len(names)])
        if name not in names:
            near = nearest(str(name), list(names))
            hint = f"did you mean '{near}'?" if near else f"choose one of {', '.join(names)}"
            raise EmbodrlError(f"there is no task '{name}'", hint, code="task-unknown")
        words = np.random.SeedSequence([config.runner.seed, config.env.train.seed, group]).generate_state(1)
        seed = data.setdefault("seed", int(words[0] >> np.uint32(1)))
        if not isinstance(seed, int | np.integer) or not 0 <= seed < _SEEDS:
            hint = f"give an integer from 0 to {_SEEDS - 1}"
            raise EmbodrlError(f"an episode has the seed {seed!r:.40}", hint, code="episode-seed")
        version, frames = runner.engine.version, runner.judging.keep_frames
        return EpisodeTask(name, names.index(name), int(seed), runner.num_steps, version, frames, data)

    async def _play(self, task: EpisodeTask, number: int, workflow: RolloutWorkflow | None) -> Trajectory | None:
        env = self._free.popleft()  # there is one for each running task
        try:
            played = await self._runner.run_episode(self._engine.for_episode(number), env, task, workflow)
            return None if played is None else played[0]
        finally:
            await env.close()
            self._free.append(env)
