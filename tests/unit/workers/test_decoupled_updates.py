"""Decoupled PPO in the training engine: plain PPO where nothing is stale, the formula where something is."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import updates
from expect import raises_code
from test_algorithm_keys import recorded_batch, settings_of
from torch import Tensor
from toy_policy import ToyPolicy, toy_rollout

from embodrl.algorithms.advantages import compute_advantages
from embodrl.algorithms.decoupled import set_proximal
from embodrl.algorithms.episodes import split_episodes
from embodrl.algorithms.losses import LossOutput
from embodrl.config import load_config
from embodrl.config.schema import ActorConfig, AlgorithmConfig, OptimConfig
from embodrl.data.trajectory import TrajectoryBatch
from embodrl.errors import EmbodrlError
from embodrl.hybrid_engines.training.native import NativeTrainEngine
from embodrl.hybrid_engines.training.options import EngineOptions
from embodrl.types import SamplingParams

PRESETS = ("ppo", "grpo", "rloo", "reinforce_pp", "dapo", "gspo", "cpgd", "srpo")
WEIGHTS = ("train/behavior_weight_mean", "train/behavior_weight_max")


def algorithm_of(changes: dict[str, Any], **decoupled: Any) -> AlgorithmConfig:
    settings = settings_of({"sampling.temperature": 1.0} | changes)
    return AlgorithmConfig.model_validate(settings | {"decoupled": decoupled})


def engine_of(policy: ToyPolicy | None = None, version: int = 0, **changes: Any) -> NativeTrainEngine:
    optim = OptimConfig(critic_warmup_iterations=changes.pop("warmup", 0), lr_warmup_iterations=0, lr=1e-2)
    stale = changes.pop("may_be_stale", False)
    config = ActorConfig(
        **({"global_batch_size": 10, "micro_batch_size": 5, "precision": "fp32"} | changes), optim=optim
    )
    engine = NativeTrainEngine(policy or ToyPolicy(), EngineOptions(config, 10, True, may_be_stale=stale), "cpu")
    engine.state.version = version
    return engine


def update(engine: NativeTrainEngine, batch: TrajectoryBatch, algorithm: AlgorithmConfig) -> dict[str, float]:
    batch.ref_logprobs = updates.reference_logprobs(engine, batch, algorithm)
    if algorithm.decoupled.needs_proximal:
        set_proximal(batch, *updates.proximal(engine, batch, algorithm))
    advantages = compute_advantages(batch, algorithm)
    return updates.update(engine, batch, advantages, algorithm, torch.Generator().manual_seed(0))


def weights_of(engine: NativeTrainEngine) -> Tensor:
    return torch.cat([tensor.flatten() for _, tensor in engine.weights()])


def watch(engine: NativeTrainEngine) -> list[Tensor]:
    """Return a list that gets the loss and the gradients of every optimizer step."""
    seen: list[Tensor] = []
    original = engine.optimizer_step

    def step(loss: Tensor) -> Any:
        gradients = [p.grad.flatten() for p in engine.policy.parameters() if p.grad is not None]
        seen.append(torch.cat([loss.view(1), *gradients]).clone())
        return original(loss)

    engine.optimizer_step = step  # pyright: ignore[reportAttributeAccessIssue]
    return seen


def settings_that_fit(algorithm: AlgorithmConfig) -> list[dict[str, Any]]:
    levels = ("token", "chunk", "episode") if algorithm.logprob_type == "token_level" else ("chunk", "episode")
    return [
        {"enabled": True, "prox": prox, "level": level, "on_exceed": on_exceed, "cap": 1.001}
        for prox in ("recompute", "loglinear")
        for level in levels
        for on_exceed in ("mask", "clamp")
        if (prox, level) != ("loglinear", "episode")
    ]


@pytest.mark.parametrize("logprob_type", [None, pytest.param("action_level", marks=pytest.mark.long), "chunk_level"])
@pytest.mark.parametrize(
    "preset", ["ppo", "grpo", *(pytest.param(name, marks=pytest.mark.long) for name in PRESETS[2:])]
)
def test_without_staleness_it_is_plain_ppo(preset: str, logprob_type: str | None) -> None:
    base = load_config([f"algorithm={preset}", "env=toy"]).config.algorithm.model_dump()
    base |= {"logprob_type": logprob_type or base["logprob_type"], "entropy_bonus": 0.01}
    plain_algorithm = AlgorithmConfig.model_validate(base)
    plain = engine_of(version=3)
    plain_steps = watch(plain)
    batch = recorded_batch()  # log-probs that are not those of the policy
    batch.policy_version[:] = 3
    expected = update(plain, copy.deepcopy(batch), plain_algorithm)
    assert not any("behavior" in name or "staleness" in name for name in expected)
    for decoupled in settings_that_fit(plain_algorithm):
        engine = engine_of(version=3)
        steps = watch(engine)
        found = update(engine, copy.deepcopy(batch), AlgorithmConfig.model_validate(base | {"decoupled": decoupled}))
        torch.testing.assert_close(torch.stack(steps), torch.stack(plain_steps), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(weights_of(engine), weights_of(plain), rtol=0, atol=1e-6)
        assert {name: found[name] for name in expected} == pytest.approx(expected, abs=1e-6)
        assert [found[name] for name in WEIGHTS] == [1, 1]
        assert found["staleness/max"] == 0


def test_without_staleness_nothing_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, batch = engine_of(version=3), recorded_batch()
    batch.policy_version[:] = 3
    monkeypatch.setattr(engine.policy, "evaluate_actions", lambda *_args, **_rest: pytest.fail("a forward pass"))
    prox, values = updates.proximal(engine, batch, algorithm_of({}, enabled=True))
    assert torch.equal(prox, batch.logprobs) and prox.data_ptr() != batch.logprobs.data_ptr()
    assert values is not None and torch.equal(values, batch["values"])


def test_only_stale_chunks_are_recomputed() -> None:
    engine, batch = engine_of(version=3), recorded_batch()
    batch.policy_version[:] = 3
    batch.policy_version[0], batch.policy_version[4] = 2, 0
    algorithm = algorithm_of({}, enabled=True)
    before = batch.logprobs.clone()
    prox, values = updates.proximal(engine, batch, algorithm)
    inputs = {name: column.flatten(0, 1) for name, column in batch.forward_inputs.items()}
    with torch.no_grad():
        present = engine.policy.evaluate_actions(inputs, SamplingParams(1.0))
    stale = (batch.policy_version < 3) & batch.valid.any(-1)
    assert stale.any() and not stale.all() and torch.equal(batch.logprobs, before)
    for found, fresh, old in ((prox, present.logprobs, before), (values, present.values, batch["values"])):
        assert found is not None and fresh is not None
        torch.testing.assert_close(found[stale], fresh.view_as(found)[stale])
        assert torch.equal(found[~stale], old[~stale])


def test_in_the_critic_s_warm_up_only_values_are_recomputed() -> None:
    engine, batch = engine_of(version=2, warmup=2), recorded_batch()
    batch.policy_version[:] = 1
    batch["values"] -= 10
    prox, values = updates.proximal(engine, batch, algorithm_of({}, enabled=True))
    assert values is not None
    assert torch.equal(prox, batch.logprobs), "the policy has not changed since, not even by a bit"
    live = batch.valid.any(-1)
    assert not torch.isclose(values[live], batch["values"][live]).any()
    assert (
        updates.proximal(engine, batch, algorithm_of({"adv_type": "reinforce_pp", "loss_type": "actor"}, enabled=True))[
            1
        ]
        is None
    )


def test_values_that_are_not_kept_are_shifted_as_their_neighbours() -> None:
    batch = recorded_batch()
    batch.truncated[:] = batch.terminated[:] = False
    batch.truncated[2, 1, -1] = batch.truncated[1, 2, -1] = batch.truncated[3, 0, 0] = True
    batch.valid[:] = True
    batch.valid[3, 0] = False  # lost
    batch.bootstrap_values[:] = 0
    batch.bootstrap_values[2, 1] = batch.bootstrap_values[1, 2] = 5.0
    batch.policy_version[:] = 2
    batch.value_version = torch.full((5, 4), -1)  # zeros on purpose, or of mixed versions
    batch.value_version[2, 1] = 2
    batch.value_version[1, 2] = 3  # valued with newer weights than the chunk
    batch.value_version[4] = torch.tensor([2, 2, 3, -1])
    end = batch.values[-1].clone()
    values = batch["values"] + torch.arange(20.0).view(5, 4, 1)
    set_proximal(batch, batch.logprobs, values)
    assert torch.equal(batch["values"], values)
    expected = torch.zeros(5, 4, 1)
    expected[2, 1] = 5 + 9  # chunk 2 of environment 1 has changed by 9
    expected[1, 2] = 5
    torch.testing.assert_close(batch.bootstrap_values, expected)
    torch.testing.assert_close(batch.values[-1], end + torch.tensor([16.0, 17.0, 0.0, 0.0]).view(4, 1))


def test_values_of_actions_are_shifted_as_the_last_one_that_was_played() -> None:
    batch = recorded_batch()
    chunk = batch.valid.shape[-1]
    batch.valid[:] = True
    batch.valid[0, 0, 1:] = False
    batch.terminated[:] = batch.truncated[:] = False
    batch.truncated[0, 0, 0] = True
    batch.values = torch.zeros(6, 4, chunk)
    batch.bootstrap_values = torch.zeros(5, 4, chunk)
    batch.value_version = batch.policy_version.clone()
    set_proximal(batch, batch.logprobs, torch.arange(1.0, chunk + 1).expand(5, 4, chunk))
    assert batch.bootstrap_values[0, 0].tolist() == [1.0] * chunk
    assert torch.equal(batch.values[-1], torch.full((4, chunk), float(chunk)))


def test_what_precedes_a_lost_chunk_is_bootstrapped_from_the_present_critic() -> None:
    batch, engine = recorded_batch(), engine_of(version=3)
    batch.policy_version[:] = 1
    batch.terminated[:] = batch.truncated[:] = False
    batch.valid[:] = True
    batch.valid[3, 0], batch.terminated[3, 0, 0] = False, True
    expected = batch["values"].clone()  # the toy policy's own
    batch["values"] -= 10
    algorithm = algorithm_of({"gamma": 1.0, "gae_lambda": 0.0, "normalize_advantages": False}, enabled=True)
    set_proximal(batch, *updates.proximal(engine, batch, algorithm))
    torch.testing.assert_close(batch["values"], expected)
    found = compute_advantages(batch, algorithm).advantages[2, 0, 0]
    torch.testing.assert_close(found, batch.rewards[2, 0].sum() + expected[3, 0, 0] - expected[2, 0, 0])


def test_an_old_critic_holds_the_present_one_back_no_more() -> None:
    """Values of the rollout far from what the critic says: the clip around them would stop its gradient."""
    batch, engine = stale_batch(), engine_of(version=3)
    batch["values"] -= 10
    plain = update(engine_of(version=3), copy.deepcopy(batch), algorithm_of({}, enabled=True, prox="loglinear"))
    fresh = update(engine, copy.deepcopy(batch), algorithm_of({}, enabled=True))
    assert plain["train/value_clip_fraction"] > 0.9 and fresh["train/value_clip_fraction"] < 0.5


def stale_batch() -> TrajectoryBatch:
    """A rollout by several policies, that are not the present one; every chunk has a number."""
    batch = recorded_batch()
    batch.policy_version.copy_(torch.arange(20).view(5, 4) % 4)
    batch["forward_inputs"] = batch.forward_inputs | {"number": torch.arange(20).view(5, 4)}
    return batch


def expected_loss(
    policy: ToyPolicy,
    batch: TrajectoryBatch,
    rows: list[int],
    prox_all: Tensor,
    algorithm: AlgorithmConfig,
    advantages: Tensor,
) -> Tensor:
    """The policy loss of some chunks, in loops over ratios; ``prox_all`` is None's tensor for loglinear."""
    decoupled, dims = algorithm.decoupled, range(3)
    flat = {name: column.flatten(0, 1) for name, column in batch.forward_inputs.items()}
    theta = policy.evaluate_actions({n: t[rows] for n, t in flat.items()}, SamplingParams(1.0)).logprobs
    old_all, valid = batch.logprobs.flatten(0, 1), batch.valid.flatten(0, 1)
    version = batch.policy_version.flatten().tolist()
    owner = split_episodes(batch.valid, batch.terminated, batch.truncated).index.flatten().tolist()

    def tokens_of(row: int) -> list[tuple[int, int]]:
        return [(c, a) for c in range(2) if valid[row, c] for a in dims]

    losses = []
    for position, row in enumerate(rows):
        old, tokens = old_all[row], tokens_of(row)
        prox = prox_all[row]
        if decoupled.prox == "loglinear":
            alpha = (3 - version[row]) / (4 - version[row])
            prox = old + alpha * (theta[position].detach() - old)
        chunk = [float(prox[t] - old[t]) for t in tokens]
        normalized = algorithm.length_normalized_ratio and algorithm.logprob_type != "token_level"
        groups = {
            "token_level": [[t] for t in tokens],
            "action_level": [[t for t in tokens if t[0] == c] for c in range(2)],
            "chunk_level": [tokens],
        }[algorithm.logprob_type]
        for group in filter(None, groups):
            x = sum(theta[position][t] - prox[t] for t in group) / (len(group) if normalized else 1)
            if decoupled.level == "token":
                w = math.exp(float(prox[group[0]] - old[group[0]]))
            elif decoupled.level == "chunk":
                w = math.exp(sum(chunk) / (len(chunk) if normalized else 1))
            else:
                mine = [
                    float(prox_all[other][t] - old_all[other][t])
                    for other in range(20)
                    if owner[other] == owner[row]
                    for t in tokens_of(other)
                ]
                w = math.exp(sum(mine) / len(mine))
            if decoupled.cap is not None and w > decoupled.cap:
                w = 0.0 if decoupled.on_exceed == "mask" else decoupled.cap
            elif decoupled.min_weight is not None:
                w = max(w, decoupled.min_weight)
            u, advantage = torch.as_tensor(x).exp(), float(advantages.flatten(0, 1)[row, 0])
            clipped = u.clamp(1 - algorithm.clip_ratio_low, 1 + algorithm.clip_ratio_high)
            losses.append(-w * torch.minimum(advantage * u, advantage * clipped))
    return torch.stack(losses).sum() / len(losses)


