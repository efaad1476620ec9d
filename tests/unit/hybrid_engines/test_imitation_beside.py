"""Imitation of demonstrations beside the loss of a rollout (``algorithm.bc_coef``)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from expect import raises_code
from torch import Tensor
from toy_policy import BINS, FEATURES, ToyPolicy, toy_rollout
from updates import update

from embodrl.algorithms.advantages import compute_advantages
from embodrl.config.schema import ActorConfig, AlgorithmConfig, OptimConfig
from embodrl.data.batch import Batch
from embodrl.data.demos import Demos
from embodrl.data.imitation import DemoDraws
from embodrl.hybrid_engines.training.native import NativeTrainEngine
from embodrl.hybrid_engines.training.options import EngineOptions
from embodrl.types import SamplingParams

COEF = 0.25


def demonstration(seed: int = 5) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.ones(7, 2, dtype=torch.bool)
    mask[3, 1] = False
    tokens = torch.randint(BINS, (7, 2, 3), generator=generator)
    return {"features": torch.randn(7, FEATURES, generator=generator), "tokens": tokens, "action_mask": mask}


def updated(imitates: bool, critic_warmup: int = 0, **algorithm: Any) -> tuple[NativeTrainEngine, dict[str, float]]:
    """Return an engine after one update of one step of gradient descent (SGD of rate 1), and what it reported."""
    optim = OptimConfig(critic_warmup_iterations=critic_warmup, lr_warmup_iterations=0, clip_grad=1e6)
    config = ActorConfig(global_batch_size=20, micro_batch_size=5, precision="fp32", optim=optim)
    engine = NativeTrainEngine(ToyPolicy(), EngineOptions(config, 10), "cpu")
    engine.state.optimizer = torch.optim.SGD([{"params": [*engine.state.leaves.values()], "role": "policy"}])
    engine.set_learning_rates = lambda rates, train_policy: engine._let_policy_train(train_policy)
    engine.state.optimizer.param_groups[0]["lr"] = 1.0
    settings = AlgorithmConfig(update_epoch=1, **algorithm)
    batch = toy_rollout(ToyPolicy(), temperature=settings.sampling.temperature)
    demos = [Batch(demonstration())] if imitates else None
    advantages = compute_advantages(batch, settings)
    metrics = update(engine, batch, advantages, settings, torch.Generator().manual_seed(0), demos)
    return engine, metrics


@pytest.mark.parametrize("loss", ["actor_critic", "actor"])
def test_the_gradient_grows_by_that_of_the_imitation_loss(loss: str) -> None:
    kind = {"loss_type": loss, "adv_type": "gae" if loss == "actor_critic" else "reinforce_pp"}
    with_it, metrics = updated(True, bc_coef=COEF, **kind)
    without, plain = updated(False, **kind)
    policy, inputs = ToyPolicy(), demonstration()
    chosen = policy.evaluate_actions(inputs, SamplingParams(1.0, 0), False, False).logprobs[inputs["action_mask"]]
    imitation = -chosen.mean()
    imitation.backward()
    for name, start in policy.named_parameters():
        moved = dict(with_it.policy.named_parameters())[name] - dict(without.policy.named_parameters())[name]
        wanted = torch.zeros_like(start) if start.grad is None else -COEF * start.grad
        torch.testing.assert_close(moved, wanted, atol=1e-5, rtol=1e-4)
    assert metrics["train/bc_loss"] == pytest.approx(float(imitation.detach()), rel=1e-5)
    assert metrics["train/policy_loss"] == plain["train/policy_loss"] and "train/bc_loss" not in plain


def test_a_warm_up_of_the_critic_imitates_nothing() -> None:
    engine, metrics = updated(True, critic_warmup=2, bc_coef=COEF)
    assert "train/bc_loss" not in metrics
    assert all(
        now.equal(was) for now, was in zip(engine.policy.head.parameters(), ToyPolicy().head.parameters(), strict=True)
    )


def demos() -> Demos:
    rng = np.random.default_rng(0)
    columns = {
        "images": rng.integers(0, 256, (8, 1, 4, 4, 3), dtype=np.uint8),
        "state": rng.normal(size=(8, 2)).astype(np.float32),
        "actions": rng.normal(size=(8, 3)).astype(np.float32),
    }
    return Demos.of_episodes(columns, [3, 5], ["pull", "push"], ["t", "t"])


def test_draws_go_on_where_a_checkpoint_was_made() -> None:
    whole, first, second = (DemoDraws(demos(), 6, 2, 3) for _ in range(3))
    wanted = [whole.next() for _ in range(3)]
    first.next()
    second.load_state(first.state())
    for (seen, actions, inside), (again, other, mask) in zip(wanted[1:], [second.next(), second.next()], strict=True):
        assert np.array_equal(seen.images, again.images) and seen.instruction == again.instruction
        assert actions.equal(other) and inside.equal(mask)
    for column in ("actions", "images", "state"):
        changed = demos()
        getattr(changed, column)[0] += 1
        with raises_code("imitation-other-data"):
            DemoDraws(changed, 6, 2, 3).load_state(first.state())
    with raises_code("imitation-other-data"):
        DemoDraws(replace(demos(), instruction_table=["pull", "lift"]), 6, 2, 3).load_state(first.state())
    with raises_code("imitation-other-data"):
        second.load_state({})
