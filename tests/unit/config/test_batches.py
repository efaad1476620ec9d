"""Batch sizes that follow from the rollout."""

from __future__ import annotations

import pytest
from expect import raises_code

from embodrl.config import load_config

TOY = ["env=toy", "env.num_processes=1", "model.warm_start=null", "model=mlp"]


@pytest.mark.parametrize(
    ("envs", "steps", "batch", "micro"), [(3, 7, 21, 21), (16, 10, 160, 80), (7, 100, 140, 70), (1, 1, 1, 1)]
)
def test_a_debug_run_takes_any_rollout(envs: int, steps: int, batch: int, micro: int) -> None:
    sizes = [f"env.train.total_num_envs={envs}", f"env.train.max_steps_per_rollout_epoch={steps}"]
    loaded = load_config([*TOY, "runner=debug", *sizes, "algorithm=ppo"], verb="train")
    assert (loaded.config.actor.global_batch_size, loaded.config.actor.micro_batch_size) == (batch, micro)
    if batch != 160:
        assert "runner.fit_batches" in str(loaded.origins["actor.global_batch_size"])


def test_a_size_that_was_given_is_kept_and_judged() -> None:
    with raises_code("batches-fill-rollouts"):
        load_config([*TOY, "runner=debug", "actor.global_batch_size=150", "actor.micro_batch_size=50"], verb="train")
    with raises_code("batches-fill-rollouts"):
        load_config([*TOY, "env.train.total_num_envs=3"], verb="train")


def test_batches_that_are_drawn_from_records_stay_as_they_are() -> None:
    usual = load_config([*TOY, "algorithm=sac"], verb="train").config.actor
    debug = load_config([*TOY, "algorithm=sac", "runner=debug"], verb="train").config.actor
    assert debug.global_batch_size == usual.global_batch_size
