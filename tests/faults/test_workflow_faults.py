"""Simulator processes that die while workflows play."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import numpy as np
from expect import raises_code
from test_env_faults import wait_until_gone

from embodrl.envs.pool.pool import EnvPool
from embodrl.errors import EnvError, EnvWorkerDied
from embodrl.workers.workflows.async_pool import AsyncPool

FORWARD = {"actions": np.full((2, 7), 0.01, np.float32)}


def make_pool(**options: Any) -> EnvPool:
    kwargs = {"image_size": 8, "auto_reset": False, "tasks": ["reach-red"]}
    return EnvPool.create("toy", kwargs, total_num_envs=12, num_processes=2, **options)


def test_a_killed_process_ends_its_episodes_cleanly_and_no_others() -> None:
    async def play(pool: EnvPool) -> None:
        environments = AsyncPool(pool)
        envs = environments.environments()
        await asyncio.gather(*(env.initialize("reach-red", seed) for seed, env in enumerate(envs)))
        assert not any(result.lost for result in await asyncio.gather(*(env.execute("act", FORWARD) for env in envs)))
        victim = pool.managers[0].pid
        assert victim is not None
        os.kill(victim, signal.SIGKILL)
        wait_until_gone([victim])
        # One asks first; the others learn with their next call that the restart has cost their episodes, too.
        first = await envs[0].execute("act", FORWARD)
        assert first.lost and first.done and not first.valid.any() and first.truncated.tolist() == [True, False]
        rest = await asyncio.gather(*(env.execute("act", FORWARD) for env in envs[1:]))
        assert [result.lost for result in rest] == [True] * 5 + [False] * 6
        assert all(result.valid.all() for result in rest[5:])
        assert pool.faults.restarts == 1 and pool.faults.lost_episodes == 6
        with raises_code("episode-not-started", EnvError):
            await envs[1].execute("act", FORWARD)
        # New episodes begin on the process that was restarted.
        await asyncio.gather(*(env.initialize("reach-red", 7) for env in envs[:6]))
        again = await asyncio.gather(*(env.execute("act", FORWARD) for env in envs[:6]))
        assert all(result.valid.all() and not result.lost for result in again)
        assert pool.faults.lost_episodes == 6
        environments.close()

    with make_pool() as pool:
        asyncio.run(play(pool))


def test_a_reset_that_finds_its_process_dead_costs_the_episodes_beside_it() -> None:
    async def play(pool: EnvPool) -> None:
        environments = AsyncPool(pool)
        envs = environments.environments()[:3]
        await asyncio.gather(*(env.initialize("reach-red", seed) for seed, env in enumerate(envs)))
        victim = pool.managers[0].pid
        assert victim is not None
        os.kill(victim, signal.SIGKILL)
        wait_until_gone([victim])
        await envs[0].initialize("reach-red", 5)
        with raises_code("episode-lost", EnvError):
            await envs[1].get_state()
        results = await asyncio.gather(*(env.execute("act", FORWARD) for env in envs))
        assert [result.lost for result in results] == [False, True, True]
        assert pool.faults.lost_episodes == 2
        environments.close()

    with make_pool() as pool:
        asyncio.run(play(pool))


def test_a_simulator_beyond_repair_reaches_the_episode_as_an_error() -> None:
    async def play(pool: EnvPool) -> None:
        environments = AsyncPool(pool)
        env, other = environments.environments()[0], environments.environments()[-1]
        await asyncio.gather(env.initialize("reach-red", 1), other.initialize("reach-red", 2))
        victim = pool.managers[0].pid
        assert victim is not None
        os.kill(victim, signal.SIGKILL)
        wait_until_gone([victim])
        with raises_code("env-worker-died", EnvWorkerDied, "0"):
            await env.execute("act", FORWARD)
        assert (await other.execute("act", FORWARD)).valid.all()
        environments.close()

    with make_pool(max_restarts=0) as pool:
        asyncio.run(play(pool))
