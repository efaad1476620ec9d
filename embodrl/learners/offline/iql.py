"""The critics of implicit Q-learning, which weight offline imitation.

Shapes: E critics, B frames of a batch, C actions in a chunk, A action dimensions.
"""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor, nn

from embodrl.algorithms.off_policy import critic_loss, soft_update
from embodrl.algorithms.offline import expectile_loss
from embodrl.config.schema import AlgorithmConfig, OffPolicyConfig, OptimConfig
from embodrl.data.offline import OfflineData
from embodrl.errors import CheckpointError, NonFiniteError
from embodrl.hybrid_engines.training.adamw import fused_adamw
from embodrl.hybrid_engines.training.side_modules import ADAM_STATE, HINT
from embodrl.learners.offline.settings import offline_settings
from embodrl.models.common.observation_net import ObservationNet, ObservationSpec
from embodrl.models.common.q_head import QEnsemble


class Critic(nn.Module):
    """E values of an observation and a chunk, or of an observation alone, with its own encoder."""

    def __init__(self, spec: ObservationSpec, num: int, chunk_dim: int, settings: OffPolicyConfig) -> None:
        super().__init__()
        self.encoder = ObservationNet(spec)
        width = self.encoder.num_features + chunk_dim
        self.heads = QEnsemble(num, width, settings.critic_hidden_sizes, settings.layer_norm)

    def init_weights(self, generator: torch.Generator) -> None:
        self.encoder.init_weights(generator)
        self.heads.init_weights(generator)

    def forward(self, inputs: dict[str, Tensor], actions: Tensor) -> Tensor:
        """Return ``float32[E,B]`` for ``actions float32[B,C,A]``, or ``[B,0]`` for state values."""
        return self.heads(self.encoder(inputs), actions)


class IqlCritics:
    """Q and V of implicit Q-learning (Kostrikov et al. 2021, arXiv 2110.06169), in float32.

    Args:
        spec: observations that the critics use.
        chunk_dim: C A.
        settings: section ``algorithm.off_policy``: critics, their size, tau.
        optim: betas and eps.
        device: training device.
        seed: seed of the weights.

    Attributes:
        q, target, v: critics; ``target`` follows ``q``.
        optimizer: optimizer of q and v.
    """

    def __init__(
        self,
        spec: ObservationSpec,
        chunk_dim: int,
        settings: OffPolicyConfig,
        optim: OptimConfig,
        device: torch.device,
        seed: int,
    ) -> None:
        self.settings = settings
        self.device = device
        self.q = Critic(spec, settings.num_q, chunk_dim, settings)
        self.v = Critic(spec, 1, 0, settings)
        generator = torch.Generator().manual_seed(seed)
        for part in (self.q, self.v):
            part.init_weights(generator)
            part.to(device)
        self.target = copy.deepcopy(self.q).requires_grad_(False)
        self.optimizer = fused_adamw(self.named().values(), optim.betas, optim.eps)

    def named(self) -> dict[str, nn.Parameter]:
        """Return the trained parameters, by name."""
        return {f"{net}.{name}": p for net in ("q", "v") for name, p in getattr(self, net).named_parameters()}

    def update(
        self, data: OfflineData, frames: Tensor, algorithm: AlgorithmConfig, rate: float, clip_grad: float
    ) -> tuple[Tensor, dict[str, float]]:
        """Take one step on Q and V; return the chunks' advantages ``float32[B]`` before it, and metrics.

        Raises:
            NonFiniteError: the loss or its gradient is not finite; the weights are unchanged.
        """
        led = data.outcomes
        assert led is not None, "the run was built for critics"
        seen = self._inputs(data, frames)
        after = self._inputs(data, led.next[frames])
        actions = data.actions(frames, data.chunk)[0].to(self.device)
        nothing = actions.new_zeros(len(frames), 0)
        with torch.no_grad():
            target_q = self.target(seen, actions).min(0).values
            bootstrap = led.discount[frames].to(self.device) * self.v(after, nothing)[0]
            target = led.returns[frames].to(self.device) + bootstrap
        values = self.v(seen, nothing)[0]
        q = self.q(seen, actions)
        value_loss = expectile_loss(target_q - values, offline_settings(algorithm).expectile).mean()
        q_loss = critic_loss(q, target).mean()
        loss = value_loss + q_loss
        loss.backward()
        norm = float(nn.utils.clip_grad_norm_(self.named().values(), clip_grad))
        if not math.isfinite(norm) or not math.isfinite(loss.item()):
            raise NonFiniteError(
                f"the loss of the critics is {loss.item()}, its gradient norm {norm}",
                "lower actor.optim.value_lr, and check the dataset's observations and rewards for NaN",
            )
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        soft_update(self.target.parameters(), self.q.parameters(), self.settings.tau)
        advantages = target_q - values.detach()
        metrics = {"value_loss": value_loss, "critic_loss": q_loss, "q_mean": q.mean(), "v_mean": values.mean()}
        found = {name: float(value.detach()) for name, value in metrics.items()}
        return advantages, found | {"critic_grad_norm": norm, "advantage_std": float(advantages.std(correction=0))}

    def _inputs(self, data: OfflineData, frames: Tensor) -> dict[str, Tensor]:
        return {name: tensor.to(self.device) for name, tensor in data.inputs(frames).items()}

    def tensors(self) -> dict[str, Tensor]:
        """Return weights, targets and moments by name, without copies."""
        named = self.named()
        kept = {name: p.detach() for name, p in named.items()}
        kept |= {f"target.{name}": p for name, p in self.target.named_parameters()}
        for name, parameter in named.items():
            state = self.optimizer.state.get(parameter, {})
            kept |= {f"{key}.{name}": state[key] for key in ADAM_STATE if key in state}
        return kept

    @torch.no_grad()
    def load(self, saved: dict[str, Tensor]) -> None:
        """Restore a result of ``tensors``.

        Raises:
            CheckpointError: it belongs to other critics.
        """
        named = self.named()
        left = dict(saved)
        own = {name: p.data for name, p in named.items()}
        own |= {f"target.{name}": p for name, p in self.target.named_parameters()}
        for name, tensor in own.items():
            tensor.copy_(_fitting(name, left.pop(name, None), tensor))
        self.optimizer.state.clear()
        for name, tensor in left.items():
            key, _, owner = name.partition(".")
            parameter = named.get(owner) if key in ADAM_STATE else None
            if parameter is None:
                raise _other_critics(name)
            like = tensor if key == "step" else parameter
            self.optimizer.state[parameter][key] = _fitting(name, tensor, like).to(self.device, copy=True)


def _fitting(name: str, found: Tensor | None, like: Tensor) -> Tensor:
    if found is None or found.shape != like.shape:
        raise _other_critics(name)
    return found


def _other_critics(name: str) -> CheckpointError:
    return CheckpointError(f"the checkpoint's critics do not match: '{name}'", HINT, code="checkpoint-mismatch")
