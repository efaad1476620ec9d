"""The engine on vLLM against the native one, on the same weights; `make test-vllm` runs this."""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from expect import raises_code

from embodrl.config.schema import RolloutConfig, SamplingConfig
from embodrl.errors import EmbodrlError, MissingDependencyError, RolloutEngineError
from embodrl.hybrid_engines.rollout.native import NativeRolloutEngine
from embodrl.models.openvla.spec import OpenVlaConfig
from embodrl.models.registry import build_policy
from embodrl.types import Observation

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed; `make test-vllm` makes an environment that has it", allow_module_level=True)

from embodrl.hybrid_engines.rollout.vllm.decoder import served_llama
from embodrl.hybrid_engines.rollout.vllm.engine import VllmRolloutEngine, language_weights
from embodrl.hybrid_engines.rollout.vllm.llm import DecodeLimits, ServedModel, import_vllm, write_config

pytestmark = pytest.mark.timeout(1800)  # importing and starting vLLM takes minutes on a machine that others use
ROWS = 5
TOLERANCE = {"atol": 1e-4, "rtol": 0}
SHAPE = {
    "image_size": 16,
    "patch_size": 8,
    "dino": {"width": 16, "depth": 2, "num_heads": 2, "mlp_dim": 24},
    "siglip": {"width": 16, "depth": 2, "num_heads": 2, "mlp_dim": 24},
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


def make_policy(**settings):
    """Return a policy with random weights."""
    settings = {"warm_start": None, "num_action_chunks": 2, "architecture": SHAPE} | settings
    policy, _ = build_policy(OpenVlaConfig.model_validate(settings), device="cpu", dtype=torch.float32, seed=0)
    return policy.eval()


def engine_of(kind, policy, num_threads=1, temperature=1.6, top_k=0, **rollout):
    sampling = SamplingConfig(temperature=temperature, top_k=top_k)
    return kind(policy, RolloutConfig(**{"precision": "fp32"} | rollout), sampling, 7, num_threads)


def observation_of(rows=ROWS, instructions=("push the cube", "pull the red cube to the goal")):
    images = np.random.default_rng(1).integers(0, 256, (rows, 1, 20, 20, 3), np.uint8)
    said = [instructions[row % len(instructions)] for row in range(rows)]
    return Observation(images, np.zeros((rows, 0), np.float32), said, np.zeros(rows, np.int32))


@pytest.fixture(scope="module")
def policy():
    return make_policy()


@pytest.fixture(scope="module")
def served(policy):
    return engine_of(VllmRolloutEngine, policy)


def assert_equal_outputs(found, wanted):
    torch.testing.assert_close(found.logprobs, wanted.logprobs, **TOLERANCE)
    np.testing.assert_array_equal(found.actions, wanted.actions)
    assert found.forward_inputs.keys() == wanted.forward_inputs.keys()
    for name, tensor in wanted.forward_inputs.items():
        assert torch.equal(found.forward_inputs[name], tensor), name
    if wanted.values is None:
        assert found.values is None
    else:
        torch.testing.assert_close(found.values, wanted.values, **TOLERANCE)


def test_greedy_actions_and_logprobs_are_those_of_the_native_engine(policy, served):
    found = served.decide(observation_of(), "greedy")
    assert_equal_outputs(found, engine_of(NativeRolloutEngine, policy).decide(observation_of(), "greedy"))
    assert found.logprobs.shape == (ROWS, 2, 7)
    assert found.logprobs.dtype == torch.float32


def test_draws_logprobs_and_values_are_those_of_the_native_engine(policy, served):
    native = engine_of(NativeRolloutEngine, policy)
    served.set_random_state(native.random_state())
    for _ in range(3):
        found = served.act(observation_of(), compute_values=True)
        assert_equal_outputs(found, native.act(observation_of(), compute_values=True))
    assert served.random_state() == native.random_state()
    assert len({tuple(row) for row in found.forward_inputs["action_tokens"].flatten(1).tolist()}) == ROWS


def test_training_computes_the_same_logprobs_again(policy, served):
    found = served.act(observation_of(), compute_values=True)
    with torch.no_grad():
        again = policy.evaluate_actions(found.forward_inputs, served.sampling)
    torch.testing.assert_close(again.logprobs, found.logprobs, **TOLERANCE)
    torch.testing.assert_close(again.values, found.values, **TOLERANCE)


@pytest.mark.parametrize("setting", [{"num_threads": 2}, {"top_k": 5, "temperature": 0.7}])
def test_threads_temperature_and_top_k_are_those_of_the_native_engine(policy, served, setting):
    native, found = (engine_of(kind, policy, **setting) for kind in (NativeRolloutEngine, VllmRolloutEngine))
    assert_equal_outputs(found.act(observation_of(), True), native.act(observation_of(), True))
    again = served.decide(observation_of(), "greedy")  # another engine of the process works as before
    assert_equal_outputs(again, engine_of(NativeRolloutEngine, policy).decide(observation_of(), "greedy"))


def test_rows_draw_from_their_own_generators(policy, served):
    seeds = [(3, row) for row in range(ROWS)]
    native = engine_of(NativeRolloutEngine, policy)
    wanted = native.act(observation_of(), False, native.row_generators(seeds))
    assert_equal_outputs(served.act(observation_of(), False, served.row_generators(seeds)), wanted)


def test_more_rows_than_vllm_decodes_at_once_wait(policy):
    sampling = SamplingConfig(temperature=1.6)
    narrow = VllmRolloutEngine(policy, RolloutConfig(precision="fp32"), sampling, 7, limits=DecodeLimits(2))
    native = engine_of(NativeRolloutEngine, policy)
    assert_equal_outputs(narrow.act(observation_of(7), True), native.act(observation_of(7), True))


def test_steps_of_few_tokens_choose_the_same(policy):
    sampling = SamplingConfig(temperature=1.6)
    native = engine_of(NativeRolloutEngine, policy)
    row = policy.model.config.num_patches + policy.processor.max_prompt_tokens + policy.num_action_chunks * 7
    small = VllmRolloutEngine(policy, RolloutConfig(precision="fp32"), sampling, 7, limits=DecodeLimits(64, row))
    assert_equal_outputs(small.act(observation_of(), True), native.act(observation_of(), True))
    with raises_code("vllm-tokens", EmbodrlError, row):
        VllmRolloutEngine(policy, RolloutConfig(precision="fp32"), sampling, 7, limits=DecodeLimits(64, row - 1))


def test_the_value_of_the_whole_prompt():
    policy = make_policy(value_head={"input": "prompt_mean"})
    native, found = engine_of(NativeRolloutEngine, policy), engine_of(VllmRolloutEngine, policy)
    assert_equal_outputs(found.act(observation_of(), True), native.act(observation_of(), True))
    torch.testing.assert_close(found.values(observation_of()), native.values(observation_of()), **TOLERANCE)


def test_adapters_are_merged():
    pytest.importorskip("peft")
    policy = make_policy(trainable="lora", lora={"rank": 4})
    plain = engine_of(NativeRolloutEngine, policy).decide(observation_of(), "greedy")
    found = engine_of(VllmRolloutEngine, policy)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0.0, 0.3, generator=torch.Generator().manual_seed(len(name)))
    found.update_weights(iter(()), 1)
    wanted = engine_of(NativeRolloutEngine, policy).decide(observation_of(), "greedy")
    assert not torch.equal(wanted.logprobs, plain.logprobs)
    assert_equal_outputs(found.decide(observation_of(), "greedy"), wanted)


