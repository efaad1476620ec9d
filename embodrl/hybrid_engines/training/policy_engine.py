"""What training backends with AdamW share; each says how weights are held and how gradients come about."""

from __future__ import annotations

import logging
import math
from abc import abstractmethod
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from embodrl.algorithms.advantages import Advantages
from embodrl.algorithms.losses import LossOutput
from embodrl.config.schema import ActorConfig, AlgorithmConfig, Config
from embodrl.data.batch import Batch
from embodrl.data.trajectory import TrajectoryBatch
from embodrl.errors import NonFiniteError
from embodrl.hybrid_engines.base import OptimizerStep, TrainEngine
from embodrl.hybrid_engines.offload import Offload, optimizer_tensors, take_peak_bytes
from embodrl.hybrid_engines.training.adamw import fused_adamw
from embodrl.hybrid_engines.training.engine_state import HeldState
from embodrl.hybrid_engines.training.objective import (
    make_imitation_loss,
    make_weighted_loss,
)
from embodrl.hybrid_engines.training.on_policy import OnPolicyUpdate
from embodrl.hybrid_engines.training.precision import Precision, not_finite, resolve_precision
from embodrl.hybrid_engines.training.schedule import LearningRates
from embodrl.hybrid_engines.training.sharding import held
from embodrl.models.base import VLAPolicy
from embodrl.processes.liveness import report_work
from embodrl.types import EvalOutput, SamplingParams

logger = logging.getLogger(__name__)

MAX_NONFINITE_IN_ROW = 5
VALUE_GROUP = "value_head"
RowsT = TypeVar("RowsT", bound=Batch)
"""A minibatch: a flat ``TrajectoryBatch``, or the frames of supervised fine-tuning."""


@dataclass(frozen=True)
class EngineOptions:
    """What a run asks of its train engine.

    Attributes:
        config: precision, optimizer, and batch sizes over all processes but ``micro_batch_size``, which is that of one.
        total_iterations: length of the run, for the learning-rate schedule.
        keep_reference: keep the weights that train as they are now; a process keeps its part.
        may_be_stale: rollouts may come from older policies; every update then reports how old they are.
    """

    config: ActorConfig
    total_iterations: int
    keep_reference: bool = False
    may_be_stale: bool = False

    @classmethod
    def of(cls, config: Config) -> EngineOptions:
        """Return the options of a run."""
        kept = config.algorithm.kl.coef > 0
        stale = config.runner.max_staleness > 0
        return cls(config.actor, config.runner.max_iterations, kept, stale)


