"""The gripper's conventions in every family, from the model to the simulator and, for imitation, back."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tiny_families import FLOW_FAMILIES, TOKEN_FAMILIES, build, generator, observation

from embodrl.types import SamplingParams

CONVENTIONS = ("libero", "bridge")
SAMPLING = SamplingParams()
# What the simulator is sent for an open gripper (the model's 1) and for a closed one (0).
OPEN = {"libero": -1.0, "bridge": 1.0}
# Closed, half and open in the model's terms, as the simulators say it.
TOLD = {"libero": [1.0, 0.0, -1.0], "bridge": [-1.0, 0.0, 1.0]}


class FromPlusMinusOne:
    """Statistics of a dataset whose gripper fills [0, 1]: the network's [-1, 1] is twice as wide."""

    def normalize(self, actions: NDArray[np.floating]) -> NDArray[np.float64]:
        return np.asarray(actions, dtype=np.float64) * 2.0 - 1.0

    def unnormalize(self, actions: NDArray[np.float64]) -> NDArray[np.float64]:
        return (actions + 1.0) / 2.0


def pair(family: str, convention: str, own_stats: bool = True):
    """Return two policies that differ only in the convention, and an observation of 24 rows."""
    policies = [build(family, gripper=name) for name in ("as_is", convention)]
    if not own_stats:
        for policy in policies:
            policy.stats = FromPlusMinusOne()
    return *policies, observation(family, batch=24)


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize("family", FLOW_FAMILIES)
def test_flow_policies_to_the_simulator(family: str, convention: str, mode: str):
    plain, told, seen = pair(family, convention, own_stats=False)
    a, b = (p.predict_action_batch(seen, mode, SAMPLING, generator()).actions for p in (plain, told))
    np.testing.assert_array_equal(b[..., :6], a[..., :6])
    opened = a[..., 6] > 0.5
    if mode == "train":
        assert opened.any() and not opened.all()
    np.testing.assert_array_equal(b[..., 6], np.where(opened, OPEN[convention], -OPEN[convention]))


@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize("family", FLOW_FAMILIES)
def test_flow_policies_from_demonstrations(family: str, convention: str):
    """The target is 0, 1/2, 1 in the model's terms, and then normalised: -1, 0, 1."""
    plain, told, _ = pair(family, convention, own_stats=False)
    actions = torch.rand(3, 1, 7, generator=generator()) * 2 - 1
    actions[:, 0, 6] = torch.tensor(TOLD[convention])
    seen = observation(family)
    a, b = (p.sft_inputs(seen, actions)["target"] for p in (plain, told))
    torch.testing.assert_close(b[:, 0, 6], torch.tensor([-1.0, 0.0, 1.0]))
    torch.testing.assert_close(b[:, 0, :6], a[:, 0, :6], rtol=0, atol=0)
    assert not torch.equal(a[:, 0, 6], b[:, 0, 6])


@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize("family", TOKEN_FAMILIES)
def test_token_policies(family: str, convention: str):
    plain, told, seen = pair(family, convention)
    a, b = (p.predict_action_batch(seen, "train", SAMPLING, generator()).actions for p in (plain, told))
    np.testing.assert_array_equal(b[..., :6], a[..., :6])
    opened = a[..., 6] > 0.5
    assert opened.any() and not opened.all()
    np.testing.assert_array_equal(b[..., 6], np.where(opened, OPEN[convention], -OPEN[convention]))
    actions = torch.zeros(3, 2, 7)
    actions[..., 6] = torch.tensor(TOLD[convention])[:, None]
    tokens = told.sft_inputs(observation(family), actions)["action_tokens"].numpy()
    wanted = np.repeat([[0.0], [0.5], [1.0]], 2, axis=1)
    np.testing.assert_allclose(told.bins.decode(tokens)[..., 6], wanted, atol=1 / 255 + 1e-6)
