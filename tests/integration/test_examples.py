"""The examples run as their comments say, at the smallest size."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from runs import TINY_POLICY, Outcome, embodrl, metrics
from safetensors.numpy import load_file

from embodrl.config.compose import concerning
from embodrl.models.base import OPTIONAL

EXAMPLES = Path(__file__).parents[2] / "examples"

pytestmark = pytest.mark.slow
ENV = {
    "max_episode_steps": 6,
    "pin_cpus": False,
    "cameras": [{"height": 16, "width": 16}],
    "eval": {"total_num_envs": 4, "num_episodes": 6},
}


def run_example(name: str, train: dict[str, object], tmp_path: Path, *overrides: str) -> list[dict[str, object]]:
    """Run an example for two iterations at the smallest size; return its metrics."""
    example = yaml.safe_load((EXAMPLES / name / "config.yaml").read_text())
    tiny = yaml.safe_load(TINY_POLICY) | {"extensions": []}
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(example | tiny | {"env": ENV | {"train": train}}))
    arguments = ("--config", config, f"runner.output_dir={tmp_path / 'run'}", "runner.max_iterations=2", *overrides)
    outcome = embodrl("train", *arguments, search_path=EXAMPLES / name)
    assert outcome.code == 0, outcome.stderr
    return metrics(tmp_path / "run")


def test_an_algorithm_from_outside_the_package(tmp_path: Path) -> None:
    without_critic = ("model.add_value_head=false", "actor.optim.critic_warmup_iterations=0")
    train = {"total_num_envs": 8, "max_steps_per_rollout_epoch": 6, "auto_reset": False}
    rows = run_example("custom_algorithm", train, tmp_path, *without_critic, "algorithm.group_size=4")
    assert [row["iteration"] for row in rows] == [0, 1, 2]
    assert rows[2]["train/num_updates"] and "train/clip_fraction" not in rows[2]


def test_a_reward_from_outside_the_package(tmp_path: Path) -> None:
    rows = run_example("custom_reward", {"total_num_envs": 4, "max_steps_per_rollout_epoch": 12}, tmp_path)
    assert [row.get("reward/errors") for row in rows] == [None, 0, 0]
    assert rows[2]["train/num_updates"]


@pytest.mark.long
def test_a_pipeline_from_outside_the_package(tmp_path: Path) -> None:
    train = {"total_num_envs": 4, "max_steps_per_rollout_epoch": 12}
    rows = run_example("custom_pipeline", train, tmp_path)
    assert [row["iteration"] for row in rows] == [0, 1, 2]
    for before, row in itertools.pairwise(rows):
        steps = row["env_steps"] - before["env_steps"]  # pyright: ignore[reportOperatorIssue]
        assert row["reward/cost"] == pytest.approx(0.01 * steps), "every action costs 0.01"
    (tmp_path / "plain").mkdir()
    plain = run_example("custom_pipeline", train, tmp_path / "plain", "pipeline.fn=null")
    assert rows[1]["rollout/return"] == plain[1]["rollout/return"], "the first rollout is the same"
    assert rows[1]["train/value_loss"] != plain[1]["train/value_loss"], "and what is learned from it is not"
    shown = embodrl("pipeline", "show", "--config", tmp_path / "config.yaml", search_path=EXAMPLES / "custom_pipeline")
    assert shown.code == 0 and "3  shape_rewards  compute    reward" in shown.stdout


def new_env_config(tmp_path: Path, **changes: object) -> Path:
    """Return a configuration of examples/new_env at the smallest size; ``changes`` are of the whole."""
    example = yaml.safe_load((EXAMPLES / "new_env" / "config.yaml").read_text())
    sizes = {
        "max_episode_steps": 6,
        "pin_cpus": False,
        "cameras": [{"height": 16, "width": 16}],
        "train": {"total_num_envs": 4, "max_steps_per_rollout_epoch": 12},
        "eval": {"total_num_envs": 4, "num_episodes": 6},
    }
    made = yaml.safe_load(TINY_POLICY) | {"extensions": example["extensions"], "env": example["env"] | sizes} | changes
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(made))
    return config


def test_an_environment_from_outside_the_package(tmp_path: Path) -> None:
    outcome = embodrl(
        "train",
        "--config",
        new_env_config(tmp_path),
        f"runner.output_dir={tmp_path / 'run'}",
        "runner.max_iterations=2",
        search_path=EXAMPLES / "new_env",
    )
    assert outcome.code == 0, outcome.stderr
    rows = metrics(tmp_path / "run")
    assert [row["iteration"] for row in rows] == [0, 1, 2]
    assert rows[2]["env_steps"] <= 2 * 4 * 12
    assert rows[2]["eval/episodes"] == 6


@pytest.mark.long
def test_an_environment_that_waits_trains_as_one_that_does_not(tmp_path: Path) -> None:
    (tmp_path / "waiting_world.py").write_text(
        f"""
