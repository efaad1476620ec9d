"""Rollouts that a run saves, and runs that train on them again without simulators."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from expect import raises_code
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import embodrl
from embodrl.data.trajectory import TrajectoryBatch
from embodrl.errors import FileFormatError
from embodrl.reporting.rows import is_measured
from embodrl.workers.saved_rollouts import check_age, load_rollout, rewards_file, rollout_file

pytestmark = pytest.mark.slow
TOY = ["env=toy", "model=mlp", "env.state=full", "env.num_processes=1", "env.train.total_num_envs=4"]
TOY += ["env.train.max_steps_per_rollout_epoch=10", "actor.global_batch_size=8", "actor.micro_batch_size=8"]
TOY += ["runner.max_iterations=2", "runner.eval_interval=0", "runner.eval_at_start=false", "env.eval.num_episodes=4"]
TOY += ["actor.optim.critic_warmup_iterations=0", "actor.optim.lr_warmup_iterations=0", "runner.logger.console=off"]


def run(directory: Path, *settings: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    result = embodrl.train([*TOY, *settings, f"runner.output_dir={directory}"])
    rows = [{k: v for k, v in row.items() if not is_measured(k)} for row in result.metrics]
    return rows, load_file(directory / "policy" / "model.safetensors")


def test_a_replay_learns_what_the_run_learned(tmp_path: Path) -> None:
    rows, weights = run(tmp_path / "run", "runner.save_rollouts=true")
    saved = tmp_path / "run" / "rollouts"
    assert [path.name for path in sorted(saved.iterdir())] == [rollout_file(saved, i).name for i in (0, 1)]
    batch, metrics = load_rollout(rollout_file(saved, 0))
    assert batch.meta["env_steps"] == 40 and not any(name.startswith("time/") for name in metrics)
    again, same = run(tmp_path / "again", f"rollout.replay={saved}")
    assert again == rows
    assert all((weights[name] == same[name]).all() for name in weights)
    other, _ = run(tmp_path / "other", f"rollout.replay={saved}", "algorithm.gamma=0.5")
    assert other[1]["train/value_loss"] != rows[1]["train/value_loss"], "the same rollouts, judged otherwise"
    with raises_code("rollout-of-another-policy"):
        sizes = ("model.num_action_chunks=2", "actor.global_batch_size=4", "actor.micro_batch_size=4")
        run(tmp_path / "chunks", f"rollout.replay={saved}", *sizes)


PROCESSES = ("cluster.device=cpu", "env.num_processes=2", "cluster.heartbeat_timeout_s=120")
PROCESSES += ("cluster.component_placement={actor: '0:0', rollout: '0:0-1', env: '0:0-1'}",)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(("runner.max_staleness=1", "algorithm.decoupled.enabled=true"), id="ahead"),
        pytest.param(("algorithm=sac",), id="replay-buffer"),
        pytest.param(("algorithm=dagger",), id="labels", marks=pytest.mark.long),
        pytest.param(PROCESSES, id="processes"),
        pytest.param((*PROCESSES, "runner.max_staleness=1"), id="processes-ahead", marks=pytest.mark.long),
    ],
)
def test_rollouts_of_every_kind_of_run_are_replayed(settings: tuple[str, ...], tmp_path: Path) -> None:
    rows, weights = run(tmp_path / "run", *settings, "runner.save_rollouts=true")
    again, same = run(tmp_path / "again", *settings, f"rollout.replay={tmp_path / 'run' / 'rollouts'}")
    assert again == rows and rows[-1]["env_steps"] >= 80
    assert all((weights[name] == same[name]).all() for name in weights)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param((), id="main-process"),
        pytest.param(("algorithm=sac", "algorithm.off_policy.warm_up=10"), id="replay-buffer"),
        pytest.param((*PROCESSES, "runner.max_staleness=1"), id="processes-ahead", marks=pytest.mark.long),
    ],
)
def test_rewards_of_a_function_are_replayed(settings: tuple[str, ...], tmp_path: Path) -> None:
    """They are those that the run paid: the function reads more than a batch has."""
    own = (*settings, "reward.fn=test_saved_rollouts:reached", "reward.on_error=drop")
    rows, weights = run(tmp_path / "run", "runner.save_rollouts=true", *own)
    saved = f"rollout.replay={tmp_path / 'run' / 'rollouts'}"
    again, same = run(tmp_path / "again", saved, *own)
    assert again == rows and rows[-1]["reward/errors"] > 0
    assert all((weights[name] == same[name]).all() for name in weights)
    plain, _ = run(tmp_path / "plain", saved, *settings)
    assert "reward/mean" not in plain[1]
    assert any(plain[1][name] != rows[1][name] for name in rows[1] if name.endswith("_loss"))
    paid = rewards_file(tmp_path / "run" / "rollouts", 0)
    known = json.loads(paid.read_text())
    first, *others = known["outcomes"]
    for number, wrong in enumerate(
        (
            known | {"outcomes": others},
            known | {"outcomes": [first | {"reward": [1.0]}, *others]},
            known | {"by": "reward.fn other:function"},
        )
    ):
        paid.write_text(json.dumps(wrong))
        with raises_code("rollout-of-other-rewards"):
            run(tmp_path / f"other_{number}", saved, *own)
    paid.unlink()
    with raises_code("rollouts-can-be-replayed"):
        run(tmp_path / "unpaid", saved, *own)


def reached(episode: Any) -> float:
    """Return a number from what batches do not have; the call of some episodes fails."""
    if episode.start_state[3] > 0:
        raise ValueError("no reward")
    return float(episode.states[-1].sum())


def test_a_batch_by_weights_of_another_age_is_refused() -> None:
    batch = TrajectoryBatch(
        {"policy_version": torch.tensor([[3, 5], [4, 0]]), "valid": torch.tensor([[[True], [True]], [[True], [False]]])}
    )
    for staleness, iteration, allowed in ((2, 5, True), (1, 5, False), (9, 4, False), (2, 6, False)):
        config = embodrl.load_config([*TOY, f"runner.max_staleness={staleness}"]).config
        with nullcontext() if allowed else raises_code("rollout-of-another-age"):
            check_age("a batch", batch, iteration, config)


def test_what_can_not_be_replayed_is_refused_before_the_run(tmp_path: Path) -> None:
    replay = f"rollout.replay={tmp_path}"
    absent = (f"rollout.replay={tmp_path / 'absent'}",)
    further = ("runner.save_rollouts=true", f"reward.model={tmp_path}", "reward.fn=test_saved_rollouts:reached")
    for settings in ((replay,), absent, *((replay, setting) for setting in further)):
        with raises_code("rollouts-can-be-replayed"):
            embodrl.load_config([*TOY, *settings])


def test_a_rollout_without_a_column_is_refused(tmp_path: Path) -> None:
    run(tmp_path / "run", "runner.save_rollouts=true", "runner.max_iterations=1")
    path = rollout_file(tmp_path / "run" / "rollouts", 0)
    with safe_open(path, "pt") as reader:
        facts = reader.metadata()
    for column in ('["rewards"]', '["valid"]'):
        save_file({name: tensor for name, tensor in load_file(path).items() if name != column}, path, facts)
        with raises_code("rollout-unreadable", FileFormatError, json.loads(column)[0]):
            load_rollout(path)


def test_files_that_are_no_rollouts_are_refused(tmp_path: Path) -> None:
    path = rollout_file(tmp_path, 0)
    for content in (None, b"no safetensors"):
        if content is not None:
            path.write_bytes(content)
        with raises_code("rollout-unreadable", FileFormatError):
            load_rollout(path)
    save_file({}, path)
    with raises_code("rollout-unreadable", FileFormatError):
        load_rollout(path)
