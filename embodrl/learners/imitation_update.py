"""Optimizer steps of supervised fine-tuning."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import cast

from torch import Tensor

from embodrl.algorithms.losses import LossOutput
from embodrl.data.batch import Batch
from embodrl.hybrid_engines.training.policy_engine import PolicyTrainEngine
from embodrl.hybrid_engines.training.schedule import LearningRates
from embodrl.learners.update import Update
from embodrl.models.base import VLAPolicy

UPDATE = f"{__name__}:ImitationUpdate"


class ImitationUpdate(Update):
    """Imitates frames, for `embodrl sft`, DAgger, and offline algorithms."""

    def step(
        self, batch: Batch, learning_rate: float, label_smoothing_bins: float, num_actions: float | None = None
    ) -> dict[str, float]:
        """Take an optimizer step; ``complete`` ends the update.

        Args:
            batch: flat, on the CPU: ``VLAPolicy.sft_inputs`` with ``action_mask bool[N,H]``.
            learning_rate: rate of the policy; the value head does not train.
            label_smoothing_bins: see ``VLAPolicy.sft_loss``.
            num_actions: divisor of the loss if ``action_mask float32[N,H]`` contains action weights; None if it marks
                existing actions, which then have equal weights.

        Returns:
            ``loss``, ``grad_norm`` before clipping, and the scalars of ``sft_loss``.

        Raises:
            NonFiniteError: several consecutive steps were not finite.
        """
        engine = self.engine
        engine.onload()
        engine.set_learning_rates(LearningRates(policy=learning_rate, value=0.0), train_policy=True)
        if num_actions is None:
            loss, scalars = imitation_gradients(engine, batch, label_smoothing_bins)
        else:
            loss_fn = make_weighted_loss(partial(sft_loss, engine), num_actions, label_smoothing_bins)
            loss, scalars = engine.forward_backward(batch, loss_fn)
            scalars = {"loss": loss, **scalars}
        step = engine.optimizer_step(loss)
        return {name: float(value) for name, value in scalars.items()} | {"grad_norm": step.grad_norm}


def sft_loss(
    engine: PolicyTrainEngine, inputs: dict[str, Tensor], label_smoothing_bins: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the engine's result of ``VLAPolicy.sft_loss``."""
    names: list[str] = []

    def compute(policy: VLAPolicy) -> tuple[Tensor | None, ...]:
        loss, scalars = policy.sft_loss(inputs, label_smoothing_bins)
        names.extend(scalars)
        return loss, *scalars.values()

    loss, *scalars = cast("tuple[Tensor, ...]", engine.run(compute))
    return loss, dict(zip(names, scalars, strict=True))


def imitation_gradients(
    engine: PolicyTrainEngine, batch: Batch, label_smoothing_bins: float = 0.0, weight: float = 1.0
) -> tuple[Tensor, dict[str, Tensor]]:
    """Add the gradients of ``weight`` times the imitation loss; return the unweighted loss and its scalars."""
    total = batch["action_mask"].sum().to(engine.device)
    loss_fn = make_imitation_loss(partial(sft_loss, engine), total, label_smoothing_bins, weight)
    loss, scalars = engine.forward_backward(batch, loss_fn)
    return loss, {"loss": loss / weight, **scalars}


def make_imitation_loss(
    imitate: Callable[[dict[str, Tensor], float], tuple[Tensor, dict[str, Tensor]]],
    total: Tensor,
    label_smoothing_bins: float,
    weight: float,
) -> Callable[[Batch], LossOutput]:
    """Return ``weight`` times the imitation loss of a micro-batch, and unweighted scalars.

    ``imitate`` is like ``VLAPolicy.sft_loss``; ``total`` is the number of actions in the whole batch (scalar).
    """

    def compute(micro: Batch) -> LossOutput:
        inputs: dict[str, Tensor] = {name: micro[name] for name in micro.names()}
        # ``sft_loss`` is a mean over the micro-batch; weighted by the share of the actions, these add up to the batch's
        # mean.
        share = inputs["action_mask"].sum() / total
        loss, scalars = imitate(inputs, label_smoothing_bins)
        return LossOutput(loss * share * weight, {name: value * share for name, value in scalars.items()})

    return compute


def make_weighted_loss(
    imitate: Callable[[dict[str, Tensor], float], tuple[Tensor, dict[str, Tensor]]],
    num_actions: float,
    label_smoothing_bins: float,
) -> Callable[[Batch], LossOutput]:
    """Return the imitation loss of a micro-batch whose ``action_mask float32[B,H]`` contains action weights.

    ``imitate`` is like ``VLAPolicy.sft_loss``; the weighted sum is divided by the whole batch's ``num_actions``.
    """

    def compute(micro: Batch) -> LossOutput:
        inputs: dict[str, Tensor] = {name: micro[name] for name in micro.names()}
        share, inputs["action_mask"] = normalized(inputs["action_mask"])
        loss, scalars = imitate(inputs, label_smoothing_bins)
        scaled = {name: value * share / num_actions for name, value in scalars.items()}
        return LossOutput(loss * share / num_actions, scaled)

    return compute


def normalized(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of weights ``float32[B,H]``, and the weights scaled so that the positive ones have mean 1.

    ``sft_loss`` divides by the sum of its mask, at least 1: scaled weights lose no precision there, however small.
    """
    total = weights.sum()
    # Avoids 0 / 0 if all weights are 0.
    return total, weights * ((weights > 0).sum() / total.clamp_min(1e-30))
