"""Training from a replay buffer: what each update changes, how many there are, and what a checkpoint restores."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch
from expect import raises_code
from replay_frames import buffer_of, config_of, updater_of
from tiny_families import build

from embodrl.config import load_config
from embodrl.data.replay import ReplayStores
from embodrl.data.shifts import shifted
from embodrl.errors import CheckpointError
from embodrl.hybrid_engines.base import EngineState, OptimizerStep
from embodrl.hybrid_engines.training.native import NativeTrainEngine
from embodrl.hybrid_engines.training.options import EngineOptions
from embodrl.hybrid_engines.training.schedule import LearningRates
from embodrl.learners.off_policy import SECTION, sample_transitions
from embodrl.models.gaussian.policy import GaussianPolicy
from embodrl.storage.checkpoint import CheckpointManager

RATES = LearningRates(policy=1e-3, value=1e-3)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def test_updates_follow_from_what_was_stored() -> None:
    updater = updater_of(config_of())  # 50 chunks: 30 beyond the warm-up
    assert updater.learn(generator())["train/num_updates"] == 15
    assert updater.learn(generator())["train/num_updates"] == 0
    assert (updater.engine.version, updater.num_updates) == (2, 15)
    metrics = updater_of(config_of(warm_up=50)).learn(generator())
    assert metrics["train/num_updates"] == 0 and "train/critic_loss" not in metrics


def test_critics_train_the_encoder_and_the_actor_does_not() -> None:
    config = config_of(policy_delay=1000)
    updater = updater_of(config)
    update, policy = updater.update, updater.engine.policy
    before = {name: p.detach().clone() for name, p in policy.named_parameters()}
    critics = copy.deepcopy(update.critic)
    updater.learn(generator())
    moved = {name for name, p in policy.named_parameters() if not torch.equal(p, before[name])}
    assert moved and all(".vision." in name for name in moved)
    assert all(not torch.equal(a, b) for a, b in zip(critics.parameters(), update.critic.parameters(), strict=True))
    batch = sample_transitions(updater.stores, 8, config.algorithm, generator())
    before = {name: p.detach().clone() for name, p in policy.named_parameters()}
    critics = copy.deepcopy(update.critic)
    update.set_rates(RATES)
    update.update_actor(batch, 1, generator())
    moved = {name for name, p in policy.named_parameters() if not torch.equal(p, before[name])}
    assert moved and not any(".vision." in name for name in moved)
    assert all(torch.equal(a, b) for a, b in zip(critics.parameters(), update.critic.parameters(), strict=True))


def test_critics_that_read_the_state_leave_the_encoder_to_the_actor() -> None:
    config = config_of(policy_delay=1000, critic_reads="state")
    updater = updater_of(config)
    update, policy = updater.update, updater.engine.policy
    before = {name: p.detach().clone() for name, p in policy.named_parameters()}
    critics = copy.deepcopy(update.critic)
    updater.learn(generator())
    assert all(torch.equal(p, before[name]) for name, p in policy.named_parameters())
    assert all(not torch.equal(a, b) for a, b in zip(critics.parameters(), update.critic.parameters(), strict=True))
    batch = sample_transitions(updater.stores, 8, config.algorithm, generator())
    update.set_rates(RATES)
    update.update_actor(batch, 1, generator())
    moved = {name for name, p in policy.named_parameters() if not torch.equal(p, before[name])}
    assert any(".vision." in name for name in moved) and any(".policy." in name for name in moved)


def test_such_critics_see_no_pictures_and_the_actor_no_more_than_its_part_of_the_state() -> None:
    config = config_of(critic_reads="state")
    updater = updater_of(config)
    update = updater.update
    policy = cast(GaussianPolicy, updater.engine.policy)
    policy.model.spec = replace(policy.model.spec, seen_state_dim=3)
    batch = sample_transitions(updater.stores, 8, config.algorithm, generator())
    inputs = {name.removeprefix("inputs."): tensor for name, tensor in batch["inputs"].items()}
    dark = inputs | {"images": torch.zeros_like(inputs["images"])}
    known = inputs | {"state": torch.cat([inputs["state"][:, :3], torch.zeros_like(inputs["state"][:, 3:])], 1)}
    assert update.seen_by_critics(dark).equal(update.seen_by_critics(inputs))
    assert not update.seen_by_critics(known).equal(update.seen_by_critics(inputs))
    assert update.features(known).equal(update.features(inputs))
    assert not update.features(dark).equal(update.features(inputs))


def test_targets_follow_the_critics() -> None:
    config = config_of(tau=0.25)
    updater = updater_of(config)
    update = updater.update
    update.set_rates(RATES)
    old = [p.clone() for p in update.target.parameters()]
    update.update_critic(sample_transitions(updater.stores, 8, config.algorithm, generator()), generator())
    for target, before, critic in zip(update.target.parameters(), old, update.critic.parameters(), strict=True):
        torch.testing.assert_close(target, 0.75 * before + 0.25 * critic, rtol=1e-6, atol=1e-7)


@pytest.mark.long
def test_critics_fit_the_rewards_of_a_bandit() -> None:
    """With a discount of 0 the value is the reward: the sum of the first action's first number."""
    config = config_of(warm_up=0, utd=1.0, policy_delay=10_000, value_lr=1e-2, critic_hidden_sizes=(32,))
    config = config.model_copy(update={"algorithm": config.algorithm.model_copy(update={"gamma": 0.0})})
    buffer = buffer_of(150)
    buffer._columns["rewards"][:, 0] = buffer._columns["actions"][:, 0, 0]
    buffer._columns["rewards"][:, 1] = 0.0
    updater = updater_of(config, ReplayStores(buffer))
    updater.learn(generator())
    buffer.stored += 20
    last = updater.learn(generator())
    assert last["train/critic_loss"] < 0.15 < 1 / 3  # the variance of what is to be fitted