@pytest.mark.parametrize("logprob_type", ["token_level", "action_level", "chunk_level"])
@pytest.mark.parametrize("normalized", [False, pytest.param(True, marks=pytest.mark.long)])
def test_stale_rollouts_give_the_formula_s_loss_and_gradients(logprob_type: str, normalized: bool) -> None:
    changes = {"adv_type": "reinforce_pp", "loss_type": "actor", "logprob_type": logprob_type}
    changes |= {"length_normalized_ratio": normalized}
    for decoupled in settings_that_fit(algorithm_of(changes)):
        for cap, least in ((None, None), (1.2, 0.9)):
            algorithm = algorithm_of(changes, **decoupled | {"cap": cap, "min_weight": least})
            engine, batch = engine_of(version=3), stale_batch()
            at_start = copy.deepcopy(engine.policy)
            inputs = {name: column.flatten(0, 1) for name, column in batch.forward_inputs.items()}
            with torch.no_grad():
                present = at_start.evaluate_actions(inputs, SamplingParams(1.0)).logprobs.float()
            fresh = (batch.policy_version == 3).view(-1, 1, 1)
            prox = torch.where(fresh, batch.logprobs.flatten(0, 1), present)
            advantages = compute_advantages(batch, algorithm).advantages
            steps, expected = watch(engine), []
            original = engine.forward_backward

            def recorded(
                minibatch: TrajectoryBatch, loss_fn: Any, engine=engine, batch=batch, prox=prox,
                algorithm=algorithm, advantages=advantages, expected=expected, original=original,
            ) -> Any:  # fmt: skip
                policy = copy.deepcopy(engine.policy)
                rows = minibatch.forward_inputs["number"].tolist()
                loss = expected_loss(policy, batch, rows, prox, algorithm, advantages)  # pyright: ignore
                gradients = torch.autograd.grad(loss, list(policy.parameters())[:-2])
                expected.append(torch.cat([loss.detach().view(1), *(g.flatten() for g in gradients)]))
                return original(minibatch, loss_fn)

            engine.forward_backward = recorded  # pyright: ignore[reportAttributeAccessIssue]
            metrics = update(engine, batch, algorithm)
            assert len(steps) == len(expected) == 4  # two epochs of two minibatches: theta moves away from prox
            torch.testing.assert_close(torch.stack(steps), torch.stack(expected), rtol=1e-4, atol=1e-5)
            fraction = metrics.get(f"train/behavior_{decoupled['on_exceed']}ed_fraction")
            assert (fraction is None) == (cap is None)
            lowest = 0 if decoupled["level"] == "episode" else 1e-6
            assert fraction is None or lowest <= fraction < 1
            assert metrics["train/behavior_weight_max"] > metrics["train/behavior_weight_mean"] > 0


