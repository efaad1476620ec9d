"""RLT's learner: critics as those of SAC, and an actor that stays near the frozen policy's actions."""

from __future__ import annotations

import torch
from torch import Tensor

from embodrl.algorithms.rlt import ramp, rlt
from embodrl.config.schema import AlgorithmConfig
from embodrl.hybrid_engines.training.off_policy import OffPolicyEngine, Transitions
from embodrl.models.small_actors.on_frozen import ReferencePolicy


class RltEngine(OffPolicyEngine):
    """Trains a ``ReferencePolicy``; arguments as of ``OffPolicyEngine``."""

    def _update_actor(
        self, batch: Transitions, generator: torch.Generator, algorithm: AlgorithmConfig
    ) -> dict[str, float]:
        """Step on ``-q_weight Q + bc_weight ||a - a_ref||^2``, without noise on the action.

        ``a_ref`` is the frozen policy's chunk, or in demonstrations what the expert would do. Some rows do not see it.
        """
        policy = self.policy
        settings = algorithm.rlt
        total = len(batch)
        assert isinstance(policy, ReferencePolicy), "the configuration was checked"
        dropped = torch.rand(total, generator=generator) < settings.reference_dropout
        update = self.num_updates - self.settings.critic_warm_up
        q_weight = ramp(settings.q_weight, settings.q_weight_end, update, settings.ramp_updates)
        bc_weight = ramp(settings.bc_weight, settings.bc_weight_end, update, settings.ramp_updates)

        def loss_of(rows: slice) -> tuple[Tensor, dict[str, Tensor]]:
            part = batch.part(rows, self.device)
            with torch.no_grad():
                seen = policy.features(part.inputs)
            mean = policy.model.distribution(policy.without_reference(seen, dropped[rows].to(self.device))).mean
            reference = torch.where(part.label_mask[..., None], part.labels, part.inputs["base"].float())
            distance = (mean - reference).square().sum((1, 2))
            q = self.critic(seen, policy.chosen(seen, mean))
            loss = rlt(q, distance, q_weight, bc_weight, self.settings.actor_q == "min").sum() / total
            return loss, {"reference_distance": distance.detach().sum() / total}

        loss, metrics = self._backward(loss_of, total, self.actor_parameters)
        norm = self._step("actor", self.optimizer, self.actor_parameters, loss)
        return {"policy_loss": loss, "grad_norm": norm, "q_weight": q_weight, "bc_weight": bc_weight, **metrics}
