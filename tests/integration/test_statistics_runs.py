"""From a collection over its check to a fine-tuned policy in the layouts of openpi and lerobot."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import embodrl
from embodrl.data.load import load_demos
from embodrl.models.openpi.stats import read_lerobot, read_openpi
from embodrl.pipelines.load import load_config
from embodrl.tools.data_check.check import check_data
from embodrl.tools.export.checkpoint import export_checkpoint

pytest.importorskip("pyarrow")
pytestmark = pytest.mark.long

ENV = ["env=toy", "env.include_state=true", "env.num_processes=1"]
STEPS = ["sft.max_steps=2", "sft.lr_warmup_steps=0", "sft.batch_size=4", "sft.stats=data"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("data") / "toy"
    few = ["collect.num_episodes=8", "collect.noise_std=0", "env.train.total_num_envs=8"]
    embodrl.collect([*ENV, *few, f"collect.output_dir={directory}"])
    return directory


def tuned(data: Path, tmp_path: Path, model: str) -> Path:
    return embodrl.sft(
        [*ENV, f"model={model}", f"sft.data_dir={data}", f"sft.output_dir={tmp_path}/run", *STEPS]
    ).policy_dir


def test_a_replay_succeeds_again_and_one_of_other_actions_does_not(data: Path, monkeypatch: pytest.MonkeyPatch):
    config = load_config(ENV, verb="collect").config
    report = check_data(data, config, None, 4, [])
    assert report.replay is not None and not report.has_errors
    assert (report.replay.episodes, report.replay.success, report.replay.recorded_success) == (4, 1.0, 1.0)
    assert report.replay.picture_difference == 0.0  # lossless, from the same seeds
    opposite = load_demos(data)
    opposite.actions = -opposite.actions
    monkeypatch.setattr("embodrl.tools.data_check.check.load_demos", lambda *args, **kwargs: opposite)
    assert "replay-fails" in {finding.code for finding in check_data(data, config, None, 4, []).findings}


def test_a_run_without_a_simulator_is_exported(data: Path, tmp_path: Path):
    directory = f"sft.output_dir={tmp_path}/run"
    few = "sft.val_episodes=2"
    policy = embodrl.sft(["env=dataset", "model=pi0", f"sft.data_dir={data}", directory, few, *STEPS]).policy_dir
    for path in (tmp_path / "run", policy):
        loaded = embodrl.load_policy(path, "cpu")
        demos = load_demos(data)
        assert np.isfinite(loaded.predict(demos.images[0], "go", demos.state[0])).all()
    held = check_data(data, None, policy.parent, 4, [], held_out=True).policy
    last = demos.select([6, 7])
    assert held is not None and (held.episodes, held.frames) == (2, len(last.actions))
    assert np.argmin(held.of_zero) == np.argmin(np.abs(last.actions).mean(0))
    for layout in ("public", "lerobot"):
        export_checkpoint(tmp_path / "run", tmp_path / layout, [], layout=layout)
    (stats,) = (policy / "assets").rglob("norm_stats.json")
    assert (tmp_path / "public" / stats.relative_to(policy)).read_bytes() == stats.read_bytes()
    assert read_lerobot(tmp_path / "lerobot")[0]


def test_pi05_is_written_as_openpi_reads_it(data: Path, tmp_path: Path):
    """openpi: models_pytorch/train config keys; src/openpi/shared/normalize.py loads ``norm_stats`` as NormStats."""
    policy = tuned(data, tmp_path, "pi05")
    config = json.loads((policy / "config.json").read_text())
    assert {"action_dim", "action_horizon", "paligemma_variant", "action_expert_variant", "precision"} <= config.keys()
    (stats,) = (policy / "assets").rglob("norm_stats.json")
    assert stats.parent.name == "toy"  # the asset id: the robot that the data state
    content = json.loads(stats.read_text())["norm_stats"]
    assert content.keys() == {"actions", "state"}
    demos = load_demos(data)
    for part, values in (("actions", demos.actions), ("state", demos.state)):
        assert content[part].keys() == {"mean", "std", "q01", "q99"}
        np.testing.assert_allclose(content[part]["mean"], values.astype(np.float64).mean(0))
        np.testing.assert_allclose(content[part]["std"], values.astype(np.float64).std(0))
    assert list(read_openpi(policy)) == ["toy"]
    export_checkpoint(tmp_path / "run", tmp_path / "exported", [])  # not the base's, nor none
    assert (tmp_path / "exported" / stats.relative_to(policy)).read_bytes() == stats.read_bytes()
    report = check_data(data, None, tmp_path / "run", 4, [])
    assert report.policy is not None and report.policy.frames == len(demos.actions)
    assert "policy-range" not in {finding.code for finding in report.findings}


def test_smolvla_is_written_as_lerobot_reads_it(data: Path, tmp_path: Path):
    """lerobot: NormalizerProcessorStep (registry name normalizer_processor) reads its state_file by these names."""
    policy = tuned(data, tmp_path, "smolvla")
    sets, methods = read_lerobot(policy)
    assert methods is not None and (methods.state, methods.actions) == ("mean_std", "mean_std")
    demos = load_demos(data)
    for name in ("policy_preprocessor.json", "policy_postprocessor.json"):
        steps = json.loads((policy / name).read_text())["steps"]
        (file,) = (step["state_file"] for step in steps if "state_file" in step)
        tensors = load_file(policy / file)
        assert {"action.mean", "action.std", "observation.state.mean", "observation.state.std"} <= tensors.keys()
        np.testing.assert_allclose(tensors["action.mean"], demos.actions.mean(0), atol=1e-6)
        np.testing.assert_allclose(tensors["observation.state.std"], demos.state.std(0), atol=1e-6)
    assert len(sets) == 1
