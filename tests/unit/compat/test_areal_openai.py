"""Workflows written for AReaL's OpenAI client run as they are written, with other imports."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import closing
from copy import deepcopy
from typing import Any

import pytest
from expect import raises_code
from tiny_families import build

from embodrl.compat.areal import GenerationHyperparameters, InferenceEngine, RolloutWorkflow, Tokenizer
from embodrl.compat.areal_openai import ArealOpenAI
from embodrl.config import load_config
from embodrl.errors import EmbodrlError, WireError, WorkflowError
from embodrl.hybrid_engines.rollout.batched import BatchedEngine
from embodrl.hybrid_engines.rollout.native import NativeRolloutEngine
from embodrl.models.base import VLAPolicy
from embodrl.types import TOKEN_MASK
from embodrl.workers.workflows.workflow import EpisodeTask, Trajectory

openai = pytest.importorskip("openai")

CONFIG = load_config(["env=toy", "model=mlp", "actor.precision=fp32"]).config
SIDE = {"type": "object", "properties": {"side": {"enum": ["left", "right"]}}, "required": ["side"]}
LOOK = {"type": "function", "function": {"name": "look", "parameters": SIDE}}
ASK = [{"role": "user", "content": "where is it?"}]
Body = Callable[[InferenceEngine], Awaitable[Any]]


@pytest.fixture(scope="module")
def policy() -> VLAPolicy:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
    return build("planner", num_action_chunks=1, planner={**sizes, "max_prompt_tokens": 300, "max_new_tokens": 48})


class Does(RolloutWorkflow):
    def __init__(self, body: Body) -> None:
        self.body = body

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Any:
        return await self.body(engine)


def run(policy: VLAPolicy, workflow: RolloutWorkflow, data: dict[str, Any] | None = None) -> Trajectory:
    engine = NativeRolloutEngine(policy, CONFIG.rollout, CONFIG.algorithm.sampling, 0)
    nowhere: Any = None

    async def play() -> Trajectory:
        with closing(BatchedEngine(engine, True, 4)) as shared:
            task = EpisodeTask("reach-red", 0, 5, 3, 0, data=data or {})
            found = await workflow.run_episode(shared.for_episode(0), nowhere, task)
            assert found is not None
            return found

    return asyncio.run(play())


def rewards(found: Trajectory) -> list[float]:
    return [float(chunk.rewards) for chunk in found.chunks]


class MultiTurn(RolloutWorkflow):
    """Asks again until the answer is right; the calls are those of AReaL's ``MultiTurnWorkflow``."""

    def __init__(self, reward_fn: Callable[..., float], tokenizer: Tokenizer, turn_discount: float) -> None:
        self.reward_fn, self.tokenizer, self.turn_discount = reward_fn, tokenizer, turn_discount
        self.gconfig = GenerationHyperparameters().new_with_stop_and_pad_token_ids(tokenizer).new(n_samples=1)

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Any:
        client = ArealOpenAI(engine=engine, tokenizer=self.tokenizer)
        messages = deepcopy(data["messages"])
        reward, discount, turns = 0.0, 1.0, 0
        while reward == 0 and turns < 3:
            _comp = await client.chat.completions.create(
                messages=messages,
                frequency_penalty=self.gconfig.frequency_penalty,
                max_completion_tokens=self.gconfig.max_new_tokens,
                stop=self.gconfig.stop,
                store=True,
                temperature=self.gconfig.temperature,
                top_p=self.gconfig.top_p,
            )
            comp = client.get_interaction(_comp.id)
            assert comp is not None and comp.model_response is not None
            reward = self.reward_fn(
                self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True),
                _comp.choices[0].message.content,
                comp.model_response.input_tokens,
                comp.model_response.output_tokens,
            )
            turns += 1
            if reward == 0:
                messages += [{"role": "assistant", "content": _comp.choices[0].message.content}]
                messages += [{"role": "user", "content": "no"}]
                discount *= self.turn_discount
        client.set_reward(_comp.id, float(reward * discount))
        return client.export_interactions("individual")


def test_a_multi_turn_workflow_runs_as_it_is_written(policy: VLAPolicy) -> None:
    seen: list[tuple[str, str]] = []

    def judge(prompt: str, text: str, prompt_ids: list[int], ids: list[int]) -> float:
        assert Tokenizer().decode(ids) == text
        assert prompt_ids == Tokenizer().apply_chat_template(ASK, add_generation_prompt=True) or seen
        seen.append((prompt, text))
        return 1.0 if len(seen) == 2 else 0.0

    found = run(policy, MultiTurn(judge, Tokenizer(), 0.5), {"messages": ASK})
    assert rewards(found) == [0.0, 0.5] and found.success and found.done
    assert seen[0][0] == "<|user|>where is it?<|end|><|assistant|>"
    assert seen[1][0] == f"<|user|>where is it?<|end|><|assistant|>{seen[0][1]}<|end|><|user|>no<|end|><|assistant|>"
    assert [policy.text_of(chunk.forward_inputs)[0].text for chunk in found.chunks] == [text for _, text in seen]


async def two_turns(client: ArealOpenAI) -> list[Any]:
    """Write two messages, the second one after a call and its result."""
    tool: dict[str, Any] = {"tools": [LOOK], "tool_choice": "required"}
    first = await client.chat.completions.create(messages=ASK, model="any", logprobs=True, **tool)
    (call,) = first.choices[0].message.tool_calls
    message = first.choices[0].message
    assert call.function.name == "look" and first.choices[0].finish_reason == "tool_calls"
    past = [*ASK, message.model_dump(exclude_none=True), {"role": "tool", "tool_call_id": call.id, "content": "no"}]
    return [first, await client.chat.completions.create(messages=past, n=openai.NOT_GIVEN, seed=None)]