import asyncio, sys
sys.path.append({str(EXAMPLES / "new_env")!r})
from line_world import *

class Waiting(Line):
    async def step(self, action):
        await asyncio.sleep(0)
        return super().step(action)

class WaitingWorld(LineWorld):
    def make_simulator(self, task):
        return Waiting(self._cameras, self._friction)

register_env(
    "waiting", WaitingWorld, "waits", tasks=("push-right",), action_dim=ACTION_DIM, settings=LineWorldConfig
)
"""
    )
    config = new_env_config(tmp_path, extensions=["waiting_world"])
    losses = []
    for kind in ("line_world", "waiting"):
        run = tmp_path / kind
        settings = (f"env.env_type={kind}", f"runner.output_dir={run}", "runner.max_iterations=2")
        outcome = embodrl("train", "--config", config, *settings, search_path=tmp_path)
        assert outcome.code == 0, outcome.stderr
        losses.append([metrics(run)[-1][key] for key in ("train/policy_loss", "train/value_loss", "rollout/return")])
    assert losses[0] == losses[1]


@pytest.mark.long
def test_an_environment_that_keeps_no_state_trains_with_a_warning_and_is_resumed(
    tmp_path: Path,
) -> None:
    (tmp_path / "forgetful.py").write_text(
        f"""
import sys
sys.path.append({str(EXAMPLES / "new_env")!r})
from line_world import *

class Forgetful(Line):
    get_state, set_state = Simulator.get_state, Simulator.set_state

class ForgetfulWorld(LineWorld):
    def make_simulator(self, task):
        return Forgetful(self._cameras, self._friction)

