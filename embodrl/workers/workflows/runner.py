"""Rollouts whose episodes are run by a workflow, all concurrently.

Shapes: T policy steps (chunks), B environments.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np

from embodrl.config.schema import Config
from embodrl.data.trajectory import TrajectoryBatch
from embodrl.envs.environment import Environment
from embodrl.envs.pool.pool import EnvPool
from embodrl.errors import EpisodeTimeout, WorkflowError
from embodrl.hybrid_engines.rollout.base import RolloutEngine
from embodrl.hybrid_engines.rollout.batched import BatchedEngine, EpisodeEngine
from embodrl.names import agents_of, import_function, import_workflow
from embodrl.specs import LOSSES
from embodrl.workers.collector import WHOLE, Metrics, Share, Snapshot, SyncCollector
from embodrl.workers.lockstep import EpisodeStats, Seconds, Shard, ShardMeta, meta_of, shard_meta
from embodrl.workers.recorders import NOT_JUDGED, Judging
from embodrl.workers.workflows.agent import AgentWorkflow
from embodrl.workers.workflows.async_pool import AsyncPool
from embodrl.workers.workflows.task_runner import AsyncTaskRunner, TaskResult
from embodrl.workers.workflows.team import Played, checked, columns_of, count
from embodrl.workers.workflows.workflow import BEYOND_REPAIR, EpisodeTask, RolloutWorkflow, judged, stack_trajectories

logger = logging.getLogger(__name__)

# Polling interval for stop signals, in seconds.
_POLL_S = 0.1
# Maximum runs of a shard until an episode of it is accepted; a shard may be few episodes, of one group.
MAX_ATTEMPTS = 4


@dataclass
class Tally:
    """Outcomes of a shard's episodes, over all attempts."""

    attempts: int = 0
    episodes: int = 0
    failed: int = 0
    rejected: int = 0
    seconds: Seconds = field(default_factory=Seconds)
    first_error: BaseException | None = None


