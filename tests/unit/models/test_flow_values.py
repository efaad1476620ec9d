"""Values of flow policies where no action is drawn, with the points at which the critic is trained."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_families import build, generator, observation
from torch import Tensor, nn

from embodrl.models.common.flow_policy import FlowPolicy
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