register_env(
    "forgetful", ForgetfulWorld, "no state", tasks=("push-right",), action_dim=ACTION_DIM, settings=LineWorldConfig
)
"""
    )
    config = new_env_config(tmp_path, extensions=["forgetful"])
    run_dir = tmp_path / "run"
    arguments = ("--config", config, "env.env_type=forgetful", f"runner.output_dir={run_dir}")
    outcome = embodrl("train", *arguments, "runner.max_iterations=2", search_path=tmp_path)
    assert outcome.code == 0 and "Forgetful has no get_state" in outcome.stderr and "Replayed" in outcome.stderr
    outcome = embodrl("resume", run_dir, "runner.max_iterations=3", search_path=tmp_path)
    assert outcome.code == 0 and "starts fresh ones" in outcome.stderr, outcome.stderr
    assert [row["iteration"] for row in metrics(run_dir)] == [0, 1, 2, 3]
    outcome = embodrl("train", *arguments[:3], "env.enable_offload=true", f"{arguments[3]}2", search_path=tmp_path)
    assert outcome.code == 1 and "env-state-unsupported" in outcome.stderr
    assert not list(tmp_path.glob("run2/checkpoints/*"))


def small_vla(*args: object) -> Outcome:
    config = EXAMPLES / "new_model" / "config.yaml"
    return embodrl(*args[:1], "--config", config, *args[1:], search_path=EXAMPLES / "new_model")


SIZES = [
    "env.max_episode_steps=10",
    "env.pin_cpus=false",
    "env.cameras=[{height: 16, width: 16}]",
    "env.train.total_num_envs=4",
    "env.train.max_steps_per_rollout_epoch=20",
    "env.eval.total_num_envs=4",
    "env.eval.num_episodes=8",
    "env.eval.decoding=greedy",
    "actor.global_batch_size=8",
    "actor.micro_batch_size=8",
    "cluster.num_threads=1",
    "runner.max_iterations=2",
    "runner.eval_interval=1",
]


@pytest.mark.slow
@pytest.mark.long
def test_a_model_from_outside_the_package(tmp_path: Path) -> None:
    outcome = small_vla(
        "collect",
        "collect.num_episodes=12",
        f"collect.output_dir={tmp_path / 'demos'}",
        *concerning(SIZES[1:], "collect"),
    )
    assert outcome.code == 0, outcome.stderr
    imitation = ["sft.max_steps=60", "sft.batch_size=32", "sft.lr_warmup_steps=5", "sft.log_interval=10"]
    paths = [f"sft.data_dir={tmp_path / 'demos'}", f"sft.output_dir={tmp_path / 'sft'}"]
    outcome = small_vla("sft", *imitation, *paths, *concerning(SIZES, "sft"))
    assert outcome.code == 0, outcome.stderr
    losses = [json.loads(line)["loss"] for line in (tmp_path / "sft" / "sft_metrics.jsonl").read_text().splitlines()]
    assert losses[-1] < losses[0] / 2
    warm = f"model.warm_start={tmp_path / 'sft' / 'policy'}"
    outcome = small_vla("train", warm, f"runner.output_dir={tmp_path / 'run'}", *concerning(SIZES, "train"))
    assert outcome.code == 0, outcome.stderr
    rows = metrics(tmp_path / "run")
    assert [row["iteration"] for row in rows] == [0, 1, 2]
    assert all(row["eval/episodes"] == 8 for row in rows)
    before, after = (load_file(tmp_path / run / "policy" / "model.safetensors") for run in ("sft", "run"))
    assert before.keys() == after.keys()
    moved = {name for name, value in after.items() if np.isfinite(value).all() and (value != before[name]).any()}
    assert moved == after.keys()


def test_the_new_model_keeps_its_promises() -> None:
    folder = EXAMPLES / "new_model"
    outcome = embodrl("model", "check", "--config", folder / "config.yaml", search_path=folder)
    promises = 7 + ("half-precision" in outcome.stdout)  # where training computes in bfloat16
    assert outcome.code == 0 and outcome.stdout.count("ok ") == promises, outcome.stdout + outcome.stderr


@pytest.mark.parametrize("model", ["rl_only", pytest.param("rl_tied", marks=pytest.mark.long)])
def test_a_model_for_rl_alone_trains_and_says_what_it_lacks(model: str, tmp_path: Path) -> None:
    own = ["extensions=[rl_only]", "env=toy", f"model.model_type={model}", "model.warm_start=null"]
    checked = embodrl("model", "check", *own, "env.cameras=[{height: 16, width: 16}]")
    assert checked.code == 0 and "FAILED" not in checked.stdout, checked.stdout + checked.stderr
    lacks = [line.split(":")[0].removeprefix("-").strip() for line in checked.stdout.splitlines() if line[0] == "-"]
    assert lacks == list(OPTIONAL) and "sft_inputs and sft_loss" in checked.stdout
    warm_up = "actor.optim.critic_warmup_iterations=0"
    outcome = embodrl("train", *own, *concerning(SIZES, "train"), warm_up, f"runner.output_dir={tmp_path / 'run'}")
    assert outcome.code == 0, outcome.stderr
    assert [row["iteration"] for row in metrics(tmp_path / "run")] == [0, 1, 2]
    policy = tmp_path / "run" / "policy"
    settings = ["extensions=[rl_only]", "env=toy", f"model.model_type={model}", f"model.warm_start={policy}"]
    again = embodrl("eval", *settings, *concerning(SIZES, "eval"), "--output", tmp_path / "eval")
    assert again.code == 0 and (tmp_path / "eval" / "eval.json").is_file(), again.stderr


def test_a_misspelt_model_of_an_extension_is_reported_with_the_nearest() -> None:
    outcome = small_vla("train", "model.model_type=smal_vla")
    assert outcome.code == 2
    assert "no model 'smal_vla'" in outcome.stderr
    assert "nearest:  small_vla" in outcome.stderr
    assert "allowed:  openvla, " in outcome.stderr and ", small_vla" in outcome.stderr