def test_metrics_of_an_update_do_not_depend_on_its_micro_batches() -> None:
    for changes, level in (({}, "token"), ({"logprob_type": "action_level"}, "chunk"), ({}, "episode")):
        algorithm = algorithm_of(changes, enabled=True, level=level, cap=1.2)
        found = [
            update(engine_of(version=3, micro_batch_size=size), stale_batch(), algorithm) for size in (10, 5, 2, 1)
        ]
        for other in found[1:]:
            assert other == pytest.approx(found[0], rel=1e-4, abs=1e-6)


def test_the_largest_weight_is_that_of_the_whole_rollout() -> None:
    batch, engine = toy_rollout(ToyPolicy(), part_invalid=False), engine_of(version=1)
    algorithm = algorithm_of({"update_epoch": 1}, enabled=True, cap=None)
    batch.logprobs[2, 1, 0, 0] -= math.log(7.0)
    metrics = update(engine, batch, algorithm)
    assert metrics["train/behavior_weight_max"] == pytest.approx(7.0, rel=1e-4)
    assert metrics["train/behavior_weight_mean"] == pytest.approx(1 + 6 / 120, rel=1e-4)


@pytest.mark.parametrize("may_be_stale", [False, True])
def test_staleness_is_reported_where_it_can_occur(may_be_stale: bool) -> None:
    engine, algorithm = engine_of(may_be_stale=may_be_stale), algorithm_of({})
    fresh = update(engine, recorded_batch(), algorithm)
    assert ("staleness/max" in fresh) == may_be_stale
    stale = update(engine, recorded_batch(), algorithm)  # version 0 again, and the engine is at 1
    assert stale["staleness/mean"] == stale["staleness/max"] == 1


