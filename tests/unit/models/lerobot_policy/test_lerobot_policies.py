"""Policies of lerobot in an interpreter of their own.

A stand-in: the interpreter is this one behind a script that puts a small package ``lerobot`` on its path, with the
names and signatures of lerobot 0.4.4 that the adapter calls.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from expect import raises_code
from safetensors.torch import save_file

from embodrl.config import load_config
from embodrl.config.schema import model_settings
from embodrl.config.schema.readers import Verb
from embodrl.errors import ConfigError, EmbodrlError
from embodrl.fields import Fields
from embodrl.models.lerobot_policy.policy import LeRobotPolicy
from embodrl.models.lerobot_policy.server import LeRobotServer
from embodrl.models.registry import build_policy
from embodrl.types import Observation, SamplingParams

CONFIGS = """
import json, types
from pathlib import Path

class PreTrainedConfig:
    @classmethod
    def from_pretrained(cls, path):
        raw = json.loads((Path(path) / "config.json").read_text())
        self = cls()
        self.type, self.n_obs_steps, self.device = raw["type"], raw["n_obs_steps"], None
        feature = lambda shape: None if shape is None else types.SimpleNamespace(shape=shape)
        self.image_features = {name: feature([3, 8, 8]) for name in raw["cameras"]}
        self.robot_state_feature, self.action_feature = feature(raw["state"]), feature(raw["action"])
        return self
"""
FACTORY = """
import os

def get_policy_class(name):
    assert name == "standin"
    return Policy

def make_pre_post_processors(config, pretrained_path, preprocessor_overrides):
    assert preprocessor_overrides == {"device_processor": {"device": config.device}}
    return (lambda batch: {**batch, "seen": True}), (lambda action: action * 2.0 + 1.0)

class Policy:
    @classmethod
    def from_pretrained(cls, path, config, strict):
        assert strict
        return cls()
    def state_dict(self):
        import torch
        return {"model.layer.weight": torch.ones(2, 3), "model.count": torch.tensor(1)}
    def eval(self):
        return self
    def reset(self):
        self.fresh = True
    def predict_action_chunk(self, batch):
        import torch
        assert self.fresh and batch["seen"] and torch.is_inference_mode_enabled()
        self.fresh = False
        if "die" in batch["task"]:
            print("last words")
            os._exit(3)
        if "raise" in batch["task"]:
            raise ValueError("the arm is folded")
        left, right = batch["observation.images.left"], batch["observation.images.right"]
        assert left.shape[1:] == (3, 8, 8) and left.dtype == torch.float32 and 0 <= left.min() and left.max() <= 1
        rows = left.mean(dim=(1, 2, 3)) + 10 * right.mean(dim=(1, 2, 3)) + batch["observation.state"].sum(dim=1)
        places = torch.arange(3)[None, :, None] + torch.zeros(len(rows), 3, 7)
        return rows[:, None, None] + places + torch.rand(7)
"""
FACTS = {
    "type": "standin",
    "n_obs_steps": 1,
    "cameras": ["observation.images.left", "observation.images.right"],
    "state": [2],
    "action": [7],
}


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an interpreter that has the stand-in."""
    root = tmp_path_factory.mktemp("other")
    for name, text in {"configs/policies": CONFIGS, "policies/factory": FACTORY}.items():
        path = root / "site" / "lerobot" / f"{name}.py"
        path.parent.mkdir(parents=True)
        path.write_text(text)
    return interpreter(root / "python", f'export PYTHONPATH="{root}/site"')


def interpreter(path: Path, line: str) -> Path:
    path.write_text(f'#!/bin/sh\n{line}\nexec "{sys.executable}" "$@"\n')
    path.chmod(0o755)
    return path


WEIGHTS = {"model.layer.weight": torch.ones(2, 3, dtype=torch.bfloat16)}


