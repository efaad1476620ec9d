"""The examples run as their comments say, at the smallest size."""

from pathlib import Path

import pytest
import yaml
from runs import TINY_POLICY, embodrl, metrics

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


def test_an_environment_from_outside_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    example = yaml.safe_load((EXAMPLES / "new_environment" / "config.yaml").read_text())
    tiny = yaml.safe_load(TINY_POLICY)
    sizes = {
        "max_episode_steps": 6,
        "pin_cpus": False,
        "cameras": [{"height": 16, "width": 16}],
        "train": {"total_num_envs": 4, "max_steps_per_rollout_epoch": 12},
        "eval": {"total_num_envs": 4, "num_episodes": 6},
    }
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(tiny | {"extensions": example["extensions"], "env": example["env"] | sizes}))
    outcome = embodrl(
        "train",
        "--config",
        config,
        f"runner.output_dir={tmp_path / 'run'}",
        "runner.max_iterations=2",
        search_path=EXAMPLES / "new_environment",
    )
    assert outcome.code == 0, outcome.stderr
    rows = metrics(tmp_path / "run")
    assert [row["iteration"] for row in rows] == [0, 1, 2]
    assert rows[2]["env_steps"] <= 2 * 4 * 12
    assert rows[2]["eval/episodes"] == 6