def test_new_weights_are_used_from_the_update_on_and_not_before():
    policy, other = make_policy(), make_policy()
    found = engine_of(VllmRolloutEngine, policy)
    before = found.decide(observation_of(), "greedy")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    weights = dict(other.named_parameters())
    language = {
        name: p for name, p in policy.named_parameters() if name.startswith("model.language_model.model.layers")
    }
    with torch.no_grad():
        for name, parameter in language.items():
            parameter.copy_(weights[name])
    assert_equal_outputs(found.decide(observation_of(), "greedy"), before)  # vLLM has weights of its own
    for version in (3, 4):
        found.update_weights(iter(weights.items()), version)
        now = found.decide(observation_of(), "greedy")
        assert now.version == found.version == version
        assert_equal_outputs(now, engine_of(NativeRolloutEngine, other).decide(observation_of(), "greedy"))
    assert not np.array_equal(now.actions, before.actions)


def test_half_precision_is_near(policy):
    found = engine_of(VllmRolloutEngine, policy, precision="bf16").act(observation_of(), True)
    with torch.no_grad():
        exact = policy.evaluate_actions(found.forward_inputs, engine_of(NativeRolloutEngine, policy).sampling)
    difference = (found.logprobs - exact.logprobs).abs()
    assert 1e-6 < difference.max() < 0.1
    torch.testing.assert_close(found.values, exact.values, atol=0.05, rtol=0)