def load(
    python: Path,
    directory: Path,
    facts: dict[str, object] | None = None,
    weights: dict[str, torch.Tensor] | None = WEIGHTS,
    **changes: object,
) -> LeRobotPolicy:
    (directory / "config.json").write_text(json.dumps({**FACTS, **(facts or {})}))
    if weights is not None:
        save_file(weights, directory / "model.safetensors")
    values = {"model_type": "lerobot", "model_path": str(directory), "python": str(python), "num_action_chunks": 2}
    config = model_settings("lerobot").model_validate({**values, "add_value_head": False, **changes})
    policy, report = build_policy(config, device="cpu", dtype=torch.float32, seed=5)
    assert isinstance(policy, LeRobotPolicy) and "standin" in report.conventions["policy"]
    return policy


@pytest.fixture(scope="module")
def policy(python: Path, tmp_path_factory: pytest.TempPathFactory) -> LeRobotPolicy:
    return load(python, tmp_path_factory.mktemp("policy"))


def seen(texts: tuple[str, ...] = ("push", "pull"), cameras: int = 2, state: int = 2) -> Observation:
    rng, rows = np.random.default_rng(0), len(texts)
    images = rng.integers(0, 256, (rows, cameras, 8, 8, 3), dtype=np.uint8)
    values = rng.uniform(-1, 1, (rows, state)).astype(np.float32)
    return Observation(images, values, list(texts), np.zeros(rows, np.int32))


def act(policy: LeRobotPolicy, observation: Observation) -> np.ndarray:
    return policy.predict_action_batch(observation, "eval", SamplingParams(), compute_values=False).actions


def test_observations_go_there_and_actions_come_back(policy: LeRobotPolicy) -> None:
    """By hand: pictures from 0 to 1 in the order of the cameras, the state, both processors, and C of 3 actions."""
    observation = seen()
    left, right = (observation.images[:, i].mean(axis=(1, 2, 3)) / 255 for i in (0, 1))
    rows = left + 10 * right + observation.state.sum(axis=1)
    noise = torch.rand(7, generator=torch.Generator().manual_seed(5)).numpy()
    wanted = 2 * (rows[:, None, None] + np.arange(2)[None, :, None] + noise) + 1
    found = act(policy, observation)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    np.testing.assert_array_equal(act(policy, observation), found)  # whatever was asked before
    np.testing.assert_allclose(act(policy, observation.select(np.array([1]))), found[1:], rtol=1e-5)


def test_an_error_of_the_policy_is_reported_and_survived(policy: LeRobotPolicy) -> None:
    with raises_code("lerobot-raised", EmbodrlError, "ValueError: the arm is folded") as raised:
        act(policy, seen(("raise",)))
    assert raised.value.code == "lerobot-raised" and "predict_action_chunk" in raised.value.hint
    assert act(policy, seen()).shape == (2, 2, 7)


@pytest.mark.parametrize(
    ("observation", "setting"), [(seen(cameras=1), "env.cameras"), (seen(state=3), "include_state")]
)
def test_other_robots_are_refused(policy: LeRobotPolicy, observation: Observation, setting: str) -> None:
    with pytest.raises(EmbodrlError) as refused:
        act(policy, observation)
    assert refused.value.code == "lerobot-does-not-fit" and setting in refused.value.hint


def test_it_only_acts(policy: LeRobotPolicy, tmp_path: Path) -> None:
    inputs = policy.preprocess(seen())
    for call in (
        lambda: policy.predict_action_batch(seen(), "train", SamplingParams()),
        lambda: policy.evaluate_actions(inputs, SamplingParams()),
        lambda: policy.predict_values(seen()),
        lambda: policy.sft_inputs(seen(), torch.zeros(2, 2, 7)),
        lambda: policy.sft_loss(inputs),
        lambda: policy.save_pretrained(tmp_path / "saved"),
    ):
        with pytest.raises(EmbodrlError) as refused:
            call()
        assert refused.value.code == "lerobot-only-acts"
    assert policy.trainable_groups() == {} and not list(policy.parameters())


