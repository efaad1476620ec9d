"""``model=remote_text``: a language model behind a server of OpenAI's API, asked over plain HTTP."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from expect import raises_code
from fake_chat_server import Answer, call, foreign, says
from served import TOKEN, served
from tiny_families import build as build_family

from embodrl.config.load import load_config
from embodrl.config.schema import Config
from embodrl.errors import RemotePolicyError, RolloutEngineError
from embodrl.hybrid_engines.rollout.batched import Completion, DecidingEngine, _Content, conversation
from embodrl.hybrid_engines.rollout.native import NativeRolloutEngine
from embodrl.models.common.chat import Conversation, ToolCall
from embodrl.models.remote_text import client as chat_client
from embodrl.models.remote_text.policy import RemoteTextPolicy, build_remote_text
from embodrl.models.remote_text.spec import RemoteTextConfig
from embodrl.types import Observation, SamplingParams

ASK = [{"role": "user", "content": "where is it?"}]
GRASP = {"type": "function", "function": {"name": "grasp"}}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMBODRL_TOKEN", TOKEN)
    monkeypatch.setattr(chat_client, "FIRST_PAUSE_S", 0.0)


def build(url: str, **settings: Any) -> RemoteTextPolicy:
    values = {"model_type": "remote_text", "warm_start": None, "num_action_chunks": 1, "url": url} | settings
    config = RemoteTextConfig.model_validate(values)
    return build_remote_text(config, device="cpu", dtype=torch.float32, seed=0)[0]


def ask(policy: RemoteTextPolicy, *conversations: Conversation, **how: Any) -> list[Completion]:
    count = len(conversations)
    images, nothing = np.zeros((count, 0, 1, 1, 3), np.uint8), np.zeros((count, 0), np.float32)
    texts = [conversation.to_text() for conversation in conversations]
    output = policy.predict_action_batch(
        Observation(images, nothing, texts, np.zeros(count, np.int32)), "eval", SamplingParams()
    )
    rows = [{name: part[row : row + 1] for name, part in output.forward_inputs.items()} for row in range(count)]
    return [Completion.of(policy, replace(output, forward_inputs=row), **how) for row in rows]


def test_messages_and_calls_of_a_foreign_server() -> None:
    answers = (says("grün"), says("I go.", [call("grasp", "{}"), call("look", '{"side": "left"}')], "tool_calls"))
    with foreign(*answers, says("cut", reason="length")) as (url, asked):
        policy = build(url, max_new_tokens=9)
        (plain,) = ask(policy, Conversation.of(ASK))
        assert plain.text == "grün" and plain.written.ended and plain.written.prompt_tokens == 7
        path, token, body = asked[0]
        assert path == "/v1/chat/completions" and token == f"Bearer {TOKEN}"
        assert body == {"model": "llm", "messages": ASK, "temperature": 0, "max_tokens": 9}
        (found,) = ask(policy, Conversation.of(ASK, [GRASP], "required"))
        assert found.tool_calls == (ToolCall("grasp", {}), ToolCall("look", {"side": "left"}))
        assert asked[1][2]["tool_choice"] == "required" and asked[1][2]["tools"][0]["function"]["name"] == "grasp"
        past = [*ASK, {"role": "assistant", "content": found.text}, {"role": "tool", "content": "held"}]
        (cut,) = ask(policy, Conversation.of(past, [GRASP]))
        assert not cut.written.ended and asked[2][2]["tool_choice"] == "auto"
        said, result = asked[2][2]["messages"][1:]
        assert said["content"] == "I go." and [one["id"] for one in said["tool_calls"]] == ["call00000", "call00001"]
        assert said["tool_calls"][1]["function"] == {"name": "look", "arguments": '{"side": "left"}'}
        assert result == {"role": "tool", "content": "held", "tool_call_id": "call00000"}


def test_rows_are_asked_together_and_one_call_may_be_kept() -> None:
    with foreign(says(None, [call("grasp", "{}"), call("grasp", "{}")], "tool_calls")) as (url, asked):
        found = ask(build(url), *[Conversation.of(ASK, [GRASP])] * 3, parallel_tool_calls=False)
        assert len(asked) == 3 and [one.tool_calls for one in found] == [(ToolCall("grasp", {}),)] * 3
        assert found[0].written.has_its_call and found[0].text.endswith("</tool_call>")


@pytest.mark.parametrize(
    ("answer", "code", "kind", "requests"),
    [
        ((503, {}), "remote-unreachable", RolloutEngineError, 3),
        ((429, {}), "remote-unreachable", RolloutEngineError, 3),
        ((401, {}), "remote-token", RolloutEngineError, 1),
        ((400, {"error": "too long"}), "remote-refused", RemotePolicyError, 1),
        ((307, {}), "remote-refused", RemotePolicyError, 1),
        ((200, []), "remote-answer", RemotePolicyError, 1),
        ((200, {"choices": []}), "remote-answer", RemotePolicyError, 1),
        (says(None, [call("grasp", "[")]), "remote-answer", RemotePolicyError, 1),
        (says("no call"), "remote-answer", RemotePolicyError, 1),
    ],
)
def test_failures_have_codes_and_attempts_a_bound(answer: Answer, code: str, kind: Any, requests: int) -> None:
    with foreign(answer) as (url, asked):
        policy = build(url, retries=2)
        with raises_code(code, kind):
            ask(policy, Conversation.of(ASK, [GRASP], "required"))
        assert len(asked) == requests


def test_a_lost_server_is_not_asked_row_by_row() -> None:
    with foreign((503, {})) as (url, asked):
        config = Config()
        native = NativeRolloutEngine(build(url, retries=1), config.rollout, config.algorithm.sampling, 0, 1)
        engine = DecidingEngine(native, "greedy", 3, None)
        found = engine._computed([_Content(conversation(ASK, None, "auto"), (row, 1)) for row in range(3)])
        # At most once a row: what has not begun when the first row fails is not asked at all.
        assert [type(one) for one in found] == [RolloutEngineError] * 3 and len(asked) <= 3 * 2


def test_a_busy_server_is_asked_again() -> None:
    with foreign((503, {}), (429, {}), says("there")) as (url, asked):
        assert ask(build(url), Conversation.of(ASK))[0].text == "there" and len(asked) == 3


def test_the_model_is_chosen_and_a_lost_server_named() -> None:
    with foreign(says("x"), models={"data": [{"id": "a"}, {"id": "b"}]}) as (url, asked):
        with raises_code("remote-models", RemotePolicyError):
            build(url)
        ask(build(url, served_model="b"), Conversation.of(ASK))
        assert asked[0][2]["model"] == "b"
    with raises_code("remote-unreachable", RolloutEngineError):
        build(url, retries=1)


def test_embodrl_is_a_foreign_server() -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "max_prompt_tokens": 400}
    planner = build_family("planner", num_action_chunks=1, planner=sizes)
    conversation = Conversation.of(ASK, [GRASP, {"function": {"name": "wait"}}], "required")

    async def run() -> None:
        async with served("openai", writer=planner) as server:
            policy = await asyncio.to_thread(build, server.urls["openai"] + "/v1")
            (found,) = await asyncio.to_thread(ask, policy, conversation)
            texts = [conversation.to_text()]
            seen = Observation(
                np.zeros((1, 0, 1, 1, 3), np.uint8), np.zeros((1, 0), np.float32), texts, np.zeros(1, np.int32)
            )
            own = Completion.of(planner, planner.predict_action_batch(seen, "eval", SamplingParams()))
            assert found.tool_calls == own.tool_calls != ()
            assert found.written.prompt_tokens == own.written.prompt_tokens

    asyncio.run(run())


@pytest.mark.parametrize(
    ("verb", "changed", "code"),
    [
        *(
            ("eval", f"model.url={url}", "remote-text-has-a-url")
            for url in ("null", "host", "ws://host/v1", "http://key@host/v1", "'http://host/v1?key=x'", "'http://[::1'")
        ),
        ("eval", "rollout.workflow=null", "remote-text-needs-a-workflow"),
        (
            "eval",
            "rollout.workflow='embodrl.workers.workflows.workflow:ChunkWorkflow'",
            "remote-text-needs-a-workflow",
        ),
        ("eval", "model.random_weights=true", "remote-text-has-its-own-weights"),
        ("eval", "model.freeze_vision=true", "remote-text-has-its-own-weights"),
        ("serve", "serve.protocols=[openai]", "remote-text-needs-a-workflow"),
        ("record", "collect.num_episodes=1", "remote-text-needs-a-workflow"),
        ("eval", "model.unnorm_key=x", "remote-text-has-its-own-weights"),
        ("eval", "model.num_action_chunks=2", "remote-text-has-its-own-weights"),
        ("train", "env.train.auto_reset=false", "trained-model-has-gradients"),
    ],
)
def test_settings_that_do_not_fit(verb: Any, changed: str, code: str) -> None:
    workflow = "rollout.workflow='two_agents:Pilots'"
    settings = ["env=toy", "model=remote_text", "model.url=http://host:1/v1", workflow]
    with raises_code(code):
        load_config([*settings, changed], verb=verb)
    load_config([*settings, "env.train.auto_reset=false"], verb="eval")


def test_it_only_writes() -> None:
    policy = build_remote_text(RemoteTextConfig(url="http://host:1/v1"), device="meta", dtype=torch.float32, seed=0)[0]
    with raises_code("remote-only-acts", RemotePolicyError):
        ask(policy, Conversation.of(ASK))