def test_steps_of_an_update_are_reported_as_they_are_done() -> None:
    reported = list[tuple[int, int, int]]()
    updater = updater_of(config_of(), on_step=lambda done, total: reported.append((done, total, updater.num_updates)))
    updater.learn(generator())
    total = updater.num_updates
    assert total > 1 and reported == [(done, total, done) for done in range(1, total + 1)]


def test_demonstrations_are_a_share_of_every_batch() -> None:
    algorithm = config_of(demo_fraction=0.25).algorithm
    stores = ReplayStores(buffer_of(60), buffer_of(30, seed=1))
    batch = sample_transitions(stores, 40, algorithm, generator())
    assert len(batch) == 40 and int(batch["is_demo"].sum()) == 10
    assert torch.equal(batch["label_mask"].any(1), batch["is_demo"])
    known = stores.demos.inputs(torch.arange(30))["state"]
    for state, is_demo in zip(batch["inputs"]["state"], batch["is_demo"], strict=True):
        assert bool((known == state).all(1).any()) == bool(is_demo)


def test_pictures_of_a_batch_are_shifted_by_the_draws_that_follow() -> None:
    """Current and next ones independently, and nothing else of the batch changes."""
    stores = ReplayStores(buffer_of(60))
    plain = sample_transitions(stores, 8, config_of().algorithm, generator())
    random = generator()
    batch = sample_transitions(stores, 8, config_of(shift_pixels=2).algorithm, random)
    again = generator()
    stores.online.draw(8, again)
    for part in ("inputs", "next_inputs"):
        assert torch.equal(batch[part]["images"], shifted(plain[part]["images"], 2, again))
        assert torch.equal(batch[part]["state"], plain[part]["state"])
    assert torch.equal(random.get_state(), again.get_state())
    assert all(torch.equal(batch[name], plain[name]) for name in ("actions", "returns", "discount", "is_demo"))


