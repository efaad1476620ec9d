"""Runs with several controllers: started like any SPMD program, they train as one with all environments does."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from expect import raises_code
from runs import HERE, TINY, Outcome, environment, metrics
from safetensors.torch import load_file

from embodrl.config import load_config
from embodrl.errors import UsageError
from embodrl.session import started
from embodrl.workers.policy import build_policy

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]  # several runs each, of two processes
HELPER = HERE / "controller.py"
LIMIT_S = 480.0
SETTINGS = (
    "runner.max_iterations=3",
    "runner.eval_interval=3",
    "runner.save_interval=1",
    "runner.stop_timeout_s=200",
    "actor.precision=fp32",
    "actor.global_batch_size=16",
    "actor.optim.lr_scheduler=constant",
    "env.num_processes=2",
)
GROUPS = (
    *("algorithm=grpo", "algorithm.group_size=2", "actor.optim.critic_warmup_iterations=0"),
    *("env.train.max_steps_per_rollout_epoch=6", "algorithm.rollout_epoch=2"),
)


def config_in(directory: Path) -> Path:
    path = directory / "tiny.yaml"
    path.write_text(TINY)
    return path


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def controllers(command: list[object], stop_at: str = "", count: int = 2) -> list[Outcome]:
    """Run a command in each of several controllers; ``OUT`` in it becomes a file of the controller."""
    port = free_port()
    processes: list[subprocess.Popen[str]] = []
    for rank in range(count):
        place = {"RANK": rank, "WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environ = environment(stop_at) | {name: str(value) for name, value in place.items()}
        arguments = [sys.executable, *(str(each).replace("OUT", str(rank)) for each in command)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        processes.append(subprocess.Popen(arguments, env=environ, text=True, **pipes))  # type: ignore[call-overload]
    try:
        outputs = [process.communicate(timeout=LIMIT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [Outcome(process.returncode, *output) for process, output in zip(processes, outputs, strict=True)]


def trained(directory: Path, *settings: str) -> list[dict[str, torch.Tensor]]:
    """The weights of both controllers after a run in ``directory/run``."""
    command = [HELPER, directory / "OUT.safetensors", config_in(directory), *SETTINGS, *settings]
    for outcome in controllers([*command, "cluster.controllers=2", f"runner.output_dir={directory / 'run'}"]):
        assert outcome.code == 0, outcome.stderr
    return [load_file(directory / f"{rank}.safetensors") for rank in range(2)]


def trained_by_one(directory: Path, *settings: str) -> dict[str, torch.Tensor]:
    directory.mkdir()
    command = [HELPER, directory / "0.safetensors", config_in(directory), *SETTINGS, *settings]
    # Two threads draw from the generators of two controllers with one.
    command += ["cluster.num_threads=2", f"runner.output_dir={directory / 'run'}"]
    subprocess.run([sys.executable, *map(str, command)], env=environment(), check=True, timeout=LIMIT_S)
    return load_file(directory / "0.safetensors")


@pytest.mark.parametrize("settings", [(), pytest.param(GROUPS, marks=pytest.mark.long)], ids=["ppo", "grpo"])
def test_two_controllers_train_as_one_with_all_environments(settings: tuple[str, ...], tmp_path: Path) -> None:
    first, second = trained(tmp_path, *settings)
    one = trained_by_one(tmp_path / "one", *settings)
    assert first.keys() == one.keys()
    start = load_file(tmp_path / "run" / "checkpoints" / "step_2" / "policy.safetensors")
    assert any(not torch.equal(first[name], start[name]) for name in start)
    for name, weight in first.items():
        assert torch.equal(weight, second[name]), name
        torch.testing.assert_close(weight, one[name], rtol=0, atol=2e-5, msg=name)
    rows = [metrics(place / "run") for place in (tmp_path, tmp_path / "one")]
    for mine, expected in zip(*rows, strict=True):
        assert mine.keys() == expected.keys()
        for name, value in expected.items():
            assert mine[name] == (pytest.approx(value, rel=1e-2, abs=1e-4) if isinstance(value, float) else value), name
    assert [row["env_steps"] for row in rows[0][1:]] == [48, 96, 144]


@pytest.mark.long
def test_a_stopped_run_resumes_to_the_same_weights(tmp_path: Path) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    for place in (whole, stopped):
        place.mkdir()
    trained(whole)
    end = Path("checkpoints", "step_3", "policy.safetensors")
    expected = load_file(whole / "run" / end)
    command = ["-m", "embodrl", "train", "--config", config_in(stopped), *SETTINGS, "cluster.controllers=2"]
    # The signal reaches one of the two, in its second rollout.
    run = stopped / "run"
    outcomes = controllers([*command, f"runner.output_dir={run}"], "act:6:SIGTERM:rank_1")
    assert [outcome.code for outcome in outcomes] == [143, 143], outcomes
    assert (run / "checkpoints" / "step_1").is_dir()
    for outcome in controllers(["-m", "embodrl", "resume", run]):
        assert outcome.code == 0, outcome.stderr
    found = load_file(run / end)
    assert found.keys() == expected.keys()
    assert all(torch.equal(weight, expected[name]) for name, weight in found.items())
    (one,) = controllers(["-m", "embodrl", "resume", run, "cluster.controllers=1"], count=1)
    assert one.code == 2
    assert "cluster.controllers" in one.stderr


SHARDED = ("actor.training_backend=fsdp", "algorithm.kl.coef=0.1", "actor.micro_batch_size=4")


@pytest.mark.long
def test_sharded_weights_train_as_whole_ones_and_outlive_a_controller(tmp_path: Path) -> None:
    whole, sharded, killed = (tmp_path / name for name in ("whole", "sharded", "killed"))
    for place in (whole, sharded, killed):
        place.mkdir()
    expected, _ = trained(whole, *SHARDED[1:])
    first, second = trained(sharded, *SHARDED)
    assert first.keys() == expected.keys()
    for name, weight in first.items():
        assert torch.equal(weight, second[name]), name
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=2e-5, msg=name)
    for mine, other in zip(metrics(sharded / "run"), metrics(whole / "run"), strict=True):
        assert mine.keys() == other.keys()
        for name, value in other.items():
            assert mine[name] == (pytest.approx(value, rel=1e-2, abs=1e-4) if isinstance(value, float) else value), name
    command = ["-m", "embodrl", "train", "--config", config_in(killed), *SETTINGS, *SHARDED, "cluster.controllers=2"]
    run = killed / "run"
    ended, gone = controllers([*command, f"runner.output_dir={run}"], "fsdp_step:6:SIGKILL:rank_1")
    assert (ended.code, gone.code) == (1, -9), ended.stderr
    assert "controller 0 has lost another one" in ended.stderr
    assert f"embodrl resume {run}" in ended.stderr
    for outcome in controllers(["-m", "embodrl", "resume", run]):
        assert outcome.code == 0, outcome.stderr
    found = load_file(run / "checkpoints" / "step_3" / "policy.safetensors")
    assert all(torch.equal(weight, first[name]) for name, weight in found.items())


@pytest.mark.long
@pytest.mark.parametrize(
    "own", [(), ("actor.training_backend=fsdp", "actor.micro_batch_size=4")], ids=["whole", "fsdp"]
)
def test_every_controller_has_a_teacher_of_another_size(own: tuple[str, ...], tmp_path: Path) -> None:
    """The KL, its gradients and the weights are those of one process with all environments."""
    config = load_config(["model.architecture.hidden_size=64"], config_in(tmp_path)).config
    build_policy(config).save_pretrained(tmp_path / "teacher")
    settings = (
        *SETTINGS,
        "runner.max_iterations=2",
        "algorithm.kl.coef=0.1",
        f"algorithm.teacher={tmp_path / 'teacher'}",
    )
    first, second = trained(tmp_path, *settings, *own)
    one = trained_by_one(tmp_path / "one", *settings)
    for name, weight in first.items():
        assert torch.equal(weight, second[name]), name
        torch.testing.assert_close(weight, one[name], rtol=0, atol=2e-5, msg=name)
    mine, theirs = (metrics(place / "run")[-1]["train/ref_kl"] for place in (tmp_path, tmp_path / "one"))
    assert mine == pytest.approx(theirs, rel=1e-3) and theirs > 0
    assert not (tmp_path / "run" / "checkpoints" / "step_2" / "reference.safetensors").exists()


def test_a_controller_without_rows_takes_part_in_what_the_others_compute(tmp_path: Path) -> None:
    found: list[dict[str, torch.Tensor]] = []
    for backend in ("native", "fsdp"):
        out = tmp_path / f"{backend}.safetensors"
        for outcome in controllers([HERE / "idle_controller.py", out, backend]):
            assert outcome.code == 0, outcome.stderr
        found.append(load_file(out))
    whole, sharded = found
    assert whole.keys() == sharded.keys()
    assert any(name.startswith("reference.") for name in whole)
    for name, value in whole.items():
        torch.testing.assert_close(sharded[name], value, rtol=1e-4, atol=2e-5, msg=name)


def test_a_killed_controller_ends_the_other(tmp_path: Path) -> None:
    command = ["-m", "embodrl", "train", "--config", config_in(tmp_path), *SETTINGS, "cluster.controllers=2"]
    run = tmp_path / "run"
    first, second = controllers([*command, f"runner.output_dir={run}"], "optimizer_step:6:SIGKILL:rank_1")
    assert second.code == -9
    assert first.code == 1
    assert "controller 0 has lost another one" in first.stderr
    assert (run / "checkpoints" / "step_1").is_dir()


@pytest.mark.long
def test_what_passes_between_controllers_does_not_grow_with_rollouts(tmp_path: Path) -> None:
    sent: list[float] = []
    for number, chunks in enumerate((4, 16)):
        place = tmp_path / str(number)
        place.mkdir()
        steps = f"env.train.max_steps_per_rollout_epoch={3 * chunks}"
        trained(place, steps, f"actor.global_batch_size={4 * chunks}", "runner.max_iterations=2")
        last = (place / "run" / "metrics.jsonl").read_text().splitlines()[-1]
        sent.append(json.loads(last)["usage/controllers_mib"])
    assert sent[1] == pytest.approx(sent[0], rel=0.02)


def test_what_does_not_fit_the_launcher_is_refused(tmp_path: Path) -> None:
    command = ["-m", "embodrl", "train", "--config", config_in(tmp_path), f"runner.output_dir={tmp_path / 'run'}"]
    environ = environment()
    alone = subprocess.run(
        [sys.executable, *map(str, command), "cluster.controllers=2", "env.num_processes=2"],
        env=environ,
        text=True,
        capture_output=True,
        check=False,
    )
    assert alone.returncode == 2
    assert "torchrun" in alone.stderr
    place = {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for settings in ((), ("cluster.controllers=2", "env.num_processes=2")):
        other = subprocess.run(
            [sys.executable, *map(str, command), *settings],
            env=os.environ | environ | place,
            text=True,
            capture_output=True,
            check=False,
        )
        assert other.returncode == 2
        assert "WORLD_SIZE" in other.stderr
    assert not (tmp_path / "run").exists()


def test_a_session_is_refused_several_controllers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    settings = ["env=toy", "model=mlp", "cluster.controllers=2", "env.num_processes=2", "cluster.num_threads=1"]
    loaded = load_config([*settings, f"runner.output_dir={tmp_path / 'run'}"])
    with raises_code("session-has-one-controller", UsageError), started(loaded):
        pass
    assert not (tmp_path / "run").exists()
