"""Training from a dataset: weights in the loss of every family, what updates change, what a checkpoint restores."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from expect import raises_code
from first_steps import watch
from tiny_families import FAMILIES, build
from tiny_training import training_config

from embodrl.config.schema import Config
from embodrl.data.demos import Demos
from embodrl.data.offline import ChunkOutcomes, OfflineData
from embodrl.errors import CheckpointError, EmbodrlError
from embodrl.hybrid_engines.training.native import NativeTrainEngine
from embodrl.hybrid_engines.training.options import EngineOptions
from embodrl.learners.imitation_update import normalized
from embodrl.learners.offline.iql import IqlCritics
from embodrl.learners.offline.learner import OfflineUpdater, advantage_instructions
from embodrl.models.common.observation_net import IMAGES, STATE, TASK, ObservationSpec

S = 8


def config_of(family: str = "gaussian", value_lr: float = 1e-3, **changes: object) -> Config:
    offline = {"updates": 2, "temperature": 1.0, **changes}
    critics = {"num_q": 2, "critic_hidden_sizes": (8,)}
    algorithm = {"adv_type": "none", "loss_type": "iql", "off_policy": critics, "offline": offline}
    optim = {"critic_warmup_iterations": 0, "lr_warmup_iterations": 0, "lr_scheduler": "constant", "lr": 1e-3}
    return training_config(family, algorithm=algorithm, actor={"optim": {**optim, "value_lr": value_lr}})


def data_of(chunk: int, count: int = 24, seed: int = 0) -> OfflineData:
    """Episodes of six frames; the last chunk of each ends it."""
    random, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    columns = {
        "images": random.integers(0, 256, (count, 1, 32, 32, 3), np.uint8),
        "state": random.standard_normal((count, S)).astype(np.float32),
        "actions": random.uniform(-1, 1, (count, 7)).astype(np.float32),
    }
    demos = Demos.of_episodes(columns, [6] * (count // 6), ["push the cube"] * (count // 6), ["push"] * (count // 6))
    over = torch.arange(count) % 6 >= 6 - chunk
    led = ChunkOutcomes(
        returns=torch.randn(count, generator=generator),
        discount=0.9 * ~over,
        next=(torch.arange(count) + chunk).clamp(max=count - 1),
        known=torch.arange(count) != 3,
    )
    images = torch.randint(0, 256, (count, 1, 16, 16, 3), generator=generator, dtype=torch.uint8)
    seen = {IMAGES: images, STATE: torch.from_numpy(demos.state), TASK: torch.zeros(count, dtype=torch.int64)}
    return OfflineData(demos, chunk, seen, led)


def critics_of(config: Config, seed: int = 0) -> IqlCritics:
    policy, off_policy, optim = build("gaussian", add_value_head=False), config.algorithm.off_policy, config.actor.optim
    size, spec = policy.num_action_chunks * policy.action_dim, ObservationSpec(1, S, 1, image_size=16)
    return IqlCritics(spec, size, off_policy, optim, torch.device("cpu"), seed)


def learner_of(config: Config, data: OfflineData, critics: IqlCritics | None = None) -> OfflineUpdater:
    policy = build("gaussian", add_value_head=False)
    engine = NativeTrainEngine(policy, EngineOptions.of(config), "cpu")
    return OfflineUpdater(config, policy, engine, data, critics)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def test_weights_are_scaled_to_the_mean_of_one() -> None:
    total, weights = normalized(torch.tensor([[1e-12, 3e-12], [0.0, 0.0]]))
    assert float(total) == pytest.approx(4e-12) and torch.allclose(weights, torch.tensor([[0.5, 1.5], [0.0, 0.0]]))
    total, weights = normalized(torch.zeros(2, 2))
    assert float(total) == 0 and torch.equal(weights, torch.zeros(2, 2))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_weighs_the_rows_of_its_imitation_loss(family: str) -> None:
    """The loss of two weighted rows is the weighted mean of the losses of each alone."""
    policy = build(family, add_value_head=False).eval()
    data = data_of(policy.num_action_chunks)
    frames = torch.tensor([0, 6])
    actions, inside = data.actions(frames, policy.action_horizon)
    torch.manual_seed(0)
    inputs = policy.sft_inputs(data.observation(frames), actions)

    def loss(rows: list[int], weights: torch.Tensor) -> float:
        part = {name: tensor[rows] for name, tensor in inputs.items()}
        return float(policy.sft_loss({**part, "action_mask": weights})[0].detach())

    inside = torch.ones_like(inside)
    both = loss([0, 1], inside * torch.tensor([[3.0], [0.5]]))
    apart = (3.0 * loss([0], inside[:1]) + 0.5 * loss([1], inside[1:])) / 3.5
    assert both == pytest.approx(apart, rel=1e-4)


def test_a_step_follows_the_sum_of_weighted_losses() -> None:
    """Weights far below 1 count as they are, whatever the size of micro-batches."""
    config = config_of()
    data, found = data_of(2), list[float]()
    frames, weights = torch.arange(4), torch.tensor([1e-6, 2e-6, 0.0, 5.0])
    for size in (1, 2, 4):
        learner = learner_of(config, data)
        learner.engine.config = config.actor.model_copy(update={"micro_batch_size": size})
        found.append(learner.imitate(frames, weights, 0.0)["policy_loss"])
    policy = build("gaussian", add_value_head=False)
    actions, inside = data.actions(frames, 2)
    inputs = policy.sft_inputs(data.observation(frames), actions)
    each = [policy.sft_loss({n: t[[i]] for n, t in inputs.items()} | {"action_mask": inside[[i]]})[0] for i in range(4)]
    counts = inside.sum(1)
    expected = float(
        sum(w * n * loss.detach() for w, n, loss in zip(weights, counts, each, strict=True)) / counts.sum()
    )
    assert found == pytest.approx([expected] * 3, rel=1e-5)


def test_critics_learn_from_the_equations() -> None:
    """One critic step moves V and Q down their losses, computed here once more, and the targets a little."""
    config = config_of()
    critics, data = critics_of(config), data_of(2)
    frames = torch.tensor([0, 4, 9])
    assert data.outcomes is not None
    nothing = torch.zeros(3, 0)
    with torch.no_grad():
        actions = torch.stack([torch.from_numpy(data.demos.actions[i : i + 2]) for i in (0, 4, 9)])
        q_target = critics.target(data.inputs(frames), actions).min(0).values
        v = critics.v(data.inputs(frames), nothing)[0]
        y = (
            data.outcomes.returns[frames]
            + data.outcomes.discount[frames] * critics.v(data.inputs(frames + 2), nothing)[0]
        )
        q = critics.q(data.inputs(frames), actions)
        u = q_target - v
        value_loss = torch.where(u < 0, 0.3, 0.7).mul(u**2).mean()
        q_loss = ((q - y) ** 2).mean()
        before = copy.deepcopy(critics.target.state_dict())
    advantages, metrics = critics.update(data, frames, config.algorithm, 1e-3, 1e9)
    assert torch.allclose(advantages, u, atol=1e-6)
    assert metrics["value_loss"] == pytest.approx(float(value_loss), rel=1e-5)
    assert metrics["critic_loss"] == pytest.approx(float(q_loss), rel=1e-5)
    for name, target in critics.target.state_dict().items():
        assert torch.allclose(target, before[name].lerp(critics.q.state_dict()[name], 0.005), atol=1e-7)


def test_critics_have_the_optimizer_of_the_settings() -> None:
    """A first AdamW step of betas (0, 0) is lr g / (|g| + eps): a large eps leaves little of it."""
    moved = list[float]()
    for eps in (1e-8, 1e4):
        config = config_of()
        optim = config.actor.optim.model_copy(update={"eps": eps, "betas": (0.0, 0.5)})
        config = config.model_copy(update={"actor": config.actor.model_copy(update={"optim": optim})})
        critics = critics_of(config)
        assert critics.optimizer.param_groups[0]["betas"] == (0.0, 0.5)
        before = [p.detach().clone() for p in critics.named().values()]
        critics.update(data_of(2), torch.tensor([0, 4, 9]), config.algorithm, 1e-3, 1e9)
        moved.append(
            max(float((p.detach() - b).abs().max()) for p, b in zip(critics.named().values(), before, strict=True))
        )
    assert moved[0] == pytest.approx(1e-3, rel=1e-3) and moved[1] < 1e-5


@pytest.mark.long
def test_a_positive_temperature_prefers_better_actions() -> None:
    """With critics that know which of two actions is better, the policy learns that one."""
    data = data_of(2)
    good = torch.arange(len(data.demos.actions)) % 12 < 6
    data.demos.actions[:] = np.where(good.numpy()[:, None], 0.5, -0.5)
    data.demos.state[:] = 0
    data.demos.images[:] = 0
    seen = {STATE: torch.zeros(24, S), IMAGES: torch.zeros(24, 1, 16, 16, 3, dtype=torch.uint8), TASK: data.seen[TASK]}
    led = (
        ChunkOutcomes(good.float(), torch.zeros(24), data.outcomes.next, torch.ones(24, dtype=torch.bool))
        if data.outcomes
        else None
    )
    data = OfflineData(data.demos, 2, seen, led)
    chosen = {}
    for temperature in (0.0, 20.0):
        changed = config_of(updates=80, temperature=temperature, value_lr=1e-2)
        learner = learner_of(changed, data, critics_of(changed))
        learner.learn(generator())
        chosen[temperature] = learner.policy.predict(np.zeros((1, 32, 32, 3), np.uint8), "", np.zeros(S, np.float32))
    assert abs(chosen[0.0]).max() < 0.25 and chosen[20.0].min() > 0.35


def test_a_checkpoint_continues_to_the_bit() -> None:
    config, data = config_of(), data_of(2)
    whole, first = (learner_of(config, data, critics_of(config)) for _ in range(2))
    draws = generator()
    for _ in range(2):
        expected = whole.learn(draws)
    draws = generator()
    first.learn(draws)
    engine, critics = copy.deepcopy(first.engine.state_dict()), copy.deepcopy(dict(first.state().tensors))["critics"]
    second = learner_of(config, data, critics_of(config, seed=9))
    second.engine.load_state_dict(engine)
    assert second.critics is not None
    second.critics.load(critics)
    assert second.learn(draws) == expected
    with raises_code("checkpoint-mismatch", CheckpointError):
        second.critics.load({name: tensor.flatten()[:1] for name, tensor in critics.items()})


def test_policy_and_critics_follow_their_gradients() -> None:
    config = config_of()
    critics = critics_of(config)
    learner = learner_of(config, data_of(2), critics)
    engine = learner.engine
    assert isinstance(engine, NativeTrainEngine)
    stepped = watch(engine.state.optimizer, critics.optimizer)
    learner.learn(generator())
    assert set(stepped.values()) == {engine.state.optimizer, critics.optimizer}
    assert any(weight.ndim == 4 for weight in stepped)


def test_instructions_say_the_advantage_but_for_a_share() -> None:
    data = replace(data_of(2), positive=np.arange(24) % 2 == 0)
    words = advantage_instructions(data, torch.arange(24), 0.0, generator())
    assert words[:2] == ["push the cube, advantage: positive", "push the cube, advantage: negative"]
    assert advantage_instructions(data, torch.arange(24), 1.0, generator()) == ["push the cube"] * 24
    dropped = advantage_instructions(data, torch.arange(24).repeat(100), 0.3, generator()).count("push the cube")
    assert 0.27 < dropped / 2400 < 0.33


def test_a_conditioned_policy_acts_as_it_is_told() -> None:
    """Actions of 0.5 are positive, those of -0.5 negative: what the policy does follows from the condition."""
    config = config_of(updates=150)
    data = data_of(2)
    good = np.arange(24) % 12 < 6
    data.demos.actions[:] = np.where(good[:, None], 0.5, -0.5)
    data.demos.state[:], data.demos.images[:] = 0, 0
    demos = replace(data.demos, state=data.demos.state[:, : S - 1])  # the last place is the condition's
    learner = learner_of(config, OfflineData(demos, 2, {}, positive=good))
    learner.learn(generator())
    chosen = {}
    for learner.policy.condition in ("positive", "negative"):
        pictures, state = np.zeros((1, 32, 32, 3), np.uint8), np.zeros(S - 1, np.float32)
        chosen[learner.policy.condition] = learner.policy.predict(pictures, "", state)
    assert chosen["positive"].min() > 0.35 and chosen["negative"].max() < -0.35
    with raises_code("condition-no-room", EmbodrlError):
        learner.policy.predict(pictures, "", np.zeros(S, np.float32))


def test_frames_without_an_outcome_are_never_drawn() -> None:
    frames = data_of(2).draw(2000, generator())
    assert set(frames.tolist()) == {*range(24)} - {3}


def test_other_data_are_refused_when_a_run_is_resumed() -> None:
    data = data_of(2)
    data.load_state(data.state())
    with raises_code("offline-other-data", CheckpointError):
        data_of(2, seed=1).load_state(data.state())
    demos = data.demos
    brighter = replace(demos, images=demos.images | np.uint8(1))
    renamed = replace(demos, instruction_table=["pull the cube"])
    for other in (brighter, renamed, replace(demos, state=demos.state[:, :0])):
        with raises_code("offline-other-data", CheckpointError):
            replace(data, demos=other).load_state(data.state())