def test_the_actor_imitates_the_labels_of_demonstrations() -> None:
    """The gradient grows by ``bc_coef`` times that of the mean squared error over the demonstrations alone."""
    algorithm = config_of(demo_fraction=0.25).algorithm
    batch = sample_transitions(ReplayStores(buffer_of(60), buffer_of(30, seed=1)), 8, algorithm, generator())

    def gradients(bc_coef: float) -> list[torch.Tensor]:
        config = config_of(alpha_lr=None)
        algorithm = config.algorithm.model_copy(update={"bc_coef": bc_coef})
        update = updater_of(config.model_copy(update={"algorithm": algorithm})).update
        kept: list[torch.Tensor] = []

        def step(loss: torch.Tensor, parameters: list[torch.nn.Parameter]) -> OptimizerStep:
            kept.extend(p.grad for p in parameters)
            return OptimizerStep(False, 0.0)

        update.engine.optimizer_step = step  # type: ignore[method-assign]
        assert ("bc_loss" in update.update_actor(batch, 1, generator())) == bool(bc_coef)
        return kept

    update = updater_of(config_of()).update
    greedy = torch.tanh(update.engine.policy.model.distribution(update.actor.features(batch["inputs"])).mean)
    error = (greedy - batch["labels"])[batch["is_demo"]].square().mean()
    expected = torch.autograd.grad(error, update.actor_parameters, allow_unused=True)
    for without, with_it, own in zip(gradients(0.0), gradients(0.5), expected, strict=True):
        torch.testing.assert_close(with_it - without, 0.5 * own, rtol=1e-3, atol=1e-6)


def test_an_update_encodes_each_picture_once() -> None:
    """The actor, and imitation beside it, read the features of the critics' forward pass, of every micro-batch."""
    config = config_of(policy_delay=1, demo_fraction=0.25)
    algorithm = config.algorithm.model_copy(update={"bc_coef": 0.5})
    actor = config.actor.model_copy(update={"micro_batch_size": 3})
    config = config.model_copy(update={"algorithm": algorithm, "actor": actor})
    update = updater_of(config).update
    batch = sample_transitions(ReplayStores(buffer_of(60), buffer_of(30, seed=1)), 8, algorithm, generator())
    expected = update.features(batch["inputs"]).detach()
    encoded: list[int] = []
    update.engine.policy.model.vision.register_forward_hook(lambda _, seen, __: encoded.append(len(seen[0])))
    read: list[torch.Tensor] = []
    known = update.seen_by_actor
    update.seen_by_actor = lambda part: read.append(known(part)) or read[-1]  # type: ignore[method-assign]
    assert "bc_loss" in update.step(batch, RATES, 1, generator())
    assert encoded == [3, 3, 3, 3, 2, 2]
    torch.testing.assert_close(torch.cat(read), expected)


def test_the_actor_waits_for_the_critics() -> None:
    updater = updater_of(config_of(critic_warm_up=10))  # of 15 updates
    steps: list[int] = []
    update_actor = updater.update.update_actor
    updater.update.update_actor = lambda *a: steps.append(a[1]) or update_actor(*a)  # type: ignore[method-assign]
    updater.learn(generator())
    assert steps == [12, 14]


def test_some_critics_are_asked_alone() -> None:
    update, chosen = updater_of(config_of()).update, torch.tensor([2, 0])
    critics = update.critic
    seen, actions = torch.randn(5, update.actor.feature_dim), torch.randn(5, 2, 7)
    torch.testing.assert_close(critics(seen, actions, chosen), critics(seen, actions)[chosen])


@pytest.mark.parametrize("alpha_lr", [1e-2, None])
def test_the_temperature_is_learned_if_it_has_a_rate(alpha_lr: float | None) -> None:
    config = config_of(alpha=0.5, alpha_lr=alpha_lr, target_entropy=-100.0)
    metrics = updater_of(config).learn(generator())
    assert (metrics["train/alpha"] < 0.49) if alpha_lr else metrics["train/alpha"] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("algorithm", "model", "per_number"), [("sac", "mlp", -1.0), ("rlpd", "mlp", -1.0), ("dsrl", "pi0", -0.5)]
)
def test_presets_aim_at_the_entropy_of_their_papers(algorithm: str, model: str, per_number: float, tmp_path: Path):
    """Nats per number of a chunk: SAC's -1, -1/2 in the code of RLPD and DSRL."""
    (tmp_path / "config.json").write_text("{}")
    given = [f"algorithm.off_policy.demos={tmp_path}"] if algorithm == "rlpd" else []
    given += [f"model.warm_start={tmp_path}"] if algorithm == "dsrl" else []
    settings = load_config(["env=toy", f"model={model}", f"algorithm={algorithm}", *given]).config.algorithm.off_policy
    changes = settings.model_dump(include={"target_entropy", "target_entropy_per_number"})
    assert updater_of(config_of(**changes)).update.target_entropy == per_number * 2 * 7


