"""Training from a replay buffer: what each update changes, how many there are, and what a checkpoint restores."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import pytest
import torch
from expect import raises_code
from tiny_families import build
from tiny_training import training_config

from embodrl.config import load_config
from embodrl.config.schema import Config
from embodrl.data.replay import ReplayBuffer, ReplayStores
from embodrl.errors import CheckpointError
from embodrl.hybrid_engines.base import EngineState
from embodrl.hybrid_engines.training.engine_state import HeldState
from embodrl.hybrid_engines.training.native import NativeTrainEngine
from embodrl.hybrid_engines.training.off_policy import SECTION, OffPolicyEngine, sample_transitions
from embodrl.hybrid_engines.training.policy_engine import EngineOptions

SETTINGS = {"num_q": 3, "subset": 2, "critic_hidden_sizes": (8,), "warm_up": 20, "utd": 0.5, "policy_delay": 2}


def config_of(value_lr: float = 1e-3, **changes: object) -> Config:
    algorithm = {"adv_type": "none", "loss_type": "sac", "off_policy": {**SETTINGS, **changes}}
    optim = {"critic_warmup_iterations": 0, "lr_warmup_iterations": 0, "lr_scheduler": "constant", "lr": 1e-3}
    optim["value_lr"] = value_lr
    return training_config("gaussian", algorithm=algorithm, actor={"optim": optim})


def engine_of(config: Config, seed: int = 0) -> OffPolicyEngine:
    policy = build("gaussian", add_value_head=False)
    return OffPolicyEngine(policy, EngineOptions.of(config), "cpu", config.algorithm.off_policy, seed)


def buffer_of(count: int, seed: int = 0) -> ReplayBuffer:
    """Episodes of five chunks, with a last observation for which there is no action."""
    random = torch.Generator().manual_seed(seed)
    acted = torch.arange(count) % 6 < 5
    buffer = ReplayBuffer(10_000, 10**9)
    buffer.add_frames(
        {
            "inputs.state": torch.randn(count, 8, generator=random),
            "inputs.images": torch.randint(0, 256, (count, 1, 8, 8, 3), generator=random, dtype=torch.uint8),
            "actions": torch.rand(count, 2, 7, generator=random) * 2 - 1,
            "labels": torch.rand(count, 2, 7, generator=random) * 2 - 1,
            "rewards": torch.randn(count, 2, generator=random) * acted[:, None],
            "valid": acted[:, None].expand(count, 2),
            "terminated": torch.zeros(count, dtype=torch.bool),
            "acted": acted,
            "source": torch.zeros(count, dtype=torch.int8),
        }
    )
    return buffer


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def test_updates_follow_from_what_was_stored() -> None:
    config = config_of()
    engine, buffer = engine_of(config), buffer_of(60)  # 50 chunks: 30 beyond the warm-up
    stores = ReplayStores(buffer)
    assert engine.learn(stores, config.algorithm, generator())["train/num_updates"] == 15
    assert engine.learn(stores, config.algorithm, generator())["train/num_updates"] == 0
    assert (engine.version, engine.num_updates) == (2, 15)
    early = engine_of(config_of(warm_up=50))
    metrics = early.learn(stores, config_of(warm_up=50).algorithm, generator())
    assert metrics["train/num_updates"] == 0 and "train/critic_loss" not in metrics


def test_critics_train_the_encoder_and_the_actor_does_not() -> None:
    config = config_of(policy_delay=1000)
    engine, stores = engine_of(config), ReplayStores(buffer_of(60))
    before = {name: p.detach().clone() for name, p in engine.policy.named_parameters()}
    critics = copy.deepcopy(engine.critic)
    engine.learn(stores, config.algorithm, generator())
    moved = {name for name, p in engine.policy.named_parameters() if not torch.equal(p, before[name])}
    assert moved and all(".vision." in name for name in moved)
    assert all(not torch.equal(a, b) for a, b in zip(critics.parameters(), engine.critic.parameters(), strict=True))
    batch = sample_transitions(stores, 8, config.algorithm, generator())
    before = {name: p.detach().clone() for name, p in engine.policy.named_parameters()}
    critics = copy.deepcopy(engine.critic)
    engine._set_rates(engine_rates())
    engine._update_actor(batch, generator(), config_of().algorithm)
    moved = {name for name, p in engine.policy.named_parameters() if not torch.equal(p, before[name])}
    assert moved and not any(".vision." in name for name in moved)
    assert all(torch.equal(a, b) for a, b in zip(critics.parameters(), engine.critic.parameters(), strict=True))


def engine_rates():
    from embodrl.hybrid_engines.training.schedule import LearningRates

    return LearningRates(policy=1e-3, value=1e-3)


def test_targets_follow_the_critics() -> None:
    config = config_of(tau=0.25)
    engine, stores = engine_of(config), ReplayStores(buffer_of(60))
    engine._set_rates(engine_rates())
    old = [p.clone() for p in engine.target.parameters()]
    engine._update_critic(sample_transitions(stores, 8, config.algorithm, generator()), generator())
    for target, before, critic in zip(engine.target.parameters(), old, engine.critic.parameters(), strict=True):
        torch.testing.assert_close(target, 0.75 * before + 0.25 * critic, rtol=1e-6, atol=1e-7)


def test_critics_fit_the_rewards_of_a_bandit() -> None:
    """With a discount of 0 the value is the reward: the sum of the first action's first number."""
    config = config_of(warm_up=0, utd=1.0, policy_delay=10_000, value_lr=1e-2, critic_hidden_sizes=(32,))
    algorithm = config.algorithm.model_copy(update={"gamma": 0.0})
    engine, buffer = engine_of(config), buffer_of(150)
    buffer._columns["rewards"][:, 0] = buffer._columns["actions"][:, 0, 0]
    buffer._columns["rewards"][:, 1] = 0.0
    engine.learn(ReplayStores(buffer), algorithm, generator())
    buffer.stored += 20
    last = engine.learn(ReplayStores(buffer), algorithm, generator())
    assert last["train/critic_loss"] < 0.15 < 1 / 3  # the variance of what is to be fitted


