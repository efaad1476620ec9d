"""On-policy distillation: the reference of the KL is a second policy, and alone it teaches."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from expect import raises_code
from safetensors.torch import load_file, save_file

import embodrl
from embodrl.errors import CheckpointError, ConfigError
from embodrl.runs.train import resume

pytestmark = pytest.mark.slow
TOY = ["env=toy", "env.state=full", "env.num_processes=1", "env.train.total_num_envs=4", "env.eval.num_episodes=4"]
TOY += ["env.train.max_steps_per_rollout_epoch=10", "actor.global_batch_size=8", "actor.micro_batch_size=8"]
TOY += ["runner.eval_interval=0", "runner.eval_at_start=false", "runner.logger.console=off", "model=mlp"]
TOY += ["actor.optim.lr_warmup_iterations=0", "actor.optim.lr_scheduler=constant"]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy that imitated the scripted expert."""
    directory = tmp_path_factory.mktemp("teacher")
    demos = f"sft.data_dir={directory / 'demos'}"
    collected = ["collect.num_episodes=20", f"collect.output_dir={directory / 'demos'}"]
    embodrl.collect(["env=toy", "model=mlp", "env.state=full", "env.num_processes=1", *collected])
    steps = ["sft.max_steps=100", "sft.batch_size=64", "sft.lr_warmup_steps=1", "runner.seed=7", demos]
    sft = embodrl.sft(["env=toy", "model=mlp", "env.state=full", *steps, f"sft.output_dir={directory / 'sft'}"])
    return sft.policy_dir


def distil(directory: Path, teacher: Path, iterations: int, *settings: str) -> list[dict[str, Any]]:
    distilled = ["algorithm=opd", f"algorithm.teacher={teacher}", f"runner.max_iterations={iterations}"]
    result = embodrl.train([*TOY, *distilled, *settings, f"runner.output_dir={directory}"])
    return result.metrics


def weights(policy: Path) -> dict[str, torch.Tensor]:
    return load_file(policy / "model.safetensors")


def test_the_policy_becomes_like_its_teacher(teacher: Path, tmp_path: Path) -> None:
    rows = distil(tmp_path / "run", teacher, 12, "actor.optim.lr=1e-2")
    divergences = [row["train/ref_kl"] for row in rows]
    assert divergences[-1] < divergences[0] / 2, divergences
    assert all(row["train/policy_loss"] == 0 for row in rows), "without advantages the KL alone teaches"
    reference = load_file(tmp_path / "run" / "checkpoints" / "step_12" / "reference.safetensors")
    known = weights(teacher)
    assert reference and all(torch.equal(t, known[name.removeprefix("model.")]) for name, t in reference.items())


def test_a_run_is_resumed_without_its_teacher(teacher: Path, tmp_path: Path) -> None:
    copied = tmp_path / "teacher"
    shutil.copytree(teacher, copied)
    distil(tmp_path / "whole", copied, 2)
    distil(tmp_path / "halves", copied, 1)
    shutil.rmtree(copied)
    assert resume(tmp_path / "halves", ["runner.max_iterations=2"]) == 0
    mine, theirs = (weights(tmp_path / name / "policy") for name in ("halves", "whole"))
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_rewards_and_a_teacher(teacher: Path, tmp_path: Path) -> None:
    alone = distil(tmp_path / "alone", teacher, 1)
    both = distil(tmp_path / "both", teacher, 1, "algorithm.adv_type=reinforce_pp")
    assert both[0]["train/ref_kl"] == pytest.approx(alone[0]["train/ref_kl"], rel=0.2)
    mine, theirs = (weights(tmp_path / name / "policy") for name in ("alone", "both"))
    assert any(not torch.equal(mine[name], theirs[name]) for name in mine)


def test_a_teacher_of_another_kind_is_refused(teacher: Path, tmp_path: Path) -> None:
    with raises_code("checkpoint-is-of-the-family", ConfigError):
        embodrl.load_config(["env=toy", "model=openvla", "algorithm=opd", f"algorithm.teacher={teacher}"])
    with raises_code("teacher-exists", ConfigError):
        distil(tmp_path / "run", teacher, 1, "model.num_action_chunks=2")
    with raises_code("teacher-differs", CheckpointError):
        distil(tmp_path / "run", teacher, 1, "model.trainable=head")


