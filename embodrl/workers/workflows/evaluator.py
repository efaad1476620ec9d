"""Evaluation of a policy by the workflow that it trains with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from functools import partial

import numpy as np
from numpy.typing import NDArray

from embodrl.errors import EnvTimeout, EnvWorkerDied
from embodrl.hybrid_engines.rollout.batched import DecidingEngine
from embodrl.types import Decoding, Observation
from embodrl.workers.evaluator import Evaluator, ResultRecorder
from embodrl.workers.workflows.async_pool import AsyncPool, PoolEnvironment
from embodrl.workers.workflows.runner import Tally, WorkflowRunner
from embodrl.workers.workflows.team import Played, acted, is_lost, outcome_of
from embodrl.workers.workflows.workflow import EpisodeTask

WavePlayer = Callable[[NDArray[np.int64], ResultRecorder], None]
"""Plays episodes ``int64[n]`` in the first n environments."""


class WorkflowEvaluator(Evaluator):
    """Evaluates like ``Evaluator``, but ``rollout.workflow`` runs the episodes, and their trajectories are the results.

    ``engine.act`` chooses with the decoding, without values. An episode may take ``env.max_episode_steps``; one that
    the workflow ends early counts with the success so far. One that fails or is rejected runs again, like one that a
    simulator fault ended; if the first ones all fail, ``run`` raises WorkflowError.
    """

    def _player(self, decoding: Decoding) -> WavePlayer:
        # Engines without generators by row draw from these through all waves, as in lockstep.
        generators = self.engine.make_generators([self.config.env.eval.seed]) if decoding == "sampled" else None
        make = partial(DecidingEngine, self.engine, decoding, self.pool.spec.num_envs, generators)
        runner = WorkflowRunner(self.config, self.pool, self.engine)
        return lambda wave, recorder: self._play_workflow(runner, make, wave, recorder)

    def _play_workflow(
        self,
        runner: WorkflowRunner,
        make_engine: Callable[[], DecidingEngine],
        wave: NDArray[np.int64],
        recorder: ResultRecorder,
    ) -> None:
        tasks = self._tasks(wave)
        with ExitStack() as stack:
            pool = stack.enter_context(closing(AsyncPool(self.pool)))
            engine = stack.enter_context(closing(make_engine()))
            environments = pool.environments()[: len(tasks)]
            for row, environment in enumerate(environments):
                environment.on_begin(_First(recorder, row, environment))
            views = [engine.for_episode(task.seed) for task in tasks]
            results = runner.play(views, environments, tasks, self.should_stop)
        recorder.results.env_s += pool.busy_s()
        recorder.results.policy_s += engine.busy_s
        tally = Tally()
        for agent in runner.agents:
            recorder.results.agents.setdefault(agent, np.full((len(recorder.results.outcome), 3), np.nan))
        episodes = runner.sort(results, tally)
        if tally.failed == len(results) and np.isnan(recorder.results.outcome[:, 0]).all():
            raise runner.nothing_left(tally) from tally.first_error
        _keep(episodes, recorder, runner.agents)

    def _tasks(self, wave: NDArray[np.int64]) -> list[EpisodeTask]:
        config = self.config
        names = self.pool.spec.tasks
        max_chunks = -(-config.env.max_episode_steps // config.model.num_action_chunks)
        return [
            EpisodeTask(names[number % len(names)], number % len(names), config.env.eval.seed + number, max_chunks, 0)
            for number in wave.tolist()
        ]


class _First:
    """Records the first observation of an episode, and starts its video; the workflow may begin others after it."""

    def __init__(self, recorder: ResultRecorder, row: int, environment: PoolEnvironment) -> None:
        self._recorder = recorder
        self._row = row
        self._environment = environment
        self._seen = False

    async def __call__(self, observation: Observation) -> None:
        if self._seen:
            return
        self._seen = True
        self._recorder.note_first(self._row, observation)
        if (path := self._recorder.videos.get(self._row)) is not None:
            with suppress(EnvWorkerDied, EnvTimeout):  # the next chunk notices the loss
                await self._environment.call("start_video", path=str(path))


def _keep(episodes: Sequence[Played | None], recorder: ResultRecorder, agents: Sequence[str]) -> None:
    """Keep the outcomes of the episodes in the first environments that neither failed nor were lost."""
    known = {row: played for row, played in enumerate(episodes) if played is not None and not is_lost(played)}
    success = np.zeros(recorder.pool.spec.num_envs, np.bool_)
    asked: list[int] = []
    for row, played in known.items():
        success[row] = outcome_of(played).success
        if success[row] and not any(trajectory.chunks[-1].terminated.any() for trajectory in acted(played)):
            asked.append(row)
    at_end = recorder.solved_at_end(success, np.array(asked, np.int64))
    for row, played in known.items():
        success_here, episode_return, length = outcome_of(played)
        recorder.keep(row, (float(success_here), episode_return, float(length), at_end[row]))
        for agent, trajectory in zip(agents, played, strict=True) if agents else ():
            if trajectory.chunks:
                recorder.results.agents[agent][recorder.places[row]] = outcome_of((trajectory,))
