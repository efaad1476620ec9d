"""Log-probs of another engine: they are measured, replaced by those of training, and weighted (D3 of the audit)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import updates
from torch import Tensor
from toy_policy import ToyPolicy, toy_rollout

from embodrl.algorithms.advantages import compute_advantages
from embodrl.algorithms.decoupled import mismatch_metrics, mismatch_terms, set_proximal
from embodrl.config import load_config
from embodrl.config.schema import ActorConfig, AlgorithmConfig, OptimConfig, RejectionConfig, SamplingConfig
from embodrl.data.trajectory import TrajectoryBatch
from embodrl.errors import ConfigError
from embodrl.hybrid_engines.training.native import NativeTrainEngine
from embodrl.hybrid_engines.training.options import EngineOptions

STILL = OptimConfig(lr=1e-30, value_lr=1e-30, critic_warmup_iterations=0, lr_warmup_iterations=0)
ACTOR = ActorConfig(global_batch_size=20, micro_batch_size=5, precision="fp32", optim=STILL)


def algorithm(level: str = "token_level", **changes: Any) -> AlgorithmConfig:
    return AlgorithmConfig(
        sampling=SamplingConfig(temperature=1.0),
        update_epoch=2,
        logprob_type=level,
        **changes,  # pyright: ignore
    )


def off_by(noise: float, engine: NativeTrainEngine) -> TrajectoryBatch:
    """Return a rollout whose log-probs differ from training's by up to ``noise``."""
    batch = toy_rollout(engine.policy)  # pyright: ignore[reportArgumentType]
    generator = torch.Generator().manual_seed(1)
    batch.logprobs = batch.logprobs + noise * (2 * torch.rand(batch.logprobs.shape, generator=generator) - 1)
    return batch


def update(noise: float, settings: AlgorithmConfig, recompute: bool) -> dict[str, float]:
    engine = NativeTrainEngine(ToyPolicy(), EngineOptions(ACTOR, 10), "cpu")
    batch = off_by(noise, engine)
    before = batch["values"].clone()
    if recompute:
        set_proximal(batch, *updates.proximal(engine, batch, settings, every_chunk=True))
        assert torch.equal(batch["values"], before)  # the critic's are those of the rollout
    return updates.update(
        engine, batch, compute_advantages(batch, settings), settings, torch.Generator().manual_seed(0)
    )


@pytest.mark.parametrize("level", ["token_level", "action_level", "chunk_level"])
def test_at_a_learning_rate_of_0_nothing_is_clipped_with_recomputed_logprobs(level: str) -> None:
    noise = 0.3
    plain, recomputed = (update(noise, algorithm(level), recompute) for recompute in (False, True))
    assert plain["train/clip_fraction"] > 0.1 and plain["train/approx_kl"] > 0.01
    assert recomputed["train/clip_fraction"] == 0 and abs(recomputed["train/approx_kl"]) < 1e-12
    for metrics in (plain, recomputed):  # the mean of |U(-0.3, 0.3)| and its largest, whatever is done about it
        assert metrics["train/logprob_mismatch"] == pytest.approx(0.15, abs=0.02)
        assert 0.27 < metrics["train/logprob_mismatch_max"] <= noise + 1e-5
    assert recomputed["train/behavior_weight_mean"] > 0 and "train/behavior_clamped_fraction" in recomputed
    assert "train/behavior_weight_mean" not in plain


def test_engines_that_agree_have_no_mismatch() -> None:
    metrics = update(0.0, algorithm(), recompute=False)
    assert metrics["train/logprob_mismatch_max"] < 1e-6 and metrics["train/clip_fraction"] == 0


def test_weights_are_those_of_truncated_importance_sampling() -> None:
    """Every token is e^0.9 times as probable in training as it was in the rollout: w = 2 at the cap, 2.46 without."""
    losses: dict[float | None, float] = {}
    for cap in (None, 2.0, 3.0):
        settings = algorithm(engine_weight_cap=cap, normalize_advantages=False)
        engine = NativeTrainEngine(ToyPolicy(), EngineOptions(ACTOR, 10), "cpu")
        batch = toy_rollout(engine.policy)  # pyright: ignore[reportArgumentType]
        batch.logprobs = batch.logprobs - 0.9
        set_proximal(batch, *updates.proximal(engine, batch, settings, every_chunk=True))
        metrics = updates.update(
            engine, batch, compute_advantages(batch, settings), settings, torch.Generator().manual_seed(0)
        )
        losses[cap] = metrics["train/policy_loss"]
        if cap is not None:
            assert metrics["train/behavior_weight_mean"] == pytest.approx(min(cap, 2.4596), rel=1e-4)
            assert metrics["train/behavior_weight_max"] == pytest.approx(2.4596, rel=1e-4)
            assert metrics["train/behavior_clamped_fraction"] == (1.0 if cap == 2.0 else 0.0)
    unweighted = losses[None]
    assert losses[2.0] == pytest.approx(2 * unweighted, rel=1e-4)
    assert losses[3.0] == pytest.approx(2.4596 * unweighted, rel=1e-4)


