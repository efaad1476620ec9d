"""RLT's update: critics as in SAC, and an actor that stays near the frozen policy's actions."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from embodrl.algorithms.losses import LossOutput
from embodrl.algorithms.rlt import ramp, rlt
from embodrl.config.schema import section_in
from embodrl.data.batch import Batch
from embodrl.learners.off_policy import OffPolicyUpdate
from embodrl.models.base import VLAPolicy
from embodrl.models.small_actors.on_frozen import ReferencePolicy
from embodrl.models.small_actors.settings import RltConfig


class RltUpdate(OffPolicyUpdate):
    """Trains a ``ReferencePolicy``."""

    def update_actor(self, batch: Batch, number: int, generator: torch.Generator) -> dict[str, float]:
        """Step on ``-q_weight Q + bc_weight ||a - a_ref||^2``, without noise on the action.

        ``a_ref`` is the frozen policy's chunk, or the expert's action in demonstrations; it is masked in some rows.
        """
        settings = section_in(self.config.algorithm, "rlt", RltConfig)
        total = len(batch)
        dropped = torch.rand(total, generator=generator) < settings.reference_dropout
        update = number - self.settings.critic_warm_up
        q_weight = ramp(settings.q_weight, settings.q_weight_end, update, settings.ramp_updates)
        bc_weight = ramp(settings.bc_weight, settings.bc_weight_end, update, settings.ramp_updates)

        def loss_of(part: Batch) -> LossOutput:
            seen = self.seen_by_actor(part)

            def choose(policy: VLAPolicy) -> tuple[Tensor, Tensor]:
                policy = cast(ReferencePolicy, policy)
                mean = policy.model.distribution(policy.without_reference(seen, part["dropped"])).mean
                return mean, policy.chosen(seen, mean)

            mean, actions = cast("tuple[Tensor, Tensor]", self.engine.run(choose))
            reference = torch.where(part["label_mask"][..., None], part["labels"], part["inputs"]["base"].float())
            distance = (mean - reference).square().sum((1, 2))
            q = self.critic(seen, actions)
            loss = rlt(q, distance, q_weight, bc_weight, self.settings.actor_q == "min").sum() / total
            return LossOutput(loss, {"reference_distance": distance.detach().sum() / total})

        loss, metrics = self.engine.forward_backward(batch.replace(dropped=dropped), loss_of, self.actor_parameters)
        step = self.engine.optimizer_step(loss, self.actor_parameters)
        found = {name: float(value) for name, value in metrics.items()}
        weights = {"q_weight": q_weight, "bc_weight": bc_weight}
        return {"policy_loss": float(loss), "grad_norm": step.grad_norm, **weights, **found}
