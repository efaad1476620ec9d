"""Teachers of another size or family: what they read, what they say of an action, and what separates them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_families import build, generator, observation, tiny_config
from tiny_language_models import write_language_model
from updates import on_policy

from embodrl.config.policy_card import CARD_FILE
from embodrl.config.schema import AlgorithmConfig, Config, KlConfig, ModelConfig, model_settings
from embodrl.data.trajectory import TrajectoryBatch
from embodrl.hybrid_engines.training.native import NativeTrainEngine
from embodrl.hybrid_engines.training.options import EngineOptions
from embodrl.models.base import VLAPolicy
from embodrl.models.common.chat import Conversation
from embodrl.models.common.teacher import build_teacher, inputs_for, is_apart, teacher_num_bytes
from embodrl.models.registry import build_policy
from embodrl.trainer.teacher import _differences
from embodrl.types import Observation, SamplingParams

SAMPLING = SamplingParams(1.0)


def taught(model: ModelConfig, teacher: Path) -> Config:
    algorithm = AlgorithmConfig(teacher=str(teacher), kl=KlConfig(coef=1.0), loss_type="actor")
    actor = Config().actor.model_copy(update={"precision": "fp32"})
    return Config().model_copy(update={"model": model, "algorithm": algorithm, "actor": actor})


def teacher_of(config: Config) -> VLAPolicy:
    return build_teacher(config, "cpu", torch.float32)


def rollout(output: Any) -> TrajectoryBatch:
    """One step of every row of an output."""
    shape = (1, *output.actions.shape[:2])
    flags: dict[str, Any] = {name: torch.zeros(shape, dtype=torch.bool) for name in ("terminated", "truncated")}
    numbers: dict[str, Any] = {
        name: torch.zeros(shape[:2], dtype=torch.int64) for name in ("policy_version", "task_id")
    }
    return TrajectoryBatch.from_rollout(
        forward_inputs={name: tensor[None] for name, tensor in output.forward_inputs.items()},
        logprobs=output.logprobs[None],
        values=torch.zeros(2, shape[1], 1),
        rewards=torch.zeros(shape),
        valid=torch.ones(shape, dtype=torch.bool),
        bootstrap_values=torch.zeros(*shape[:2], 1),
        **flags,
        **numbers,
    )


def test_a_gaussian_of_another_size_by_hand(tmp_path: Path) -> None:
    """``log N(u; mean, std) - log(1 - tanh(u)^2)``, of the teacher's mean and deviation."""
    other = {"use_images": False, "hidden_sizes": (5,), "max_state_dim": 8}
    public = build("gaussian", gaussian=other, add_value_head=False)
    public.save_pretrained(tmp_path / "teacher")
    policy = build("gaussian")
    config = taught(tiny_config("gaussian"), tmp_path / "teacher")
    assert is_apart(config) and _differences(config, teacher_of(config), policy) == ""
    weights = sum(value.numel() for value in public.state_dict().values())
    assert teacher_num_bytes(config, torch.float32) == 4 * weights

    output = policy.predict_action_batch(observation("gaussian"), "train", SAMPLING, generator(), False)
    options = EngineOptions.of(config)
    assert not options.keep_reference
    update = on_policy(NativeTrainEngine(policy, options, "cpu"), config)
    found = update.reference_logprobs(rollout(output))[0]
    u = output.forward_inputs["pre_tanh"].double()
    with torch.no_grad():
        chunk: Any = public.model.chunk_distribution(public.features(output.forward_inputs))  # type: ignore[operator]
    mean, std = chunk.mean.double(), chunk.std.double()
    wanted = -0.5 * ((u - mean) / std) ** 2 - std.log() - 0.5 * math.log(2 * math.pi) - (1 - u.tanh() ** 2).log()
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-4)


