"""A model that defines what RL needs and nothing else: the defaults of ``VLAPolicy``, and what they refuse."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from expect import raises_code
from rl_only import RlOnly
from torch import nn

from embodrl.config import load_config
from embodrl.config.schema import ModelConfig
from embodrl.hybrid_engines.rollout.native import NativeRolloutEngine
from embodrl.models.base import CHECKPOINTING, IMITATION, OPTIONAL, TRAINABLE_HEAD, VLAPolicy, lacking, require
from embodrl.models.common.checkpoint import save_weights
from embodrl.models.common.lora import target_names
from embodrl.models.common.merging import merged_state_dict
from embodrl.models.registry import build_policy
from embodrl.trainer import parts as run_parts
from embodrl.trainer.imitation_parts import start_imitation
from embodrl.types import Observation, SamplingParams

SECTION = ModelConfig(model_type="rl_only", warm_start=None, num_action_chunks=2, action_dim=3)
SEEN = Observation(
    np.random.default_rng(0).integers(0, 255, (2, 1, 16, 16, 3), np.uint8),
    np.zeros((2, 0), np.float32),
    ["a", "b"],
    np.zeros(2, np.int32),
)


def build(**changes: object) -> VLAPolicy:
    section = ModelConfig.model_validate(SECTION.model_dump() | changes)
    return build_policy(section, device="cpu", dtype=torch.float32, seed=0)[0]


def test_what_rl_needs_is_three_methods() -> None:
    assert VLAPolicy.__abstractmethods__ == {"preprocess", "predict_action_batch", "evaluate_actions"}
    assert {feature: lacking(build(), feature) for feature in OPTIONAL} == {
        feature: list(methods) for feature, methods in OPTIONAL.items()
    }


def test_every_module_is_a_group_and_a_bare_parameter_is_refused() -> None:
    policy = build()
    groups = policy.trainable_groups()
    assert list(groups) == ["body", "head", "value_head"]
    assert sum(map(len, groups.values())) == len(list(policy.parameters())) and policy.unused_parameters() == []

    class Bare(RlOnly):
        def __init__(self, config: ModelConfig) -> None:
            super().__init__(config)
            self.log_std = nn.Parameter(torch.zeros(3))

    with raises_code("policy-parts") as caught:
        Bare(SECTION).parts()
    assert "log_std" in caught.value.message


def test_values_come_with_the_actions_or_are_missed() -> None:
    policy = build()
    output = policy.predict_action_batch(SEEN, "eval", SamplingParams())
    assert torch.equal(policy.predict_values(SEEN), output.values)
    policy.predict_action_batch = lambda *args, **kwargs: replace(output, values=None)  # type: ignore[method-assign]
    with raises_code("policy-has-no-values"):
        policy.predict_values(SEEN)


@pytest.mark.parametrize("trainable", ["all", "lora"])
def test_what_is_saved_acts_the_same_when_it_is_loaded(trainable: str, tmp_path: Path) -> None:
    if trainable == "lora":
        pytest.importorskip("peft")
    policy = build(trainable=trainable, lora={"rank": 2})
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(torch.randn_like(parameter))
    policy.save_pretrained(tmp_path / "policy")
    again = build(warm_start=str(tmp_path / "policy"))
    wanted = merged_state_dict(policy)
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in again.state_dict().items())
    np.testing.assert_array_equal(policy.predict(SEEN.images, "a"), again.predict(SEEN.images, "a"))


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    policy = build(model_type="rl_tied")
    groups = policy.trainable_groups()
    assert sum(map(len, groups.values())) == len(list(policy.parameters()))
    state = dict(policy.state_dict())
    same, other = "body.2.weight", "emb.weight"
    one_name = {name: tensor for name, tensor in state.items() if name != same}
    for number, saved in enumerate((state, one_name)):
        directory = tmp_path / str(number)
        directory.mkdir()
        save_weights(saved, directory)
        again = build(model_type="rl_tied", warm_start=str(directory))
        assert again.get_parameter(same) is again.get_parameter(other)
        assert all(torch.equal(tensor, state[name]) for name, tensor in again.state_dict().items())
        assert all(parameter.requires_grad for parameter in again.parameters())
    (tmp_path / "differ").mkdir()
    save_weights(state | {other: state[other] + 1}, tmp_path / "differ")
    with raises_code("weights-mismatch"):
        build(model_type="rl_tied", warm_start=str(tmp_path / "differ"))


def test_tied_layers_have_no_adapters() -> None:
    assert target_names(build(model_type="rl_tied")) == ["head"]


def test_every_name_of_tied_weights_is_copied_to_who_acts() -> None:
    learner, actor = (build(model_type="rl_tied") for _ in range(2))
    with torch.no_grad():
        learner.get_parameter("emb.weight").add_(1)
    config = load_config(["env=toy"]).config
    engine = NativeRolloutEngine(actor, config.rollout, config.algorithm.sampling, 0)
    engine.update_weights(learner.state_dict().items(), 1)
    assert torch.equal(actor.get_parameter("body.2.weight"), learner.get_parameter("emb.weight"))


@pytest.mark.parametrize("setting", [CHECKPOINTING, "algorithm.bc_coef=0.5"], ids=["checkpointing", "imitation"])
def test_training_is_refused_before_there_is_a_run(setting: str) -> None:
    own = ["extensions=[rl_only]", "env=toy", "model.model_type=rl_only", "model.warm_start=null"]
    loaded = load_config(own)
    actor = loaded.config.actor.model_copy(update={"gradient_checkpointing": setting == CHECKPOINTING})
    algorithm = loaded.config.algorithm.model_copy(update={"bc_coef": 0.5 * (setting != CHECKPOINTING)})
    config = loaded.config.model_copy(update={"actor": actor, "algorithm": algorithm})
    with raises_code("policy-lacks-feature") as caught:
        run_parts.check_machine(config, loaded.deployment)
    assert "embodrl.VLAPolicy" in (caught.value.hint or "")


@pytest.mark.parametrize(("setting", "method"), [(TRAINABLE_HEAD, "head_parameters"), (CHECKPOINTING, "enable")])
def test_settings_that_need_more_are_refused_when_the_policy_is_built(setting: str, method: str) -> None:
    from embodrl.workers.policy import build_policy as build_of_run

    own = ["extensions=[rl_only]", "env=toy", "model.model_type=rl_only", "model.warm_start=null"]
    config = load_config([*own, setting]).config
    with raises_code("policy-lacks-feature") as caught:
        build_of_run(config, torch.device("cpu"))
    assert setting in caught.value.message and method in caught.value.message and "RlOnly" in caught.value.message


def test_imitation_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = build()
    with raises_code("policy-lacks-feature") as caught:
        start_imitation(SimpleNamespace(config=None), None, policy, None)  # type: ignore[arg-type]
    assert "sft_inputs and sft_loss" in caught.value.message
    for call in (lambda: policy.sft_inputs(SEEN, torch.zeros(2, 2, 3)), lambda: policy.sft_loss({})):
        with raises_code("policy-lacks-feature"):
            call()
    monkeypatch.setattr(run_parts, "build_policy", lambda *_: policy)
    for loss_type, bc_coef, asked_by in (
        ("actor_critic", 0.5, "algorithm.bc_coef"),
        ("dagger", 0.0, "algorithm.loss_type=dagger"),
        ("actor_critic", 0.0, ""),
    ):
        actor = SimpleNamespace(gradient_checkpointing=False)
        algorithm = SimpleNamespace(loss_type=loss_type, bc_coef=bc_coef)
        session = SimpleNamespace(config=SimpleNamespace(algorithm=algorithm, actor=actor), weights_from=None)
        if not asked_by:
            assert run_parts.make_policy(session, torch.device("cpu")) is policy  # type: ignore[arg-type]
            continue
        with raises_code("policy-lacks-feature") as caught:
            run_parts.make_policy(session, torch.device("cpu"))  # type: ignore[arg-type]
        assert asked_by in caught.value.message


def test_who_offers_a_feature_passes() -> None:
    from tiny_families import build as build_family

    for feature in OPTIONAL:
        require(build_family("gaussian"), feature)
    with raises_code("policy-lacks-feature"):
        require(build(), IMITATION)
