"""Off-policy training in one process: critics, their targets, the temperature, and the actor, from a replay buffer.

Shapes: E critics, B transitions of a batch, F features, C actions in a chunk, A action dimensions.
"""

from __future__ import annotations

import copy
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from embodrl.algorithms.off_policy import (
    chunk_return,
    critic_loss,
    n_step_return,
    sac,
    soft_target,
    soft_update,
    temperature_loss,
)
from embodrl.config.schema import AlgorithmConfig, OffPolicyConfig
from embodrl.data.replay import ReplayBuffer, ReplayStores
from embodrl.errors import CheckpointError, NonFiniteError
from embodrl.hybrid_engines.base import EngineState
from embodrl.hybrid_engines.training.adamw import fused_adamw
from embodrl.hybrid_engines.training.engine_state import ADAM_STATE, HINT, HeldState
from embodrl.hybrid_engines.training.native import NativeTrainEngine
from embodrl.hybrid_engines.training.parallel import add_gradients
from embodrl.hybrid_engines.training.policy_engine import MAX_NONFINITE_IN_ROW, EngineOptions
from embodrl.hybrid_engines.training.schedule import LearningRates, learning_rates
from embodrl.models.base import OffPolicyActor, VLAPolicy
from embodrl.models.common.q_head import QEnsemble
from embodrl.processes.liveness import report_work

logger = logging.getLogger(__name__)

SECTION = "off_policy"
"""Of the engine's state: critics, targets, temperature, and the moments of their optimizer."""
LOG_ALPHA = "log_alpha"


class OffPolicyState(HeldState["OffPolicyEngine"]):
    """State with critics, targets, temperature, and the moments of their optimizer."""

    def _named(self) -> dict[str, nn.Parameter]:
        """Return what the critics' optimizer trains, by name."""
        encoder = {id(p) for p in self.engine.encoder_parameters}
        named = {f"critic.{name}": p for name, p in self.engine.critic.named_parameters()}
        named |= {f"encoder.{name}": p for name, p in self.engine.policy.named_parameters() if id(p) in encoder}
        return named | {LOG_ALPHA: self.engine.log_alpha}

    def shards(self) -> dict[str, dict[str, Tensor]]:
        named = self._named()
        # The encoder's weights belong to the policy and are saved with it; only its moments are kept here.
        kept = {name: p.detach() for name, p in named.items() if not name.startswith("encoder.")}
        kept |= {f"target.{name}": p for name, p in self.engine.target.named_parameters()}
        for name, parameter in named.items():
            state = self.engine.learner.state.get(parameter, {})
            kept |= {f"{key}.{name}": state[key] for key in ADAM_STATE if key in state}
        return super().shards() | {SECTION: kept}

    def counters(self) -> dict[str, int]:
        counts = {f"nonfinite_{who}": count for who, count in self.engine.nonfinite.items()}
        return super().counters() | {"num_updates": self.engine.num_updates} | counts

    @torch.no_grad()
    def load(self, saved: EngineState) -> None:
        tensors = dict(saved.tensors)
        own = dict(tensors.pop(SECTION, {}))
        super().load(EngineState(tensors, saved.state))
        self.engine.learner.state.clear()
        named = self._named()
        targets = {name: p.data for name, p in named.items() if not name.startswith("encoder.")}
        targets |= {f"target.{name}": p.data for name, p in self.engine.target.named_parameters()}
        for name, tensor in targets.items():
            found = own.pop(name, None)
            if found is None or found.shape != tensor.shape:
                raise _other_critics(name)
            tensor.copy_(found)
        for name, tensor in own.items():
            key, _, owner = name.partition(".")
            parameter = named.get(owner)
            if parameter is None or key not in ADAM_STATE or (key != "step" and tensor.shape != parameter.shape):
                raise _other_critics(name)
            self.engine.learner.state[parameter][key] = tensor.to(self.engine.device, copy=True)
        self.engine.num_updates = saved.state["num_updates"]
        self.engine.nonfinite = {who: saved.state[f"nonfinite_{who}"] for who in self.engine.nonfinite}

    def num_bytes(self) -> int:
        named = self._named()
        own = sum(3 * p.nbytes for p in named.values()) + sum(p.nbytes for p in self.engine.target.parameters())
        return super().num_bytes() + own