def test_steps_of_an_update_are_reported_as_they_are_done() -> None:
    config = config_of()
    engine, reported = engine_of(config), list[tuple[int, int, int]]()
    engine.on_step = lambda done, total: reported.append((done, total, engine.num_updates))
    engine.learn(ReplayStores(buffer_of(60)), config.algorithm, generator())
    total = engine.num_updates
    assert total > 1 and reported == [(done, total, done) for done in range(1, total + 1)]


def test_demonstrations_are_a_share_of_every_batch() -> None:
    algorithm = config_of(demo_fraction=0.25).algorithm
    stores = ReplayStores(buffer_of(60), buffer_of(30, seed=1))
    batch = sample_transitions(stores, 40, algorithm, generator())
    assert len(batch) == 40 and int(batch.is_demo.sum()) == 10 and torch.equal(batch.label_mask.any(1), batch.is_demo)
    known = stores.demos.inputs(torch.arange(30))["state"]
    for state, is_demo in zip(batch.inputs["state"], batch.is_demo, strict=True):
        assert bool((known == state).all(1).any()) == bool(is_demo)


def test_the_actor_imitates_the_labels_of_demonstrations() -> None:
    """The gradient grows by ``bc_coef`` times that of the mean squared error over the demonstrations alone."""
    algorithm = config_of(demo_fraction=0.25).algorithm
    batch = sample_transitions(ReplayStores(buffer_of(60), buffer_of(30, seed=1)), 8, algorithm, generator())

    def gradients(bc_coef: float) -> list[torch.Tensor]:
        engine = engine_of(config_of(alpha_lr=None))
        kept: list[torch.Tensor] = []
        engine._step = lambda who, optimizer, parameters, loss: kept.extend(p.grad for p in parameters) or 0.0  # type: ignore[method-assign]
        algorithm = config_of().algorithm.model_copy(update={"bc_coef": bc_coef})
        metrics = engine._update_actor(batch, generator(), algorithm)
        assert ("bc_loss" in metrics) == bool(bc_coef)
        return kept

    engine = engine_of(config_of())
    greedy = torch.tanh(engine.policy.model.distribution(engine.actor.features(batch.inputs)).mean)
    error = (greedy - batch.labels)[batch.is_demo].square().mean()
    expected = torch.autograd.grad(error, engine.actor_parameters, allow_unused=True)
    for without, with_it, own in zip(gradients(0.0), gradients(0.5), expected, strict=True):
        torch.testing.assert_close(with_it - without, 0.5 * own, rtol=1e-3, atol=1e-6)


def test_the_actor_waits_for_the_critics() -> None:
    config = config_of(critic_warm_up=10)  # of 15 updates
    engine = engine_of(config)
    steps: list[int] = []
    update = engine._update_actor
    engine._update_actor = lambda *a: steps.append(engine.num_updates) or update(*a)  # type: ignore[method-assign]
    engine.learn(ReplayStores(buffer_of(60)), config.algorithm, generator())
    assert steps == [12, 14]


