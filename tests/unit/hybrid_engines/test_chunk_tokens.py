"""Training on tokens that stand for a whole chunk (``TOKEN_MASK``), as pi0-FAST's: as many as there are, none else."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import updates
from test_train_engine import ALGORITHM, largest_change, make_engine, weights_of
from torch import Tensor
from toy_policy import ToyPolicy, toy_rollout

from embodrl.algorithms.advantages import compute_advantages, penalized_rewards
from embodrl.config.schema import KlConfig
from embodrl.data.trajectory import TrajectoryBatch
from embodrl.learners.objective import chunk_weights, trained_chunks
from embodrl.types import TOKEN_MASK, EvalOutput

TOKENS = 6


class ChunkTokenPolicy(ToyPolicy):
    """The 2 x 3 tokens of a chunk in one row, the last ones of which may be missing."""

    def evaluate_actions(self, forward_inputs: dict[str, Tensor], *arguments: Any, **named: Any) -> EvalOutput:
        output = super().evaluate_actions(forward_inputs, *arguments, **named)
        mask = forward_inputs[TOKEN_MASK][..., None]
        entropy = None if output.entropy is None else torch.where(mask, output.entropy.flatten(1)[..., None], 0.0)
        return EvalOutput(torch.where(mask, output.logprobs.flatten(1)[..., None], 0.0), entropy, output.values)


def rollout(lengths: list[int] | None = None) -> TrajectoryBatch:
    """Return a rollout of 20 chunks; the lengths of their sentences repeat, None: all are whole."""
    batch = toy_rollout(ToyPolicy())
    steps, envs = batch.logprobs.shape[:2]
    length = torch.tensor(lengths or [TOKENS]).repeat(steps * envs)[: steps * envs].view(steps, envs, 1)
    mask = torch.arange(TOKENS) < length
    inputs = {**batch.forward_inputs, TOKEN_MASK: mask}
    return batch.replace(forward_inputs=inputs, logprobs=torch.where(mask, batch.logprobs.flatten(2), 0.0)[..., None])


def update(batch: TrajectoryBatch, policy: ToyPolicy, level: str, **changes: Any) -> tuple[dict[str, float], Any]:
    algorithm = ALGORITHM.model_copy(update={"logprob_type": level, "entropy_bonus": 0.01, "update_epoch": 2})
    engine = make_engine(policy, **changes)
    metrics = updates.update(
        engine, batch, compute_advantages(batch, algorithm), algorithm, torch.Generator().manual_seed(0)
    )
    return metrics, weights_of(engine)


@pytest.mark.parametrize("level", ["token_level", "chunk_level"])
def test_whole_sentences_of_whole_chunks_train_like_actions(level: str) -> None:
    plain, tokens = toy_rollout(ToyPolicy()), rollout()
    for batch in (plain, tokens):
        batch.valid = torch.ones_like(batch.valid)
    metrics, weights = update(plain, ToyPolicy(), level)
    found, changed = update(tokens, ChunkTokenPolicy(), level)
    assert found == pytest.approx(metrics, rel=1e-5, abs=1e-7)
    assert largest_change(weights, changed) < 1e-7 < largest_change(weights, weights_of(make_engine()))


@pytest.mark.parametrize("level", ["token_level", "chunk_level"])
@pytest.mark.parametrize("micro_batch_size", [1, 4, 7])
def test_micro_batches_do_not_change_the_update(level: str, micro_batch_size: int) -> None:
    batch = rollout([6, 1, 3])
    metrics, weights = update(batch, ChunkTokenPolicy(), level)
    found, changed = update(batch, ChunkTokenPolicy(), level, micro_batch_size=micro_batch_size)
    assert found == pytest.approx(metrics, rel=1e-4, abs=1e-6) and largest_change(weights, changed) < 1e-6


def test_averages_are_over_the_tokens_that_there_are() -> None:
    """A log-prob that is lower by 0.5 in the rollout: every ratio is exp(0.5), whatever is missing."""
    batch = rollout([6, 1, 3])
    batch.logprobs = torch.where(batch.forward_inputs[TOKEN_MASK][..., None], batch.logprobs - 0.5, 0.0)
    metrics, _ = update(batch, ChunkTokenPolicy(), "token_level")
    assert metrics["train/first_minibatch_kl"] == pytest.approx(math.exp(0.5) - 1.5, abs=1e-4)
    assert metrics["train/logprob_mismatch"] == pytest.approx(0.5, abs=1e-5)


def test_all_tokens_of_a_chunk_that_ended_early_count() -> None:
    batch = rollout([6, 1, 3])
    begun, whole = batch.valid.any(-1), batch.valid.all(-1)
    assert bool((begun & ~whole).any())  # an episode ended within a chunk
    wanted = torch.where(begun, batch.forward_inputs[TOKEN_MASK].sum(-1), 0)
    assert torch.equal(batch.drawn.sum(-1), wanted)
    assert toy_rollout(ToyPolicy()).drawn.shape == batch.valid.shape


def test_weights_of_sequences_count_tokens() -> None:
    """seq_mean: each chunk of an episode, or episode, weighs by its tokens; on average over the ratios 1."""
    batch = rollout([6, 1, 3])
    algorithm = ALGORITHM.model_copy(update={"loss_agg": "episode_mean", "logprob_type": "token_level"})
    weights = chunk_weights(batch, trained_chunks(batch, compute_advantages(batch, algorithm)), algorithm)
    assert weights is not None
    counts = batch.drawn.sum(-1)
    assert float((weights * counts).sum() / counts.sum()) == pytest.approx(1.0, abs=1e-5)


def test_the_kl_of_a_chunk_is_paid_with_its_first_action() -> None:
    batch = rollout([6, 1, 3])
    batch.ref_logprobs = torch.where(batch.forward_inputs[TOKEN_MASK][..., None], batch.logprobs - 0.1, 0.0)
    algorithm = ALGORITHM.model_copy(update={"kl": KlConfig(coef=2.0, placement="reward", estimator="k1")})
    paid = batch.rewards - penalized_rewards(batch, algorithm)
    wanted = torch.zeros_like(paid)
    wanted[..., 0] = 0.2 * batch.drawn.sum(-1)
    torch.testing.assert_close(paid, wanted, rtol=0, atol=1e-5)