class OffPolicyEngine(NativeTrainEngine):
    """Trains the policy as SAC's actor; everything runs in float32.

    Args:
        policy: an ``OffPolicyActor``; moved to the device. Its encoder trains with the critics.
        options: what the run asks for.
        device: device on which the policy trains.
        settings: section ``algorithm.off_policy``.
        seed: seed of the critics' weights.
        num_threads: micro-batches computed at the same time on a CPU.

    Attributes:
        critic, target: ensembles on the policy's features; the second follows the first.
        log_alpha: logarithm of the temperature, scalar.
        num_updates: optimizer steps of the critics so far.
    """

    sections = (*NativeTrainEngine.sections, SECTION)
    make_state = OffPolicyState

    def __init__(
        self,
        policy: VLAPolicy,
        options: EngineOptions,
        device: torch.device | str,
        settings: OffPolicyConfig,
        seed: int,
        num_threads: int = 1,
    ) -> None:
        super().__init__(policy, options, device, num_threads)
        assert isinstance(policy, OffPolicyActor), "the configuration was checked"
        self.actor = policy
        self.settings = settings
        chunk = math.prod(policy.chunk_shape)
        shape = (policy.feature_dim + chunk, settings.critic_hidden_sizes, settings.layer_norm)
        self.critic = QEnsemble(settings.num_q, *shape)
        self.critic.init_weights(torch.Generator().manual_seed(seed))
        self.critic.to(self.device)
        self.target = copy.deepcopy(self.critic).requires_grad_(False)
        # The logarithm is what trains, so that alpha stays positive.
        self.log_alpha = nn.Parameter(torch.tensor(math.log(settings.alpha), device=self.device))
        per_chunk = settings.target_entropy_per_number * chunk
        self.target_entropy = per_chunk if settings.target_entropy is None else settings.target_entropy
        self.num_updates = 0
        self.nonfinite = {"critics": 0, "actor": 0}
        encoder = {id(p) for p in policy.encoder_parameters()}
        self.encoder_parameters = [p for p in self.policy_parameters if id(p) in encoder]
        self.actor_parameters = [p for p in self.policy_parameters if id(p) not in encoder]
        self.critic_parameters = [*self.critic.parameters(), *self.encoder_parameters]
        groups = [{"params": self.critic_parameters}, {"params": [self.log_alpha]}]
        optim = self.config.optim
        self.learner = fused_adamw(groups, optim.betas, optim.eps)

    # -- learning -----------------------------------------------------------------------------------------------------

    def learn(
        self, stores: ReplayStores, algorithm: AlgorithmConfig, generator: torch.Generator
    ) -> dict[str, float | None]:
        """Train on transitions drawn from replay buffers and raise ``version`` by one.

        There are ``utd`` updates for each chunk stored since the last call, none before ``warm_up`` chunks.

        Args:
            stores: what was seen and done.
            algorithm: its section ``off_policy``, discount and level of rewards.
            generator: source of the draws, on the CPU.

        Returns:
            metrics named ``train/...``.

        Raises:
            NonFiniteError: several steps in a row were not finite.
        """
        self.onload()
        settings = algorithm.off_policy
        optim = self.config.optim
        rates = learning_rates(optim, self.version, self.options.total_iterations, 0)
        self._set_rates(rates)
        # Counted from the beginning of the run, so that a resumed run makes exactly the updates that are due.
        due = int(settings.utd * max(0, stores.online.stored - settings.warm_up)) - self.num_updates
        totals: dict[str, float] = defaultdict(float)
        counts: dict[str, int] = defaultdict(int)
        for _ in self.steps(due if len(stores.online) else 0):
            batch = sample_transitions(stores, self.config.global_batch_size, algorithm, generator)
            metrics = self._update_critic(batch, generator)
            self.num_updates += 1
            if self.num_updates > settings.critic_warm_up and self.num_updates % settings.policy_delay == 0:
                metrics |= self._update_actor(batch, generator, algorithm)
            for name, value in metrics.items():
                totals[name] += value
                counts[name] += 1
        self.complete_update()
        result: dict[str, float | None] = {f"train/{name}": total / counts[name] for name, total in totals.items()}
        return result | {
            "train/alpha": float(self.log_alpha.detach().exp()),
            "train/num_updates": float(max(0, due)),
            "train/lr": rates.policy,
            "train/value_lr": rates.value,
        }

    def _set_rates(self, rates: LearningRates) -> None:
        self.set_learning_rates(rates, train_policy=True)
        alpha_lr = self.settings.alpha_lr or 0.0
        for group, rate in zip(self.learner.param_groups, (rates.value, alpha_lr), strict=True):
            group["lr"] = rate

    def _update_critic(self, batch: Transitions, generator: torch.Generator) -> dict[str, float]:
        settings = self.settings
        minimum = self.settings.target_q == "min"
        chosen = torch.randperm(settings.num_q, generator=generator)[: settings.subset].to(self.device)
        # Drawn on the CPU for the whole batch, so that it depends on neither micro-batches nor threads nor device.
        noise = self._noise(len(batch), generator)
        alpha = float(self.log_alpha.detach().exp())
        total = len(batch)

        def loss_of(rows: slice) -> tuple[Tensor, dict[str, Tensor]]:
            part = batch.part(rows, self.device)
            with torch.no_grad():
                seen = self.actor.features(part.next_inputs)
                actions, logprobs = self.actor.sample_chunk(seen, noise[rows].to(self.device))
                next_q = self.target(seen, actions, chosen)
                backup = (next_q, logprobs, alpha, settings.backup_entropy, minimum)
                target = soft_target(part.returns, part.discount, *backup)
            q = self.critic(self.actor.features(part.inputs), part.actions)
            # Divided by the whole batch, so that the losses of the micro-batches add up.
            loss = critic_loss(q, target).sum() / total
            return loss, {"q_mean": q.detach().mean(0).sum() / total, "target_mean": target.sum() / total}

        loss, metrics = self._backward(loss_of, total, self.critic_parameters)
        norm = self._step("critics", self.learner, self.critic_parameters, loss)
        soft_update(self.target.parameters(), self.critic.parameters(), settings.tau)
        demos = float(batch.is_demo.float().mean())
        return {"critic_loss": loss, "critic_grad_norm": norm, "demo_share": demos, **metrics}

    def _update_actor(
        self, batch: Transitions, generator: torch.Generator, algorithm: AlgorithmConfig
    ) -> dict[str, float]:
        bc_coef = algorithm.bc_coef
        noise = self._noise(len(batch), generator)
        alpha = float(self.log_alpha.detach().exp())
        total = len(batch)
        labelled = batch.label_mask.sum().clamp_min(1)

        def loss_of(rows: slice) -> tuple[Tensor, dict[str, Tensor]]:
            part = batch.part(rows, self.device)
            # The critics alone train the encoder.
            with torch.no_grad():
                seen = self.actor.features(part.inputs)
            actions, logprobs = self.actor.sample_chunk(seen, noise[rows].to(self.device))
            loss = sac(logprobs, self.critic(seen, actions), alpha, self.settings.actor_q == "min").sum() / total
            metrics = {"entropy": -logprobs.detach().sum() / total}
            if bc_coef:
                demos = {**part.inputs, "target": part.labels, "action_mask": part.label_mask}
                share = part.label_mask.sum() / labelled
                bc_loss = self.policy.sft_loss(demos)[0] * share
                loss = loss + bc_coef * bc_loss
                metrics["bc_loss"] = bc_loss.detach()
            return loss, metrics

        loss, metrics = self._backward(loss_of, total, self.actor_parameters)
        norm = self._step("actor", self.optimizer, self.actor_parameters, loss)
        if self.settings.alpha_lr is not None:
            # The temperature's loss is linear in the log-prob, so that the mean over the batch is enough.
            mean_logprob = torch.tensor(-metrics["entropy"], device=self.device)
            temperature_loss(self.log_alpha, mean_logprob, self.target_entropy).backward()
            # The gradients of the critics are cleared, so that this step moves the temperature alone.
            self.learner.step()
            self.learner.zero_grad(set_to_none=True)
        return {"policy_loss": loss, "grad_norm": norm, **metrics}

    def _noise(self, rows: int, generator: torch.Generator) -> Tensor:
        return torch.randn(rows, *self.actor.chunk_shape, generator=generator)

    def _backward(
        self,
        loss_of: Callable[[slice], tuple[Tensor, dict[str, Tensor]]],
        total: int,
        parameters: list[nn.Parameter],
    ) -> tuple[float, dict[str, float]]:
        """Add the gradients of the micro-batches; return the loss and the sums of their metrics."""
        size = self.config.micro_batch_size
        tasks = [lambda start=start: loss_of(slice(start, start + size)) for start in range(0, total, size)]
        loss, outputs = add_gradients(tasks, {p: p for p in parameters}, self.num_threads)
        return float(loss), {name: float(sum(output[name] for output in outputs)) for name in outputs[0]}

    def _step(self, who: str, optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], loss: float) -> float:
        """Clip, step unless something is not finite, and clear; return the norm of the gradients before clipping."""
        norm = float(nn.utils.clip_grad_norm_(parameters, self.config.optim.clip_grad))
        report_work()
        if math.isfinite(norm) and math.isfinite(loss):
            optimizer.step()
            self.nonfinite[who] = 0
        else:
            self.nonfinite[who] += 1
            logger.warning("loss of the %s %s, gradient norm %s: no update", who, loss, norm)
        optimizer.zero_grad(set_to_none=True)
        if self.nonfinite[who] >= MAX_NONFINITE_IN_ROW:
            raise NonFiniteError(
                f"the loss of the {who} or its gradient was not finite {self.nonfinite[who]} times in a row; the"
                " weights are as they were before",
                "lower actor.optim.lr and actor.optim.value_lr, and look for NaN in the observations and rewards",
            )
        return norm

    def offloadable(self) -> Iterator[Tensor]:
        yield from super().offloadable()
        yield from (*self.critic.parameters(), *self.target.parameters())
        for state in self.learner.state.values():
            yield from (state[key] for key in ADAM_STATE[1:] if key in state)