@pytest.mark.parametrize("prox", ["recompute", "loglinear"])
def test_updates_of_the_critic_alone_make_no_policy_older(prox: str) -> None:
    algorithm = algorithm_of({}, enabled=True, prox=prox)
    batch = recorded_batch()  # of version 0
    engine = engine_of(warmup=2)
    for version in range(3):
        assert engine.version == version
        metrics = update(engine, copy.deepcopy(batch), algorithm)
        assert metrics["staleness/max"] == version
        assert [metrics[name] for name in WEIGHTS] == [1, 1], "the policy is the one that acted"
    assert update(engine, copy.deepcopy(batch), algorithm)["train/behavior_weight_max"] > 1


def seen_by_user(
    *, logprobs: Tensor, old_logprobs: Tensor, prox_logprobs: Tensor, behavior_weights: Tensor, valid: Tensor
) -> LossOutput:
    """A loss from outside the package: the weighted probability ratio."""
    assert not prox_logprobs.requires_grad and not behavior_weights.requires_grad
    torch.testing.assert_close(behavior_weights[valid], (prox_logprobs - old_logprobs).exp()[valid])
    loss = (behavior_weights * (logprobs - prox_logprobs).exp()).mean()
    return LossOutput(loss, {"approx_kl": torch.zeros(())})


