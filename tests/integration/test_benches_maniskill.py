"""The benchmarks on the real simulator, at the smallest size; the figures themselves mean nothing here."""

from __future__ import annotations

import e2e
import envs
import pytest
import render

pytestmark = [pytest.mark.sim, pytest.mark.slow, pytest.mark.xdist_group("maniskill")]


@pytest.mark.long
def test_rendering(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render, "NUM_BLOCKS", 1)
    monkeypatch.setattr(render, "FRAMES", {64: 3, 224: 3})
    monkeypatch.setattr(render, "WARM_UP", 1)
    result = render.run()
    for size in ("64", "224"):
        figures = result["sizes"][size]
        assert 0 < figures["mean_difference_of_255"] < 10
        for mode in ("loop", "render"):
            assert figures[mode]["stock"]["samples"] == figures[mode]["embodrl"]["samples"] == 3
            assert figures[mode]["ratio"] > 0
    assert result["ratio"] > 0 and result["ratio_224"] > 0 and result["hardware"]["cpu"]


@pytest.mark.long
def test_end_to_end() -> None:
    small = ["env.train.total_num_envs=2", "env.train.max_steps_per_rollout_epoch=50"]
    small += ["actor.global_batch_size=10", "actor.micro_batch_size=10", "actor.optim.critic_warmup_iterations=0"]
    result = e2e.run(small, iterations=1)
    for side in (result["embodrl"], result["baseline"]):
        assert 0 < side["env_steps"] <= 100
        assert side["wall_split"]["env"] > 0 and side["cores_split"]["simulation"] > 0
    assert result["ratio"] > 0


@pytest.mark.long
def test_environments_beside_the_vectorisation_of_maniskill(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(envs, "ROUNDS", 1)
    monkeypatch.setattr(envs, "BLOCK_S", 0.05)
    result = envs.run(["maniskill"], [64], [1])["envs"]["maniskill"]
    assert [row["steps_per_s"] > 0 for row in result["rows"]] == [True] * 3
    assert result["rows"][0]["what"] == envs.CASES["maniskill"].stock and result["task"] == "PushCube-v1"
