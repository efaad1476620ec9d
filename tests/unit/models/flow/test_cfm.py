"""Flow matching without log-probs: the surrogate of FPO against the imitation loss and plain numbers."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from tiny_families import FLOW_FAMILIES, build, generator, observation
from torch import Tensor

from embodrl.data.rng import RowGenerators
from embodrl.models.flow.cfm import CfmSampler
from embodrl.models.flow.flow import Sampler, denoising_times
from embodrl.types import SamplingParams

CPU = torch.device("cpu")
SAMPLES = 4


def linear(x: Tensor, tau: Tensor) -> tuple[Tensor, Tensor]:
    """A velocity ``0.8 x - 0.6 (1 + tau)``; its features are its input."""
    return 0.8 * x - 0.6 * (1.0 + tau[:, None, None]), x


def sampler(keep_errors: bool = False) -> CfmSampler:
    return CfmSampler(3, SAMPLES, 2, 3, denoising_times, keep_errors)


def test_the_surrogate_is_the_negative_loss_at_kept_noise_and_times() -> None:
    chain = sampler(keep_errors=True).sample(linear, (5, 4, 6), generator(), CPU)
    target, noise, tau = (chain.stored[f"flow_{name}"].double().numpy() for name in ("target", "noise", "tau"))
    losses = np.zeros((5, 2, 3))
    for row in range(5):
        for n in range(SAMPLES):
            x = tau[row, n] * noise[row, n] + (1 - tau[row, n]) * target[row]
            error = 0.8 * x - 0.6 * (1 + tau[row, n]) - noise[row, n] + target[row]
            np.testing.assert_allclose(chain.stored["flow_error"][row, n], error[:2, :3], atol=1e-5)
            losses[row] += error[:2, :3] ** 2 / SAMPLES
    np.testing.assert_allclose(chain.logprobs, -losses, atol=1e-5)
    assert sampler().evaluate(linear, chain.stored).logprobs.equal(chain.logprobs), "the ratio begins at 1"


def test_the_chunk_is_where_the_ode_leads_and_times_are_stratified() -> None:
    chain = sampler().sample(linear, (400, 1, 1), generator(), CPU)
    x = torch.randn(400, 1, 1, generator=generator())
    for tau in (1.0, 2 / 3, 1 / 3):
        x = x - (0.8 * x - 0.6 * (1 + tau)) / 3
    torch.testing.assert_close(chain.actions, x)
    tau = chain.stored["flow_tau"]
    assert (tau * SAMPLES).floor().equal(torch.arange(SAMPLES).expand(400, -1).float())
    assert abs(float((tau * SAMPLES % 1).mean()) - 0.5) < 4 * (1 / 12 / 1600) ** 0.5


def test_a_row_draws_the_same_in_any_batch() -> None:
    def drawn(seeds: list[int]) -> dict[str, Tensor]:
        rows = RowGenerators(tuple(generator(seed) for seed in seeds))
        return sampler().sample(linear, (len(seeds), 4, 6), rows, CPU).stored

    one, three = drawn([7]), drawn([1, 7, 2])
    assert all(three[name][1:2].equal(one[name]) for name in one)


@pytest.mark.parametrize("family", FLOW_FAMILIES)
def test_the_surrogate_of_a_policy_is_its_imitation_loss(family: str) -> None:
    """``sft_loss`` at each kept noise and time, of the actions that are run; and no value knows the actions."""
    policy = build(family, flow={"method": "cfm", "num_steps": 2, "num_samples": SAMPLES})
    seen, sampling = observation(family), SamplingParams()
    with torch.no_grad():
        output = policy.predict_action_batch(seen, "train", sampling, generator())
        for parameter in policy.parameters():
            parameter.mul_(1.01)
        inputs = output.forward_inputs
        found = policy.evaluate_actions(inputs, sampling)
        wanted = torch.zeros(3)
        run = policy.num_action_chunks, policy.action_dim
        policy.loss_action_dims = lambda: run[1]
        mask = torch.arange(policy.action_horizon).expand(3, -1) < run[0]
        for row in range(3):
            for n in range(SAMPLES):
                one = {name: value[row : row + 1] for name, value in inputs.items()}
                at = {"target": one["flow_target"], "noise": one["flow_noise"][:, n], "tau": one["flow_tau"][:, n]}
                loss, _ = policy.sft_loss(one | at | {"action_mask": mask[row : row + 1]})
                wanted[row] += loss / SAMPLES
        other = policy.evaluate_actions(inputs | {"flow_target": inputs["flow_target"] + 1.0}, sampling)
    torch.testing.assert_close(-found.logprobs.mean((1, 2)), wanted, atol=1e-4, rtol=1e-4)
    assert not found.logprobs.equal(output.logprobs)
    assert policy.value_input == "prefix" and other.values is not None
    torch.testing.assert_close(other.values, found.values)


def test_errors_of_flow_sde_are_those_of_its_log_prob() -> None:
    chosen = Sampler(3, 0.5, 2, 3, keep_errors=True)
    chain = chosen.sample(linear, (5, 4, 6), generator(), CPU)
    evaluation = chosen.evaluate(lambda x, tau: (linear(x, tau)[0] + 0.1, x), chain.stored)
    assert evaluation.errors is not None
    for errors, logprobs in ((chain.stored["flow_error"], chain.logprobs), (evaluation.errors, evaluation.logprobs)):
        at_mean = logprobs + 0.5 * errors.squeeze(1).square()
        torch.testing.assert_close(at_mean, at_mean[:, :1, :1].expand_as(at_mean))
    plain = Sampler(3, 0.5, 2, 3).sample(linear, (5, 4, 6), generator(), CPU)
    assert plain.actions.equal(chain.actions) and dataclasses.asdict(plain)["stored"].keys() == {
        "flow_x",
        "flow_next",
        "flow_step",
    }