class WorkflowRunner:
    """Runs the episodes of a group of environments with a workflow, all concurrently.

    An episode that raises or times out is counted and left out, like one that the workflow rejects. Sampling in an
    episode depends on its numbers, not on the order of requests. The pool is without auto-reset; ``workflow`` None uses
    ``rollout.workflow``.
    """

    def __init__(
        self,
        config: Config,
        pool: EnvPool,
        engine: RolloutEngine,
        judging: Judging = NOT_JUDGED,
        workflow: RolloutWorkflow | None = None,
    ) -> None:
        self.config = config
        self.pool = pool
        self.engine = engine
        self.judging = judging
        if workflow is None:
            assert config.rollout.workflow is not None
            workflow = cast("RolloutWorkflow", import_workflow(config.rollout.workflow))
            if isinstance(workflow, AgentWorkflow) and config.rollout.agent is not None:
                workflow.agent = import_function(config.rollout.agent)
        self.workflow: RolloutWorkflow = workflow
        self.agents = agents_of(workflow)
        self.num_envs = pool.spec.num_envs
        self.num_steps = config.rollout_chunks
        self.needs_values = LOSSES.entry(config.algorithm.loss_type).needs_values
        self.bootstrap = self.needs_values and config.algorithm.bootstrap_type == "truncation"

    def roll_out(self, shard: Shard, should_stop: Callable[[], bool]) -> TrajectoryBatch:
        """Return the episodes of a shard: a column for each, or for each agent of each.

        If all of them were rejected, the shard runs again, up to ``MAX_ATTEMPTS`` times in all: with other random
        numbers, and from other initial states unless ``env.train.use_fixed_reset_state_ids``. All attempts are counted.

        Raises:
            InterruptedError: ``should_stop``, polled now and then, returned True.
            WorkflowError: every episode of an attempt failed, or none was accepted in any attempt.
            EnvError: a simulator is beyond repair.
            RolloutEngineError: the engine is.
        """
        tally = Tally()
        while True:
            failed = tally.failed
            episodes, means = self._attempt(self._redrawn(shard, tally.attempts), should_stop, tally)
            if any(episodes):
                break
            if tally.attempts == MAX_ATTEMPTS or tally.failed - failed == self.num_envs:
                raise self.nothing_left(tally) from tally.first_error
        columns, groups = columns_of(episodes, len(self.agents) or 1, shard.group_id)
        batch = stack_trajectories(columns, self.num_steps, groups, self.bootstrap, self.judging)
        batch.meta = shard_meta(batch, self.count(episodes), tally.seconds) | {
            "counts": {"workflow/failed_episodes": tally.failed, "workflow/rejected_episodes": tally.rejected},
            "means": means,
        }
        return batch

    def rebuild(self) -> None:
        """Rebuild the environments to clear their history."""
        self.pool.call("rebuild", restart=True)

    def _redrawn(self, shard: Shard, attempts: int) -> Shard:
        """Return the shard for a given attempt; groups stay groups."""
        if not attempts:
            return shard
        seeds = shard.seeds
        if not self.config.env.train.use_fixed_reset_state_ids:
            words = [
                np.random.SeedSequence([int(seed), attempts]).generate_state(1)[0] >> np.uint32(1) for seed in seeds
            ]
            seeds = np.array(words, np.int64)
        return replace(shard, seeds=seeds, random=(*shard.random, attempts))

    def _attempt(
        self, shard: Shard, should_stop: Callable[[], bool], tally: Tally
    ) -> tuple[list[Played | None], dict[str, float]]:
        """Return the episodes, None where an episode failed or was rejected, and means for the metrics."""
        names = self.pool.spec.tasks
        episodes = [
            EpisodeTask(names[task_id], task_id, seed, self.num_steps, shard.iteration, self.judging.keep_frames)
            for seed, task_id in zip(shard.seeds.tolist(), shard.task_ids.tolist(), strict=True)
        ]
        with ExitStack() as stack:
            environments = stack.enter_context(closing(AsyncPool(self.pool)))
            engine = BatchedEngine(self.engine, self.needs_values, self.num_envs, shard.random)
            stack.enter_context(closing(engine))
            views = [engine.for_episode(shard.first + row) for row in range(self.num_envs)]
            results = self.play(views, environments.environments(), episodes, should_stop)
        tally.seconds.merge(Seconds(environments.busy_s(), engine.busy_s))
        means = {"workflow/env_batch": environments.mean_batch(), "workflow/policy_batch": engine.mean_batch()}
        return self.sort(results, tally), means

    def play(
        self,
        engines: Sequence[EpisodeEngine],
        environments: Sequence[Environment],
        tasks: Sequence[EpisodeTask],
        should_stop: Callable[[], bool],
    ) -> list[TaskResult]:
        """Run one episode in each environment, all concurrently, and return the results in this order.

        Raises:
            InterruptedError: ``should_stop``, polled now and then, returned True.
        """
        # When it is closed, running episodes are cancelled.
        with AsyncTaskRunner(len(tasks), len(tasks), name="episodes") as runner:
            runner.pause()  # all begin together: the first calls go out as one request
            for row, task in enumerate(tasks):
                runner.submit(self.run_episode, engines[row], environments[row], task, task_id=str(row))
            runner.resume()
            return self._wait(runner, len(tasks), should_stop)

    async def run_episode(
        self, engine: EpisodeEngine, env: Environment, task: EpisodeTask, workflow: RolloutWorkflow | None = None
    ) -> Played | None:
        """Return what a workflow makes of an episode, checked, while it is judged; None uses the runner's workflow.

        Raises:
            EpisodeTimeout: it took longer than ``rollout.episode_timeout_s``.
            WorkflowError: it returned no trajectory, not those of its agents, or one that is too long.
            EmbodrlError: its trajectory lacks the frames to judge.
        """
        workflow = workflow or self.workflow
        limit = self.config.rollout.episode_timeout_s
        clock = asyncio.timeout(limit)
        try:
            async with clock:
                returned = await workflow.run_episode(engine, env, task)
        except TimeoutError as error:
            if not clock.expired():
                raise  # raised by the workflow itself
            raise EpisodeTimeout(
                f"an episode took more than {limit:g} s",
                "find the call that it waits for, or raise rollout.episode_timeout_s (null: no limit)",
            ) from error
        if returned is None:
            return None
        played = checked(returned, agents_of(workflow), task, type(workflow).__name__)
        if (judge := self.judging.judge) is None:
            return played
        return tuple(judged(each, self.num_steps, self.pool.spec.tasks, judge) for each in played)

    def _wait(self, runner: AsyncTaskRunner, count: int, should_stop: Callable[[], bool]) -> list[TaskResult]:
        results: list[TaskResult] = []
        while len(results) < count:
            if should_stop():
                raise InterruptedError
            results += runner.wait(count - len(results), _POLL_S)
        return sorted(results, key=lambda result: int(result.id))

    def sort(self, results: list[TaskResult], tally: Tally) -> list[Played | None]:
        """Return the episodes, None where an episode failed or was rejected; count both."""
        errors = [result.exception for result in results if result.exception is not None]
        for error in errors:
            if isinstance(error, BEYOND_REPAIR):
                raise error
        episodes = [result.value if result.status == "ok" else None for result in results]
        failed = sum(result.status != "ok" for result in results)
        tally.attempts += 1
        tally.episodes += len(results)
        tally.failed += failed
        tally.rejected += episodes.count(None) - failed
        tally.first_error = tally.first_error or next(iter(errors), None)
        if errors and failed < len(results):
            logger.warning("%d of %d episodes failed", len(errors), len(results), exc_info=errors[0])
        return episodes

    def nothing_left(self, tally: Tally) -> WorkflowError:
        error = tally.first_error
        return WorkflowError(
            f"of {tally.episodes} episodes {tally.failed} failed and {tally.rejected} were rejected"
            + (f", in {tally.attempts} attempts" if tally.attempts > 1 else "")
            + (f"; the first failure: {type(error).__name__}: {error}" if error else ""),
            f"fix {self.config.rollout.workflow or type(self.workflow).__name__}",
        )

    def count(self, episodes: Sequence[Played | None]) -> EpisodeStats:
        """Return what is known of the episodes."""
        return count(episodes, self.pool.spec.tasks, self.agents, self.num_steps)


