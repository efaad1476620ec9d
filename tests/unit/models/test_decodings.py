"""Ways of choosing actions: the most probable, a sample, and the nearest to the mean."""

import numpy as np
import pytest
import torch
from expect import raises_code
from tiny_families import build, observation

from embodrl.models.common.sampling import draw, expected
from embodrl.models.openvla_oft.policy import OpenVLAOFTRegressionPolicy
from embodrl.types import SamplingParams


def test_the_mean_is_that_of_the_distribution_that_is_sampled():
    # Probabilities 0.4, 0, 0.1, 0.2, 0.3: their mean is 0.2 + 0.6 + 1.2 = 2.0, while the most probable bin is 0.
    logits = torch.tensor([0.4, 1e-9, 0.1, 0.2, 0.3]).log()
    assert expected(logits, SamplingParams()).item() == 2 and draw(logits, SamplingParams(), None).item() == 0
    # At temperature 1/2 they go as the squares 16, 0, 1, 4, 9: (2 + 12 + 36) / 30 = 1.67.
    assert expected(logits[None], SamplingParams(temperature=0.5)).tolist() == [2]
    # Of the two most probable, 4/7 and 3/7: 12/7 = 1.71; at temperature 1/4 they go as 256 and 81: 324/337 = 0.96.
    assert expected(logits, SamplingParams(top_k=2)).item() == 2
    assert expected(logits, SamplingParams(temperature=0.25, top_k=2)).item() == 1


@pytest.mark.parametrize("family", ["openvla", "openvla_oft"])
def test_each_token_is_the_mean_given_those_before_it(family):
    policy, sampling = build(family).eval(), SamplingParams(temperature=0.7)
    seen = observation(family, 2)
    output = policy.predict_action_batch(seen, "mean", sampling, compute_values=False)
    tokens = output.forward_inputs["action_tokens"]
    with torch.no_grad():
        logits, _ = policy.action_logits(output.forward_inputs)
    np.testing.assert_array_equal(policy.bins.index(tokens.flatten(1)), expected(logits, sampling))
    greedy = policy.predict_action_batch(seen, "eval", sampling, compute_values=False)
    assert not np.array_equal(greedy.actions, output.actions)


@pytest.mark.parametrize("family", ["pi0", "pi0_fast", "gaussian"])
def test_a_family_without_an_order_of_bins_has_no_mean(family):
    policy = build(family)
    assert policy.decodings == ("greedy", "sampled")
    with raises_code("policy-has-no-decoding"):
        policy.predict_action_batch(observation(family, 1), "mean", SamplingParams(), compute_values=False)


def test_a_policy_without_a_density_is_greedy():
    assert OpenVLAOFTRegressionPolicy.decodings == ("greedy",)
