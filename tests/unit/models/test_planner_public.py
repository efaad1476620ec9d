"""The planner with public language models: prompts, log-probs, training, files, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from expect import raises_code
from tiny_families import generator
from tiny_language_models import KINDS, write_language_model

from embodrl.config.schema import model_settings
from embodrl.models.common.chat import Conversation, ToolCall, parse_calls, tagged
from embodrl.models.common.sampling import draw_quantile
from embodrl.models.planner.page import Page, unpack
from embodrl.models.planner.policy import ALLOWED, TOKENS, PlannerPolicy
from embodrl.models.planner.public_network import load_balancing_loss
from embodrl.models.planner.public_vocabulary import PublicVocabulary
from embodrl.models.registry import build_policy
from embodrl.tools.model_tools import contract
from embodrl.tools.model_tools.contract import Subject
from embodrl.types import TOKEN_MASK, Observation, SamplingParams

SAMPLING = SamplingParams(0.8)
MOVE = {
    "name": "move",
    "parameters": {"type": "object", "properties": {"to": {"enum": ["red", "blau – grün"]}}, "required": ["to"]},
}
ASK = [{"role": "user", "content": "go to the red square"}]
REQUIRED = Conversation.of(ASK, [MOVE], "required")
TEXTS = (REQUIRED.to_text(), "pull", Conversation.of(ASK, [MOVE]).to_text())


def build(directory: Path | None, **changes: Any) -> PlannerPolicy:
    sizes = {"max_prompt_tokens": 300, "max_new_tokens": 60, **changes.pop("planner", {})}
    values = {"model_type": "planner", "warm_start": None, "num_action_chunks": 1, "planner": sizes, **changes}
    path = None if directory is None else str(directory)
    config = model_settings("planner").model_validate(
        {"model_path": path, "value_head": {"hidden_sizes": (8,)}, **values}
    )
    policy = build_policy(config, device="cpu", dtype=torch.float32, seed=3)[0].eval()
    assert isinstance(policy, PlannerPolicy)
    return policy


def observation(*texts: str) -> Observation:
    count = len(texts)
    nothing = np.zeros((count, 0), np.float32)
    return Observation(np.zeros((count, 0, 1, 1, 3), np.uint8), nothing, list(texts), np.zeros(count, np.int32))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_language_model(tmp_path_factory.mktemp("qwen3"))


@pytest.fixture
def vocabulary(directory: Path) -> PublicVocabulary:
    return PublicVocabulary(directory, 336)


@pytest.mark.parametrize("kind", KINDS)
def test_a_directory_writes_trains_and_is_written_again(kind: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    policy = build(write_language_model(tmp_path / "public", kind))
    output = policy.predict_action_batch(observation(*TEXTS), "train", SAMPLING, generator())
    inputs, mask = output.forward_inputs, output.forward_inputs[TOKEN_MASK]
    again = policy.evaluate_actions(inputs, SAMPLING)
    torch.testing.assert_close(again.logprobs, output.logprobs, rtol=0, atol=1e-5)
    torch.testing.assert_close(again.values, output.values, rtol=0, atol=1e-5)
    torch.testing.assert_close(policy.predict_values(observation(*TEXTS)), output.values, rtol=0, atol=1e-5)
    assert parse_calls(policy.text_of(inputs)[0].text)[0].name == "move"

    before = {name: value.clone() for name, value in policy.model.state_dict().items()}
    optimizer = torch.optim.SGD(policy.model.parameters(), lr=0.1)
    (-again.logprobs.sum()).backward()
    optimizer.step()
    unmoved = [name for name, value in policy.model.state_dict().items() if torch.equal(value, before[name])]
    assert unmoved == []
    after = policy.evaluate_actions(inputs, SAMPLING).logprobs.detach()
    assert (after - output.logprobs).abs().max() > 1e-3

    policy.save_pretrained(tmp_path / "saved")
    load: Any = AutoModelForCausalLM.from_pretrained
    public, found = load(tmp_path / "saved", output_loading_info=True)
    assert not any(found.values()) and public.generation_config.eos_token_id == [2, 0]
    assert type(public).__name__ == type(policy.model).__name__
    row = 1  # a message without a grammar
    count = int(mask[row].sum())
    prompt = inputs["input_ids"][row][inputs["attention_mask"][row]]
    chat = [{"role": "user", "content": "pull"}]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"] == prompt.tolist()
    ids = torch.cat([prompt, inputs[TOKENS][row, :count]])[None]
    with torch.no_grad():
        logits = public.eval()(ids).logits[0, len(prompt) - 1 : -1, : policy.vocabulary.size] / SAMPLING.temperature
    wanted = logits.log_softmax(dim=-1).gather(1, ids[0, len(prompt) :, None])
    torch.testing.assert_close(after[row, :count], wanted, rtol=0, atol=1e-4)
    read = build(tmp_path / "saved").evaluate_actions(inputs, SAMPLING)
    torch.testing.assert_close(read.logprobs, after, rtol=0, atol=1e-5)


@pytest.mark.parametrize("check", ["rows-are-independent", "seeds-decide", "gradients", "save-and-load"])
def test_contract(directory: Path, check: str) -> None:
    subject = Subject(build(directory), observation(*TEXTS), SAMPLING, load=build)
    assert list(contract.CHECKS[check](subject)) == []


@pytest.mark.parametrize("kind", ["qwen2", "mixtral"])
def test_adapters_train_and_are_merged(kind: str, tmp_path: Path) -> None:
    made = build(write_language_model(tmp_path / "public", kind), trainable="lora", lora={"rank": 2})
    contract.stir(made, 0.1)
    subject = Subject(made, observation(*TEXTS), SAMPLING, load=build)
    for check in ("gradients", "ratio-is-one"):
        assert list(contract.CHECKS[check](subject)) == []
    output = made.predict_action_batch(observation(*TEXTS), "train", SAMPLING, generator())
    made.save_pretrained(tmp_path / "saved")
    again = build(tmp_path / "saved").evaluate_actions(output.forward_inputs, SAMPLING)
    torch.testing.assert_close(again.logprobs, output.logprobs, rtol=0, atol=1e-4)


def test_required_calls_are_a_distribution(directory: Path) -> None:
    """The probabilities of all permitted calls sum to 1."""
    policy = build(directory)
    rows = len(REQUIRED.calls)
    tree = policy.vocabulary.tree(REQUIRED.calls)
    output = policy.predict_action_batch(observation(*[TEXTS[0]] * rows), "train", SAMPLING, generator())
    page = Page([tree] * rows, policy.vocabulary, 60)
    ends = [[*policy.vocabulary.spell(call), policy.vocabulary.ends[0]] for call in REQUIRED.calls]
    assert tree.longest == max(map(len, ends))
    for place in range(tree.longest):
        page.permit(place)
        page.write(place, torch.tensor([call[place] if place < len(call) else 0 for call in ends]))
    every = {**output.forward_inputs, TOKENS: page.tokens, TOKEN_MASK: page.mask, ALLOWED: page.allowed}
    total = policy.evaluate_actions(every, SAMPLING).logprobs.detach().sum(dim=(1, 2)).exp().sum()
    assert rows == 2 and float(total) == pytest.approx(1.0, abs=1e-5)


def test_prompts_are_those_of_the_template(vocabulary: PublicVocabulary) -> None:
    call = ToolCall("move", {"to": "red"})
    past = [{"role": "assistant", "content": call.to_text()}, {"role": "tool", "content": "there"}]
    tool = {"type": "function", "function": {"name": "wait", "description": "", "parameters": {"type": "object"}}}
    wanted = (
        f"<|im_start|>system\n{json.dumps(tool)}\nCall with <tool_call></tool_call><|im_end|>\n"
        "<|im_start|>user\ngo to the red square<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "move", "arguments": {"to": "red"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>tool\nthere<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = vocabulary.encode(Conversation.of([*ASK, *past], [tool]))
    assert vocabulary._tokenizer.decode(ids) == wanted and ids.count(1) == 5 and ids.count(2) == 4


@pytest.mark.parametrize(
    "template", [None, "{% for m in messages %}{{ m.role }}|{{ m.content }}\n{% endfor %}assistant|"]
)
def test_models_whose_template_takes_no_tools_read_of_them(template: str | None, tmp_path: Path) -> None:
    found = PublicVocabulary(write_language_model(tmp_path, "llama", template), 336)
    past = [{"role": "assistant", "content": ToolCall("move", {"to": "red"}).to_text()}]
    ids = found.encode(Conversation.of([*ASK, *past, {"role": "tool", "content": "there"}], [MOVE]))
    text = found._tokenizer.decode(ids)
    mark = "|" if template else ": "
    lines = text.split("\n")
    assert lines[0] == f"system{mark}You may call one of these functions, whose signatures are JSON:"
    assert json.loads(lines[1])["name"] == "move" and f"user{mark}go to the red square" in lines
    said = [f"assistant{mark}<tool_call>", lines[-6], "</tool_call>", f"user{mark}<tool_response>", "there"]
    assert lines[-7:-2] == said and lines[-1] == ("assistant|" if template else "assistant:")
    assert json.loads(lines[-6]) == {"name": "move", "arguments": {"to": "red"}}


def test_a_template_that_refuses_is_reported(tmp_path: Path) -> None:
    template = (
        "{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}{{ messages[0].content }}"
    )
    found = PublicVocabulary(write_language_model(tmp_path, "llama", template), 336)
    with raises_code("planner-template"):
        found.encode(Conversation.of([{"role": "system", "content": "x"}, *ASK]))


def test_pieces_of_characters(vocabulary: PublicVocabulary) -> None:
    text = "grün – ✓ go"
    ids = vocabulary._ids(text, add_special_tokens=False)
    whole, cut = vocabulary.decode([*ids, 2], 3), vocabulary.decode(ids[:-4], 3)
    assert whole.text == text and whole.ended and len(whole.tokens) == len(ids) and whole.prompt_tokens == 3
    assert b"" in whole.tokens and not cut.ended and text.startswith(cut.text.rstrip("\ufffd"))
    assert vocabulary.decode([*ids, 0], 3).ended and vocabulary.ends == (2, 0)


def test_calls_between_marks() -> None:
    wait, move = ToolCall("wait", {}), ToolCall("move", {"to": "red"})
    both = f"I think.\n{tagged(wait.to_text())}\n{tagged(move.to_text())}"
    assert parse_calls(both) == (wait, move) and parse_calls(both[:-3]) == ()
    assert parse_calls('{"name": "move", "parameters": {"to": "red"}}') == (move,)
    function = {"function": {"name": "wait", "arguments": "{}"}}
    again = Conversation.of([*ASK, {"role": "assistant", "content": None, "tool_calls": [function, function]}])
    assert parse_calls(again.messages[1][1]) == (wait, wait)


def test_calls_and_their_results_have_ids_in_a_prompt(tmp_path: Path) -> None:
    """Ids that templates demand are numbers of the calls, whatever those of the server were."""
    template = (
        "{% for m in messages %}{{ m.role }}:{{ m.content }}{% for c in m.tool_calls or [] %}({{ c.id }} "
        "{{ c.function.name }}){% endfor %}{{ m.tool_call_id }}\n{% endfor %}{% if tools %}{% endif %}"
    )
    found = PublicVocabulary(write_language_model(tmp_path, "mixtral", template), 336)
    calls = [{"id": f"x{number}", "function": {"name": "wait", "arguments": "{}"}} for number in range(3)]
    past = [
        {"role": "assistant", "content": "I go", "tool_calls": calls[:2]},
        *({"role": "tool", "tool_call_id": name, "content": name} for name in ("x1", "x0")),
        {"role": "assistant", "content": None, "tool_calls": calls[2:]},
        {"role": "tool", "content": "x2"},
    ]
    lines = found._tokenizer.decode(found.encode(Conversation.of([*ASK, *past], [MOVE]))).split("\n")
    assert lines[1:-1] == [
        "assistant:I go(call00000 wait)(call00001 wait)",
        *("tool:x0call00000", "tool:x1call00001", "assistant:(call00002 wait)", "tool:x2call00002"),
    ]


def test_quantiles_and_packed_choices() -> None:
    logits = torch.tensor([0.2, 0.0, 0.5, 0.3]).log().expand(6, 4)
    numbers = torch.tensor([0.0, 0.19, 0.21, 0.69, 0.71, 1 - 2**-24])
    assert draw_quantile(logits, SamplingParams(1.0), numbers).tolist() == [0, 0, 2, 2, 3, 3]
    packed = torch.tensor([[0b10000001, 0b10]], dtype=torch.uint8)
    assert unpack(packed, 10).nonzero()[:, 1].tolist() == [0, 7, 9]


def test_experts_from_random_weights(tmp_path: Path) -> None:
    """The router trains, and what is saved is Mixtral over bytes, which is read again."""
    from transformers import AutoModelForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_experts": 4}
    policy = build(None, planner=sizes)
    output = policy.predict_action_batch(observation(*TEXTS), "train", SAMPLING, generator())
    again = policy.evaluate_actions(output.forward_inputs, SAMPLING)
    torch.testing.assert_close(again.logprobs, output.logprobs, rtol=0, atol=1e-5)
    again.logprobs.sum().backward()
    routers = [value for name, value in policy.model.named_parameters() if name.endswith("mlp.gate.weight")]
    assert len(routers) == 2 and all(value.grad is not None and value.grad.any() for value in routers)
    policy.save_pretrained(tmp_path / "saved")
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path / "saved")).__name__ == "MixtralForCausalLM"
    for read in (build(tmp_path / "saved"), build(None, warm_start=str(tmp_path / "saved"), planner=sizes)):
        found = read.evaluate_actions(output.forward_inputs, SAMPLING)
        torch.testing.assert_close(found.logprobs, output.logprobs, rtol=0, atol=1e-6)
    with raises_code("warm-start-size"):
        build(None, warm_start=str(tmp_path / "saved"), planner={**sizes, "num_experts": 2})
    first, second = (build(None, planner=sizes).model.state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_the_load_of_experts_by_hand() -> None:
    """Two layers, three experts, two per token; the second token is padding."""
    first = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8], [0.2, 0.7, 0.1]]).log()
    second = torch.tensor([[0.6, 0.1, 0.3], [0.8, 0.1, 0.1], [0.1, 0.5, 0.4]]).log().requires_grad_()
    read = torch.tensor([[True, False, True]])
    # Chosen by the four that count: (0, 1), (1, 0), (0, 2), (1, 2): f = 3/4, 3/4, 1/2; P = 1.4, 1.6, 1.0, over 4.
    loss = load_balancing_loss((first, second), read, 2)
    assert loss.item() == pytest.approx(3 * (0.75 * 1.4 + 0.75 * 1.6 + 0.5 * 1.0) / 4)
    loss.backward()
    assert second.grad is not None and second.grad[0].any() and not second.grad[1].any()
    assert float(load_balancing_loss((torch.zeros(4, 3),), torch.ones(1, 4) > 0, 3)) == pytest.approx(3.0)


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("recomputes", [False, True])
def test_experts_are_balanced_over_real_tokens(kind: str, recomputes: bool, tmp_path: Path) -> None:
    """The loss is that of transformers for every row alone, joined by the numbers of its tokens, and routers learn."""
    from transformers import AutoModelForCausalLM

    policy = build(write_language_model(tmp_path, kind))
    if recomputes:
        policy.enable_gradient_checkpointing()
    public: Any = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    output = policy.predict_action_batch(observation("pull", TEXTS[0]), "train", SAMPLING, generator())
    inputs = output.forward_inputs
    lengths = inputs[TOKEN_MASK].sum(dim=1).tolist()
    assert lengths[0] != lengths[1]
    found = policy.evaluate_actions(inputs, SAMPLING, compute_router_loss=True)
    plain = policy.evaluate_actions(inputs, SAMPLING)
    assert plain.router_loss is None and torch.equal(plain.logprobs, found.logprobs)
    logits: Any = [[], []]
    for row, length in enumerate(lengths):
        prompt = inputs["input_ids"][row][inputs["attention_mask"][row]]
        ids = torch.cat([prompt, inputs[TOKENS][row, : length - 1]])[None]
        for layer, part in enumerate(public(ids, output_router_logits=True).router_logits):
            logits[layer].append(part)
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    joined: Any = tuple(torch.cat(parts) for parts in logits)
    wanted: Any = load_balancing_loss_func(joined, 4, 2)
    assert found.router_loss is not None
    torch.testing.assert_close(found.router_loss, wanted, rtol=1e-5, atol=0)
    found.router_loss.backward()
    wanted.backward()
    for (name, mine), other in zip(policy.model.named_parameters(), public.parameters(), strict=True):
        assert "gate.weight" not in name or (mine.grad is not None and mine.grad.any())
        if other.grad is not None:
            torch.testing.assert_close(mine.grad, other.grad, rtol=1e-3, atol=1e-6, msg=name)


def test_a_model_without_experts_has_no_load_to_balance(directory: Path) -> None:
    for policy in (build(directory), build(None)):
        output = policy.predict_action_batch(observation("pull"), "train", SAMPLING, generator())
        with raises_code("router-missing"):
            policy.evaluate_actions(output.forward_inputs, SAMPLING, compute_router_loss=True)


def _write(name: str, **changes: Any) -> Callable[[Path], None]:
    def write(directory: Path) -> None:
        path = directory / name
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return write


def _pickle(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")


def _no_end(directory: Path) -> None:
    (directory / "generation_config.json").unlink()
    for name, key in (("config.json", "eos_token_id"), ("tokenizer_config.json", "eos_token")):
        _write(name, **{key: None})(directory)


@pytest.mark.parametrize(
    ("code", "spoil"),
    [
        ("planner-tokenizer", lambda directory: (directory / "tokenizer.json").unlink()),
        ("weights-pickled", _pickle),
        ("weights-missing", lambda directory: (directory / "model.safetensors").unlink()),
        ("planner-model-kind", _write("config.json", architectures=["LlamaForSequenceClassification"])),
        ("planner-model-kind", _write("config.json", quantization_config={"quant_method": "gptq"})),
        ("checkpoint-family", _write("config.json", model_type="openvla")),
        ("planner-model-kind", _write("config.json", model_type="gpt2")),
        ("planner-weights", _write("config.json", num_hidden_layers=3)),
        ("planner-weights", _write("config.json", hidden_size=20)),
        ("planner-vocabulary", _write("config.json", vocab_size=100)),
        ("planner-positions", _write("config.json", max_position_embeddings=359)),
        ("planner-no-end", _no_end),
    ],
)
def test_what_is_refused(code: str, spoil: Callable[[Path], None], tmp_path: Path) -> None:
    write_language_model(tmp_path / "public", "llama")
    spoil(tmp_path / "public")
    with raises_code(code):
        build(tmp_path / "public")