@pytest.mark.parametrize("prox", ["recompute", "loglinear"])
def test_a_loss_of_the_user_s_gets_log_probs_and_weights(prox: str) -> None:
    changes = {"adv_type": "reinforce_pp", "loss_type": "test_decoupled_updates:seen_by_user"}
    algorithm = algorithm_of(changes, enabled=True, prox=prox, cap=None)
    engine, before = engine_of(version=3), weights_of(engine_of())
    metrics = update(engine, stale_batch(), algorithm)
    assert metrics["train/behavior_weight_max"] > 1 and not torch.equal(weights_of(engine), before)


def test_what_is_missing_or_impossible_is_reported() -> None:
    engine, batch = engine_of(version=3), stale_batch()
    algorithm = algorithm_of({}, enabled=True)
    advantages = compute_advantages(batch, algorithm)
    with raises_code("prox-logprobs-missing") as caught:
        updates.update(engine, batch, advantages, algorithm, torch.Generator())
    assert "set_proximal" in caught.value.hint
    with raises_code("prox-partial-episodes"):
        updates.update(
            engine,
            batch,
            advantages,
            algorithm_of({}, enabled=True, prox="loglinear", level="episode"),
            torch.Generator(),
        )
    batch.policy_version[0, 0] = 4
    with raises_code("chunk-version", EmbodrlError, "4", "3"):
        updates.proximal(engine, batch, algorithm)
    with raises_code("chunk-version", EmbodrlError, "4", "3"):
        updates.update(engine, batch, advantages, algorithm_of({}), torch.Generator())
