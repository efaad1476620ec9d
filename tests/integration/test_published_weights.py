"""A run whose weights others can follow."""

import json
from pathlib import Path

import pytest
import torch
from runs import TINY, embodrl, script
from safetensors.torch import load_file

from embodrl.hybrid_engines.weight_sync.disk import DiskReceiver

pytestmark = pytest.mark.slow
EXAMPLE = Path(__file__).parents[2] / "examples" / "follow_weights" / "follow.py"


class Tensors:
    def __init__(self):
        self.tensors = {}

    def update_weights(self, weights, version):
        self.tensors.update({name: tensor.clone() for name, tensor in weights})


def assert_as_checkpoint(run, step):
    target = Tensors()
    assert DiskReceiver(target, run / "weights").receive().version == step
    saved = load_file(run / "checkpoints" / f"step_{step}" / "policy.safetensors")
    assert target.tensors.keys() == saved.keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in target.tensors.items())


def versions(run):
    return {
        int(path.name[1:]): json.loads((path / "manifest.json").read_text()) for path in (run / "weights").iterdir()
    }


@pytest.mark.long
def test_a_run_can_be_followed_from_outside(tmp_path):
    config, run = tmp_path / "config.yaml", tmp_path / "run"
    config.write_text(TINY)
    frozen = ["model.trainable=head", "rollout.publish_weights=true", "runner.save_interval=2"]
    outcome = embodrl("train", "--config", config, f"runner.output_dir={run}", "runner.max_iterations=2", *frozen)
    assert outcome.code == 0, outcome.stderr
    found = versions(run)
    assert sorted(found) == [0, 1, 2] and [found[v]["base"] for v in (0, 1, 2)] == [0, 0, 0]
    whole, trained = (sum(file["num_bytes"] for file in found[version]["files"].values()) for version in (0, 1))
    assert trained < whole
    assert_as_checkpoint(run, 2)
    outcome = embodrl("resume", run, "runner.max_iterations=3")
    assert outcome.code == 0, outcome.stderr
    found = versions(run)
    assert {version: found[version]["base"] for version in sorted(found)} == {2: 2, 3: 2}
    assert_as_checkpoint(run, 3)
    followed = script(EXAMPLE, run, 1)
    last = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][-1]
    assert followed.stdout.strip() == f"version 3: success {last['eval/success_rate']:.1%} of 6"
