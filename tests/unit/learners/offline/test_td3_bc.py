"""TD3+BC: its targets, the gradient of its actor, and when its targets follow."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from replay_frames import buffer_of
from tiny_families import build
from tiny_training import training_config
from torch import Tensor

from embodrl.config.schema import Config
from embodrl.data.batch import Batch
from embodrl.hybrid_engines.base import OptimizerStep
from embodrl.hybrid_engines.training.native import NativeTrainEngine
from embodrl.hybrid_engines.training.options import EngineOptions
from embodrl.hybrid_engines.training.schedule import LearningRates
from embodrl.learners.off_policy import transitions
from embodrl.learners.offline.td3_bc import Td3BcUpdate, Td3BcUpdater

RATES = LearningRates(policy=1e-3, value=1e-3)


def config_of(policy_delay: int = 2, **offline: object) -> Config:
    critics = {"num_q": 2, "critic_hidden_sizes": (8,), "policy_delay": policy_delay, "tau": 0.25}
    algorithm = {"adv_type": "none", "loss_type": "td3_bc", "off_policy": critics, "offline": {"updates": 4, **offline}}
    optim = {"critic_warmup_iterations": 0, "lr_warmup_iterations": 0, "lr_scheduler": "constant", "lr": 1e-3}
    return training_config("gaussian", algorithm=algorithm, actor={"optim": {**optim, "value_lr": 1e-3}})


def updater_of(config: Config) -> Td3BcUpdater:
    engine = NativeTrainEngine(build("gaussian", add_value_head=False), EngineOptions.of(config), "cpu")
    return Td3BcUpdater(config, engine, buffer_of(60))


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def drawn(updater: Td3BcUpdater) -> Batch:
    return transitions(updater.data, 8, updater.config.algorithm, generator(), is_demo=True)


def greedy(policy: Any, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    seen = policy.features(inputs)
    return seen, torch.tanh(policy.model.distribution(seen).mean)


@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_targets_are_of_the_target_actor_with_clipped_noise(noise: float) -> None:
    updater = updater_of(config_of(policy_noise=noise, noise_clip=0.1))
    update, batch = updater.update, drawn(updater)
    with torch.no_grad():
        for parameter in update.engine.policy.parameters():
            parameter.add_(0.1)  # the policy moves, its target does not
        batch = batch.replace(noise=torch.randn(8, *update.actor.chunk_shape, generator=generator()))
        found = update.backup(batch, torch.tensor([0, 1]), 0.0)
        seen = update.engine.policy.features(batch["next_inputs"])
        actions = torch.tanh(update.target_actor.model.distribution(seen).mean)
        actions = (actions + (noise * batch["noise"]).clamp(-0.1, 0.1)).clamp(-1, 1)
        q = torch.stack([update.target(seen, actions, torch.tensor([i]))[0] for i in (0, 1)])
    torch.testing.assert_close(found, batch["returns"] + batch["discount"] * q.min(0).values)


def test_the_actor_descends_the_equation() -> None:
    updater = updater_of(config_of(alpha=1.5))
    update, batch = updater.update, drawn(updater)
    kept: list[Tensor] = []

    def step(loss: Tensor, parameters: list[torch.nn.Parameter]) -> OptimizerStep:
        kept.extend(p.grad.clone() for p in parameters if p.grad is not None)
        return OptimizerStep(False, 0.0)

    update.engine.optimizer_step = step  # type: ignore[method-assign]
    update.set_rates(RATES)
    update.update_actor(batch, 2, generator())
    seen, actions = greedy(update.engine.policy, batch["inputs"])
    q = update.critic(seen.detach(), actions)[0]
    mask = batch["label_mask"].float()
    error = ((actions - batch["actions"]).square().mean(-1) * mask).sum() / mask.sum()
    loss = -1.5 * (q / q.abs().mean().detach()).mean() + error
    trained = list(update.actor_parameters)
    expected = [g for g in torch.autograd.grad(loss, trained, allow_unused=True) if g is not None]
    assert len(kept) == len(expected)
    for mine, theirs in zip(kept, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


def test_targets_follow_when_the_actor_has_moved() -> None:
    updater = updater_of(config_of(policy_delay=2))
    update = updater.update
    targets = [*update.target.parameters(), *update.target_actor.parameters()]
    before = [p.clone() for p in targets]
    update.step(drawn(updater), RATES, 1, generator())
    assert all(torch.equal(p, old) for p, old in zip(targets, before, strict=True))
    metrics = update.step(drawn(updater), RATES, 2, generator())
    for target, old, critic in zip(update.target.parameters(), before, update.critic.parameters(), strict=False):
        torch.testing.assert_close(target, 0.75 * old + 0.25 * critic, rtol=1e-6, atol=1e-7)
    assert {"critic_loss", "policy_loss", "bc_loss"} <= metrics.keys() and "alpha" not in metrics
    moved = [not torch.equal(p, old) for p, old in zip(targets, before, strict=True)]
    assert any(moved[len([*update.target.parameters()]) :]), "so does the target of the actor"


def test_a_checkpoint_restores_the_targets() -> None:
    config = config_of()
    whole, halves = updater_of(config), updater_of(config)
    random = generator()
    for _ in range(2):
        whole.learn(random)
    random = generator()
    halves.learn(random)
    again = updater_of(config)
    again.engine.load_state_dict(halves.engine.state_dict())
    again.num_updates = halves.num_updates
    again.learn(random)
    for mine, theirs in zip(again.engine.policy.parameters(), whole.engine.policy.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert isinstance(again.update, Td3BcUpdate)
    for mine, theirs in zip(
        again.update.target_actor.parameters(), whole.update.target_actor.parameters(), strict=True
    ):
        assert torch.equal(mine, theirs)