def test_some_critics_are_asked_alone() -> None:
    critics, chosen = engine_of(config_of()).critic, torch.tensor([2, 0])
    seen, actions = torch.randn(5, engine_of(config_of()).actor.feature_dim), torch.randn(5, 2, 7)
    torch.testing.assert_close(critics(seen, actions, chosen), critics(seen, actions)[chosen])


@pytest.mark.parametrize("alpha_lr", [1e-2, None])
def test_the_temperature_is_learned_if_it_has_a_rate(alpha_lr: float | None) -> None:
    config = config_of(alpha=0.5, alpha_lr=alpha_lr, target_entropy=-100.0)
    engine = engine_of(config)
    metrics = engine.learn(ReplayStores(buffer_of(60)), config.algorithm, generator())
    assert (metrics["train/alpha"] < 0.49) if alpha_lr else metrics["train/alpha"] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("algorithm", "model", "per_number"), [("sac", "mlp", -1.0), ("rlpd", "mlp", -0.5), ("dsrl", "pi0", -0.5)]
)
def test_presets_aim_at_the_entropy_of_their_papers(algorithm: str, model: str, per_number: float, tmp_path: Path):
    """Nats per number of a chunk: SAC's -1, -1/2 in the code of RLPD and DSRL."""
    (tmp_path / "config.json").write_text("{}")
    given = [f"algorithm.off_policy.demos={tmp_path}"] if algorithm == "rlpd" else []
    given += [f"model.warm_start={tmp_path}"] if algorithm == "dsrl" else []
    settings = load_config(["env=toy", f"model={model}", f"algorithm={algorithm}", *given]).config.algorithm.off_policy
    changes = settings.model_dump(include={"target_entropy", "target_entropy_per_number"})
    engine = engine_of(config_of(**changes))
    assert engine.target_entropy == per_number * 2 * 7


def test_a_target_entropy_of_a_chunk_takes_the_place_of_that_per_number() -> None:
    assert engine_of(config_of(target_entropy=-3.0, target_entropy_per_number=-0.5)).target_entropy == -3.0


@pytest.mark.parametrize("target_q", ["min", "mean"])
def test_the_target_is_of_the_least_critic_or_of_the_mean(target_q: str) -> None:
    config = config_of(subset=3, target_q=target_q, backup_entropy=False)
    engine = engine_of(config)
    batch = sample_transitions(ReplayStores(buffer_of(60)), 8, config.algorithm, generator())
    three = torch.tensor([[1.0], [2.0], [6.0]])
    engine.target.forward = lambda seen, *_: three.expand(3, len(seen))  # type: ignore[method-assign]
    found = engine._update_critic(batch, generator())["target_mean"]
    next_q = 1.0 if target_q == "min" else 3.0
    assert found == pytest.approx(float((batch.returns + batch.discount * next_q).mean()), abs=1e-5)


def test_a_restored_engine_continues_bit_exactly() -> None:
    config, buffer = config_of(), buffer_of(60)
    first, second = engine_of(config), engine_of(config, seed=5)
    first.learn(ReplayStores(buffer), config.algorithm, generator())
    saved = first.state_dict()
    copies = {section: {n: t.clone() for n, t in part.items()} for section, part in saved.tensors.items()}
    assert set(copies) == set(OffPolicyEngine.sections) == {*NativeTrainEngine.sections, SECTION}
    second.load_state_dict(EngineState(copies, dict(saved.state)))
    buffer.stored += 20
    for engine in (first, second):
        engine.learn(ReplayStores(buffer), config.algorithm, generator())
    left, right = first.state_dict(), second.state_dict()
    assert left.state == right.state
    for section, tensors in left.tensors.items():
        assert tensors.keys() == right.tensors[section].keys()
        assert all(torch.equal(tensor, right.tensors[section][name]) for name, tensor in tensors.items())
    assert first.state_num_bytes() > HeldState(first).num_bytes() + sum(p.nbytes for p in first.target.parameters())


@pytest.mark.parametrize("change", [{"num_q": 4}, {"critic_hidden_sizes": (9,)}, {"layer_norm": False}])
def test_critics_of_another_size_are_refused(change: dict[str, object]) -> None:
    saved = engine_of(config_of()).state_dict()
    with raises_code("checkpoint-mismatch", CheckpointError):
        engine_of(config_of(**change)).load_state_dict(saved)


def test_a_loss_that_is_not_finite_changes_nothing() -> None:
    config = config_of()
    engine, buffer = engine_of(config), buffer_of(60)
    buffer._columns["rewards"][:] = math.nan
    before = [p.clone() for p in engine.critic.parameters()]
    with raises_code("non-finite"):
        engine.learn(ReplayStores(buffer), config.algorithm, generator())
    assert all(torch.equal(a, b) for a, b in zip(before, engine.critic.parameters(), strict=True))