def test_rewards_of_turns_are_discounted(policy: VLAPolicy) -> None:
    async def body(engine: InferenceEngine) -> Any:
        client = ArealOpenAI(engine)
        first, second = await two_turns(client)
        assert isinstance(first, openai.types.chat.ChatCompletion)
        client.set_reward(first.id, 0.25)
        client.set_last_reward(2.0)
        exported = client.export_completions(turn_discount=0.5)
        assert [one.reward for one in exported.values()] == [0.25 + 0.5 * 2.0, 2.0]
        assert list(exported) == [first.id, second.id] and exported[second.id].parent is exported[first.id]
        assert client.get_completions(first.id) is exported[first.id]
        with pytest.raises(RuntimeError):
            client.apply_reward_discount(0.5)
        with pytest.raises(KeyError):
            client.set_reward("chatcmpl-other", 1.0)
        return exported

    found = run(policy, Does(body))
    assert rewards(found) == [1.25 - 2.0, 2.0], "from each message on, they sum up to its exported reward"
    assert found.success and [bool(chunk.terminated) for chunk in found.chunks] == [False, True]


def test_rewards_without_discount_are_their_own(policy: VLAPolicy) -> None:
    async def body(engine: InferenceEngine) -> Any:
        client = ArealOpenAI(engine)
        first, _ = await two_turns(client)
        client.set_reward(first.id, 0.25)
        with pytest.raises(ValueError, match="concat"):
            client.export_interactions("concat")
        return client.export_interactions()

    found = run(policy, Does(body))
    assert rewards(found) == [0.25, 0.0] and not found.success


def test_a_message_of_another_client_is_trained_alone(policy: VLAPolicy) -> None:
    async def body(engine: InferenceEngine) -> Any:
        client = ArealOpenAI(engine)
        first, second = await two_turns(client)
        client.set_reward(first.id, 5.0)
        client.set_reward(second.id, 1.0)
        return {second.id: client.export_interactions()[second.id]}

    assert rewards(run(policy, Does(body))) == [1.0]


def test_a_conversation_is_trained_from_its_last_message(policy: VLAPolicy) -> None:
    async def body(engine: InferenceEngine) -> Any:
        client = ArealOpenAI(engine, Tokenizer(), chat_template_type="concat")
        first, second = await two_turns(client)
        client.set_reward(first.id, 5.0)
        client.set_reward(second.id, 1.0)
        exported = client.export_interactions("concat")
        assert list(exported) == [second.id]
        return exported

    assert rewards(run(policy, Does(body))) == [0.0, 1.0]

    async def branches(engine: InferenceEngine) -> Any:
        client = ArealOpenAI(engine, chat_template_type="concat")
        first, _ = await two_turns(client)
        past = [*ASK, first.choices[0].message, {"role": "user", "content": "again"}]
        await client.chat.completions.create(messages=past, extra_body={})
        return client.export_interactions("concat")

    with raises_code("workflow-trajectory", WorkflowError, "2 conversations"):
        run(policy, Does(branches))


def test_streams_have_the_same_message(policy: VLAPolicy) -> None:
    async def body(engine: InferenceEngine) -> Any:
        client = ArealOpenAI(engine)
        stream = await client.chat.completions.create(messages=ASK, stream=True, max_tokens=9)
        chunks = [chunk async for chunk in stream]
        (one,) = client.export_interactions().values()
        assert isinstance(chunks[0], openai.types.chat.ChatCompletionChunk) and one.completion is not None
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert text == one.completion.choices[0].message.content and one.interaction_id == chunks[0].id
        client.set_last_reward(1.0)
        return {"rewards": [1.0]}

    found = run(policy, Does(body))
    assert rewards(found) == [1.0] and int(found.chunks[0].forward_inputs[TOKEN_MASK].sum()) == 9


@pytest.mark.parametrize(
    "given", [{"temperature": 0.3}, {"top_p": 0.5}, {"stop": "."}, {"n": 2}, {"seed": 1}, {"reasoning": "low"}]
)
def test_requests_that_choose_otherwise_than_the_run_are_refused(policy: VLAPolicy, given: dict[str, Any]) -> None:
    async def body(engine: InferenceEngine) -> Any:
        client = ArealOpenAI(engine)
        with raises_code("chat-request", WireError):
            await client.chat.completions.create(messages=ASK, **given)
        assert not client.export_interactions() and not engine.completions
        with pytest.raises(RuntimeError):
            client.set_last_reward(1.0)
        await client.chat.completions.create(messages=ASK)
        return {"rewards": [0.0]}

    assert rewards(run(policy, Does(body))) == [0.0]


def test_clients_with_other_settings_are_refused(policy: VLAPolicy) -> None:
    async def body(engine: InferenceEngine) -> Any:
        for given in ({"tool_call_parser": "llama"}, {"engine_max_tokens": 9}, {"chat_template_type": "raw"}):
            with raises_code("areal-counterpart", EmbodrlError):
                ArealOpenAI(engine, None, **given)
        client = ArealOpenAI(engine, api_key="any", engine_max_tokens=None)
        with raises_code("areal-counterpart", EmbodrlError):
            await client.chat.completions.create(messages=ASK, store=False)
        await client.chat.completions.create(messages=ASK)
        return client.export_interactions()

    assert rewards(run(policy, Does(body))) == [0.0]
