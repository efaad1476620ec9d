"""The common part of training backends with AdamW; each defines how weights are held and how gradients are computed."""

from __future__ import annotations

import logging
import math
from abc import abstractmethod
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from embodrl.algorithms.losses import LossOutput
from embodrl.config.schema import Config
from embodrl.data.batch import Batch
from embodrl.errors import NonFiniteError
from embodrl.hybrid_engines.base import Counters, EngineState, FileFacts, OptimizerStep, TrainEngine
from embodrl.hybrid_engines.offload import take_peak_bytes
from embodrl.hybrid_engines.training.engine_state import HeldState
from embodrl.hybrid_engines.training.options import EngineOptions
from embodrl.hybrid_engines.training.precision import Precision, not_finite, resolve_precision
from embodrl.hybrid_engines.training.schedule import LearningRates
from embodrl.hybrid_engines.training.sharding import held
from embodrl.hybrid_engines.training.side_modules import SideModules
from embodrl.hybrid_engines.training.state_shapes import StateShapes
from embodrl.models.base import VLAPolicy
from embodrl.models.common.own_critic import own_critic
from embodrl.names import import_object
from embodrl.processes.liveness import report_work
from embodrl.types import EvalOutput, SamplingParams

logger = logging.getLogger(__name__)

MAX_NONFINITE_IN_ROW = 5
RowsT = TypeVar("RowsT", bound=Batch)
"""A minibatch: a flat ``TrajectoryBatch``, or frames for supervised fine-tuning."""
Outputs = tuple[Tensor | None, ...]
Leaves = Mapping[nn.Parameter, nn.Parameter]
"""Parameter -> the optimizer's tensor for it, which holds its gradient."""


