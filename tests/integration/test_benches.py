"""The benchmarks run and give what is promised, at the smallest size; the figures themselves mean nothing here."""

from __future__ import annotations

import json
from pathlib import Path

import asynchrony
import e2e
import learning_signal
import pytest
import task_runner as tasks
import transport
import weight_sync


@pytest.mark.long
def test_transport(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(transport, "BLOCK", dict.fromkeys(transport.BLOCK, 3))
    monkeypatch.setattr(transport, "NUM_BLOCKS", 2)
    monkeypatch.setattr(transport, "WARM_UP", 1)
    path = tmp_path / "transport.json"
    assert transport.main(path) == 0
    result = json.loads(path.read_text())
    sides = [result[name] for name in ("memcpy", "baseline", "embodrl", "embodrl_copy")]
    assert all(side["samples"] == 6 and 0 < side["median_us"] <= side["p95_us"] for side in sides)
    assert result["ratio"] == pytest.approx(result["baseline"]["median_us"] / result["embodrl"]["median_us"], abs=0.06)
    assert result["observation_mb"] == 2.41 and result["hardware"]["cores"] >= 1


@pytest.mark.long
def test_end_to_end_on_an_environment_without_a_simulator(monkeypatch: pytest.MonkeyPatch) -> None:
    small = ["env=toy", "env.train.total_num_envs=4", "env.train.max_steps_per_rollout_epoch=10"]
    small += ["actor.global_batch_size=8", "actor.micro_batch_size=8", "actor.optim.critic_warmup_iterations=0"]
    monkeypatch.setattr(e2e, "check_simulator", lambda config: None)
    monkeypatch.setattr(e2e, "BASELINE", {})
    result = e2e.run(small, iterations=1)
    for side in (result["embodrl"], result["baseline"]):
        assert 0 < side["env_steps"] <= 40
        assert side["env_steps_per_s"] == pytest.approx(side["env_steps"] / side["wall_s"], rel=0.02)
        assert sum(side["wall_split"].values()) == pytest.approx(1, abs=1e-3)
        assert side["cores_busy"] == pytest.approx(sum(side["cores_split"].values()), abs=1e-3)
        assert all(part >= 0 for part in side["cores_split"].values())
    assert result["ratio"] > 0 and result["hardware"]["cpu"]


@pytest.mark.long
def test_rollouts_beside_training_are_measured_in_the_middle_of_a_run() -> None:
    tiny = ("env=toy", "model=openvla", "env.num_processes=1", "env.train.total_num_envs=4", "algorithm.update_epoch=1")
    small = ("actor.global_batch_size=20", "actor.micro_batch_size=20", "env.train.max_steps_per_rollout_epoch=25")
    rows = asynchrony.compare((*tiny, *small), 2)
    for mode, _ in asynchrony.MODES:
        assert rows[mode]["env_steps_per_s"] > 0 and rows[mode]["of_ideal"] > 0
    assert rows["synchronous"]["rollouts"] == 2 and rows["synchronous"]["mean_staleness"] == 0
    for mode, ahead in (("one step ahead", 1), ("bounded, 4", 4), ("rollouts alone", 4)):
        assert 0 <= rows[mode]["mean_staleness"] <= ahead
        assert 0 <= rows[mode]["rollouts"] <= 2 + ahead + 1, "two are trained on, and some may be in store"


def test_the_learning_signal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    small = ["env=toy", "model=mlp", "model.num_action_chunks=2", "env.max_episode_steps=8", "env.num_processes=2"]
    small += ["env.train.total_num_envs=4", "env.train.max_steps_per_rollout_epoch=10"]
    small += ["actor.global_batch_size=20", "actor.micro_batch_size=20", "actor.optim.critic_warmup_iterations=1"]
    monkeypatch.setattr(learning_signal, "check_simulator", lambda config: None)
    path = tmp_path / "signal.json"
    size = ["--states", "4", "--chunks", "5", "--groups", "4"]
    assert learning_signal.main([*size, "--json", str(path), *small]) == 0
    result = json.loads(path.read_text())
    assert result["differences"] == 0, "a chunk played twice from the same state leads to the same"
    assert result["env_steps"]["branches"] >= 4 * 5 * 2
    for outcome in result["outcomes"].values():
        assert set(outcome["shares_percent"]) == {"states", "chunks", "rest"}
    assert result["outcomes"]["return"]["variance"] > 0
    assert all(found["groups"] == 4 and found["chunks"] > 0 for found in result["gradient"].values())
    assert result["gradient"]["branches, return"]["squared_norm"] > 0


def test_tasks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tasks, "NUM_TASKS", {"no_op": 60, "sleep": 30})
    monkeypatch.setattr(tasks, "MEMORY_TASKS", 20)
    monkeypatch.setattr(tasks, "NUM_ROUNDS", 2)
    monkeypatch.setattr(tasks, "SLEEP_S", 0.01)
    path = tmp_path / "tasks.json"
    assert tasks.main(path) == 0
    result = json.loads(path.read_text())
    assert result["no_op_per_s"] > 0 and len(result["resident_after_rounds"]) == 2
    assert result["ratio_no_op"] == pytest.approx(
        result["no_op_per_s"] / result["gather_no_op_per_s"], rel=0.05, abs=0.01
    )
    assert result["sleep_s"] >= 0.01 and result["gather_sleep_s"] >= 0.01


@pytest.mark.slow
def test_weight_sync(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(weight_sync, "ROUNDS", 2)
    monkeypatch.setattr(weight_sync, "BUCKET_BYTES", 300_000)
    monkeypatch.setattr(weight_sync, "TENSOR_BYTES", 80_000)
    path = tmp_path / "weight_sync.json"
    assert weight_sync.main(path, (0.5, 1)) == 0
    rows = json.loads(path.read_text())["rows"]
    kinds = ["memcpy", "memory", "collective", "disk"]
    assert [(row["size_mb"], row["kind"]) for row in rows] == [(size, kind) for size in (0.5, 1) for kind in kinds]
    for row in rows:
        assert 0 < row["median_ms"] <= row["largest_ms"]
        assert row["of_memcpy"] == 1 or row["kind"] != "memcpy"
        assert row["gb_per_s"] > 0