def test_a_process_that_ends_is_named_with_its_last_words(python: Path, tmp_path: Path) -> None:
    with raises_code("lerobot-process-lost", EmbodrlError, 3, "last words") as lost:
        act(load(python, tmp_path), seen(("die",)))
    assert lost.value.code == "lerobot-process-lost"


@pytest.fixture
def here(python: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The stand-in in this process, for what does not depend on the process around the server."""
    monkeypatch.syspath_prepend(python.parent / "site")
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "lerobot"]:
        del sys.modules[name]


def serve(directory: Path, facts: dict[str, object], weights: dict[str, torch.Tensor] | None) -> LeRobotServer:
    (directory / "config.json").write_text(json.dumps({**FACTS, **facts}))
    if weights is not None:
        save_file(weights, directory / "model.safetensors")
    return LeRobotServer(Fields({"path": str(directory), "device": "cpu", "seed": 5}, "the START frame"))


def test_a_policy_with_a_history_is_refused(here: None, tmp_path: Path) -> None:
    with raises_code("lerobot-needs-history"):
        serve(tmp_path, {"n_obs_steps": 2}, WEIGHTS)


@pytest.mark.parametrize(
    ("facts", "code"),
    [
        ({"action": [6]}, "lerobot-does-not-fit"),
        pytest.param({"type": "another"}, "lerobot-raised", marks=pytest.mark.long),
    ],
)
def test_policies_that_do_not_fit_are_refused(
    python: Path, tmp_path: Path, facts: dict[str, object], code: str
) -> None:
    with raises_code(code):
        load(python, tmp_path, facts)


@pytest.mark.parametrize(
    "weights", [None, {"layer.weight": torch.zeros(2, 3)}, {"of.another.version": torch.ones(2, 3)}]
)
def test_weights_that_lerobot_did_not_load_are_refused(
    here: None, tmp_path: Path, weights: dict[str, torch.Tensor] | None
) -> None:
    """Some of its policies print that they could not, and continue with random ones."""
    with raises_code("lerobot-weights"):
        serve(tmp_path, {}, weights)
    assert serve(tmp_path, {}, {"layer.weight": torch.ones(2, 3)}).describe()["action_dim"] == 7


def test_an_interpreter_without_lerobot_is_named(tmp_path: Path) -> None:
    bare = interpreter(tmp_path / "python", "unset PYTHONPATH")
    with pytest.raises(EmbodrlError) as missing:
        load(bare, tmp_path)
    assert missing.value.code == "lerobot-missing" and "model.python" in missing.value.hint


@pytest.mark.parametrize(
    ("verb", "changes", "codes"),
    [
        ("eval", (), set()),
        ("train", (), {"trained-model-has-gradients"}),
        ("sft", (), {"fine-tuned-model-has-gradients"}),
        ("eval", ("model.python=null",), {"lerobot-policy-is-there"}),
        ("eval", ("model.python=/nowhere/python",), {"lerobot-policy-is-there"}),
        ("eval", ("model.model_path=null",), {"lerobot-policy-is-there"}),
        ("eval", ("model.add_value_head=true",), {"model-has-value-heads"}),
        ("eval", ("model.unnorm_key=push",), {"lerobot-policy-brings-its-statistics"}),
        ("eval", (f"model.stats_path={__file__}",), {"lerobot-policy-brings-its-statistics"}),
    ],
)
def test_it_is_for_evaluation_with_an_interpreter(
    tmp_path: Path, verb: Verb, changes: tuple[str, ...], codes: set[str]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    arguments = ["model=lerobot", f"model.python={sys.executable}", f"model.model_path={tmp_path}"]
    try:
        load_config([*arguments, *changes], verb=verb)
        found: set[str] = set()
    except ConfigError as error:
        found = {problem.code for problem in error.problems}
    assert found == codes