class PolicyTrainEngine(TrainEngine):
    """AdamW on the weights of a policy.

    Args:
        policy: its ``trainable_groups`` train, the rest stays as it is; on the device, and already sharded if it is
            to be.
        options: what the run asks for.
        device: device on which the policy trains.

    Attributes:
        memory: what ``offload`` takes off the device.
        shares_weights: what acts uses the weights themselves, so that they stay on the device.
        is_shared: other processes of the default group have the rest of the state.
        draw_demos: returns inputs of ``sft_loss``; every step of ``update`` that trains the policy then imitates some,
            too, with the weight ``algorithm.bc_coef``.
        make_state: class of the state, as this backend holds it.
        on_policy: updates by rollouts.
    """

    shares_weights = False
    is_shared = False
    draw_demos: Callable[[], Batch] | None = None
    make_state: Callable[[Any], HeldState[Any]] = HeldState

    def __init__(self, policy: VLAPolicy, options: EngineOptions, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self.policy = policy
        self.options = options
        self.config = options.config
        self.precision: Precision = resolve_precision(self.config.precision, self.device)
        self.version = self.nonfinite_in_row = 0
        groups = policy.trainable_groups()
        self.policy_parameters = [p for name, group in groups.items() if name != VALUE_GROUP for p in group]
        self.value_parameters = list(groups.get(VALUE_GROUP, []))
        self.leaves = self._make_leaves()
        self.masters = self._make_masters()
        # Before the optimizer is built, which must change the float32 copies.
        self.leaves |= self.masters
        self.optimizer = self._build_optimizer()
        self.memory = Offload(self.offloadable)
        self.state = self.make_state(self)
        self.on_policy = OnPolicyUpdate(self)

    # -- what a backend defines ---------------------------------------------------------------------------------------

    def _make_leaves(self) -> dict[nn.Parameter, nn.Parameter]:
        """Return, for every parameter that trains, what the optimizer changes: the same memory."""
        return {p: p for p in (*self.policy_parameters, *self.value_parameters)}

    def _make_masters(self) -> dict[nn.Parameter, nn.Parameter]:
        """Return float32 copies of what trains in half precision: the optimizer changes these.

        Micikevicius et al. 2018, "Mixed Precision Training", arXiv 1710.03740, section 3.1: an update below 2^-9 of a
        bf16 weight rounds to none. The weights are rounded from their copies after every step.
        """
        if self.config.optim.master_weights is False:
            return {}
        halves = [p for p in self.leaves if p.dtype.itemsize < torch.float32.itemsize]
        return {p: nn.Parameter(held(p).detach().float()) for p in halves}

    @torch.no_grad()
    def _round_masters(self) -> None:
        for parameter, master in self.masters.items():
            held(parameter).copy_(master)

    def evaluate(self, forward_inputs: dict[str, Tensor], sampling: SamplingParams, **wanted: bool) -> EvalOutput:
        """Return what ``VLAPolicy.evaluate_actions`` does."""
        return self.policy.evaluate_actions(forward_inputs, sampling, **wanted)

    @abstractmethod
    def forward_backward(
        self, minibatch: RowsT, loss_fn: Callable[[RowsT], LossOutput]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Add the gradients of a minibatch, micro-batch by micro-batch.

        Args:
            minibatch: flat; its rows are chunks.
            loss_fn: loss of a micro-batch; those of a minibatch must add up to its loss.

        Returns:
            the loss and metrics, summed over the micro-batches; of metrics named ``..._max`` the largest.
        """

    @abstractmethod
    def _clip_gradients(self) -> float:
        """Scale the gradients of the leaves to ``optim.clip_grad``; return their L2 norm before."""

    @abstractmethod
    def evaluate_rows(self, compute: Callable[[Tensor], Tensor], chosen: Tensor, result: Tensor) -> None:
        """Write ``compute(rows)`` to ``result[rows]`` for the rows ``chosen``, a micro-batch at a time."""

    # -- the update ---------------------------------------------------------------------------------------------------

    def _build_optimizer(self) -> torch.optim.AdamW:
        optim = self.config.optim
        param_groups: list[dict[str, object]] = []
        for role, parameters in (("policy", self.policy_parameters), ("value", self.value_parameters)):
            # Biases, norms and layer scales are vectors; decaying them only shrinks activations.
            for decay, chosen in (
                (optim.weight_decay, [self.leaves[p] for p in parameters if p.ndim > 1]),
                (0.0, [self.leaves[p] for p in parameters if p.ndim <= 1]),
            ):
                if chosen:
                    param_groups.append({"params": chosen, "weight_decay": decay, "role": role})
        return fused_adamw(param_groups, optim.betas, optim.eps)

    def update(
        self,
        batch: TrajectoryBatch,
        advantages: Advantages,
        algorithm: AlgorithmConfig,
        generator: torch.Generator,
    ) -> dict[str, float]:
        return self.on_policy.update(batch, advantages, algorithm, generator)

    def proximal(
        self, batch: TrajectoryBatch, algorithm: AlgorithmConfig, every_chunk: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        return self.on_policy.proximal(batch, algorithm, every_chunk)

    def sft_loss(self, inputs: dict[str, Tensor], label_smoothing_bins: float) -> tuple[Tensor, dict[str, Tensor]]:
        """Return what ``VLAPolicy.sft_loss`` does."""
        return self.policy.sft_loss(inputs, label_smoothing_bins)

    def imitate(self, batch: Batch, learning_rate: float, label_smoothing_bins: float) -> dict[str, float]:
        metrics = self.imitation_step(batch, learning_rate, label_smoothing_bins)
        self.complete_update()
        return metrics | {"lr": learning_rate}

    def imitation_step(
        self, batch: Batch, learning_rate: float, label_smoothing_bins: float, num_actions: float | None = None
    ) -> dict[str, float]:
        self.onload()
        self.set_learning_rates(LearningRates(policy=learning_rate, value=0.0), train_policy=True)
        if num_actions is None:
            loss, scalars = self.imitation_gradients(batch, label_smoothing_bins)
        else:
            loss_fn = make_weighted_loss(self.sft_loss, num_actions, label_smoothing_bins)
            loss, scalars = self.forward_backward(batch, loss_fn)
            scalars = {"loss": loss, **scalars}
        step = self.optimizer_step(loss)
        return {name: float(value) for name, value in scalars.items()} | {"grad_norm": step.grad_norm}

    def imitation_gradients(
        self, batch: Batch, label_smoothing_bins: float = 0.0, weight: float = 1.0
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Add the gradients of ``weight`` times the imitation loss; return that loss and, without weight, scalars."""
        total = batch["action_mask"].sum().to(self.device)
        loss_fn = make_imitation_loss(self.sft_loss, total, label_smoothing_bins, weight)
        loss, scalars = self.forward_backward(batch, loss_fn)
        return loss, {"loss": loss / weight, **scalars}

    def set_learning_rates(self, rates: LearningRates, train_policy: bool) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rates.policy if group["role"] == "policy" else rates.value
        # Without gradients AdamW passes the policy over: neither its weights nor its moments move.
        self._let_policy_train(train_policy)

    def _let_policy_train(self, train_policy: bool) -> None:
        """Give the policy gradients, or leave it without."""
        for parameter in self.policy_parameters:
            parameter.requires_grad_(train_policy)

    def optimizer_step(self, loss: Tensor) -> OptimizerStep:
        """Clip the gradients, update the weights unless something is not finite, and clear the gradients.

        Args:
            loss: scalar; not finite means no update.

        Raises:
            NonFiniteError: the last steps were all not finite.
        """
        grad_norm = self._clip_gradients()
        where = ""
        applied = math.isfinite(grad_norm) and math.isfinite(float(loss))
        if applied:
            self.optimizer.step()
            self._round_masters()
            self.nonfinite_in_row = 0
        else:
            self.nonfinite_in_row += 1
            leaves = {name: self.leaves.get(parameter) for name, parameter in self.state.trained().items()}
            where = not_finite((name, leaf.grad) for name, leaf in leaves.items() if leaf is not None)
            where = f"the gradients of {where}" if where else "the loss alone"
            logger.warning("loss %s, gradient norm %s: no update; not finite: %s", float(loss), grad_norm, where)
        self.clear_gradients()
        report_work()
        if self.nonfinite_in_row >= MAX_NONFINITE_IN_ROW:
            raise NonFiniteError(
                f"the loss or its gradient was not finite {self.nonfinite_in_row} times in a row, the last time"
                f" {where}; the weights are as they were before",
                "lower actor.optim.lr and actor.optim.value_lr, set actor.precision to fp32, and look for NaN in the "
                "observations and rewards",
            )
        return OptimizerStep(applied, grad_norm)

    def clear_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def complete_update(self) -> None:
        self.version += 1
        # Before a rollout or a checkpoint gets them.
        where = not_finite((name, held(parameter)) for name, parameter in self.state.trained().items())
        if where:
            raise NonFiniteError(
                f"update {self.version} made weights NaN or infinite: {where}",
                "resume from the last checkpoint with a lower actor.optim.lr, or with actor.precision=fp32",
                code="weights-not-finite",
            )

    # -- memory -------------------------------------------------------------------------------------------------------

    def offloadable(self) -> Iterator[Tensor]:
        """Yield what only training needs: moments, gradients, the reference and, unless it is what acts, weights."""
        yield from optimizer_tensors(self.optimizer)
        yield from self._kept_of_reference()
        yield from self.masters.values()
        if not self.shares_weights:
            yield from self.policy.parameters()
            yield from self.policy.buffers()
            yield from self.leaves.values()

    def _kept_of_reference(self) -> Iterable[Tensor]:
        """Return the memory of ``reference_weights``."""
        return self.reference_weights().values()

    def take_peak_memory(self) -> int | None:
        return take_peak_bytes(self.device)

    # -- weights ------------------------------------------------------------------------------------------------------

    def weights(self, wanted: Container[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Those of the wanted names, or all."""
        self.onload()
        yield from (named for named in self.policy.state_dict().items() if wanted is None or named[0] in wanted)

    @abstractmethod
    def reference_weights(self) -> dict[str, Tensor]:
        """Return the weights of the reference that are not the policy's own; {} without a reference."""
