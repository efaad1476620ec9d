"""The engine on vLLM against the native one, on the same weights; `make test-vllm` runs this."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import torch

from embodrl.config.schema import ModelConfig, RolloutConfig, SamplingConfig
from embodrl.hybrid_engines.rollout import NativeRolloutEngine
from embodrl.models.registry import build_policy
from embodrl.types import Observation

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed; `make test-vllm` makes an environment that has it", allow_module_level=True)

from embodrl.hybrid_engines.vllm_engine import VllmRolloutEngine, language_weights

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
    settings = {"warm_start": None, "num_action_chunks": 2, "architecture": SHAPE} | settings
    policy, _ = build_policy(ModelConfig.model_validate(settings), device="cpu", dtype=torch.float32, seed=0)
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
    found = served.act_greedily(observation_of())
    assert_equal_outputs(found, engine_of(NativeRolloutEngine, policy).act_greedily(observation_of()))
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
