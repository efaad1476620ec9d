"""Which rows a training process gets of a rollout."""

from __future__ import annotations

import pytest
import torch
from expect import raises_code
from tiny_training import NUM_ENVS, NUM_STEPS, tiny_rollout, training_config

from embodrl.algorithms.advantages import compute_advantages
from embodrl.data.shared_inputs import INPUTS
from embodrl.data.shared_rows import HeldInputs, read_by, separate, share_of
from embodrl.errors import BatchIndexError
from embodrl.hybrid_engines.training.remote import Sharing
from embodrl.learners.on_policy import OnPolicyUpdate
from embodrl.workers.policy import build_policy


def test_a_smaller_share_repeats_the_first_row() -> None:
    assert [share_of(5, 2, share).tolist() for share in range(2)] == [[0, 1, 2], [3, 4]]
    rows = torch.tensor([7, 3, 9])
    assert [part.tolist() for part in read_by(rows, 2)] == [[7, 3], [9, 7]]
    assert [part.tolist() for part in read_by(rows[:1], 3)] == [[7], [7], [7]]


@pytest.mark.parametrize("family", ["openvla", "pi0_fast"])
def test_inputs_leave_the_batch_and_come_back(family: str) -> None:
    config = training_config(family)
    policy = build_policy(config)
    batch = tiny_rollout(family, policy, config, 0)
    small, (first, second) = separate(batch, [torch.tensor([4, 1, 4]), torch.tensor([0])])
    assert first.rows.tolist() == [1, 4] and len(first.inputs["images" if "images" in first.inputs else "pixels"]) == 2
    assert small.drawn.equal(batch.drawn), "masks of tokens count everywhere"
    assert set(small.get(INPUTS) or {}) <= {"token_mask"}
    rows = torch.tensor([4, 1])
    filled = first.fill(small.fold()[rows], torch.device("cpu"))
    expected = batch.fold()[rows].forward_inputs
    assert filled.forward_inputs.keys() == expected.keys()
    assert all(tensor.equal(expected[name]) for name, tensor in filled.forward_inputs.items())
    with raises_code("batch-index", BatchIndexError):
        second.at(rows)


@pytest.mark.parametrize(("epochs", "num_shares"), [(1, 2), (2, 3)])
def test_an_update_says_which_rows_it_reads(epochs: int, num_shares: int) -> None:
    config = training_config(algorithm={"update_epoch": epochs})
    policy = build_policy(config)
    batch = tiny_rollout("openvla", policy, config, 0)
    advantages = compute_advantages(batch, config.algorithm)
    generator = torch.Generator().manual_seed(5)
    before = generator.get_state()
    sharing = Sharing(config, num_shares, 0, has_critic=True)
    found = OnPolicyUpdate.rows_of_shares(sharing, "update", (batch, advantages, generator))
    assert found is not None and generator.get_state().equal(before)
    trained = batch.valid.any(-1).flatten().nonzero().squeeze(-1)
    assert torch.cat(found).unique().equal(trained), "each row is somebody's"
    most = max(len(rows.unique()) for rows in found)
    assert most < len(trained) if epochs == 1 else most <= len(trained)
    assert OnPolicyUpdate.rows_of_shares(sharing, "critic_warmup", ()) is None


def test_only_chunks_of_older_weights_are_evaluated_again() -> None:
    algorithm = {"decoupled": {"enabled": True}, "loss_type": "actor_critic"}
    config = training_config(algorithm=algorithm)
    policy = build_policy(config)
    batch = tiny_rollout("openvla", policy, config, 0)
    batch.policy_version.fill_(3)
    batch.policy_version[:, 1] = 2
    old = OnPolicyUpdate.rows_of_shares(Sharing(config, 2, 3, has_critic=True), "proximal", (batch,))
    assert old is not None
    rows = torch.arange(NUM_STEPS * NUM_ENVS).view(NUM_STEPS, NUM_ENVS)
    assert set(torch.cat(old).tolist()) == set(rows[:, 1].tolist())
    every = OnPolicyUpdate.rows_of_shares(Sharing(config, 2, 3, has_critic=True), "proximal", (batch, True))
    assert every is not None and len(torch.cat(every).unique()) == int(batch.valid.any(-1).sum())


def test_nobody_reads_what_is_not_held() -> None:
    held = HeldInputs(torch.tensor([2, 5]), {"x": torch.tensor([20.0, 50.0])})
    assert held.at(torch.tensor([5, 2, 5]))["x"].tolist() == [50, 20, 50]
    with raises_code("batch-index", BatchIndexError):
        held.at(torch.tensor([6]))
