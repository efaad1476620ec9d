"""The loss of a micro-batch: what is added to the algorithm's own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from expect import raises_code
from torch import Tensor, nn
from toy_policy import ToyPolicy, toy_rollout
from updates import on_policy, update

from embodrl.algorithms.advantages import compute_advantages
from embodrl.algorithms.losses import LossOutput
from embodrl.config.schema import ActorConfig, AlgorithmConfig, OptimConfig
from embodrl.config.schema.algorithm import KlConfig, TaskAlgorithmConfig
from embodrl.errors import EmbodrlError
from embodrl.hybrid_engines.training.native import NativeTrainEngine
from embodrl.hybrid_engines.training.options import EngineOptions
from embodrl.types import EvalOutput, SamplingParams


class Routed(ToyPolicy):
    """Its router's loss is the router's weight times the number of rows that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Parameter(torch.tensor(0.5))

    def evaluate_actions(
        self,
        forward_inputs: dict[str, Tensor],
        sampling: SamplingParams,
        compute_entropy: bool = True,
        compute_values: bool = True,
        compute_router_loss: bool = False,
    ) -> EvalOutput:
        output = super().evaluate_actions(forward_inputs, sampling, compute_entropy, compute_values)
        seen = len(output.logprobs)
        return replace(output, router_loss=self.router * seen) if compute_router_loss else output

    def parts(self) -> dict[str, nn.Module]:
        parts = super().parts()
        return parts | {"language": nn.ModuleList([parts["language"], nn.ParameterList([self.router])])}


def trained(coef: float) -> tuple[Routed, dict[str, float]]:
    policy = Routed()
    optim = OptimConfig(fn="torch.optim:SGD", lr=0.1, critic_warmup_iterations=0, lr_warmup_iterations=0, clip_grad=1e9)
    config = ActorConfig(global_batch_size=100, micro_batch_size=12, precision="fp32", optim=optim)
    engine = NativeTrainEngine(policy, EngineOptions(config, 10), "cpu")
    algorithm = AlgorithmConfig(router_aux_loss_coef=coef, update_epoch=1)
    batch = toy_rollout(policy, part_invalid=False)
    metrics = update(engine, batch, compute_advantages(batch, algorithm), algorithm, torch.Generator().manual_seed(0))
    return policy, metrics


def test_the_load_of_experts_is_a_mean_over_micro_batches_by_their_tokens() -> None:
    """20 rows of equally many tokens: 12, then 8, so that the loss is ``router * (12 * 12 + 8 * 8) / 20``."""
    policy, metrics = trained(0.2)
    rate = metrics["train/lr"]
    assert metrics["train/router_aux_loss"] == pytest.approx(0.5 * 10.4)
    assert policy.router.item() == pytest.approx(0.5 - rate * 0.2 * 10.4)
    policy, metrics = trained(0.0)
    assert "train/router_aux_loss" not in metrics and float(policy.router) == 0.5


def weighs_nothing(*, logprobs: Tensor, old_logprobs: Tensor, ref_logprobs: Tensor, kl_coef: float) -> LossOutput:
    raise AssertionError("not reached")


def test_a_loss_of_a_pipeline_reads_what_is_configured() -> None:
    """Before anything is trained; ``kl_weights`` alone is missing."""
    algorithm = AlgorithmConfig(
        loss_type="actor",
        adv_type="rloo",
        kl=KlConfig(coef=0.1),
        by_task=(TaskAlgorithmConfig(task="reach-red", kl_weight=0.5),),
    )
    policy = ToyPolicy()
    engine = NativeTrainEngine(policy, EngineOptions(ActorConfig(precision="fp32"), 10), "cpu")
    batch = toy_rollout(policy, part_invalid=False)
    advantages = compute_advantages(batch, AlgorithmConfig(update_epoch=1))
    with raises_code("loss-unusable", EmbodrlError, "kl_weights"):
        on_policy(engine, algorithm).update(batch, advantages, torch.Generator(), loss=weighs_nothing)