def test_a_target_entropy_of_a_chunk_takes_the_place_of_that_per_number() -> None:
    config = config_of(target_entropy=-3.0, target_entropy_per_number=-0.5)
    assert updater_of(config).update.target_entropy == -3.0


@pytest.mark.parametrize("target_q", ["min", "mean"])
def test_the_target_is_of_the_least_critic_or_of_the_mean(target_q: str) -> None:
    config = config_of(subset=3, target_q=target_q, backup_entropy=False)
    update = updater_of(config).update
    batch = sample_transitions(ReplayStores(buffer_of(60)), 8, config.algorithm, generator())
    three = torch.tensor([[1.0], [2.0], [6.0]])
    update.target.forward = lambda seen, *_: three.expand(3, len(seen))  # type: ignore[method-assign]
    found = update.update_critic(batch, generator())["target_mean"]
    next_q = 1.0 if target_q == "min" else 3.0
    assert found == pytest.approx(float((batch["returns"] + batch["discount"] * next_q).mean()), abs=1e-5)


def test_a_restored_engine_continues_bit_exactly() -> None:
    config, buffer = config_of(), buffer_of(60)
    other = config.model_copy(update={"runner": config.runner.model_copy(update={"seed": 5})})
    first, second = updater_of(config, ReplayStores(buffer)), updater_of(other, ReplayStores(buffer))
    first.learn(generator())
    saved = first.engine.state_dict()
    copies = {section: {n: t.clone() for n, t in part.items()} for section, part in saved.tensors.items()}
    assert set(copies) == set(first.engine.shapes().sections) == {"policy", "optimizer", SECTION}
    second.engine.load_state_dict(EngineState(copies, dict(saved.state)))
    second.num_updates = first.num_updates
    buffer.stored += 20
    for updater in (first, second):
        updater.learn(generator())
    left, right = first.engine.state_dict(), second.engine.state_dict()
    assert left.state == right.state
    for section, tensors in left.tensors.items():
        assert tensors.keys() == right.tensors[section].keys()
        assert all(torch.equal(tensor, right.tensors[section][name]) for name, tensor in tensors.items())
    alone = NativeTrainEngine(build("gaussian", add_value_head=False), EngineOptions.of(config), "cpu")
    targets = sum(p.nbytes for p in first.update.target.parameters())
    assert first.engine.shapes().num_bytes > alone.shapes().num_bytes + targets


def test_checkpoints_of_earlier_versions_count_in_the_engine(tmp_path: Path) -> None:
    """The names of the section are those of earlier checkpoints; their number of updates is among the counters."""
    updater = updater_of(config_of())
    updater.learn(generator())
    kept = updater.engine.state_dict().tensors[SECTION]
    assert {name.partition(".")[0] for name in kept} >= {"critic", "log_alpha", "target", "step", "exp_avg"}
    assert any(name.startswith("exp_avg.encoder.") for name in kept) and "exp_avg.log_alpha" in kept
    manager = CheckpointManager(tmp_path, 1)
    manager.save(1, {}, {"engine": {"num_updates": 7}})
    checkpoint, _ = manager.latest_good()
    assert checkpoint is not None
    updater.load_state(checkpoint)
    assert updater.num_updates == 7


@pytest.mark.parametrize("change", [{"num_q": 4}, {"critic_hidden_sizes": (9,)}, {"layer_norm": False}])
def test_critics_of_another_size_are_refused(change: dict[str, object]) -> None:
    saved = updater_of(config_of()).engine.state_dict()
    with raises_code("checkpoint-mismatch", CheckpointError):
        updater_of(config_of(**change)).engine.load_state_dict(saved)


def test_a_loss_that_is_not_finite_changes_nothing() -> None:
    buffer = buffer_of(60)
    buffer._columns["rewards"][:] = math.nan
    updater = updater_of(config_of(), ReplayStores(buffer))
    before = [p.clone() for p in updater.update.critic.parameters()]
    with raises_code("non-finite"):
        updater.learn(generator())
    assert all(torch.equal(a, b) for a, b in zip(before, updater.update.critic.parameters(), strict=True))
