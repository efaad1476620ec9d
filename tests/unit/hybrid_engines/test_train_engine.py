"""The native training engine on a policy small enough to check by hand."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from expect import raises_code
from torch import Tensor
from toy_policy import ToyPolicy, toy_rollout
from updates import reference_logprobs, update

from embodrl.algorithms.advantages import Advantages, compute_advantages
from embodrl.algorithms.losses import LossOutput
from embodrl.config.schema import ActorConfig, AlgorithmConfig, KlConfig, OptimConfig, SamplingConfig
from embodrl.data.trajectory import TrajectoryBatch
from embodrl.errors import CheckpointError, EmbodrlError, NonFiniteError
from embodrl.hybrid_engines.base import EngineState
from embodrl.hybrid_engines.training.native import NativeTrainEngine
from embodrl.hybrid_engines.training.options import EngineOptions
from embodrl.hybrid_engines.training.precision import resolve_precision
from embodrl.hybrid_engines.training.schedule import learning_rates
from embodrl.learners.objective import chunk_weights, flatten_chunks, trained_chunks
from embodrl.processor import Processor

ALGORITHM = AlgorithmConfig(sampling=SamplingConfig(temperature=1.0), update_epoch=1)


def make_engine(policy: ToyPolicy | None = None, **changes: Any) -> NativeTrainEngine:
    optim = {"critic_warmup_iterations": 0, "lr_warmup_iterations": 0, "lr": 1e-3} | changes.pop("optim", {})
    defaults: dict[str, Any] = {"global_batch_size": 100, "micro_batch_size": 100, "precision": "fp32"}
    config = ActorConfig(**(defaults | changes), optim=OptimConfig(**optim))
    return NativeTrainEngine(policy or ToyPolicy(), EngineOptions(config, 10), "cpu")


def train(
    engine: NativeTrainEngine, algorithm: AlgorithmConfig = ALGORITHM, seed: int = 0, **rollout: Any
) -> dict[str, float]:
    batch = toy_rollout(engine.policy, seed=seed, **rollout)  # pyright: ignore[reportArgumentType]
    return update(engine, batch, compute_advantages(batch, algorithm), algorithm, torch.Generator().manual_seed(seed))


def weights_of(engine: NativeTrainEngine) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in engine.weights()}


def largest_change(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def test_an_update_raises_the_probability_of_good_actions() -> None:
    engine = make_engine()
    batch = toy_rollout(engine.policy)  # pyright: ignore[reportArgumentType]
    advantages = compute_advantages(batch, ALGORITHM)
    for _ in range(10):
        metrics = update(engine, batch, advantages, ALGORITHM, torch.Generator().manual_seed(0))
    assert metrics["train/policy_loss"] < -0.01
    assert engine.version == 10


def test_log_probs_that_disagree_with_the_rollout_show_before_the_first_step() -> None:
    metrics = train(make_engine(), replace_epochs(2))
    assert abs(metrics["train/first_minibatch_kl"]) < 1e-6 < metrics["train/approx_kl"]
    engine = make_engine()
    batch = toy_rollout(engine.policy)  # pyright: ignore[reportArgumentType]
    batch.logprobs = batch.logprobs - 0.5  # every ratio is exp(0.5), so that the k3 estimate is exp(0.5) - 1 - 0.5
    advantages = compute_advantages(batch, ALGORITHM)
    metrics = update(engine, batch, advantages, ALGORITHM, torch.Generator().manual_seed(0))
    assert metrics["train/first_minibatch_kl"] == pytest.approx(0.148721, abs=1e-4)


def replace_epochs(epochs: int) -> AlgorithmConfig:
    return ALGORITHM.model_copy(update={"update_epoch": epochs})


@pytest.mark.parametrize("level", ["token_level", "action_level", "chunk_level"])
@pytest.mark.parametrize("micro_batch_size", [1, 4, 7])
def test_micro_batches_do_not_change_the_update(level: str, micro_batch_size: int) -> None:
    algorithm = ALGORITHM.model_copy(update={"logprob_type": level, "entropy_bonus": 0.01, "update_epoch": 2})
    whole, split = make_engine(), make_engine(micro_batch_size=micro_batch_size)
    expected, metrics = train(whole, algorithm), train(split, algorithm)
    assert metrics == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert largest_change(weights_of(whole), weights_of(split)) < 1e-6


def gradients(engine: NativeTrainEngine) -> dict[str, Tensor]:
    seen: dict[str, Tensor] = {}

    def keep(loss: Tensor) -> Any:
        seen.update({n: p.grad.clone() for n, p in engine.policy.named_parameters() if p.grad is not None})
        return NativeTrainEngine.optimizer_step(engine, loss)

    engine.optimizer_step = keep  # pyright: ignore[reportAttributeAccessIssue]
    train(engine)
    return seen


def test_micro_batches_give_the_gradients_of_the_whole() -> None:
    whole, split = gradients(make_engine()), gradients(make_engine(micro_batch_size=5))
    assert whole.keys() == split.keys() and len(whole) == 8
    for name, gradient in whole.items():
        torch.testing.assert_close(split[name], gradient, rtol=1e-5, atol=1e-7)


def test_a_chunk_without_valid_actions_is_not_trained_on() -> None:
    policy = ToyPolicy()
    batch = toy_rollout(policy)
    estimate = compute_advantages(batch, ALGORITHM)
    rows = flatten_chunks(batch, estimate, trained_chunks(batch, estimate))
    assert len(rows["valid"]) == 18  # 20, less the two after the end
    engine = make_engine(policy)
    generator = torch.Generator().manual_seed(0)
    poisoned = copy.deepcopy(batch)
    poisoned.forward_inputs["features"][3:, 1] = torch.nan
    metrics = update(engine, poisoned, compute_advantages(poisoned, ALGORITHM), ALGORITHM, generator)
    clean = make_engine(ToyPolicy())
    expected = update(clean, batch, compute_advantages(batch, ALGORITHM), ALGORITHM, torch.Generator().manual_seed(0))
    assert metrics == expected


def test_a_fraction_of_the_chunks_trains_those_with_the_largest_advantages() -> None:
    batch = toy_rollout(ToyPolicy())
    estimate = compute_advantages(batch, ALGORITHM)
    everything = trained_chunks(batch, estimate)
    size = torch.where(estimate.valid, estimate.advantages.abs(), 0.0).sum(-1) / estimate.valid.sum(-1).clamp_min(1)
    kept = trained_chunks(batch, estimate, 0.2)
    assert int(kept.sum()) == 4 and bool((kept <= everything).all())  # 18 / 5, rounded up
    assert size[kept].min() >= size[everything & ~kept].max()
    torch.testing.assert_close(trained_chunks(batch, estimate, 1.0), everything)
    equal = Advantages(torch.ones_like(estimate.advantages), estimate.returns, estimate.valid)
    first = trained_chunks(batch, equal, 0.2).flatten().nonzero().squeeze(-1)
    assert first.tolist() == everything.flatten().nonzero().squeeze(-1)[:4].tolist()


def test_what_gets_no_gradient_is_not_computed() -> None:
    batch = toy_rollout(ToyPolicy())
    estimate = compute_advantages(batch, ALGORITHM)
    algorithm = ALGORITHM.model_copy(update={"chunk_fraction": 0.2})
    kept = trained_chunks(batch, estimate, 0.2)
    poisoned = copy.deepcopy(batch)
    poisoned.forward_inputs["features"][~kept] = torch.nan
    metrics = update(make_engine(ToyPolicy()), poisoned, estimate, algorithm, torch.Generator().manual_seed(0))
    assert metrics["train/num_nonfinite"] == 0 and metrics["train/num_updates"] > 0
    full = update(make_engine(ToyPolicy()), batch, estimate, ALGORITHM, torch.Generator().manual_seed(0))
    assert metrics["train/policy_loss"] != full["train/policy_loss"]


def lost_episode(batch: TrajectoryBatch) -> TrajectoryBatch:
    """Return the rollout with the last episode of environment 0 ended by a fault of the simulator."""
    valid, truncated = batch.valid.clone(), batch.truncated.clone()
    terminated = batch.terminated.clone()
    valid[-1, 0], terminated[-1, 0], truncated[-1, 0] = False, False, True
    return batch.replace(valid=valid, terminated=terminated, truncated=truncated)


@pytest.mark.parametrize("loss_agg", ["token_mean", "episode_mean", "fixed_length"])
def test_lost_episodes_do_not_shrink_the_gradient(loss_agg: str) -> None:
    config = AlgorithmConfig(adv_type="grpo", loss_type="actor", gamma=1.0, loss_agg=loss_agg)
    batch = lost_episode(toy_rollout(ToyPolicy()))
    estimate = compute_advantages(batch, config)
    trained = trained_chunks(batch, estimate)
    lost = batch.valid.any(-1) & ~trained
    assert lost.any() and trained.any()
    without = batch.replace(valid=batch.valid & trained.unsqueeze(-1))
    weights = chunk_weights(batch, trained, config)
    rows = flatten_chunks(batch, estimate, trained, weights)
    assert len(rows) == int(trained.sum())
    if weights is not None:  # as if the lost episodes had never begun
        expected = chunk_weights(without, trained, config)
        assert expected is not None
        torch.testing.assert_close(weights[trained], expected[trained])


def test_minibatches_cover_every_chunk_once_an_epoch_and_differ_by_at_most_one() -> None:
    engine, seen = make_engine(global_batch_size=7, micro_batch_size=7), list[list[float]]()
    original, batch = engine.forward_backward, toy_rollout(ToyPolicy())

    def recorded(minibatch: TrajectoryBatch, loss_fn: Any) -> tuple[Tensor, dict[str, Tensor]]:
        seen.append(minibatch.forward_inputs["features"][:, 0].tolist())
        return original(minibatch, loss_fn)

    engine.forward_backward = recorded  # pyright: ignore[reportAttributeAccessIssue]
    twice = AlgorithmConfig(sampling=SamplingConfig(temperature=1.0), update_epoch=2)
    update(engine, batch, compute_advantages(batch, twice), twice, torch.Generator().manual_seed(0))
    assert [len(part) for part in seen] == [6] * 6
    first, second = (sum(parts, list[float]()) for parts in (seen[:3], seen[3:]))
    chosen = batch.forward_inputs["features"][batch.valid.any(-1)]
    assert sorted(first) == sorted(second) == sorted(chosen[:, 0].tolist())
    assert first != second


def test_equal_seeds_give_equal_runs_and_others_do_not() -> None:
    def run(seed: int) -> dict[str, Tensor]:
        engine = make_engine(global_batch_size=6, micro_batch_size=3)
        batch = toy_rollout(engine.policy)  # pyright: ignore[reportArgumentType]
        generator = torch.Generator().manual_seed(seed)
        for _ in range(2):
            update(engine, batch, compute_advantages(batch, ALGORITHM), ALGORITHM, generator)
        return weights_of(engine)

    assert largest_change(run(0), run(0)) == 0
    assert largest_change(run(0), run(1)) > 0


def test_critic_warmup_trains_the_value_head_only() -> None:
    engine = make_engine(optim={"critic_warmup_iterations": 2, "weight_decay": 0.1})
    before = weights_of(engine)
    for iteration in range(2):
        assert train(engine, seed=iteration)["train/lr"] == 0
    after = weights_of(engine)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"value.weight", "value.bias"}
    assert {name.partition(".")[2] for name in engine.state_dict().tensors["optimizer"]} == changed
    assert train(engine, seed=2)["train/lr"] > 0
    assert not torch.equal(weights_of(engine)["head.weight"], before["head.weight"])
    assert engine.state.optimizer.state[engine.state.policy_parameters[0]]["step"] == 1


def test_without_a_critic_there_is_no_critic_warmup() -> None:
    engine = make_engine(optim={"critic_warmup_iterations": 2})
    before = weights_of(engine)
    metrics = train(engine, ALGORITHM.model_copy(update={"loss_type": "actor"}))
    assert metrics["train/lr"] > 0 and "train/value_loss" not in metrics
    after = weights_of(engine)
    assert not torch.equal(before["head.weight"], after["head.weight"])
    assert torch.equal(before["value.weight"], after["value.weight"])


def test_weight_decay_spares_biases_and_norms() -> None:
    engine = make_engine(optim={"weight_decay": 0.5})
    decayed = {id(p) for group in engine.state.optimizer.param_groups if group["weight_decay"] for p in group["params"]}
    names = {name for name, p in engine.policy.named_parameters() if id(p) in decayed}
    assert names == {"body.weight", "head.weight", "value.weight"}


@pytest.mark.parametrize(
    ("scheduler", "expected"),
    [
        ("constant", [0, 0, 0.25, 0.5, 0.75, 1, 1, 1, 1, 1]),
        ("linear", [0, 0, 0.25, 0.5, 0.75, 1, 1, 0.8, 0.6, 0.4]),
        ("cosine", [0, 0, 0.25, 0.5, 0.75, 1, 1, 0.882843, 0.6, 0.317157]),
    ],
)
def test_learning_rates_by_hand(scheduler: Any, expected: list[float]) -> None:
    config = OptimConfig(lr=2.0, value_lr=3.0, lr_scheduler=scheduler, lr_warmup_iterations=4, min_lr_ratio=0.2)
    rates = [learning_rates(config, i, 10, critic_warmup=2) for i in range(10)]
    assert [rate.policy / 2.0 for rate in rates] == pytest.approx(expected, abs=1e-6)
    assert [rate.value / 3.0 for rate in rates[:7]] == pytest.approx([1.0] * 7)
    assert rates[-1].value / 3.0 == pytest.approx(expected[-1], abs=1e-6)


def test_a_gradient_is_clipped_and_its_norm_reported_unclipped() -> None:
    engine = make_engine(optim={"clip_grad": 1e-3})
    parameter = engine.state.policy_parameters[0]
    for p in engine.state.policy_parameters:
        p.grad = torch.zeros_like(p)
    parameter.grad = torch.full_like(parameter, 3.0)
    seen: list[float] = []
    engine.state.optimizer.register_step_pre_hook(lambda *_: seen.append(float(parameter.grad.norm())))  # pyright: ignore
    step = engine.optimizer_step(torch.tensor(1.0))
    assert step.applied and step.grad_norm == pytest.approx(3.0 * parameter.numel() ** 0.5)
    assert seen == pytest.approx([1e-3], rel=1e-3)


def poison(engine: NativeTrainEngine, calls: set[int], value: float) -> None:
    original, count = engine.forward_backward, 0

    def broken(minibatch: TrajectoryBatch, loss_fn: Any) -> tuple[Tensor, dict[str, Tensor]]:
        nonlocal count
        count += 1
        factor = value if count in calls else 1.0

        def scaled(micro: TrajectoryBatch) -> LossOutput:
            output = loss_fn(micro)
            return LossOutput(output.loss * factor, output.metrics)

        return original(minibatch, scaled)

    engine.forward_backward = broken  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_step_that_is_not_finite_changes_nothing_and_is_counted(
    value: float, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine()
    train(engine)
    before, state = weights_of(engine), copy.deepcopy(engine.state.optimizer.state_dict()["state"])
    poison(engine, {1}, value)
    with caplog.at_level(logging.WARNING):
        metrics = train(engine)
    assert metrics["train/num_nonfinite"] == 1 and metrics["train/num_updates"] == 0
    assert "no update; not finite: the gradients of 'body.weight', 'body.bias', 'norm.weight' and" in caplog.text
    assert largest_change(before, weights_of(engine)) == 0
    for index, moments in engine.state.optimizer.state_dict()["state"].items():
        assert all(torch.equal(state[index][key], moments[key]) for key in moments)
    assert train(engine)["train/num_updates"] == 1


def test_five_steps_in_a_row_that_are_not_finite_stop_the_run() -> None:
    engine = make_engine(global_batch_size=3, micro_batch_size=3)  # 6 minibatches an epoch
    poison(engine, {1, 2, 3, 4, 6, 7, 8, 9, 10}, float("nan"))
    assert train(engine)["train/num_nonfinite"] == 5
    with raises_code("non-finite", NonFiniteError, "5") as caught:
        train(engine)
    assert "the gradients of 'body.weight'" in caught.value.message and "actor.optim.lr" in caught.value.hint
    assert all(tensor.isfinite().all() for _, tensor in engine.weights())


def test_weights_that_an_update_made_infinite_are_named() -> None:
    engine = make_engine(optim={"lr": 1e39})  # finite gradients; the step overflows float32
    with raises_code("weights-not-finite") as caught:
        train(engine)
    assert "update 1 made weights NaN or infinite: 'body.weight'" in caught.value.message


def test_target_kl_ends_the_update_before_the_step_that_would_go_further() -> None:
    algorithm = ALGORITHM.model_copy(update={"update_epoch": 50, "target_kl": 0.02})
    engine = make_engine(optim={"lr": 1e-2})
    metrics = train(engine, algorithm)
    assert metrics["train/early_stop"] == 1
    assert 1 <= metrics["train/num_updates"] < 50
    assert metrics["train/approx_kl"] <= 0.02
    assert all(p.grad is None for p in engine.policy.parameters())


def test_a_restored_engine_continues_bit_for_bit() -> None:
    straight = make_engine(optim={"critic_warmup_iterations": 1, "lr_scheduler": "cosine"})
    train(straight, seed=0)
    train(straight, seed=1)
    saved = straight.state_dict()
    saved = EngineState({n: {k: t.clone() for k, t in g.items()} for n, g in saved.tensors.items()}, dict(saved.state))
    resumed = make_engine(ToyPolicy(seed=9), optim={"critic_warmup_iterations": 1, "lr_scheduler": "cosine"})
    resumed.load_state_dict(saved)
    assert resumed.version == 2
    for seed in (2, 3):
        assert train(straight, seed=seed) == train(resumed, seed=seed)
    assert largest_change(weights_of(straight), weights_of(resumed)) == 0
    assert straight.shapes().num_bytes == sum(
        t.numel() * t.element_size()
        for group in straight.state_dict().tensors.values()
        for name, t in group.items()
        if not name.startswith("step.")
    )


def test_offload_between_updates_changes_no_bit() -> None:
    straight, offloaded = make_engine(), make_engine()
    assert offloaded.offload() is None  # nothing to move before the first update
    for seed in range(3):
        assert train(straight, seed=seed) == train(offloaded, seed=seed)
        report = offloaded.offload()
        moments = 2 * sum(p.numel() for p in offloaded.policy.parameters()) * 4
        assert report is not None and report.before >= moments and report.after == 0
        assert all(
            t.untyped_storage().nbytes() == 0 for s in offloaded.state.optimizer.state.values() for t in s.values()
        )
        assert largest_change(weights_of(straight), weights_of(offloaded)) == 0  # what acts is still there
    saved, wanted = offloaded.state_dict().tensors["optimizer"], straight.state_dict().tensors["optimizer"]
    assert saved.keys() == wanted.keys() and all(torch.equal(saved[name], wanted[name]) for name in wanted)
    offloaded.offload()
    offloaded.load_state_dict(straight.state_dict())
    assert train(straight, seed=3) == train(offloaded, seed=3)


def test_weights_that_do_not_act_leave_as_well() -> None:
    algorithm = ALGORITHM.model_copy(update={"kl": KlConfig(coef=0.1)})
    config = make_engine().config
    straight, offloaded = (
        NativeTrainEngine(ToyPolicy(), EngineOptions(config, 10, keep_reference=True), "cpu", shares_weights=shares)
        for shares in (True, False)
    )
    batch = toy_rollout(ToyPolicy())
    for seed in range(2):
        mine, theirs = (reference_logprobs(engine, batch, algorithm) for engine in (offloaded, straight))
        assert torch.equal(mine, theirs)
        assert train(straight, seed=seed) == train(offloaded, seed=seed)
        assert offloaded.offload() is not None
        assert offloaded.state.reference is not None
        kept = (*offloaded.policy.parameters(), *offloaded.state.reference.parameters())
        assert not any(p.untyped_storage().nbytes() for p in kept)
        straight.offload()  # the reference leaves, what acts stays
        assert straight.state.reference is not None
        frozen = straight.state.reference_weights().values()
        assert not any(p.untyped_storage().nbytes() for p in frozen)
        assert all(p.untyped_storage().nbytes() for p in straight.policy.parameters())
    assert all(torch.equal(t, weights_of(straight)[name]) for name, t in offloaded.weights())


def test_a_restored_engine_in_critic_warmup_has_no_policy_moments() -> None:
    engine = make_engine(optim={"critic_warmup_iterations": 2})
    train(engine)
    resumed = make_engine(optim={"critic_warmup_iterations": 2})
    resumed.load_state_dict(engine.state_dict())
    assert set(resumed.state.optimizer.state) == set(resumed.state.value_parameters)


@pytest.mark.parametrize("damage", ["missing weight", "other shape", "half moments", "unknown moments"])
def test_a_state_of_another_policy_is_refused(damage: str) -> None:
    engine = make_engine()
    train(engine)
    saved = engine.state_dict()
    if damage == "missing weight":
        del saved.tensors["policy"]["head.weight"]
    elif damage == "other shape":
        saved.tensors["optimizer"]["exp_avg.head.bias"] = torch.zeros(3)
    elif damage == "half moments":
        del saved.tensors["optimizer"]["step.head.bias"]
    else:
        saved.tensors["optimizer"]["exp_avg.nowhere"] = torch.zeros(3)
    with raises_code("checkpoint-mismatch", CheckpointError):
        make_engine().load_state_dict(saved)


def test_precision_auto_follows_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for has_bf16, expected in ((True, "bf16"), (False, "fp32")):
        found = Processor("any", "AVX2", has_bf16)
        monkeypatch.setattr("embodrl.hybrid_engines.training.precision.processor", lambda found=found: found)
        assert resolve_precision("auto", "cpu") == expected
        assert resolve_precision("fp32", "cpu") == "fp32"
        assert resolve_precision("bf16", "cpu") == "bf16"


def test_bf16_computes_the_forward_pass_in_bf16_and_keeps_weights_in_fp32() -> None:
    engine = make_engine(precision="bf16")
    dtypes: list[torch.dtype] = []
    engine.policy.head.register_forward_hook(lambda _module, _inputs, output: dtypes.append(output.dtype))  # pyright: ignore
    metrics = train(engine)
    assert dtypes[-1] == torch.bfloat16
    assert {p.dtype for p in engine.policy.parameters()} == {torch.float32}
    assert metrics["train/num_updates"] == 1


def reference_engine(**changes: Any) -> NativeTrainEngine:
    optim = OptimConfig(critic_warmup_iterations=0, lr_warmup_iterations=0, lr=1e-2)
    config = ActorConfig(global_batch_size=100, micro_batch_size=7, precision="fp32", optim=optim)
    return NativeTrainEngine(ToyPolicy(**changes), EngineOptions(config, 10, keep_reference=True), "cpu")


def test_the_reference_stays_where_the_policy_began_and_shares_what_does_not_train() -> None:
    engine = reference_engine()
    assert engine.state.reference is not None
    start = weights_of(engine)
    batch = toy_rollout(engine.policy)  # pyright: ignore[reportArgumentType]
    before = reference_logprobs(engine, batch, ALGORITHM)
    live = batch.valid.any(-1)
    torch.testing.assert_close(before[live], batch.logprobs[live])
    assert (before[~live] == 0).all() and batch.valid.any() and not live.all()
    for seed in range(2):
        train(engine, seed=seed)
    assert torch.equal(reference_logprobs(engine, batch, ALGORITHM), before)
    for name, parameter in engine.state.reference.named_parameters():
        shared = name.startswith("value.")
        assert (parameter is dict(engine.policy.named_parameters())[name]) == shared
        assert shared or (torch.equal(parameter, start[name]) and not parameter.requires_grad)
    assert largest_change(weights_of(engine), start) > 0
    extra = engine.shapes().num_bytes - make_engine().shapes().num_bytes
    assert extra == sum(p.numel() * 4 for p in engine.state.policy_parameters)


def test_a_restored_reference_is_that_of_the_first_start() -> None:
    engine = reference_engine()
    train(engine)
    saved = engine.state_dict()
    resumed = reference_engine(seed=9)
    batch = toy_rollout(ToyPolicy())
    assert not torch.equal(reference_logprobs(resumed, batch, ALGORITHM), reference_logprobs(engine, batch, ALGORITHM))
    resumed.load_state_dict(saved)
    assert torch.equal(reference_logprobs(resumed, batch, ALGORITHM), reference_logprobs(engine, batch, ALGORITHM))
    del saved.tensors["reference"]
    with raises_code("checkpoint-mismatch", CheckpointError):
        reference_engine().load_state_dict(saved)
    with raises_code("reference-missing", EmbodrlError, "keep_reference"):
        reference_logprobs(make_engine(), batch, ALGORITHM)


def test_a_kl_to_the_reference_holds_the_policy_back() -> None:
    def distance(coef: float) -> float:
        algorithm = ALGORITHM.model_copy(update={"kl": KlConfig(coef=coef), "normalize_advantages": False})
        engine = reference_engine()
        for seed in range(10):
            batch = toy_rollout(engine.policy, seed=0)  # pyright: ignore[reportArgumentType]
            batch.ref_logprobs = reference_logprobs(engine, batch, algorithm)
            advantages = compute_advantages(batch, algorithm)
            metrics = update(engine, batch, advantages, algorithm, torch.Generator().manual_seed(seed))
        assert ("train/ref_kl" in metrics) == (coef > 0)
        apart = reference_logprobs(engine, batch, algorithm) - batch.logprobs
        return float(apart[batch.valid].square().mean())

    assert distance(10.0) < 0.5 * distance(0.0)


def test_an_update_without_any_rows_changes_nothing() -> None:
    engine = make_engine()
    batch = toy_rollout(engine.policy)  # pyright: ignore[reportArgumentType]
    batch.valid[:] = False
    before = weights_of(engine)
    metrics = update(engine, batch, compute_advantages(batch, ALGORITHM), ALGORITHM, torch.Generator())
    assert metrics["train/num_updates"] == 0 and largest_change(before, weights_of(engine)) == 0
    assert engine.version == 1


def halved_loss(*, logprobs: Tensor, advantages: Tensor, valid: Tensor, **settings: Any) -> LossOutput:
    """A loss from outside the package."""
    assert settings["kl_coef"] == 0 and settings["weights"] is None
    live = valid.unsqueeze(-1)
    loss = -(torch.where(live, logprobs * advantages.unsqueeze(-1), 0.0)).mean() / 2
    return LossOutput(loss, {"approx_kl": torch.zeros(())})


def lossy(logprobs: Tensor) -> Tensor:
    return logprobs.mean()


def test_a_loss_of_the_user_s_gets_what_it_names_and_is_checked() -> None:
    engine = make_engine()
    before = weights_of(engine)
    metrics = train(engine, ALGORITHM.model_copy(update={"loss_type": "test_train_engine:halved_loss"}))
    assert metrics["train/num_updates"] == 1 and largest_change(before, weights_of(engine)) > 0
    assert torch.equal(weights_of(engine)["value.weight"], before["value.weight"]), "it asks for no values"
    with raises_code("loss-result", EmbodrlError, "approx_kl"):
        train(make_engine(), ALGORITHM.model_copy(update={"loss_type": "test_train_engine:lossy"}))
