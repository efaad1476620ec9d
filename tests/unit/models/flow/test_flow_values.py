"""Values of flow policies where no action is drawn, with the points at which the critic is trained."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_families import build, generator, observation
from torch import Tensor, nn

from embodrl.models.flow.flow_policy import FlowPolicy
from embodrl.types import SamplingParams

DRAWS = 512


class Recorder(nn.Module):
    """A critic that keeps what it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[Tensor] = []

    def forward(self, hidden: Tensor) -> Tensor:
        self.read.append(hidden.detach())
        return hidden[:, :1]


@pytest.mark.parametrize("family", ["pi0", "smolvla"])
def test_a_bootstrap_reads_the_critic_where_it_is_trained(family: str) -> None:
    policy = build(family, "flow_sde", value_head={"hidden_sizes": (16,), "input": "suffix"})
    assert isinstance(policy, FlowPolicy)
    recorder = Recorder()
    policy.value_head = recorder  # type: ignore[assignment]
    seen = observation(family, 1)
    policy.predict_action_batch(seen.select(np.zeros(DRAWS, np.int64)), "train", SamplingParams(), generator(1))
    [trained_at] = recorder.read
    center = trained_at.mean(dim=0)
    recorder.read.clear()
    value = policy.predict_values(seen)
    bootstrap = torch.cat(recorder.read).mean(dim=0)
    assert len(recorder.read) == policy.flow.num_steps
    torch.testing.assert_close(value[0, 0], bootstrap[0])
    with torch.no_grad():
        zeros = torch.zeros(1, policy.horizon, policy.padded_action_dim)
        network = policy.velocity(policy.encode(policy.preprocess(seen)))
        at_zero = network(zeros, torch.ones(1))[1][0, : policy.num_action_chunks].mean(dim=0)
    assert (bootstrap - center).norm() < 0.7 * (at_zero - center).norm()


@pytest.mark.parametrize("family", ["pi0", "gr00t"])
def test_drawn_noise_of_evaluations_follows_from_the_observation(family: str) -> None:
    policy = build(family, flow={"evaluation_noise": "drawn"})
    assert isinstance(policy, FlowPolicy)
    seen = observation(family, 3)
    starts = policy._evaluation_start(seen)
    alone = policy._evaluation_start(seen.select(np.array([2])))
    assert torch.equal(starts[2:], alone) and not torch.equal(starts[0], starts[1])
    together, again = (policy.predict_action_batch(seen, "eval", SamplingParams()).actions for _ in range(2))
    np.testing.assert_array_equal(together, again)
    many = observation(family, 64, seed=1)
    noise = policy._evaluation_start(many)
    assert abs(float(noise.mean())) < 0.05 and abs(float(noise.std()) - 1) < 0.05
    fixed = build(family)
    assert isinstance(fixed, FlowPolicy)
    assert torch.equal(*fixed._evaluation_start(seen)[:2])