class PolicyTrainEngine(TrainEngine):
    """Gradients and optimizer steps on a policy's weights. Algorithm-agnostic: updates drive it."""

    def __init__(self, state: HeldState, options: EngineOptions) -> None:
        self.state = state
        self.policy = state.policy
        self.device = state.device
        self.memory = state.memory
        self.options = options
        self.config = options.config
        self.precision: Precision = resolve_precision(self.config.precision, self.device)

    @property
    def version(self) -> int:
        return self.state.version

    def attach(self, update: str, config: Config, on_step: Callable[[int, int], None] | None = None) -> Any:
        return import_object(update)(self, config, on_step)

    # -- defined by backends -------------------------------------------------------------------------------------------

    def run(self, compute: Callable[[VLAPolicy], Outputs]) -> Outputs:
        """Return the result of a computation with the policy while its weights are available."""
        return compute(self.policy)

    @abstractmethod
    def forward_backward(
        self,
        minibatch: RowsT,
        loss_fn: Callable[[RowsT], LossOutput],
        parameters: Sequence[nn.Parameter] | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Add the gradients of a minibatch, micro-batch by micro-batch.

        Args:
            minibatch: flat; its rows are chunks.
            loss_fn: loss of a micro-batch; the losses of a minibatch's micro-batches must sum to its loss.
            parameters: parameters that get gradients; None: all trained weights of the policy. The following step must
                use the same.

        Returns:
            the loss and metrics, summed over the micro-batches; metrics named ``..._max`` take the maximum.
        """

    @abstractmethod
    def _collect(self, parameters: Sequence[nn.Parameter] | None) -> Leaves:
        """Return parameters whose gradients are summed over all processes, and the optimizer's tensors for them."""

    @abstractmethod
    def _clip(self, leaves: Leaves) -> float:
        """Clip the leaves' gradients to ``optim.clip_grad``; return their L2 norm before."""

    @abstractmethod
    def evaluate_rows(self, compute: Callable[[Tensor], Tensor], chosen: Tensor, result: Tensor) -> None:
        """Write ``compute(rows)`` to ``result[rows]`` for the rows ``chosen``, if any, by micro-batches."""

    @abstractmethod
    def reference_policy(self) -> AbstractContextManager[Callable[..., EvalOutput]]:
        """Return a context that provides ``evaluate`` of the run's initial policy.

        Raises:
            EmbodrlError: no reference is kept.
        """

    # -- forward passes ------------------------------------------------------------------------------------------------

    def evaluate(self, forward_inputs: dict[str, Tensor], sampling: SamplingParams, **wanted: bool) -> EvalOutput:
        """Return the result of ``VLAPolicy.evaluate_actions``."""

        def compute(policy: VLAPolicy) -> Outputs:
            critic = own_critic(policy)
            if critic is None:
                output = policy.evaluate_actions(forward_inputs, sampling, **wanted)
            else:
                output = policy.evaluate_actions(forward_inputs, sampling, **wanted | {"compute_values": False})
                output = critic.evaluate(output, forward_inputs, wanted.get("compute_values", True))
            return output.logprobs, output.entropy, output.values, output.errors, output.router_loss

        logprobs, *others = self.run(compute)
        return EvalOutput(cast(Tensor, logprobs), *others)

    # -- steps ---------------------------------------------------------------------------------------------------------

    def add_modules(
        self,
        section: str,
        modules: Mapping[str, nn.Module | nn.Parameter],
        policy_parts: Mapping[str, list[nn.Parameter]],
    ) -> SideModules:
        """Train modules, identical in all processes and on the device, alongside the policy, with their own optimizer.

        ``policy_parts`` are parameters of the policy that train with them, by part name.
        """
        return self.state.add_modules(section, modules, policy_parts)

    def set_learning_rates(self, rates: LearningRates, train_policy: bool) -> None:
        """Set the rates of the policy's optimizer; without ``train_policy`` only the value head trains."""
        for group in self.state.optimizer.param_groups:
            group["lr"] = rates.policy if group["role"] == "policy" else rates.value
        # Without gradients AdamW skips the policy: neither its weights nor its moments move.
        self._let_policy_train(train_policy)

    def _let_policy_train(self, train_policy: bool) -> None:
        for parameter in self.state.policy_parameters:
            parameter.requires_grad_(train_policy)

    def optimizer_step(self, loss: Tensor, parameters: Sequence[nn.Parameter] | None = None) -> OptimizerStep:
        """Clip the gradients, update the weights if everything (``loss`` included) is finite, and clear the gradients.

        Raises:
            NonFiniteError: too many consecutive steps were not finite.
        """
        step = self._step(self.state.optimizer, parameters, loss, self.state)
        if step.applied:
            self.state.moments.round_weights()
        return step

    def modules_step(self, loss: Tensor, parameters: Sequence[nn.Parameter]) -> OptimizerStep:
        """Like ``optimizer_step``, with the optimizer of the modules alongside the policy."""
        side = self.state.side
        assert side is not None, "modules were added"
        return self._step(side.optimizer, parameters, loss, side)

    def _step(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[nn.Parameter] | None,
        loss: Tensor,
        owner: HeldState | SideModules,
    ) -> OptimizerStep:
        """Step if everything is finite; ``owner`` counts consecutive failures."""
        leaves = self._collect(parameters)
        grad_norm = self._clip(leaves)
        where = ""
        applied = math.isfinite(grad_norm) and math.isfinite(float(loss))
        if applied:
            optimizer.step()
            owner.nonfinite_in_row = 0
        else:
            owner.nonfinite_in_row += 1
            where = not_finite((name, leaf.grad) for name, leaf in _named(self.state, leaves))
            where = f"the gradients of {where}" if where else "the loss alone"
            logger.warning("loss %s, gradient norm %s: no update; not finite: %s", float(loss), grad_norm, where)
        self.state.clear_gradients()
        report_work()
        if owner.nonfinite_in_row >= MAX_NONFINITE_IN_ROW:
            raise NonFiniteError(
                f"the loss or its gradient was not finite {owner.nonfinite_in_row} times in a row, the last time"
                f" {where}; the weights are unchanged",
                "lower actor.optim.lr and actor.optim.value_lr, set actor.precision to fp32, and check the "
                "observations and rewards for NaN",
            )
        return OptimizerStep(applied, grad_norm)

    def complete_update(self) -> None:
        self.state.version += 1
        # Before a rollout or a checkpoint uses them.
        where = not_finite((name, held(parameter)) for name, parameter in self.state.moments.trained.items())
        if where:
            raise NonFiniteError(
                f"update {self.version} made weights NaN or infinite: {where}",
                "resume from the last checkpoint with a lower actor.optim.lr, or with actor.precision=fp32",
                code="weights-not-finite",
            )

    # -- memory and weights --------------------------------------------------------------------------------------------

    def take_peak_memory(self) -> int | None:
        return take_peak_bytes(self.device)

    def weights(self, wanted: Container[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights with the wanted names, or all."""
        self.onload()
        yield from (named for named in self.policy.state_dict().items() if wanted is None or named[0] in wanted)

    # -- state ---------------------------------------------------------------------------------------------------------

    def state_dict(self) -> EngineState:
        return self.state.whole()

    def load_state_dict(self, saved: EngineState) -> None:
        self.state.load(saved)

    def counters(self) -> Counters:
        return self.state.counters()

    def save_shards(self, directory: Path) -> FileFacts:
        from embodrl.hybrid_engines.training.sharded_checkpoint import save_state  # imports torch's compiler

        return save_state(self.state, directory)

    def load_shards(self, directory: Path, counters: Mapping[str, int]) -> None:
        from embodrl.hybrid_engines.training.sharded_checkpoint import load_state

        load_state(self.state, directory, counters)

    def shapes(self) -> StateShapes:
        return self.state.shapes()


def _named(state: HeldState, leaves: Leaves) -> Iterator[tuple[str, nn.Parameter]]:
    named = state.moments.trained | ({} if state.side is None else state.side.trained())
    yield from ((name, leaves[parameter]) for name, parameter in named.items() if parameter in leaves)
