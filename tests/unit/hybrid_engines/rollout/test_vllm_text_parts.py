"""What of a planner in vLLM can be tested without vLLM; the rest is in tests/vllm."""

from __future__ import annotations

import importlib.util
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from expect import raises_code
from tiny_families import build

from embodrl.config import load_config
from embodrl.config.schema import RolloutConfig, SamplingConfig
from embodrl.errors import ConfigError
from embodrl.hybrid_engines.rollout.batched import conversation
from embodrl.hybrid_engines.rollout.native import NativeRolloutEngine
from embodrl.hybrid_engines.rollout.vllm import text_engine
from embodrl.hybrid_engines.rollout.vllm.llm import DecodeLimits, ServedModel
from embodrl.hybrid_engines.rollout.vllm.text_engine import VllmTextEngine
from embodrl.hybrid_engines.rollout.vllm.writing import draw_next
from embodrl.types import Observation

SAMPLING = SamplingConfig(temperature=0.9)
PLANNER = (
    *("env=toy", "model=planner", "rollout=vllm", "cluster.device=cpu", "env.train.auto_reset=false"),
    *("rollout.workflow='embodrl.workers.workflows.workflow:ChunkWorkflow'", "model.num_action_chunks=1"),
    *("model.planner.num_attention_heads=2", "env.train.max_steps_per_rollout_epoch=10"),
)
TOOL = {
    "name": "go",
    "parameters": {"type": "object", "properties": {"to": {"enum": ["a", "bc"]}}, "required": ["to"]},
}


class PlainLlm:
    """Stands in for vLLM: the policy's own network, one row after the other, asked again for every token."""

    network = None

    def __init__(self, served, limits, num_threads, can_sleep, options):
        self.served, self.options, self.can_sleep, self.loaded = served, options, can_sleep, []

    def load_weights(self, weights):
        self.loaded.append(dict(weights))

    @torch.no_grad()
    def generate(self, requests, params):
        return [self.row(list(one["prompt_token_ids"]), each) for one, each in zip(requests, params, strict=True)]

    def row(self, prompt, params):
        done, found = [], []
        while len(done) < params.max_tokens and not (done and done[-1] in params.stop_token_ids):
            ids = torch.tensor([prompt + done])
            hidden = self.network.reader()(ids, torch.ones_like(ids, dtype=torch.bool))
            logits = self.network.logits(hidden, self.served.config["vocab_size"])
            row = draw_next(logits, [(params.extra_args["writing"], done)])[0]
            done.append(int(row.argmax()))
            found.append({done[-1]: SimpleNamespace(logprob=float(row.max()))})
        return SimpleNamespace(token_ids=done, logprobs=found)


@pytest.fixture
def policy(monkeypatch):
    made = build("planner")
    monkeypatch.setattr(PlainLlm, "network", made.network)
    monkeypatch.setattr(text_engine, "LocalLlm", PlainLlm)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=SimpleNamespace))
    return made


@pytest.mark.parametrize("num_threads", [1, 2])
def test_the_same_messages_are_written_as_by_the_native_engine(policy, num_threads):
    rows = [conversation([{"role": "user", "content": text}], [TOOL], choice) for text, choice in
            (("a", "required"), ("go", "auto"), ("go on", "required"))]  # fmt: skip
    seen, config = Observation.concat(rows), RolloutConfig(precision="fp32")
    common = policy, config, SAMPLING, 7, num_threads, (0, 1)
    served, native = VllmTextEngine(common), NativeRolloutEngine(*common)
    pairs = [(engine.act(seen, True), engine.decide(seen, "greedy")) for engine in (served, native)]
    for found, wanted in zip(*pairs, strict=True):
        assert found.forward_inputs.keys() == wanted.forward_inputs.keys()
        for name, tensor in wanted.forward_inputs.items():
            assert torch.equal(found.forward_inputs[name], tensor), name
        torch.testing.assert_close(found.logprobs, wanted.logprobs, atol=1e-5, rtol=0)
        np.testing.assert_array_equal(found.actions, wanted.actions)
        assert (found.values is None) == (wanted.values is None)
    assert served.random_state() == native.random_state()
    served.update_weights(policy.named_parameters(), 3)
    assert served.version == 3 and len(served.decoder.loaded) == 2
    assert served.decoder.loaded[1].keys() == policy.model.state_dict().keys()


def test_prefixes_are_cached_unless_refused(policy):
    config = RolloutConfig(precision="fp32")
    for caches in (True, False):
        engine = VllmTextEngine((policy, config, SAMPLING, 7, 1, (0, 1)), DecodeLimits(caches_prefixes=caches))
        assert engine.decoder.options["enable_prefix_caching"] is caches


def test_processes_that_share_a_model_have_part_of_the_cache():
    served = ServedModel({"num_key_value_heads": 2}, (2, 64), torch.device("cpu"), torch.float32, 130)
    whole = served.kv_cache_bytes(DecodeLimits(3))
    assert whole == (3 * 2 + 1) * 128 * 2 * 2 * 64 * 4
    assert served.kv_cache_bytes(DecodeLimits(3, tensor_parallel_size=2)) == whole // 2
    assert served.kv_cache_bytes(DecodeLimits(3, tensor_parallel_size=4)) == whole // 2, "heads are not split"


def problems(*arguments):
    with pytest.raises(ConfigError) as caught:
        load_config(list(arguments))
    return {problem.key: problem.code for problem in caught.value.problems}


def test_what_is_refused_before_the_start(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    load_config([*PLANNER, "rollout.vllm.tensor_parallel_size=2"])
    cases = {
        ("model.planner.num_attention_heads=4",): ("model.planner.num_attention_heads", "kernels-for-its-heads"),
        ("rollout.vllm.tensor_parallel_size=4",): ("rollout.vllm.tensor_parallel_size", "kernels-for-its-heads"),
        ("rollout.vllm.tensor_parallel_size=2", "rollout.own_process=true"): (
            "rollout.vllm.tensor_parallel_size",
            "one-process-has-the-processes-of-vllm",
        ),
    }
    for settings, (key, code) in cases.items():
        assert problems(*PLANNER, *settings)[key].endswith(code)
    remote = problems(*PLANNER, "rollout=remote", "rollout.remote.urls=['http://127.0.0.1:1']")
    assert remote["rollout.backend"] == "a-message-is-a-chunk"


def test_only_planners_write():
    with raises_code("vllm-policy"):
        VllmTextEngine((build("openvla"), RolloutConfig(backend="vllm"), SAMPLING, 0, 1, (0, 1)))
