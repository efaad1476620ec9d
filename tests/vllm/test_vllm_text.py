"""A planner's messages from vLLM beside those of the native engine, on the same weights; `make test-vllm` runs this."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from expect import raises_code
from runs import embodrl, metrics
from tiny_language_models import KINDS, write_language_model

from embodrl.config.schema import RolloutConfig, SamplingConfig, model_settings
from embodrl.hybrid_engines.rollout.batched import conversation
from embodrl.hybrid_engines.rollout.native import NativeRolloutEngine
from embodrl.models.registry import build_policy
from embodrl.types import TOKEN_MASK, Observation, SamplingParams

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed; `make test-vllm` makes an environment that has it", allow_module_level=True)

from embodrl.hybrid_engines.rollout.vllm.llm import DecodeLimits
from embodrl.hybrid_engines.rollout.vllm.text_engine import VllmTextEngine

pytestmark = pytest.mark.timeout(1800)
EXAMPLE = Path(__file__).resolve().parents[2] / "examples/planner"
TOLERANCE = {"atol": 1e-4, "rtol": 0}
PROMPT = 400
EXPERTS = ("mixtral", "qwen3_moe")
COLOUR = {"type": "string", "enum": ["red", "green", "blue", "yellow"]}
TOOLS = [{"name": "reach", "parameters": {"type": "object", "properties": {"colour": COLOUR}, "required": ["colour"]}}]
LONG = "look at the board, and say in a few words which of the squares are there and which of them is the nearest one"
BYTES = {"max_prompt_tokens": 512, "hidden_size": 128, "intermediate_size": 96, "num_attention_heads": 4}
PUBLIC = {"hidden_size": 128, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}


def make_policy(directory=None, **settings):
    """Return a planner with random weights, or that of a directory."""
    sizes = {"max_prompt_tokens": PROMPT, "max_new_tokens": 60, **({} if directory else BYTES)}
    values = {"model_type": "planner", "warm_start": None, "num_action_chunks": 1, "planner": sizes}
    values |= {"model_path": directory and str(directory), "value_head": {"hidden_sizes": (8,)}}
    config = model_settings("planner").model_validate(values | settings)
    return build_policy(config, device="cpu", dtype=torch.float32, seed=3)[0].eval()


def public_directory(path, kind, **changes):
    head = {"head_dim": 32} if kind.startswith("qwen3") else {}
    return write_language_model(path, kind, **{**PUBLIC, **head, **changes})


def engine_of(kind, policy, num_threads=1, **limits):
    common = policy, RolloutConfig(precision="fp32"), SamplingConfig(temperature=0.9), 7, num_threads, (0, 1)
    return NativeRolloutEngine(*common) if kind is NativeRolloutEngine else kind(common, DecodeLimits(**limits))


def asked(*rows):
    """Return conversations as one batch: each a choice of tools and the messages so far, the user's first."""
    parts = []
    for choice, *texts in rows:
        roles = ("user", "assistant", "tool")
        messages = [{"role": roles[place % 3], "content": text} for place, text in enumerate(texts)]
        parts.append(conversation(messages, TOOLS, choice))
    return Observation.concat(parts)


FIRST = asked(("required", "go to red"), ("auto", LONG), ("required", LONG), ("auto", "go"), ("required", "go to blue"))


@pytest.fixture(scope="module")
def policy():
    return make_policy()


@pytest.fixture(scope="module")
def served(policy):
    return engine_of(VllmTextEngine, policy)


def assert_equal_outputs(found, wanted):
    for name, tensor in wanted.forward_inputs.items():
        assert torch.equal(found.forward_inputs[name], tensor), name
    torch.testing.assert_close(found.logprobs, wanted.logprobs, **TOLERANCE)
    np.testing.assert_array_equal(found.actions, wanted.actions)
    assert (found.values is None) == (wanted.values is None)
    if wanted.values is not None:
        torch.testing.assert_close(found.values, wanted.values, **TOLERANCE)


def assert_same_engine(found, wanted, seen=FIRST):
    """Compare the most probable messages, and drawn ones.

    A public model draws by one number in the running sum of 330 probabilities, where rounding may choose a neighbour:
    then that row goes on otherwise, with the log-probs of what it has written.
    """
    assert_equal_outputs(found.decide(seen, "greedy"), wanted.decide(seen, "greedy"))
    found.set_random_state(wanted.random_state())
    for _ in range(2):
        output, other = found.act(seen, True), wanted.act(seen, True)
        if wanted.policy.vocabulary.whole_noise:
            assert_equal_outputs(output, other)
        with torch.no_grad():
            again = wanted.policy.evaluate_actions(output.forward_inputs, wanted.sampling)
        torch.testing.assert_close(again.logprobs, output.logprobs, **TOLERANCE)
        tokens = [part.forward_inputs["response_tokens"] for part in (output, other)]
        equal = (tokens[0] == tokens[1]).all(dim=1)
        assert equal.sum() >= len(equal) - 1, "rounding seldom chooses"
    assert found.random_state() == wanted.random_state()


def test_messages_calls_logprobs_and_values_are_those_of_the_native_engine(policy, served):
    native = engine_of(NativeRolloutEngine, policy)
    assert_same_engine(served, native)
    output = served.act(FIRST, True)
    texts = [written.text for written in policy.text_of(output.forward_inputs)]
    assert all('"name":"reach"' in texts[row] for row in (0, 2, 4))
    assert not any('"name":"reach"' in texts[row] for row in (1, 3))
    with torch.no_grad():
        again = policy.evaluate_actions(output.forward_inputs, served.sampling)
    torch.testing.assert_close(again.logprobs, output.logprobs, **TOLERANCE)
    assert (output.logprobs[output.forward_inputs[TOKEN_MASK]] < -0.1).any()
    other = SamplingParams(0.5, 3)  # as the client of a server chooses it
    seeds = [[row] for row in range(len(texts))]
    pair = [engine.decide(FIRST, "sampled", engine.row_generators(seeds), other) for engine in (served, native)]
    assert_equal_outputs(*pair)