def test_openvla_teaches_openvla_oft(tmp_path: Path) -> None:
    """Both read one picture and prompt, and have the same tokens of bins."""
    public = build("openvla", add_value_head=False)
    public.save_pretrained(tmp_path / "teacher")
    (tmp_path / "teacher" / CARD_FILE).write_text(json.dumps({"model_type": "openvla"}))
    policy = build("openvla_oft", add_value_head=False)
    config = taught(tiny_config("openvla_oft"), tmp_path / "teacher")
    assert is_apart(config)
    teacher = teacher_of(config)
    assert type(teacher) is type(public) and _differences(config, teacher, policy) == ""
    inputs = policy.predict_action_batch(
        observation("openvla_oft"), "train", SAMPLING, generator(), False
    ).forward_inputs
    found = teacher.evaluate_actions(inputs_for(teacher, inputs), SAMPLING, compute_values=False).logprobs
    own = {**public.preprocess(observation("openvla")), "action_tokens": inputs["action_tokens"]}
    wanted = public.evaluate_actions(own, SAMPLING, compute_values=False).logprobs
    torch.testing.assert_close(found, wanted)
    frozen = build("openvla_oft", freeze_vision=True)
    assert _differences(config, teacher, frozen).startswith("pictures")

    policy.save_pretrained(tmp_path / "student")
    back = taught(tiny_config("openvla"), tmp_path / "student")
    student = teacher_of(back)
    assert is_apart(back) and _differences(back, student, public) == ""
    one = public.predict_action_batch(observation("openvla"), "train", SAMPLING, generator(), False).forward_inputs
    found = student.evaluate_actions(inputs_for(student, one), SAMPLING, compute_values=False).logprobs
    assert found.shape == (3, 2, 7)


def test_what_the_policy_does_not_read_or_say_is_named(tmp_path: Path) -> None:
    build("openvla", num_action_chunks=1).save_pretrained(tmp_path / "short")
    config = taught(tiny_config("openvla_oft"), tmp_path / "short")
    policy = build("openvla_oft")
    policy.num_action_chunks = 1
    assert _differences(config, teacher_of(config), policy) == "chunks"
    build("gaussian", gaussian={"use_images": False, "max_state_dim": 40}).save_pretrained(tmp_path / "state")
    config = taught(tiny_config("gaussian"), tmp_path / "state")
    assert _differences(config, teacher_of(config), build("gaussian")) == "the input 'state'"


def planner(path: Path | None) -> ModelConfig:
    sizes = {"max_prompt_tokens": 300, "max_new_tokens": 60}
    values = {"model_type": "planner", "warm_start": None, "num_action_chunks": 1, "planner": sizes}
    place = None if path is None else str(path)
    return model_settings("planner").model_validate({**values, "model_path": place, "add_value_head": False})


def made(model: ModelConfig) -> VLAPolicy:
    return build_policy(model, device="cpu", dtype=torch.float32, seed=0)[0].eval()


def test_a_qwen_teaches_a_llama_with_its_tokens(tmp_path: Path) -> None:
    small = write_language_model(tmp_path / "llama", "llama")
    large = write_language_model(tmp_path / "qwen", "qwen3", hidden_size=24)
    config = taught(planner(small), large)
    policy, teacher = made(config.model), teacher_of(config)
    assert is_apart(config) and _differences(config, teacher, policy) == ""
    text = Conversation.of([{"role": "user", "content": "go"}]).to_text()
    nothing = np.zeros((1, 0), np.float32)
    seen = Observation(np.zeros((1, 0, 1, 1, 3), np.uint8), nothing, [text], np.zeros(1, np.int32))
    inputs = policy.predict_action_batch(seen, "train", SAMPLING, generator(), False).forward_inputs
    found = teacher.evaluate_actions(inputs, SAMPLING, compute_values=False).logprobs
    wanted = made(planner(large)).evaluate_actions(inputs, SAMPLING, compute_values=False).logprobs
    torch.testing.assert_close(found, wanted)
    assert found.requires_grad is False

    made(planner(None)).save_pretrained(tmp_path / "bytes")
    config = taught(planner(small), tmp_path / "bytes")
    assert _differences(config, teacher_of(config), policy) == "tokens"


@pytest.mark.parametrize(("trainable", "apart"), [("all", False), ("lora", True)])
def test_a_policy_that_trains_adapters_has_its_teacher_beside_it(trainable: str, apart: bool, tmp_path: Path) -> None:
    build("openvla").save_pretrained(tmp_path / "teacher")
    model = tiny_config("openvla", trainable=trainable)
    assert is_apart(taught(model, tmp_path / "teacher")) is apart
    assert not is_apart(taught(model, tmp_path / "gone"))
