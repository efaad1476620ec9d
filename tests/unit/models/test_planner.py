"""The planner: its contract as a policy, the distribution of its messages, its files, and conversations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from expect import raises_code
from tiny_families import generator

from embodrl.config.schema import model_settings
from embodrl.models.common.chat import Conversation, ToolCall, parse_calls, said_before_calls, tagged
from embodrl.models.planner.page import Page
from embodrl.models.planner.policy import ALLOWED, TOKENS, PlannerPolicy
from embodrl.models.planner.tokenizer import END, decode, encode
from embodrl.models.registry import build_policy
from embodrl.tools.model_tools import contract
from embodrl.tools.model_tools.contract import Subject
from embodrl.types import TOKEN_MASK, Observation, PolicyOutput, SamplingParams

SAMPLING = SamplingParams(0.8)
ASK = [{"role": "system", "content": "Use tools."}, {"role": "user", "content": "go to the red square"}]
MOVE = {
    "name": "move",
    "parameters": {
        "type": "object",
        "properties": {"to": {"enum": ["red", "rose", "blau – grün"]}, "fast": {"type": "boolean"}},
        "required": ["to"],
    },
}
WAIT = {"type": "function", "function": {"name": "wait"}}
REQUIRED = Conversation.of(ASK, [MOVE, WAIT], "required")
TEXTS = (REQUIRED.to_text(), "pull", Conversation.of(ASK[1:], [MOVE]).to_text())


def build(**changes: Any) -> PlannerPolicy:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "max_new_tokens": 70}
    values = {"model_type": "planner", "warm_start": None, "num_action_chunks": 1, "planner": sizes, **changes}
    config = model_settings("planner").model_validate({"value_head": {"hidden_sizes": (8,)}, **values})
    policy = build_policy(config, device="cpu", dtype=torch.float32, seed=3)[0].eval()
    assert isinstance(policy, PlannerPolicy)
    return policy


def observation(*texts: str) -> Observation:
    count = len(texts)
    nothing = np.zeros((count, 0), np.float32)
    return Observation(np.zeros((count, 0, 1, 1, 3), np.uint8), nothing, list(texts), np.zeros(count, np.int32))


@pytest.fixture
def policy() -> PlannerPolicy:
    made = build()
    contract.stir(made, 0.1)
    return made


def written(policy: PlannerPolicy, mode: Any = "train") -> PolicyOutput:
    return policy.predict_action_batch(observation(*TEXTS), mode, SAMPLING, generator())


@pytest.mark.parametrize("check", [name for name in contract.CHECKS if name != "imitation"])
def test_contract(policy: PlannerPolicy, check: str) -> None:
    subject = Subject(policy, observation(*TEXTS), SAMPLING, load=lambda path: build(model_path=str(path)))
    assert list(contract.CHECKS[check](subject)) == []


def test_training_reproduces_the_log_probs_of_the_rollout(policy: PlannerPolicy) -> None:
    output = written(policy)
    mask = output.forward_inputs[TOKEN_MASK]
    again = policy.evaluate_actions(output.forward_inputs, SAMPLING)
    assert output.logprobs.shape == again.logprobs.shape == (3, 70, 1) and mask.sum(dim=1).tolist()[1] > 1
    torch.testing.assert_close(again.logprobs, output.logprobs, rtol=0, atol=1e-5)
    torch.testing.assert_close(again.values, output.values, rtol=0, atol=1e-5)
    torch.testing.assert_close(policy.predict_values(observation(*TEXTS)), output.values, rtol=0, atol=1e-5)
    assert not output.logprobs[~mask].any() and output.logprobs[1][mask[1]].max() < 0
    contract.stir(policy)
    assert (policy.evaluate_actions(output.forward_inputs, SAMPLING).logprobs - output.logprobs).abs().max() > 1e-3


def test_adapters_train() -> None:
    made = build(trainable="lora", lora={"rank": 2})
    contract.stir(made, 0.1)
    subject = Subject(made, observation(*TEXTS), SAMPLING, load=lambda path: build(model_path=str(path)))
    assert {name for name, _ in made.named_parameters() if "lora_" in name}
    assert list(contract.CHECKS["gradients"](subject)) == list(contract.CHECKS["ratio-is-one"](subject)) == []


def test_only_written_tokens_have_gradients(policy: PlannerPolicy) -> None:
    output = written(policy)
    inputs = dict(output.forward_inputs)
    mask = inputs[TOKEN_MASK]
    assert not mask.all()

    def gradient(inputs: dict[str, torch.Tensor], of: torch.Tensor) -> torch.Tensor:
        policy.zero_grad()
        result = policy.evaluate_actions(inputs, SAMPLING, compute_values=False)
        assert result.entropy is not None
        (result.logprobs[of].sum() + result.entropy[of].sum()).backward()
        return torch.cat([p.grad.flatten() for p in policy.model.parameters() if p.grad is not None])

    wanted = gradient(inputs, torch.ones_like(mask))
    assert wanted.any() and not gradient(inputs, ~mask).any()
    inputs[TOKENS] = torch.where(mask, inputs[TOKENS], 65)
    torch.testing.assert_close(gradient(inputs, torch.ones_like(mask)), wanted)


def test_required_calls_are_a_distribution(policy: PlannerPolicy) -> None:
    """The probabilities of all permitted calls sum to 1, and a sample is one of them."""
    calls = REQUIRED.calls
    assert len(calls) == 10 and '{"name":"wait","arguments":{}}' in calls
    rows = len(calls)
    output = policy.predict_action_batch(observation(*[TEXTS[0]] * rows), "train", SAMPLING, generator())
    texts = [message.text for message in policy.text_of(output.forward_inputs)]
    assert set(texts) <= set(calls) and len(set(texts)) > 1
    page = Page([policy.vocabulary.tree(calls)] * rows, policy.vocabulary, 70)
    ends = [[*call.encode(), END] for call in calls]
    for place in range(70):
        page.permit(place)
        chosen = torch.tensor([call[place] if place < len(call) else 0 for call in ends])
        if not page.write(place, chosen):
            break
    every = {**output.forward_inputs, TOKENS: page.tokens, TOKEN_MASK: page.mask, ALLOWED: page.allowed}
    total = policy.evaluate_actions(every, SAMPLING).logprobs.detach().sum(dim=(1, 2)).exp().sum()
    assert float(total) == pytest.approx(1.0, abs=1e-5)
    greedy = written(policy, "eval")
    assert policy.text_of(greedy.forward_inputs)[0].text in calls


def test_transformers_reads_what_a_planner_saves(policy: PlannerPolicy, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    policy.save_pretrained(tmp_path / "saved")
    public = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()
    output = written(policy)
    inputs = output.forward_inputs
    row = 1  # a message without a grammar
    count = int(inputs[TOKEN_MASK][row].sum())
    prompt = inputs["input_ids"][row][inputs["attention_mask"][row]]
    ids = torch.cat([prompt, inputs[TOKENS][row, :count]])[None]
    with torch.no_grad():
        logits = public(ids).logits[0, len(prompt) - 1 : -1, : END + 1] / SAMPLING.temperature
    found = logits.log_softmax(dim=-1).gather(1, ids[0, len(prompt) :, None])
    torch.testing.assert_close(found, output.logprobs[row, :count], rtol=0, atol=1e-4)


def test_bytes_and_prompts() -> None:
    cut, whole = decode(list("grün".encode()), 3), decode([0xFF, END], 4)
    assert cut.text == "grün" and not cut.ended and len(cut.tokens) == 5 and cut.prompt_tokens == 3
    assert whole.text == "\ufffd" and whole.ended and len(whole.tokens) == 1
    assert encode(Conversation.of([{"role": "user", "content": "ab"}])) == [260, 97, 98, END, 261]
    assert Conversation.read(REQUIRED.to_text()) == REQUIRED
    past = {"function": {"name": "move", "arguments": '{"to":"red"}'}}
    again = Conversation.of([*ASK, {"role": "assistant", "content": None, "tool_calls": [past]}])
    assert parse_calls(again.messages[2][1]) == (ToolCall("move", {"to": "red"}),)


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('{"name": "move", "arguments": {"to": "red"}}', (ToolCall("move", {"to": "red"}),)),
        (' {"arguments":{},"name":"wait"}\n', (ToolCall("wait", {}),)),
        ('I call {"name": "wait", "arguments": {}}', ()),
        ('{"name": "wait", "arguments": {}', ()),
        ('{"name": "wait"}', ()),
        ('{"name": "wait", "arguments": []}', ()),
        ('{"name": 3, "arguments": {}}', ()),
        ('["name", "arguments"]', ()),
        ("[" * 100_000, ()),
        ("", ()),
    ],
)
def test_tool_calls_in_a_text(text: str, calls: tuple[ToolCall, ...]) -> None:
    assert parse_calls(text) == calls


def number(**about: Any) -> dict[str, Any]:
    return {"name": "f", "parameters": {"properties": {"x": {"type": "integer", **about}}, "required": ["x"]}}


@pytest.mark.parametrize(
    "request_",
    [
        ([], None, "auto"),
        ([{"role": "robot", "content": "x"}], None, "auto"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], None, "auto"),
        ([{"role": "assistant", "content": None, "tool_calls": [{"id": 1}]}], None, "auto"),
        (ASK, [{"description": "no name"}], "auto"),
        (ASK, [WAIT], "maybe"),
        (ASK, None, "required"),
        (ASK, [number()], "required"),
        (ASK, [number(minimum=0, maximum=10**9)], "required"),
        (ASK, [number(minimum=3, maximum=1)], "required"),
        (ASK, [number(enum=[f"{n}{'x' * 10**4}" for n in range(30)])], "required"),
    ],
)
def test_requests_of_another_form(request_: Any) -> None:
    with raises_code("chat-request"):
        Conversation.of(*request_)


def test_required_calls_of_numbers() -> None:
    assert [
        parse_calls(call)[0].arguments["x"]
        for call in Conversation.of(ASK, [number(minimum=1, maximum=3)], "required").calls
    ] == [1, 2, 3]


def test_lengths_are_limited(policy: PlannerPolicy) -> None:
    with raises_code("planner-prompt-too-long"):
        policy.preprocess(observation("x" * 600))
    policy.max_tokens = 20
    with raises_code("planner-call-too-long"):
        written(policy)


def test_marks_within_an_argument_are_part_of_it() -> None:
    quoted = json.dumps({"name": "say", "arguments": {"text": "use <tool_call> and </tool_call> here"}})
    (call,) = parse_calls(quoted)
    assert call.arguments["text"] == "use <tool_call> and </tool_call> here"
    assert parse_calls(tagged(quoted)) == (call,) and said_before_calls(quoted) == ""
    assert parse_calls(f"Well: {tagged(quoted)}\n{tagged(quoted)}") == (call, call)
    assert parse_calls(tagged(quoted)[:-3]) == () == parse_calls("<tool_call>{} </tool_call>")
