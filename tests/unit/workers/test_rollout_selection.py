"""Groups, dynamic sampling and frames of a rollout, on the toy environment in this process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from test_algorithm_keys import HalfExpert
from test_rollout import CHUNK, KnownPolicy, config_of, worker_of

from embodrl.envs.toy.env import ToyVectorEnv
from embodrl.workers.dynamic_sampling import group_success_rates, sample_mixed_groups
from embodrl.workers.recorders import Judging

# Success of the groups of two that HalfExpert plays: both, one, none, one.
FOUR_GROUPS = (
    "env.tasks=[reach-red]",
    "env.train.total_num_envs=8",
    "env.train.auto_reset=false",
    "env.max_episode_steps=40",
    "env.train.max_steps_per_rollout_epoch=40",
    "algorithm.group_size=2",
)


def gather(*overrides: str, iteration: int = 0) -> Any:
    policy = HalfExpert()
    worker, policy.pool = worker_of(config_of(*FOUR_GROUPS, *overrides), policy)
    batch, metrics = worker.gather(iteration)
    if not worker.config.algorithm.filter.enabled:
        return batch, metrics
    batch, selected = sample_mixed_groups(worker, batch, iteration)
    return batch, metrics | selected


def test_success_rates_of_groups() -> None:
    batch, metrics = gather()
    assert group_success_rates(batch, 2).tolist() == [1.0, 0.5, 0.0, 0.5]
    assert metrics["rollout/success_rate"] == 0.5
    assert batch.group_id.tolist() == [[0, 0, 1, 1, 2, 2, 3, 3]] * 10
    assert batch.meta["env_steps"] == int(batch.valid.sum())
    # by hand: an episode whose loss is not its fault does not count
    lost = batch.valid.clone()
    lost[-1] = False
    batch.valid, batch.terminated = lost, torch.zeros_like(lost)
    batch.truncated = torch.zeros_like(lost)
    batch.truncated[-1, 3, 0] = True
    assert group_success_rates(batch, 2).tolist() == [1.0, 1.0, 0.0, 0.5]


def test_mixed_groups_are_kept_and_the_others_replaced() -> None:
    plain, _ = gather("algorithm.rollout_epoch=2")
    batch, metrics = gather("algorithm.filter.enabled=true")
    assert group_success_rates(batch, 2).tolist() == [0.5] * 4
    assert batch.group_id[0].tolist() == [1, 1, 3, 3, 5, 5, 7, 7]
    kept = [2, 3, 6, 7, 10, 11, 14, 15]
    for name in ("rewards", "valid", "values", "task_id", "success"):
        assert torch.equal(getattr(batch, name), getattr(plain, name)[:, kept]), name
    assert torch.equal(batch.forward_inputs["seen"], plain.forward_inputs["seen"][:, kept])
    assert batch.meta["env_steps"] == int(plain.valid.sum()), "steps of dropped groups were simulated, too"
    assert {name: value for name, value in metrics.items() if "group" in name or "resamples" in name} == {
        "rollout/groups_kept": 4,
        "rollout/groups_dropped": 4,
        "rollout/groups_missing": 0,
        "rollout/resamples": 1,
    }
    assert metrics["rollout/episodes"] == 16 and metrics["rollout/success_rate"] == 0.5


def test_what_is_still_missing_stays_missing() -> None:
    batch, metrics = gather("algorithm.filter={enabled: true,max_resamples: 0}")
    assert batch.rewards.shape[1] == 4 and metrics["rollout/groups_missing"] == 2
    nothing, metrics = gather(
        "algorithm.filter={enabled: true,max_resamples: 1,min_rate: 0.4,max_rate: 0.6}", "algorithm.group_size=4"
    )
    assert nothing.rewards.shape == (10, 0, 4) and metrics["rollout/groups_missing"] == 2
    assert nothing.meta["env_steps"] > 0


@pytest.mark.parametrize("stages", [1, 2])
def test_groups_have_numbers_of_their_own(stages: int) -> None:
    worker, _ = worker_of(
        config_of("algorithm.group_size=2", "algorithm.rollout_epoch=2", f"rollout.pipeline_stages={stages}")
    )
    batch, _ = worker.gather(0)
    assert batch.group_id[0].tolist() == [0, 0, 1, 1, 2, 2, 3, 3] and batch.frames is None


@pytest.mark.parametrize("auto_reset", ["true", "false"])
def test_frames_show_what_a_chunk_led_to(auto_reset: str) -> None:
    config = config_of(f"env.train.auto_reset={auto_reset}", "env.max_episode_steps=16", "env.train.total_num_envs=8")
    worker, _ = worker_of(config, KnownPolicy(0.5))
    worker.judging = Judging(keep_frames=True)
    batch, _ = worker.gather(0)
    assert batch.frames is not None and batch.frames.dtype == torch.uint8
    # the same episodes once more, by hand
    env = ToyVectorEnv(8, config.env.tasks, image_size=8, max_episode_steps=16, auto_reset=False)
    seeds, tasks = worker.schedule.draw(0, 0)
    before = env.reset(seeds, tasks, np.arange(8)).images[:, 0]
    actions, active = np.zeros((8, CHUNK, 7), np.float32), np.ones(8, np.bool_)
    actions[..., 0] = 0.5
    solved = 0
    for index in range(4):
        step = env.chunk_step(actions, active)
        expected = step.observation.images[:, 0].copy()
        ended = step.terminated.any(1) & active
        if auto_reset == "true":  # the end of these was not drawn: the next episode has begun
            expected[ended] = before[ended]
        np.testing.assert_array_equal(batch.frames[index].numpy()[active], expected[active])
        solved, active, before = solved + ended.sum(), active & ~step.done, step.observation.images[:, 0].copy()
    assert 0 < solved < 8 and step.truncated.any()