def test_a_teacher_of_another_size_teaches_alike(teacher: Path, tmp_path: Path) -> None:
    """The KL is that of both networks, it falls, and no copy of the policy is kept."""
    small = ("model.gaussian.hidden_sizes=[24]", "actor.optim.lr=1e-2")
    rows = distil(tmp_path / "run", teacher, 12, *small)
    divergences = [row["train/ref_kl"] for row in rows]
    assert divergences[-1] < divergences[0] / 2, divergences
    run = tmp_path / "run"
    assert not (run / "checkpoints" / "step_12" / "reference.safetensors").exists()
    assert weights(run / "policy").keys() != weights(teacher).keys()


TWO = "cluster.component_placement={actor:'0:0-1',rollout:0,env:0}"
PROCESSES = {
    "own": ["actor.own_process=true"],
    "two": ["actor.training_backend=fsdp", "cluster.device=cpu", TWO, "actor.micro_batch_size=4"],
}


@pytest.mark.long
@pytest.mark.parametrize(("name", "allowed"), [("own", 0.0), ("two", 1e-4)])
def test_a_teacher_in_training_processes_teaches_alike(
    name: str, allowed: float, teacher: Path, tmp_path: Path
) -> None:
    small = ("model.gaussian.hidden_sizes=[24]", "actor.precision=fp32", "rollout.precision=fp32")
    one = distil(tmp_path / "one", teacher, 2, *small)
    several = distil(tmp_path / name, teacher, 2, *small, *PROCESSES[name])
    for mine, theirs in zip(several, one, strict=True):
        for metric in ("train/ref_kl", "train/grad_norm", "train/entropy"):
            assert mine[metric] == pytest.approx(theirs[metric], rel=allowed, abs=allowed), metric
    assert several[0]["train/ref_kl"] > 0.1


def test_a_resumed_run_reads_the_same_teacher(teacher: Path, tmp_path: Path) -> None:
    copied = tmp_path / "copied"
    shutil.copytree(teacher, copied)
    small = "model.gaussian.hidden_sizes=[24]"
    distil(tmp_path / "whole", copied, 2, small)
    distil(tmp_path / "halves", copied, 1, small)
    assert resume(tmp_path / "halves", ["runner.max_iterations=2"]) == 0
    mine, theirs = (weights(tmp_path / name / "policy") for name in ("halves", "whole"))
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    stored = load_file(copied / "model.safetensors")
    save_file({name: value + 1 for name, value in stored.items()}, copied / "model.safetensors")
    for name in ("checksums.json", "SHA256SUMS"):
        (copied / name).unlink(missing_ok=True)
    with raises_code("teacher-changed", CheckpointError):
        resume(tmp_path / "halves", ["runner.max_iterations=3"])
    shutil.rmtree(copied)
    with raises_code("teacher-changed", CheckpointError):
        resume(tmp_path / "halves", ["runner.max_iterations=3"])


def test_a_teacher_in_the_checkpoint_is_not_replaced_by_another_network(teacher: Path, tmp_path: Path) -> None:
    copied = tmp_path / "copied"
    shutil.copytree(teacher, copied)
    run = tmp_path / "run"
    distil(run, copied, 1)
    small = tmp_path / "small"
    distil(small, teacher, 1, "model.gaussian.hidden_sizes=[24]")
    shutil.rmtree(copied)
    shutil.copytree(small / "policy", copied)
    with raises_code("teacher-changed", CheckpointError):
        resume(run, ["runner.max_iterations=2"])


def test_a_state_teaches_pictures(teacher: Path, tmp_path: Path) -> None:
    """An MLP teaches a CNN, whose inputs have the state, too; another room for the state is refused."""
    cnn = ("model=cnn", "model.gaussian.image_size=16", "model.gaussian.channels=[4,4]", "model.gaussian.feature_dim=8")
    rows = distil(tmp_path / "run", teacher, 1, *cnn)
    assert rows[0]["train/ref_kl"] > 0 and rows[0]["train/num_updates"]
    with raises_code("teacher-differs", CheckpointError, "input"):
        distil(tmp_path / "other", teacher, 1, "model.gaussian.max_state_dim=40")
