"""Workflows written for AReaL's engine run as they are written, with other imports."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from expect import raises_code
from tiny_families import build
from tiny_language_models import write_language_model

from embodrl.compat.areal import (
    GenerationHyperparameters,
    InferenceEngine,
    ModelRequest,
    RolloutWorkflow,
    Tokenizer,
)
from embodrl.config import load_config
from embodrl.errors import EmbodrlError, WorkflowError
from embodrl.hybrid_engines.rollout.batched import BatchedEngine
from embodrl.hybrid_engines.rollout.native import NativeRolloutEngine
from embodrl.models.base import VLAPolicy
from embodrl.models.common.chat import Conversation
from embodrl.models.planner import tokenizer as planner
from embodrl.types import TOKEN_MASK
from embodrl.workers.workflows.workflow import EpisodeTask, Trajectory

CONFIG = load_config(["env=toy", "model=mlp", "actor.precision=fp32"]).config
SIDE = {"type": "object", "properties": {"side": {"enum": ["left", "right"]}}, "required": ["side"]}
LOOK = {"name": "look", "description": "turn the camera", "parameters": SIDE}
ASK = [{"role": "user", "content": "where is it?"}]
SHORT = {"max_prompt_tokens": 200, "max_new_tokens": 8}


@pytest.fixture(scope="module")
def policy() -> VLAPolicy:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "max_prompt_tokens": 400}
    return build("planner", num_action_chunks=1, planner=sizes)


class TwoTurns(RolloutWorkflow):
    """Asks until the answer is right; the second prompt continues the first one token by token."""

    def __init__(self, reward_fn: Callable[..., float], gconfig: GenerationHyperparameters, tokenizer: Tokenizer):
        self.reward_fn, self.gconfig, self.tokenizer = reward_fn, gconfig, tokenizer

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> dict[str, torch.Tensor] | None:
        tokens: dict[str, list[Any]] = {"seq": [], "logprobs": [], "loss_mask": [], "versions": []}
        input_ids = self.tokenizer.apply_chat_template(data["messages"], [LOOK], add_generation_prompt=True)
        reward = 0.0
        for _ in range(2):
            req = ModelRequest(
                rid=uuid.uuid4().hex,
                input_ids=input_ids,
                gconfig=self.gconfig.new(n_samples=1),
                metadata={"tool_choice": "required"},
                tokenizer=self.tokenizer,
            )
            resp = await engine.agenerate(req)
            reward = self.reward_fn(self.tokenizer.decode(resp.output_tokens), data["answer"])
            before = len(resp.input_tokens) - len(tokens["seq"])
            assert resp.input_tokens[: len(tokens["seq"])] == tokens["seq"] and resp.input_tokens == input_ids
            tokens["seq"] += resp.input_tokens[-before:] + resp.output_tokens
            tokens["logprobs"] += [0.0] * before + resp.output_logprobs
            tokens["loss_mask"] += [0] * before + [1] * resp.output_len
            tokens["versions"] += [-1] * before + resp.output_versions
            again = self.tokenizer.apply_chat_template(
                [{"role": "user", "content": "no"}], tokenize=True, add_generation_prompt=True
            )
            input_ids = [*tokens["seq"], *again]
        if reward < 0:
            return None
        res = {name: torch.tensor(column).unsqueeze(0) for name, column in tokens.items()}
        return {**res, "input_ids": res.pop("seq"), "rewards": torch.tensor([reward])}


def run(policy: VLAPolicy, workflow: RolloutWorkflow, data: dict[str, Any]) -> Trajectory | None:
    engine = NativeRolloutEngine(policy, CONFIG.rollout, CONFIG.algorithm.sampling, 0)
    task = EpisodeTask("reach-red", 0, 5, 3, 0, data=data)
    nowhere: Any = None

    async def play() -> Trajectory | None:
        with closing(BatchedEngine(engine, True, 4)) as shared:
            return await workflow.run_episode(shared.for_episode(0), nowhere, task)

    return asyncio.run(play())


def test_an_episode_of_two_turns_is_two_messages_with_the_reward_of_the_last(policy: VLAPolicy) -> None:
    said: list[str] = []

    def judge(text: str, answer: str) -> float:
        said.append(text)
        return 1.0 if answer in ("left", "right") else -1.0

    workflow = TwoTurns(judge, GenerationHyperparameters(n_samples=4), Tokenizer())
    found = run(policy, workflow, {"messages": ASK, "answer": "left"})
    assert found is not None and found.success and found.done
    assert [float(chunk.rewards) for chunk in found.chunks] == [0.0, 1.0]
    written = [each.text for each in policy.text_of(found.chunks[1].forward_inputs)]
    assert written == said[1:] and said[1].startswith('{"name":"look"')
    assert found.chunks[0].forward_inputs[TOKEN_MASK].sum() > 1
    assert run(policy, workflow, {"messages": ASK, "answer": "nowhere"}) is None


def test_prompts_are_read_as_they_are_written() -> None:
    conversation = Conversation.of([*ASK, {"role": "assistant", "content": "über"}, *ASK], [LOOK])
    assert planner.read(planner.encode(conversation)) == conversation
    assert planner.read(planner.encode(Conversation.of(ASK))) == Conversation.of(ASK)
    padded, no_tools = [planner.PAD, *planner.encode(conversation)], [planner.TOOLS, *planner.encode(conversation)]
    for ids in ([], [65, 66], planner.encode(conversation)[:-1], [planner.ROLE_IDS["assistant"]], padded, no_tools):
        with raises_code("planner-prompt", EmbodrlError):
            planner.read(ids)


@pytest.mark.parametrize(
    ("returned", "reason"),
    [
        ({"rewards": [0.0, 1.0]}, "2 rewards for 1 messages"),
        ({}, "0 rewards"),
        ({"rewards": 1.0, "loss_mask": [0, 1]}, "loss_mask"),
    ],
)
def test_what_is_not_one_episode_is_refused(policy: VLAPolicy, returned: dict[str, Any], reason: str) -> None:
    class Wrong(RolloutWorkflow):
        async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> dict[str, Any]:
            assert data["episode"].name == "reach-red" and data["env"] is None and engine.get_version() == 0
            ids = Tokenizer().apply_chat_template(ASK, add_generation_prompt=True)
            resp = await engine.agenerate(ModelRequest(input_ids=ids))
            assert resp.input_len == len(ids) and resp.stop_reason in ("stop", "length")
            return returned

    with raises_code("workflow-trajectory", WorkflowError, reason):
        run(policy, Wrong(), {})


def test_what_has_no_counterpart_is_refused(policy: VLAPolicy) -> None:
    class Asks(RolloutWorkflow):
        async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> None:
            await engine.agenerate(data["request"])

    ids = Tokenizer().apply_chat_template(ASK, add_generation_prompt=True)
    own = GenerationHyperparameters().new_with_stop_and_pad_token_ids(Tokenizer())
    changes: list[dict[str, Any]] = [{"n_samples": 2}, {"temperature": 0.3}, {"top_p": 0.5}, {"stop": ["."]}]
    changes += [{"greedy": True}, {"frequency_penalty": 1.0}, {"stop_token_ids": (65,)}, {"max_tokens": len(ids)}]
    requests = [ModelRequest(input_ids=ids, gconfig=own.new(**change)) for change in changes]
    for request_ in (*requests, ModelRequest(input_ids=ids, image_data=["aGk="])):
        with raises_code("areal-counterpart", EmbodrlError, "counterpart"):
            run(policy, Asks(), {"request": request_})


def test_a_request_limits_its_message(policy: VLAPolicy) -> None:
    class Short(RolloutWorkflow):
        async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> dict[str, Any]:
            ids = Tokenizer().apply_chat_template(ASK, add_generation_prompt=True)
            lengths = []
            for change in ({"max_new_tokens": 3}, {"max_tokens": len(ids) + 2}):
                gconfig = GenerationHyperparameters(temperature=CONFIG.algorithm.sampling.temperature, **change)
                resp = await engine.agenerate(ModelRequest(input_ids=ids, gconfig=gconfig))
                assert resp.stop_reason == "length" and resp.output_tokens_without_stop == resp.output_tokens
                lengths.append(resp.output_len)
            assert lengths == [3, 2]
            return {"rewards": [1.0]}

    found = run(policy, Short(), {})
    assert found is not None
    assert [int(chunk.forward_inputs[TOKEN_MASK].sum()) for chunk in found.chunks] == [3, 2]


def test_a_prompt_as_text_has_its_marks() -> None:
    text = Tokenizer().apply_chat_template(ASK, tokenize=False, add_generation_prompt=True)
    assert text == "<|user|>where is it?<|end|><|assistant|>"


def test_tokens_of_a_public_model_are_refused(tmp_path: Path) -> None:
    class Asks(RolloutWorkflow):
        async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> dict[str, Any]:
            ids = Tokenizer().apply_chat_template(ASK, add_generation_prompt=True)
            await engine.agenerate(ModelRequest(input_ids=ids))
            raise AssertionError

    model = build("planner", num_action_chunks=1, model_path=str(write_language_model(tmp_path)), planner=SHORT)
    with raises_code("areal-counterpart"):
        run(model, Asks(), {})
