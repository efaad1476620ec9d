"""Offline training in one process: weighted imitation of a dataset, with the critics of IQL or without.

Shapes: E critics, B frames of a batch, C actions in a chunk, A action dimensions, F features.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from embodrl.algorithms.losses import LossOutput
from embodrl.algorithms.off_policy import critic_loss, soft_update
from embodrl.algorithms.offline import advantage_weights, expectile_loss
from embodrl.config.schema import AlgorithmConfig, OffPolicyConfig, OptimConfig
from embodrl.data.batch import Batch
from embodrl.data.offline import OfflineData
from embodrl.errors import CheckpointError, NonFiniteError
from embodrl.hybrid_engines.base import EngineState
from embodrl.hybrid_engines.training.adamw import fused_adamw
from embodrl.hybrid_engines.training.engine_state import ADAM_STATE, HINT
from embodrl.hybrid_engines.training.native import NativeTrainEngine
from embodrl.hybrid_engines.training.policy_engine import EngineOptions
from embodrl.hybrid_engines.training.schedule import learning_rates
from embodrl.models.base import VLAPolicy
from embodrl.models.common.condition import Condition, conditioned
from embodrl.models.common.observation_net import ObservationNet, ObservationSpec
from embodrl.models.common.q_head import QEnsemble

SECTION = "critics"
"""Of the engine's state."""


class Critic(nn.Module):
    """E values of an observation and a chunk, or of an observation alone, with an encoder of its own."""

    def __init__(self, spec: ObservationSpec, num: int, chunk_dim: int, settings: OffPolicyConfig) -> None:
        super().__init__()
        self.encoder = ObservationNet(spec)
        width = self.encoder.num_features + chunk_dim
        self.heads = QEnsemble(num, width, settings.critic_hidden_sizes, settings.layer_norm)

    def init_weights(self, generator: torch.Generator) -> None:
        """Draw weights."""
        self.encoder.init_weights(generator)
        self.heads.init_weights(generator)

    def forward(self, inputs: dict[str, Tensor], actions: Tensor) -> Tensor:
        """Return ``float32[E,B]``; ``actions float32[B,C,A]``, or ``[B,0]`` for values of observations."""
        return self.heads(self.encoder(inputs), actions)


