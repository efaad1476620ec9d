"""OpenVLA cut up over two processes, and in one piece, beside the policy in one process."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest
import torch
from megatron_workers import Probe, toy_loss
from tiny_training import largest_difference, tiny_rollout, training_config
from torch import Tensor

from embodrl.config.schema import Config
from embodrl.data.trajectory import TrajectoryBatch
from embodrl.models.openvla.policy import OpenVLAPolicy
from embodrl.scheduler.group import WorkerGroup
from embodrl.scheduler.placement import ProcessPlace
from embodrl.types import SamplingParams
from embodrl.workers.policy import build_policy

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="needs megatron-core: make test-megatron"),
]

SAMPLINGS = [SamplingParams(1.0, 0), SamplingParams(0.3, 0), SamplingParams(0.6, 5)]


def config_of(size: int) -> Config:
    actor = {"training_backend": "megatron", "tensor_parallel_size": size}
    return training_config(actor={**actor, "optim": {"clip_grad": 1e9}})


@pytest.fixture(scope="module")
def policy() -> OpenVLAPolicy:
    torch.manual_seed(0)
    found = build_policy(config_of(1))
    assert isinstance(found, OpenVLAPolicy)
    return found


@pytest.fixture(scope="module")
def rows(policy: OpenVLAPolicy) -> TrajectoryBatch:
    batch = tiny_rollout("openvla", policy, config_of(1), seed=4)
    return batch.select("forward_inputs", "logprobs").fold()


@pytest.fixture(scope="module", params=[1, 2])
def group(request: pytest.FixtureRequest) -> Iterator[WorkerGroup]:
    group = WorkerGroup(Probe, "actor", config=config_of(request.param))
    group.launch([ProcessPlace("actor", rank) for rank in range(request.param)], "process", timeout_s=1800)
    yield group
    group.close()


def test_weights_come_back_to_the_bit(policy: OpenVLAPolicy, group: WorkerGroup) -> None:
    expected = policy.state_dict()
    for found in group.call("gather", "policy", list(expected)).result()[:1]:
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_the_language_model_is_cut_up(group: WorkerGroup) -> None:
    size = len(group.call("shapes").result())
    for shapes in group.call("shapes").result():
        layer = "model.language_model.model.layers.0."
        assert shapes[f"{layer}self_attention.linear_qkv.weight"] == [3 * 32 // size, 32]
        assert shapes[f"{layer}mlp.linear_fc2.weight"] == [32, 48 // size]
        assert shapes["model.language_model.lm_head.weight"][0] * size == shapes_of_vocabulary()


def shapes_of_vocabulary() -> int:
    policy = build_policy(config_of(1))
    assert isinstance(policy, OpenVLAPolicy)
    return policy.model.config.llama.vocab_size


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_outputs_agree(
    policy: OpenVLAPolicy, rows: TrajectoryBatch, group: WorkerGroup, sampling: SamplingParams
) -> None:
    with torch.no_grad():
        logits, _ = policy.action_logits(rows.forward_inputs)
        expected = policy.evaluate_actions(rows.forward_inputs, sampling)
    results = group.call("evaluate", dict(rows.forward_inputs.items()), sampling.temperature, sampling.top_k).result()
    windows = torch.cat([found["window"] for found in results], dim=-1)
    torch.testing.assert_close(windows[..., results[0]["places"]], logits, atol=1e-5, rtol=0)
    for found in results:
        torch.testing.assert_close(found["logprobs"], expected.logprobs, atol=1e-5, rtol=0)
        torch.testing.assert_close(found["entropy"], expected.entropy, atol=1e-5, rtol=0)
        torch.testing.assert_close(found["values"], expected.values, atol=1e-5, rtol=0)


def test_loss_and_gradients_agree(policy: OpenVLAPolicy, rows: TrajectoryBatch, group: WorkerGroup) -> None:
    policy.zero_grad()
    expected_loss = torch.zeros(())
    for chosen in torch.arange(len(rows)).split(2):
        loss = toy_loss(policy.evaluate_actions(rows[chosen].forward_inputs, SamplingParams(0.7, 0)))
        loss.backward()
        expected_loss += loss.detach()
    expected: dict[str, Tensor] = {n: p.grad for n, p in policy.named_parameters() if p.grad is not None}
    for loss, gradients in group.call("gradients", rows).result():
        scale = max(float(g.abs().max()) for g in expected.values())
        torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=1e-5)
        assert largest_difference(gradients, expected) < 1e-5 * scale
