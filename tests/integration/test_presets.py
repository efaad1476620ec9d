"""Every algorithm preset trains on the toy environment, and resumes bit-exactly with all of its state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from runs import TINY, metrics
from safetensors.torch import load_file

from embodrl.config import load_config
from embodrl.config.presets import presets
from embodrl.runs.train import resume, train

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("torch_as_it_was")]
SMALL = (
    "env.tasks=[reach-red]",
    "env.train.total_num_envs=8",
    "runner.eval_interval=0",
    "runner.eval_at_start=false",
    "actor.optim.lr_scheduler=constant",
)
WHOLE = ("env.train.auto_reset=false", "env.train.max_steps_per_rollout_epoch=6")
IN_GROUPS = (*WHOLE, "algorithm.group_size=4")


def run(tmp_path: Path, preset: str, iterations: int, *overrides: str) -> list[dict[str, Any]]:
    config = tmp_path / "tiny.yaml"
    config.write_text(TINY.replace("extensions: [stop_at]", "").replace("critic_warmup_iterations: 1, ", ""))
    groups = {"ppo": (), "vapo": (), "reinforce_pp": WHOLE}.get(preset, IN_GROUPS)
    arguments = [f"algorithm={preset}", *SMALL, *groups, f"runner.max_iterations={iterations}", *overrides]
    loaded = load_config([*arguments, f"runner.output_dir={tmp_path / 'run'}"], config)
    assert train(loaded).exit_code == 0
    return metrics(tmp_path / "run")  # pyright: ignore[reportReturnType]


def without_eval(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The last iteration of a run is always evaluated, and the halves end in other places than the whole."""
    return [{name: value for name, value in row.items() if not name.startswith("eval/")} for row in rows]


def test_all_presets_are_here() -> None:
    assert presets("algorithm") == sorted([*EXPECTED, *OFF_POLICY, *OF_FLOWS, "opd", "ppo_gaussian"])


# They have tests of their own.
OFF_POLICY = ("sac", "rlpd", "residual", "dsrl", "rlt", "hil_serl", "dagger", "hg_dagger", "iql", "td3_bc", "recap")
OF_FLOWS = ("fpo", "pi_nft")
EXPECTED = {
    "ppo": {"train/value_loss"},
    "vapo": {"train/value_loss", "train/positive_nll"},
    "grpo": set(),
    "rloo": set(),
    "branch": set(),
    "reinforce_pp": set(),
    "dapo": {"rollout/groups_kept", "rollout/groups_dropped", "rollout/resamples"},
    "gspo": set(),
    "cpgd": {"train/drift"},
    "srpo": {"srpo/failure_reward"},
}


WITH_CRITIC = ("ppo", "vapo")
# What a preset adds to the graph, the batch or the loss trains in short; the others differ by their advantages.
SHORT = ("grpo",)


@pytest.mark.parametrize("preset", [p if p in SHORT else pytest.param(p, marks=pytest.mark.long) for p in EXPECTED])
def test_a_preset_trains(preset: str, tmp_path: Path) -> None:
    rows = run(tmp_path, preset, 3)
    assert [row["iteration"] for row in rows] == [1, 2, 3]
    for row in rows[1:]:
        assert EXPECTED[preset] <= row.keys()
        if row["train/num_updates"]:
            assert 0 <= row["train/clip_fraction"] <= 1 and row["train/approx_kl"] >= 0
            assert abs(row["train/policy_loss"]) < 1e3
        assert 0 <= row["rollout/success_rate"] <= 1
    assert preset in WITH_CRITIC or "train/value_loss" not in rows[-1]
    assert preset == "dapo" or any(row["train/num_updates"] for row in rows)


@pytest.mark.parametrize("preset", ["srpo", "dapo"])
@pytest.mark.long
def test_memory_and_reference_survive_a_stop(preset: str, tmp_path: Path) -> None:
    kl = ("algorithm.kl.coef=0.1", "env.max_episode_steps=12", "env.train.max_steps_per_rollout_epoch=12")
    for name in ("whole", "halves"):
        (tmp_path / name).mkdir()
    whole = run(tmp_path / "whole", preset, 4, *kl)
    run(tmp_path / "halves", preset, 2, *kl)
    assert resume(tmp_path / "halves" / "run", ["runner.max_iterations=4"]) == 0
    assert without_eval(metrics(tmp_path / "halves" / "run")) == without_eval(whole)
    left, right = (load_file(tmp_path / n / "run" / "policy" / "model.safetensors") for n in ("whole", "halves"))
    assert all(left[name].equal(right[name]) for name in left)
    assert any(row.get("train/ref_kl") for row in whole)
    saved = tmp_path / "whole" / "run" / "checkpoints" / "step_4"
    assert (saved / "reference.safetensors").is_file()