class IqlCritics:
    """Q and V of implicit Q-learning (Kostrikov et al. 2021, arXiv 2110.06169), in float32.

    Args:
        spec: what is looked at.
        chunk_dim: C A.
        settings: section ``algorithm.off_policy``: critics, their size, tau.
        optim: betas and eps.
        device: where they train.
        seed: of their weights.

    Attributes:
        q, target, v: the second follows the first.
        optimizer: of q and v.
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
        self.settings, self.device = settings, device
        self.q, self.v = Critic(spec, settings.num_q, chunk_dim, settings), Critic(spec, 1, 0, settings)
        generator = torch.Generator().manual_seed(seed)
        for part in (self.q, self.v):
            part.init_weights(generator)
            part.to(device)
        self.target = copy.deepcopy(self.q).requires_grad_(False)
        self.optimizer = fused_adamw(self.named().values(), optim.betas, optim.eps)

    def named(self) -> dict[str, nn.Parameter]:
        """Return what trains, by name."""
        return {f"{net}.{name}": p for net in ("q", "v") for name, p in getattr(self, net).named_parameters()}

    def update(
        self, data: OfflineData, frames: Tensor, algorithm: AlgorithmConfig, rate: float, clip_grad: float
    ) -> tuple[Tensor, dict[str, float]]:
        """Take one step on Q and V; return the advantages ``float32[B]`` of the chunks before it, and metrics.

        Raises:
            NonFiniteError: the loss or its gradient is not finite; the weights are as before.
        """
        led = data.led
        assert led is not None, "the run was built for critics"
        seen, after = self._inputs(data, frames), self._inputs(data, led.next[frames])
        actions = data.actions(frames, data.chunk)[0].to(self.device)
        nothing = actions.new_zeros(len(frames), 0)
        with torch.no_grad():
            target_q = self.target(seen, actions).min(0).values
            bootstrap = led.discount[frames].to(self.device) * self.v(after, nothing)[0]
            target = led.returns[frames].to(self.device) + bootstrap
        values, q = self.v(seen, nothing)[0], self.q(seen, actions)
        value_loss = expectile_loss(target_q - values, algorithm.offline.expectile).mean()
        q_loss = critic_loss(q, target).mean()
        loss = value_loss + q_loss
        loss.backward()
        norm = float(nn.utils.clip_grad_norm_(self.named().values(), clip_grad))
        if not math.isfinite(norm) or not math.isfinite(loss.item()):
            raise NonFiniteError(
                f"the loss of the critics is {loss.item()}, its gradient norm {norm}",
                "lower actor.optim.value_lr, and look for NaN in the observations and rewards of the dataset",
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
        """Go back to what ``tensors`` returned.

        Raises:
            CheckpointError: it is of other critics.
        """
        named, left = self.named(), dict(saved)
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
    return CheckpointError(f"the checkpoint's critics do not fit: '{name}'", HINT, code="checkpoint-mismatch")


class OfflineEngine(NativeTrainEngine):
    """Imitates the executed actions of a dataset, each chunk with a weight.

    Args:
        policy: any with ``sft_loss``; moved to the device.
        options: what the run asks for.
        device: where the policy trains.
        critics: of IQL, whose advantages are the weights; None: every chunk weighs the same.
        num_threads: micro-batches computed at the same time on a CPU.
    """

    def __init__(
        self,
        policy: VLAPolicy,
        options: EngineOptions,
        device: torch.device | str,
        critics: IqlCritics | None,
        num_threads: int = 1,
    ) -> None:
        super().__init__(policy, options, device, num_threads)
        self.critics = critics
        self.sections = (*NativeTrainEngine.sections, *(() if critics is None else (SECTION,)))

    def learn_offline(
        self, data: OfflineData, algorithm: AlgorithmConfig, generator: torch.Generator
    ) -> dict[str, float | None]:
        self.onload()
        optim, settings = self.config.optim, algorithm.offline
        rates = learning_rates(optim, self.version, self.options.total_iterations, 0)
        self._set_learning_rates(rates, train_policy=True)
        totals: dict[str, float] = defaultdict(float)
        for _ in self.steps(settings.updates):
            frames = data.draw(self.config.global_batch_size, generator)
            weights, metrics = torch.ones(len(frames)), dict[str, float]()
            if self.critics is not None:
                found = self.critics.update(data, frames, algorithm, rates.value, optim.clip_grad)
                weights = advantage_weights(found[0], settings.temperature, settings.max_weight).cpu()
                at_bound = float((weights >= settings.max_weight).float().mean())
                metrics = {**found[1], "weight_mean": float(weights.mean()), "weights_clipped": at_bound}
            words = (
                None if data.positive is None else told_advantages(data, frames, settings.condition_dropout, generator)
            )
            metrics |= self._imitate(data, frames, weights, settings.label_smoothing_bins, words)
            for name, value in metrics.items():
                totals[name] += value
        self.complete_update()
        result: dict[str, float | None] = {f"train/{name}": x / settings.updates for name, x in totals.items()}
        counts = {"train/num_updates": float(settings.updates), "train/lr": rates.policy}
        return result | counts | ({} if self.critics is None else {"train/value_lr": rates.value})

    def _imitate(
        self, data: OfflineData, frames: Tensor, weights: Tensor, smoothing: float, words: list[str] | None = None
    ) -> dict[str, float]:
        """Take one step on ``sum_i w_i loss_i / (number of actions)``; return metrics."""
        actions, inside = data.actions(frames, self.policy.action_horizon)
        inputs = self.policy.sft_inputs(data.observation(frames, words), actions)
        batch = Batch(
            {name: tensor.cpu() for name, tensor in inputs.items()} | {"action_mask": inside * weights[:, None]}
        )
        total = float(inside.sum())

        def loss_fn(micro: Batch) -> LossOutput:
            micro_inputs: dict[str, Tensor] = {name: micro[name] for name in micro.names()}
            share, micro_inputs["action_mask"] = normalized(micro_inputs["action_mask"])
            loss, scalars = self.sft_loss(micro_inputs, smoothing)
            return LossOutput(loss * share / total, {name: value * share / total for name, value in scalars.items()})

        loss, scalars = self.forward_backward(batch, loss_fn)
        step = self.optimizer_step(loss)
        metrics = {"policy_loss": float(loss)} | {name: float(value) for name, value in scalars.items()}
        return metrics | {"grad_norm": step.grad_norm}

    # -- state --------------------------------------------------------------------------------------------------------

    def shards(self) -> dict[str, dict[str, Tensor]]:
        return super().shards() | ({} if self.critics is None else {SECTION: self.critics.tensors()})

    def load_state_dict(self, saved: EngineState) -> None:
        tensors = dict(saved.tensors)
        own = dict(tensors.pop(SECTION, {}))
        super().load_state_dict(EngineState(tensors, saved.state))
        if self.critics is not None:
            self.critics.load(own)

    def state_num_bytes(self) -> int:
        own = 0 if self.critics is None else sum(4 * p.nbytes for p in self.critics.named().values())
        return super().state_num_bytes() + own

    def offloadable(self) -> Iterator[Tensor]:
        yield from super().offloadable()
        if self.critics is not None:
            yield from (tensor for tensor in self.critics.tensors().values() if tensor.ndim)


def told_advantages(data: OfflineData, frames: Tensor, dropout: float, generator: torch.Generator) -> list[str]:
    """Return the instructions of frames, which say whether the advantage is positive but for a share of them."""
    index, dropped = frames.numpy(), (torch.rand(len(frames), generator=generator) < dropout).tolist()
    assert data.positive is not None, "the data are labelled"
    signs: list[Condition] = ["positive" if flag else "negative" for flag in data.positive[index]]
    texts = (data.demos.instructions[number] for number in data.demos.episode[index])
    return [conditioned(text, None if drop else sign) for text, sign, drop in zip(texts, signs, dropped, strict=True)]


def normalized(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of weights ``float32[B,H]``, and these scaled so that those above 0 have the mean 1.

    ``sft_loss`` divides by the sum of its mask, at least 1: scaled weights lose no precision there, however small.
    """
    total = weights.sum()
    return total, weights * ((weights > 0).sum() / total.clamp_min(1e-30))