@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("level", ["token", "chunk", "episode"])
def test_what_is_rejected_trains_nothing(level: str, cap: float | None) -> None:
    """Half of the environments were played with log-probs 0.9 too low, a ratio of 2.46; the others match."""

    def trained(batch_rejects: bool, **rejection: Any) -> dict[str, float]:
        given = {"rejection": RejectionConfig(**rejection)} if batch_rejects else {}
        settings = algorithm(engine_weight_cap=cap, normalize_advantages=False, **given)
        engine = NativeTrainEngine(ToyPolicy(), EngineOptions(ACTOR, 10), "cpu")
        batch = toy_rollout(engine.policy)  # pyright: ignore[reportArgumentType]
        batch.logprobs = batch.logprobs.clone()
        half = batch.logprobs.shape[1] // 2
        batch.logprobs[:, :half] -= 0.9
        set_proximal(batch, *updates.proximal(engine, batch, settings, every_chunk=True))
        advantages = compute_advantages(batch, settings)
        if not batch_rejects:  # what rejection has to amount to: no advantages where the ratio is 2.46
            advantages.advantages[:, :half] = 0.0
        share = float(batch.valid[:, :half].sum() / batch.valid.sum())
        return updates.update(engine, batch, advantages, settings, torch.Generator().manual_seed(0)) | {"share": share}

    plain = trained(batch_rejects=False)
    found = trained(batch_rejects=True, metric="ratio", level=level, upper=2.4)
    assert "train/rejected_fraction" not in plain
    assert found["train/rejected_fraction"] == pytest.approx(found["share"], abs=0.05) and 0.2 < found["share"] < 0.8
    assert found["train/policy_loss"] == pytest.approx(plain["train/policy_loss"], rel=1e-4)
    assert trained(batch_rejects=True, metric="ratio", level=level, upper=2.5)["train/rejected_fraction"] == 0


def test_chunks_of_older_weights_are_no_mismatch() -> None:
    logprobs, old = torch.zeros(3, 1, 2), torch.full((3, 1, 2), -0.5)
    valid = torch.tensor([[True], [True], [False]])

    def measured(*staleness: int) -> dict[str, float]:
        terms: dict[str, Tensor] = mismatch_terms(logprobs, old, valid, torch.tensor(staleness))
        return mismatch_metrics(terms)

    old[0] = -0.25
    assert measured(0, 0, 0) == {"logprob_mismatch": 0.375, "logprob_mismatch_max": 0.5}
    assert measured(0, 1, 0) == {"logprob_mismatch": 0.25, "logprob_mismatch_max": 0.25}
    assert measured(2, 1, 0) == {}  # nothing is known


def test_auto_follows_the_engine_and_not_the_precision() -> None:
    def recomputes(*arguments: str) -> bool:
        return load_config(["env=toy", "model=openvla", *arguments], verb="plan").config.recomputes_logprobs

    assert not recomputes() and not recomputes("actor.precision=bf16", "rollout.precision=bf16")
    assert recomputes("rollout=vllm") and not recomputes("rollout=vllm", "algorithm.recompute_logprobs=false")
    assert recomputes("algorithm.recompute_logprobs=true")


def test_what_can_not_be_recomputed_is_refused_and_what_is_not_is_noted() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(
            [
                "env=toy",
                "model=openvla",
                "algorithm.recompute_logprobs=true",
                "algorithm.decoupled.enabled=true",
                "algorithm.decoupled.prox=loglinear",
            ]
        )
    assert "recomputed-is-not-interpolated" in {problem.code for problem in caught.value.problems}
    line = ["env=toy", "model=openvla", "rollout=vllm", "algorithm.recompute_logprobs=false"]
    assert "engines-disagree" in {note.code for note in load_config(line, verb="plan").notes}