class WorkflowCollector(SyncCollector):
    """Gathers like ``SyncCollector``, but ``rollout.workflow`` runs the episodes, one per environment.

    The batch has a column for each episode, or for each agent of each.

    Args:
        pool: started pool, without auto-reset.
        should_stop: polled while waiting; if it returns True, ``gather`` raises InterruptedError.
        share: the pool's share of the run's environments.
        workflow: None uses ``rollout.workflow``.
    """

    def __init__(
        self,
        config: Config,
        pool: EnvPool,
        engine: RolloutEngine,
        should_stop: Callable[[], bool],
        judging: Judging = NOT_JUDGED,
        share: Share = WHOLE,
        workflow: RolloutWorkflow | None = None,
    ) -> None:
        super().__init__(config, pool, engine, should_stop, judging, share)
        self.episode_runner = WorkflowRunner(config, pool, engine, judging, workflow)
        self._metas: list[ShardMeta] = []

    def gather(self, iteration: int) -> tuple[TrajectoryBatch, Metrics]:
        """See Collector; raises also the errors of ``WorkflowRunner.roll_out``."""
        self._metas = []
        return super().gather(iteration)

    def metas(self) -> list[ShardMeta]:
        return self._metas

    def restore(self, carried: Snapshot) -> None:
        super().restore(carried)
        self._metas = list(carried["metas"])

    def _roll_out(self, iteration: int, epoch: int) -> list[TrajectoryBatch]:
        """Return the episodes of all environments as one batch; raises as ``gather``."""
        seeds, task_ids = self.schedule.draw(iteration, epoch)
        numbers = (self.config.runner.seed, iteration, epoch)
        first = self.schedule.rows.start
        shard = Shard(iteration, seeds, task_ids, self.schedule.group_ids(epoch), numbers, first)
        batch = self.episode_runner.roll_out(shard, self.should_stop)
        self._metas.append(meta_of(batch))
        batch.meta = {}
        return [batch]