@pytest.mark.parametrize("kind", EXPERTS)
def test_experts_are_refused(kind, tmp_path):
    with raises_code("vllm-experts"):
        engine_of(VllmTextEngine, make_policy(public_directory(tmp_path, kind)))


@pytest.mark.parametrize("kind", sorted({*KINDS} - {*EXPERTS}))
def test_public_models_write_the_same(kind, tmp_path):
    policy = make_policy(public_directory(tmp_path, kind))
    found = engine_of(VllmTextEngine, policy, num_threads=2)
    assert_same_engine(found, engine_of(NativeRolloutEngine, policy, num_threads=2))
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    found.update_weights(iter(()), 1)
    assert_same_engine(found, engine_of(NativeRolloutEngine, policy, num_threads=2))


def test_adapters_are_merged():
    pytest.importorskip("peft")
    policy = make_policy(trainable="lora", lora={"rank": 4})
    found = engine_of(VllmTextEngine, policy)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0.0, 0.3, generator=torch.Generator().manual_seed(len(name)))
    found.update_weights(iter(()), 1)
    assert_same_engine(found, engine_of(NativeRolloutEngine, policy))


def two_turns(engine):
    """Play a conversation of two turns for two rows; return the outputs and the cached tokens of each turn."""
    rows, outputs, cached = [("auto", LONG), ("auto", LONG[::-1])], [], []
    for _ in range(2):
        before = engine.decoder.cached_tokens if isinstance(engine, VllmTextEngine) else 0
        outputs.append(engine.decide(asked(*rows), "greedy"))
        cached.append(engine.decoder.cached_tokens - before if isinstance(engine, VllmTextEngine) else 0)
        said = [written.text for written in engine.policy.text_of(outputs[-1].forward_inputs)]
        rows = [(*row, text, "there is no such square") for row, text in zip(rows, said, strict=True)]
    return outputs, cached


def test_later_turns_find_their_beginning_in_the_cache_and_none_after_new_weights():
    policy, other = make_policy(), make_policy()
    found, plain = (engine_of(VllmTextEngine, policy, caches_prefixes=caches) for caches in (True, False))
    outputs, (first, second) = two_turns(found)
    for output, wanted in zip(outputs, two_turns(engine_of(NativeRolloutEngine, policy))[0], strict=True):
        assert_equal_outputs(output, wanted)
    lengths = [int(output.forward_inputs["attention_mask"].sum()) for output in outputs]
    assert found.decoder.prompt_tokens == sum(lengths)
    assert lengths[0] - 2 * 128 - first <= second <= lengths[1], "all whole pages of the first turn"
    assert second >= 2 * 128
    assert two_turns(found)[1][0] > first, "the same conversation again"
    assert two_turns(plain)[1] == [0, 0]

    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    found.update_weights(other.named_parameters(), 2)
    outputs, cached = two_turns(found)
    assert cached[0] == first, "as at the start: nothing of the old weights"
    wanted = two_turns(engine_of(NativeRolloutEngine, other))[0]
    for output, native in zip(outputs, wanted, strict=True):
        assert output.version == 2
        assert_equal_outputs(output, native)


def test_two_processes_share_each_layer(policy):
    before = psutil.Process().children(recursive=True)
    found = engine_of(VllmTextEngine, policy, max_num_seqs=8, tensor_parallel_size=2)
    workers = [child for child in psutil.Process().children(recursive=True) if child not in before]
    assert len(workers) >= 2
    assert_same_engine(found, engine_of(NativeRolloutEngine, policy))
    other = make_policy()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    mine = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    found.update_weights(other.named_parameters(), 1)
    assert_same_engine(found, engine_of(NativeRolloutEngine, other))
    policy.load_state_dict(mine)


@pytest.mark.timeout(3600)
def test_a_run_of_the_example(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLE))
    settings = (
        *("model.planner.num_attention_heads=2", "rollout.precision=fp32", "actor.precision=fp32"),
        *("env.train.total_num_envs=8", "env.eval.num_episodes=2", "env.start_timeout_s=600"),
        *("algorithm.group_size=4", "runner.max_iterations=2", "runner.eval_interval=2"),
    )
    rows = {}
    for backend in ("vllm", "native"):
        run_dir = tmp_path / backend
        command = ("train", "--config", EXAMPLE / "config.yaml", f"rollout.backend={backend}", *settings)
        outcome = embodrl(*command, f"runner.output_dir={run_dir}", timeout_s=1500)
        assert outcome.code == 0, outcome.stderr
        rows[backend] = metrics(run_dir)
    assert [row["iteration"] for row in rows["vllm"]] == [0, 1, 2]
    for row, other in zip(rows["vllm"], rows["native"], strict=True):
        assert row.get("train/behavior_weight_mean", 1.0) == pytest.approx(1.0, abs=1e-4)
        other.pop("workflow/policy_batch", None)  # conversations that happened to wait together
        for name, value in other.items():
            near = value if value is None else pytest.approx(value, rel=1e-3, abs=1e-4)
            assert row[name] == near, (row["iteration"], name)
