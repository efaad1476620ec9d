"""OpenAI's chat completions: asked by the official client, and over plain HTTP."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch
from served import TOKEN, Served, served
from tiny_families import build

from embodrl.models.base import VLAPolicy
from embodrl.models.common.chat import Conversation, LiveToken, ToolCall
from embodrl.models.planner.policy import ALLOWED, TOKENS
from embodrl.models.planner.tokenizer import END, PAD, encode
from embodrl.types import TOKEN_MASK, Observation, PolicyOutput

SIDE = {"type": "object", "properties": {"side": {"enum": ["left", "right"]}}, "required": ["side"]}
LOOK = {"type": "function", "function": {"name": "look", "description": "turn", "parameters": SIDE}}
GRASP = {"type": "function", "function": {"name": "grasp"}}
ASK = [{"role": "user", "content": "where is it?"}]
Post = Callable[..., Coroutine[Any, Any, tuple[int, Any]]]


@pytest.fixture(scope="module")
def planner() -> VLAPolicy:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "max_prompt_tokens": 400}
    return build("planner", num_action_chunks=1, planner=sizes)


def talk(planner: VLAPolicy, test: Callable[[Served, Post], Awaitable[None]], **settings: Any) -> None:
    async def run() -> None:
        async with served("openai", writer=planner, **settings) as server, aiohttp.ClientSession() as session:

            async def post(content: Any, token: str = TOKEN, path: str = "/v1/chat/completions") -> tuple[int, Any]:
                text = content if isinstance(content, str) else json.dumps(content)
                headers = {"Authorization": f"Bearer {token}"}
                async with session.post(server.urls["openai"] + path, data=text, headers=headers) as answer:
                    return answer.status, await answer.json()

            await asyncio.wait_for(test(server, post), 60)

    asyncio.run(run())


def says(monkeypatch: pytest.MonkeyPatch, planner: VLAPolicy, text: str, hold: threading.Event | None = None) -> None:
    """Let a policy write bytes and their end, each with the log-prob -0.5; the last byte waits for ``hold``."""

    def write(observation: Observation, *_: object, **__: object) -> PolicyOutput:
        tokens = torch.tensor([[*text.encode(), END]]).expand(observation.batch_size, -1)
        room = planner.get_parameter("model.lm_head.weight").new_zeros(tokens.shape[0], 160)
        mask = room.bool()
        mask[:, : tokens.shape[1]] = True
        ids = torch.full(room.shape, PAD).masked_scatter(mask, tokens)
        written = {TOKENS: ids, TOKEN_MASK: mask, ALLOWED: torch.zeros(*room.shape, 33, dtype=torch.uint8)}
        nothing = np.zeros((observation.batch_size, 1, 0), np.float32)
        return PolicyOutput(nothing, -0.5 * mask[..., None], None, {**planner.preprocess(observation), **written})

    def write_live(observation: Observation, *given: Any) -> PolicyOutput:
        for place, byte in enumerate(text.encode()):
            if hold is not None and place + 1 == len(text.encode()):
                assert hold.wait(60)
            for row in range(observation.batch_size):
                given[-1](row, LiveToken(place, bytes([byte]), -0.5))
        return write(observation)

    monkeypatch.setattr(planner, "predict_action_batch", write)
    monkeypatch.setattr(planner, "write_live", write_live)


def of(**more: Any) -> dict[str, Any]:
    return {"model": "planner", "messages": ASK, **more}


def test_the_official_client_calls_tools_and_reads_errors(planner: VLAPolicy) -> None:
    openai = pytest.importorskip("openai")

    async def test(server: Served, post: Post) -> None:
        url = server.urls["openai"] + "/v1"
        client = openai.AsyncOpenAI(base_url=url, api_key=TOKEN, max_retries=0)
        assert [model.id async for model in client.models.list()] == ["planner"]
        assert (await client.models.retrieve("planner")).owned_by == "embodrl"
        create = client.chat.completions.create
        found = await create(model="planner", messages=ASK, tools=[LOOK, GRASP], tool_choice="required", logprobs=True)
        choice = found.choices[0]
        (call,) = choice.message.tool_calls
        assert choice.finish_reason == "tool_calls" and choice.message.content is None and call.id
        assert (call.function.name, json.loads(call.function.arguments)) in [
            *(("look", {"side": side}) for side in ("left", "right")),
            ("grasp", {}),
        ]
        assert found.usage.completion_tokens == len(choice.logprobs.content) + 1
        assert found.usage.total_tokens == found.usage.prompt_tokens + found.usage.completion_tokens
        assert sum(token.logprob for token in choice.logprobs.content) < 0
        answer = {"role": "tool", "tool_call_id": call.id, "content": "nothing there"}
        past = [*ASK, choice.message.model_dump(exclude_none=True), answer]
        named = {"type": "function", "function": {"name": "grasp"}}
        again = await create(model="planner", messages=past, tools=[LOOK, GRASP], tool_choice=named, temperature=0)
        assert again.choices[0].message.tool_calls[0].function.name == "grasp"
        text = ToolCall(call.function.name, json.loads(call.function.arguments)).to_text()
        said = [*ASK, {"role": "assistant", "content": text}, answer]
        assert again.usage.prompt_tokens == len(encode(Conversation.of(said, [GRASP])))
        for error, more in (
            (openai.BadRequestError, {"stream_options": {"include_usage": True}}),
            (openai.BadRequestError, {"stop": ["x"] * 5}),
            (openai.NotFoundError, {"model": "gpt-4"}),
        ):
            with pytest.raises(error) as caught:
                await create(**of(**more))
            assert caught.value.code in ("chat-request", "model_not_found")
        with pytest.raises(openai.AuthenticationError):
            await client.with_options(api_key="wrong").models.list()
        with pytest.raises(openai.NotFoundError):
            await client.embeddings.create(model="planner", input="x")
        await client.close()

    talk(planner, test)


def test_the_official_client_reads_streams(planner: VLAPolicy) -> None:
    openai = pytest.importorskip("openai")

    async def test(server: Served, post: Post) -> None:
        client = openai.AsyncOpenAI(base_url=server.urls["openai"] + "/v1", api_key=TOKEN, max_retries=0)
        create = client.chat.completions.create
        fixed = {"model": "planner", "messages": ASK, "temperature": 1, "seed": 3, "logprobs": True}
        whole = await create(**fixed)
        stream = await create(**fixed, stream=True, stream_options={"include_usage": True})
        *chunks, last = [chunk async for chunk in stream]
        deltas = [chunk.choices[0] for chunk in chunks]
        assert deltas[0].delta.role == "assistant" and {chunk.id for chunk in chunks} == {last.id}
        assert "".join(one.delta.content or "" for one in deltas) == whole.choices[0].message.content
        assert [one.finish_reason for one in deltas if one.finish_reason] == [whole.choices[0].finish_reason]
        found = [token for one in deltas if one.logprobs for token in one.logprobs.content]
        assert found == whole.choices[0].logprobs.content
        assert not last.choices and last.usage == whole.usage and not any(chunk.usage for chunk in chunks)
        async with client.chat.completions.stream(
            model="planner", messages=ASK, tools=[LOOK, GRASP], tool_choice="required"
        ) as events:
            message = (await events.get_final_completion()).choices[0]
        (call,) = message.message.tool_calls
        assert message.finish_reason == "tool_calls" and call.id and call.function.name in ("look", "grasp")
        with pytest.raises(openai.NotFoundError):
            await create(model="gpt-4", messages=ASK, stream=True)
        await client.close()

    talk(planner, test)


def test_a_stream_is_events(planner: VLAPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    """A character of several bytes comes with the last of them; what the text lacks of one becomes U+FFFD."""
    says(monkeypatch, planner, "aü")

    async def test(server: Served, post: Post) -> None:
        url = server.urls["openai"] + "/v1/chat/completions"
        headers = {"Authorization": f"Bearer {TOKEN}"}

        async def events(**more: Any) -> list[Any]:
            async with (
                aiohttp.ClientSession() as session,
                session.post(url, json=of(stream=True, **more), headers=headers) as answer,
            ):
                assert answer.status == 200 and answer.content_type == "text/event-stream"
                *lines, end = (await answer.text()).split("\n\n")
            assert end == "" and lines.pop() == "data: [DONE]"
            return [json.loads(line.removeprefix("data: ")) for line in lines]

        found = await events()
        assert {chunk["object"] for chunk in found} == {"chat.completion.chunk"} and "usage" not in found[0]
        assert [chunk["choices"][0]["delta"] for chunk in found] == [
            {"role": "assistant", "content": ""},
            *({"content": piece} for piece in ("a", "", "ü")),
            {},
        ]
        assert [chunk["choices"][0]["finish_reason"] for chunk in found] == [None] * 4 + ["stop"]
        cut = await events(max_tokens=2)
        assert [chunk["choices"][0]["delta"].get("content") for chunk in cut[1:]] == ["a", "\ufffd", None]
        assert cut[-1]["choices"][0]["finish_reason"] == "length"

    talk(planner, test)


def test_a_message_has_several_calls(planner: VLAPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    look = '<tool_call>{"name":"look","arguments":{"side":"left"}}</tool_call>'
    text = f'I look.\n{look}\n<tool_call>{{"name":"grasp","arguments":{{}}}}</tool_call>'
    says(monkeypatch, planner, text)

    async def test(server: Served, post: Post) -> None:
        tools = {"tools": [LOOK, GRASP], "logprobs": True}
        _, both = await post(of(**tools))
        message = both["choices"][0]["message"]
        first, second = message["tool_calls"]
        assert message["content"] == "I look." and both["choices"][0]["finish_reason"] == "tool_calls"
        assert first["function"] == {"name": "look", "arguments": '{"side": "left"}'}
        assert second["function"] == {"name": "grasp", "arguments": "{}"} and first["id"] != second["id"]
        _, alone = await post(of(**tools, parallel_tool_calls=False))
        choice = alone["choices"][0]
        assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["look"]
        assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "I look."
        count = len(f"I look.\n{look}")  # what follows was not delivered: it counts, and is trained, nowhere
        assert alone["usage"]["completion_tokens"] == count == len(choice["logprobs"]["content"])
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": said}
            for call, said in ((second, "held"), (first, "seen"))
        ]
        status, after = await post(of(messages=[*ASK, message, *results]))
        said = [("user", ASK[0]["content"]), ("assistant", text), ("tool", "seen"), ("tool", "held")]
        wanted = encode(
            Conversation(
                tuple((role, content.replace("call>{", "call>\n{").replace("}</", "}\n</")) for role, content in said)
            )
        )
        assert status == 200 and after["usage"]["prompt_tokens"] == len(wanted)
        for wrong in (results[:1], [*results, results[0]], [results[0], {**results[1], "tool_call_id": "call_x"}]):
            status, found = await post(of(messages=[*ASK, message, *wrong]))
            assert status == 400 and found["error"]["code"] == "chat-request"

    talk(planner, test)


async def stream_of(server: Served, **more: Any) -> AsyncIterator[Any]:
    """Yield the chunks of a stream as they arrive."""
    headers = {"Authorization": f"Bearer {TOKEN}"}
    url = server.urls["openai"] + "/v1/chat/completions"
    async with (
        aiohttp.ClientSession() as session,
        session.post(url, json=of(stream=True, **more), headers=headers) as got,
    ):
        async for line in got.content:
            text = line.decode().strip().removeprefix("data: ")
            if text and text != "[DONE]":
                yield json.loads(text)


def test_a_stream_begins_before_its_message_is_complete(planner: VLAPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    hold = threading.Event()
    says(monkeypatch, planner, "I look.", hold)

    async def test(server: Served, post: Post) -> None:
        for tools in ({}, {"tools": [LOOK]}):
            hold.clear()
            texts: list[str] = []
            async for chunk in stream_of(server, logprobs=True, **tools):
                texts.append(chunk["choices"][0]["delta"].get("content", ""))
                if "".join(texts) == "I loo":  # the last one that was written may be part of a longer character
                    hold.set()
            assert "".join(texts) == "I look." and hold.is_set()

    talk(planner, test)


@pytest.mark.parametrize(
    ("text", "before"),
    [
        ('I look. \n<tool_call>{"name":"grasp","arguments":{}}</tool_call>', "I look."),
        ('<tool_call>{"name":"grasp","arguments":{}}</tool_call>', ""),
        (' {"name":"grasp","arguments":{}}', ""),
        ("if a < b: <tool_", "if a < b:"),
        ("{} is empty", ""),
        ("a <tool_call> is a mark", "a"),
    ],
)
def test_what_may_become_a_call_is_not_sent_as_text(
    planner: VLAPolicy, monkeypatch: pytest.MonkeyPatch, text: str, before: str
) -> None:
    hold = threading.Event()
    says(monkeypatch, planner, text, hold)

    async def test(server: Served, post: Post) -> None:
        given = {"tools": [GRASP], "logprobs": True}
        early, texts, calls, tokens, reasons = [], [], [], [], []
        stream = stream_of(server, **given)
        if not before:
            hold.set()
        async for chunk in stream:
            (choice,) = chunk["choices"]
            texts.append(choice["delta"].get("content") or "")
            calls += choice["delta"].get("tool_calls", [])
            tokens += (choice["logprobs"] or {"content": []})["content"]
            reasons.append(choice["finish_reason"])
            if not hold.is_set():
                early.append(texts[-1])
                if "".join(early) == before:
                    hold.set()
        (whole,) = (await post(of(**given)))[1]["choices"]
        assert "".join(early) == before
        assert "".join(texts) == (whole["message"]["content"] or "")
        assert [one["function"]["name"] for one in calls if "id" in one] == [
            one["function"]["name"] for one in whole["message"].get("tool_calls", [])
        ]
        assert tokens == whole["logprobs"]["content"] and reasons[-1] == whole["finish_reason"]

    talk(planner, test)


def test_streams_and_others_are_one_batch(planner: VLAPolicy) -> None:
    async def test(server: Served, post: Post) -> None:
        async def streamed(seed: int) -> str:
            chunks = [chunk async for chunk in stream_of(server, temperature=1, seed=seed)]
            return "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)

        server.core.pause()
        waiting = [asyncio.create_task(streamed(seed)) for seed in (1, 2)]
        waiting += [asyncio.create_task(post(of(temperature=1, seed=3)))]
        while len(server.core._under_way) < len(waiting):
            await asyncio.sleep(0)
        before = server.core.batches
        server.core.resume()
        found = await asyncio.gather(*waiting)
        assert server.core.batches - before == 1
        alone = [
            (await post(of(temperature=1, seed=seed)))[1]["choices"][0]["message"]["content"] for seed in (1, 2, 3)
        ]
        assert alone == [*found[:2], found[2][1]["choices"][0]["message"]["content"]]

    talk(planner, test, max_wait_ms=50.0)


@pytest.mark.parametrize("said", ["", "I am"])
def test_a_policy_that_fails_ends_its_stream(planner: VLAPolicy, monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    openai = pytest.importorskip("openai")

    def write_live(observation: Observation, *given: Any) -> PolicyOutput:
        for place, byte in enumerate(said.encode()):
            given[-1](0, LiveToken(place, bytes([byte]), -0.5))
        raise RuntimeError("a secret of the server")

    monkeypatch.setattr(planner, "write_live", write_live)

    async def test(server: Served, post: Post) -> None:
        client = openai.AsyncOpenAI(base_url=server.urls["openai"] + "/v1", api_key=TOKEN, max_retries=0)
        texts: list[str] = []
        with pytest.raises(openai.APIError) as caught:
            async for chunk in await client.chat.completions.create(**of(stream=True)):
                texts.append(chunk.choices[0].delta.content)
        assert "".join(texts) == said[:-1] and "RuntimeError" in str(caught.value)
        assert isinstance(caught.value, openai.APIStatusError) == (not said) and "secret" not in str(caught.value)
        await client.close()

    talk(planner, test)


def test_free_text_is_sampled_by_seed_and_cut_at_the_limit(planner: VLAPolicy) -> None:
    async def test(server: Served, post: Post) -> None:
        long = [(await post(of(temperature=1, seed=seed)))[1]["choices"][0] for seed in (3, 3, 4)]
        texts = [choice["message"]["content"] for choice in long]
        assert texts[0] == texts[1] != texts[2]
        status, found = await post(of(temperature=1.0, seed=3, max_tokens=5, logprobs=True))
        choice = found["choices"][0]
        assert status == 200 and choice["finish_reason"] == "length" and found["usage"]["completion_tokens"] == 5
        data = bytes(byte for token in choice["logprobs"]["content"] for byte in token["bytes"])
        assert data.decode(errors="replace") == choice["message"]["content"]
        greedy = [(await post(of(temperature=0)))[1], (await post(of()))[1]]  # serve.decoding=greedy
        assert (await post(of(temperature=1e-40)))[1]["choices"] == greedy[0]["choices"]
        assert greedy[0]["choices"] == greedy[1]["choices"] and greedy[0]["id"] != greedy[1]["id"]

    talk(planner, test)


async def chunks_of(server: Served, **more: Any) -> list[list[Any]]:
    """Return the choices of a stream, one list per index."""
    found: dict[int, list[Any]] = {}
    async for chunk in stream_of(server, **more):
        for choice in chunk["choices"]:
            found.setdefault(choice["index"], []).append(choice)
    return [found[index] for index in sorted(found)]


def said(chunks: list[Any]) -> str:
    return "".join(chunk["delta"].get("content") or "" for chunk in chunks)


def test_an_answer_has_several_choices(planner: VLAPolicy) -> None:
    openai = pytest.importorskip("openai")

    async def test(server: Served, post: Post) -> None:
        client = openai.AsyncOpenAI(base_url=server.urls["openai"] + "/v1", api_key=TOKEN, max_retries=0)
        fixed = {**of(temperature=1, seed=5, max_tokens=20), "n": 3}
        answer = await client.chat.completions.create(**fixed)
        texts = [choice.message.content for choice in answer.choices]
        assert [choice.index for choice in answer.choices] == [0, 1, 2] and len(set(texts)) == 3
        one = await client.chat.completions.create(**{**fixed, "n": 1})
        assert one.choices[0].message.content == texts[0]
        assert answer.usage.prompt_tokens == one.usage.prompt_tokens
        assert answer.usage.completion_tokens == 60
        streamed: dict[int, str] = {}
        options = {"stream": True, "stream_options": {"include_usage": True}}
        async for chunk in await client.chat.completions.create(**fixed, **options):
            for choice in chunk.choices:
                streamed[choice.index] = streamed.get(choice.index, "") + (choice.delta.content or "")
        assert [streamed[index] for index in (0, 1, 2)] == texts and chunk.usage == answer.usage
        assert len(await chunks_of(server, n=2, tools=[GRASP], tool_choice="required")) == 2
        called = await client.chat.completions.create(**of(n=2, tools=[GRASP], tool_choice="required"))
        assert len({choice.message.tool_calls[0].id for choice in called.choices}) == 2
        await client.close()

    talk(planner, test)


@pytest.mark.parametrize(
    ("text", "stop", "before", "count"),
    [
        ("I look. Then I grasp.", ". ", "I look", 8),
        ("I look. Then I grasp.", ["grasp", "Then"], "I look. ", 12),
        ("abc", ["abc", "b"], "a", 2),  # "b" ends first
        ("aüo", "ü", "a", 3),
        ("ab", ["bc", "c"], "ab", 3),  # its end counts, too
        ("stop", "stop", "", 4),
    ],
)
def test_a_stop_sequence_ends_a_message(
    planner: VLAPolicy, monkeypatch: pytest.MonkeyPatch, text: str, stop: Any, before: str, count: int
) -> None:
    says(monkeypatch, planner, text)

    async def test(server: Served, post: Post) -> None:
        for tools in ({}, {"tools": [GRASP]}):
            _, answer = await post(of(stop=stop, logprobs=True, **tools))
            (choice,) = answer["choices"]
            assert choice["message"]["content"] == before and choice["finish_reason"] == "stop"
            assert len(choice["logprobs"]["content"]) == len(before.encode())
            assert answer["usage"]["completion_tokens"] == count
            (chunks,) = await chunks_of(server, stop=stop, logprobs=True, **tools)
            assert said(chunks) == before and chunks[-1]["finish_reason"] == "stop"
            tokens = [token for chunk in chunks if chunk["logprobs"] for token in chunk["logprobs"]["content"]]
            assert tokens == choice["logprobs"]["content"]
        _, cut = await post(of(stop=stop, max_tokens=1))
        assert cut["choices"][0]["finish_reason"] == ("stop" if count == 1 else "length")

    talk(planner, test)


def test_what_may_become_a_stop_sequence_is_not_sent(planner: VLAPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    hold = threading.Event()
    says(monkeypatch, planner, "a STO STOP", hold)

    async def test(server: Served, post: Post) -> None:
        early: list[str] = []
        texts: list[str] = []
        async for chunk in stream_of(server, stop=" STOP"):
            texts.append(chunk["choices"][0]["delta"].get("content") or "")
            if not hold.is_set():
                early.append(texts[-1])
                if "".join(early) == "a STO":
                    hold.set()
        assert "".join(early) == "".join(texts) == "a STO"

    talk(planner, test)


def test_a_call_behind_a_stop_sequence_is_none(planner: VLAPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    says(monkeypatch, planner, 'I look.<tool_call>{"name":"grasp","arguments":{}}</tool_call>')

    async def test(server: Served, post: Post) -> None:
        for stop, words in (("</tool_call>", 'I look.<tool_call>{"name":"grasp","arguments":{}}'), (".", "I look")):
            message = (await post(of(stop=stop, tools=[GRASP])))[1]["choices"][0]["message"]
            assert message["content"] == words and "tool_calls" not in message

    talk(planner, test)


def test_top_p_and_penalties_change_what_is_written(planner: VLAPolicy) -> None:
    async def test(server: Served, post: Post) -> None:
        async def written(**more: Any) -> list[int]:
            found = (await post(of(max_tokens=60, logprobs=True, **more)))[1]["choices"][0]
            assert all(token["logprob"] <= 0 for token in found["logprobs"]["content"])
            return [byte for token in found["logprobs"]["content"] for byte in token["bytes"]]

        greedy = await written(temperature=0)
        assert await written(temperature=1, top_p=0, seed=1) == greedy  # the most probable token alone
        assert await written(temperature=1, seed=1) != greedy
        never_twice = await written(temperature=0, presence_penalty=2)
        assert len(set(greedy)) < len(greedy) and len(set(never_twice)) == len(never_twice)
        assert await written(temperature=0, frequency_penalty=2) == never_twice

    talk(planner, test)


def test_concurrent_requests_of_one_temperature_are_a_batch(planner: VLAPolicy) -> None:
    async def test(server: Served, post: Post) -> None:
        server.core.pause()
        waiting = [
            asyncio.create_task(post(of(temperature=heat, seed=row))) for row, heat in enumerate((1, 1, 1, 0.5, 0))
        ]
        while len(server.core._under_way) < len(waiting):
            await asyncio.sleep(0)
        before = server.core.batches
        server.core.resume()
        found = await asyncio.gather(*waiting)
        assert server.core.batches - before == 3 and {status for status, _ in found} == {200}
        alone = await post(of(temperature=1, seed=2))
        assert alone[1]["choices"] == found[2][1]["choices"]

    talk(planner, test, max_wait_ms=50.0)


@pytest.mark.parametrize(
    "wrong",
    [
        "[]",
        "nothing",
        {"model": "planner"},
        of(messages=[]),
        of(messages=["hello"]),
        of(messages=[{"role": "user", "content": [{"type": "image_url"}]}]),
        of(messages=[{"role": "robot", "content": "hello"}]),
        of(temperature=3),
        of(temperature="NaN"),
        of(temperature=10**400),
        of(messages=[{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[" * 10**5}}]}]),
        of(max_tokens=0),
        of(max_tokens=3, max_completion_tokens=4),
        of(n=0),
        of(n=129),
        of(n=True),
        of(stop=""),
        of(stop=[3]),
        of(stop="\ud800"),
        of(stop="x" * 65),
        of(n=33),
        of(stop={}),
        of(stop=["a", "b", "c", "d", "e"]),
        of(stop="x" * 1025),
        of(seed=-1),
        of(top_p=1.5),
        of(top_p="NaN"),
        of(presence_penalty=-2.1),
        of(frequency_penalty=True),
        of(logit_bias={"65": 1}),
        of(reasoning_effort="low"),
        of(logprobs=1),
        of(stream=1),
        of(stream_options={"include_usage": True}),
        of(stream=True, stream_options={"other": True}),
        of(parallel_tool_calls="no"),
        of(model=3),
        of(tools={}),
        of(tools=[{"type": "function", "function": 3}]),
        of(tools=[{"type": "function", "function": {"name": "f", "parameters": {"properties": 3}}}]),
        of(tools=[{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": 3}}}}]),
        of(tools=[LOOK], tool_choice={"type": "function", "function": {"name": "other"}}),
        of(tool_choice="required"),
        of(tools=[LOOK], tool_choice=["auto"]),
        of(messages=[{"role": "user", "content": "x" * 500}]),
    ],
    ids=lambda wrong: str(wrong)[:60],
)
def test_what_is_refused(planner: VLAPolicy, wrong: Any) -> None:
    async def test(server: Served, post: Post) -> None:
        status, found = await post(wrong)
        error = found["error"]
        assert (status, error["type"]) == (400, "invalid_request_error") and error["message"]
        assert error["code"] in ("chat-request", "planner-prompt-too-long")
        assert (await post(of(temperature=0)))[0] == 200

    talk(planner, test)


def test_paths_tokens_and_health(planner: VLAPolicy) -> None:
    async def test(server: Served, post: Post) -> None:
        assert (await post(of(), token="wrong"))[0] == 401
        status, found = await post(of(), path="/v1/completions")
        assert status == 404 and found["error"]["code"] == "chat-path"
        parts = [{"type": "text", "text": "where "}, {"type": "text", "text": "is it?"}]
        whole = [await post(of(messages=[{"role": "user", "content": text}])) for text in (parts, "where is it?")]
        assert whole[0][1]["choices"] == whole[1][1]["choices"]
        async with aiohttp.ClientSession() as session, session.get(server.urls["openai"] + "/health") as answer:
            assert answer.status == 200
        assert any("openai takes POST /v1/chat/completions for model=planner" in line for line in server.lines)

    talk(planner, test)
