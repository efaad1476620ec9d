"""The examples run as their comments say, at the smallest size."""

from pathlib import Path

import pytest
import yaml
from runs import TINY_POLICY, embodrl, metrics

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.slow
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