def _other_critics(name: str) -> CheckpointError:
    return CheckpointError(f"the checkpoint's critics do not fit: '{name}'", HINT, code="checkpoint-mismatch")


@dataclass(frozen=True)
class Transitions:
    """What an update trains on.

    Attributes:
        inputs, next_inputs: present and next inputs of the policy by name, ``[B,...]``.
        actions: ``float32[B,C,A]``, as they were executed.
        returns, discount: ``float32[B]``; see ``n_step_return``.
        is_demo: ``bool[B]``.
        labels, label_mask: ``float32[B,C,A]`` and ``bool[B,C]``, what the expert would do, where one was asked.
    """

    inputs: dict[str, Tensor]
    next_inputs: dict[str, Tensor]
    actions: Tensor
    returns: Tensor
    discount: Tensor
    is_demo: Tensor
    labels: Tensor
    label_mask: Tensor

    def __len__(self) -> int:
        return len(self.returns)

    def part(self, rows: slice, device: torch.device) -> Transitions:
        """Return some rows, on a device."""
        return self._each(lambda x: x[rows].to(device))

    def joined(self, other: Transitions) -> Transitions:
        """Return the rows of both."""
        return self._each(lambda *pair: torch.cat(pair), other)

    def _each(self, change: Callable[..., Tensor], *others: Transitions) -> Transitions:
        def of(x: Tensor | dict[str, Tensor], *rest: Any) -> Any:
            if isinstance(x, Tensor):
                return change(x, *rest)
            return {key: change(tensor, *(each[key] for each in rest)) for key, tensor in x.items()}

        return Transitions(
            **{name: of(x, *(getattr(other, name) for other in others)) for name, x in vars(self).items()}
        )