def test_vllm_draws_by_itself_with_the_same_log_probs(policy, served, monkeypatch, tmp_path):
    """Its own sampler, mask and temperature, instead of our logits processor."""
    import vllm

    monkeypatch.setattr(torch, "set_num_threads", torch.set_num_threads)  # vLLM replaces it
    first = policy.bins.first_id
    write_config(served_llama(policy.model, torch.float32, 64), tmp_path)
    llm = vllm.LLM(
        model=str(tmp_path),
        load_format="dummy",
        skip_tokenizer_init=True,
        enable_prompt_embeds=True,
        dtype="float32",
        max_model_len=64,
        max_num_seqs=ROWS,
        max_num_batched_tokens=64 * ROWS,
        kv_cache_memory_bytes=8 << 20,
        enforce_eager=True,
        logprobs_mode="processed_logprobs",
    )
    llm.llm_engine.model_executor.driver_worker.worker.model_runner.reload_weights(
        weights_iterator=language_weights(policy)
    )
    inputs = policy.preprocess(observation_of())
    with torch.no_grad():
        embeddings, mask = policy.prompt_embeddings(inputs)
    prompts = [{"prompt_embeds": e[m.bool()]} for e, m in zip(embeddings, mask, strict=True)]
    params = vllm.SamplingParams(
        temperature=1.6, max_tokens=14, ignore_eos=True, logprobs=0, allowed_token_ids=list(range(first, first + 256))
    )
    answers = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
    tokens = torch.tensor([answer.token_ids for answer in answers])
    theirs = torch.tensor(
        [[step[token].logprob for step, token in zip(a.logprobs, a.token_ids, strict=True)] for a in answers]
    )
    with torch.no_grad():
        ours = policy.evaluate_actions({**inputs, "action_tokens": tokens.view(ROWS, 2, 7)}, served.sampling)
    torch.testing.assert_close(ours.logprobs.flatten(1), theirs, **TOLERANCE)


def test_starting_vllm_leaves_random_numbers_and_threads_alone(policy):
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    engine_of(VllmRolloutEngine, policy)
    assert torch.equal(torch.rand(3), wanted)
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    assert torch.get_num_threads() == before + 1
    torch.set_num_threads(before)


def test_what_a_cpu_can_not_do_is_refused(policy, monkeypatch):
    with raises_code("missing-dependency", MissingDependencyError, "embodrl[vllm]"):
        import_vllm(torch.device("cuda"))
    with raises_code("vllm-start"):
        engine_of(VllmRolloutEngine, policy, enable_offload=True)
    monkeypatch.setattr(ServedModel, "kv_cache_bytes", lambda *_: 1 << 50)
    with raises_code("vllm-start", EmbodrlError, "max_num_seqs"):
        engine_of(VllmRolloutEngine, policy)


def test_a_fault_in_vllm_is_reported_and_its_leftovers_are_not_decoded_later(policy, monkeypatch):
    found = engine_of(VllmRolloutEngine, policy)
    runner = found.decoder.runner

    def fail(*_args, **_kwargs):
        raise RuntimeError("no page left")

    with monkeypatch.context() as broken:
        broken.setattr(runner, "execute_model", fail)
        with raises_code("rollout-engine", RolloutEngineError, "5 rows", "RuntimeError: no page left"):
            found.decide(observation_of(), "greedy")
    for again in (lambda: found.decide(observation_of(), "greedy"), lambda: found.update_weights(iter(()), 1)):
        with raises_code("rollout-engine", RolloutEngineError, "RuntimeError: no page left"):
            again()
    assert found.version == 0


def test_weights_that_vllm_can_not_take_are_reported(policy):
    found = engine_of(VllmRolloutEngine, policy)
    with raises_code("rollout-engine", RolloutEngineError):
        found.decoder.load_weights([("model.layers.0.mlp.down_proj.weight", torch.zeros(3, 3))])


def test_no_process_no_shared_memory_and_no_file_is_held(policy, monkeypatch, tmp_path):
    """Whatever ends the process, nothing of vLLM outlives it."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = psutil.Process().children(recursive=True)
    engine_of(VllmRolloutEngine, policy).act(observation_of(), True)
    assert psutil.Process().children(recursive=True) == before
    assert list(tmp_path.iterdir()) == []
    # Unnamed memory, /memfd:..., goes with the process.
    mapped = {line.split(maxsplit=5)[5] for line in Path("/proc/self/maps").read_text().splitlines() if "/" in line}
    opened = {file.path for file in psutil.Process().open_files()}
    held = [path for path in mapped | opened if path.startswith(("/dev/shm/", str(tmp_path)))]
    assert not [path for path in held if not path.endswith("(deleted)")]