def sample_transitions(
    stores: ReplayStores, count: int, algorithm: AlgorithmConfig, generator: torch.Generator
) -> Transitions:
    """Return ``count`` transitions, ``demo_fraction`` of them from the demonstrations."""
    from_demos = round(count * algorithm.off_policy.demo_fraction) if stores.demos is not None else 0
    online = _transitions(stores.online, count - from_demos, algorithm, generator, False)
    if stores.demos is None or not from_demos:
        return online
    return online.joined(_transitions(stores.demos, from_demos, algorithm, generator, True))


def _transitions(
    buffer: ReplayBuffer, count: int, algorithm: AlgorithmConfig, generator: torch.Generator, is_demo: bool
) -> Transitions:
    places = buffer.draw(count, generator)
    seen = buffer.window(places, algorithm.off_policy.n_step)
    per_action = algorithm.reward_type == "action_level"
    rewards, lengths = chunk_return(seen.rewards, seen.valid, algorithm.gamma, per_action)
    found = n_step_return(rewards, lengths, seen.terminated, seen.acted, algorithm.gamma)
    return Transitions(
        inputs=buffer.inputs(places),
        next_inputs=buffer.inputs(places + found.offset),
        actions=buffer.column("actions", places),
        returns=found.returns,
        discount=found.discount,
        is_demo=torch.full((count,), is_demo),
        # Rows of the run itself are masked, and need any tensor of this shape.
        labels=buffer.column("labels" if is_demo else "actions", places),
        label_mask=seen.valid[:, 0] & is_demo,
    )
