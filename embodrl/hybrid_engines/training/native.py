"""Training in one process, on a CPU or one GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from embodrl.algorithms.losses import LossOutput, is_largest
from embodrl.errors import EmbodrlError
from embodrl.hybrid_engines.copies import frozen_copy
from embodrl.hybrid_engines.training.engine_state import HeldState
from embodrl.hybrid_engines.training.options import EngineOptions
from embodrl.hybrid_engines.training.parallel import add_gradients, on_threads
from embodrl.hybrid_engines.training.policy_engine import Leaves, PolicyTrainEngine, RowsT
from embodrl.hybrid_engines.training.precision import autocast
from embodrl.models.base import VLAPolicy
from embodrl.processes.liveness import report_work
from embodrl.types import EvalOutput

Differentiated = tuple[LossOutput, tuple[Tensor | None, ...]]
"""Loss of a micro-batch, and the gradients of the trained weights."""
# Inference comes first: a delayed chunk stalls simulators, a delayed micro-batch stalls nothing.
NICENESS_BESIDE_ROLLOUTS = 10


class NativeState(HeldState):
    """State in one process; the reference is a policy that shares the frozen weights."""

    def __init__(
        self, policy: VLAPolicy, options: EngineOptions, device: torch.device | str, shares_weights: bool
    ) -> None:
        super().__init__(policy, options, device, shares_weights)
        self.reference = frozen_copy(policy, self.policy_parameters) if options.keep_reference else None

    def reference_weights(self) -> dict[str, Tensor]:
        if self.reference is None:
            return {}
        trained = {id(p) for p in self.policy_parameters}
        names = [name for name, p in self.policy.named_parameters() if id(p) in trained]
        frozen = dict(self.reference.named_parameters())
        return {name: frozen[name].data for name in names}


class NativeTrainEngine(PolicyTrainEngine):
    """AdamW on the policy's own weights, which the rollout may use as well.

    Args:
        policy: its ``trainable_groups`` train, other weights are fixed; moved to the device.
        options: engine options of the run. A reference costs as much memory again as the trained weights; the rest is
            shared. Stale rollouts are collected during training: on a CPU, inference and simulators then have priority
            over training.
        device: device on which the policy trains.
        num_threads: micro-batches computed in parallel on a CPU.
        shares_weights: the rollout uses the same tensors; False for a process that only trains.
    """

    state: NativeState

    def __init__(
        self,
        policy: VLAPolicy,
        options: EngineOptions,
        device: torch.device | str,
        num_threads: int = 1,
        shares_weights: bool = True,
    ) -> None:
        super().__init__(NativeState(policy.to(device), options, device, shares_weights), options)
        self.num_threads = num_threads if self.device.type == "cpu" else 1
        self.niceness = NICENESS_BESIDE_ROLLOUTS if options.may_be_stale and self.device.type == "cpu" else 0

    @contextmanager
    def reference_policy(self) -> Iterator[Callable[..., EvalOutput]]:
        if self.state.reference is None:
            raise EmbodrlError(
                "the engine keeps no reference policy", "make it with keep_reference=True", code="reference-missing"
            )
        yield self.state.reference.evaluate_actions

    def forward_backward(
        self,
        minibatch: RowsT,
        loss_fn: Callable[[RowsT], LossOutput],
        parameters: Sequence[nn.Parameter] | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        # While only the critic trains, the policy needs no gradients.
        trained = [p for p in self._named_or_all(parameters) if p.requires_grad]

        def differentiate(rows: slice) -> Differentiated:
            with autocast(self.precision, self.device):
                output = loss_fn(minibatch[rows].to(self.device, non_blocking=True))
            report_work()
            # Not ``backward``: threads would add to the same gradients, in completion order.
            gradients = torch.autograd.grad(output.loss, trained, allow_unused=True)
            return LossOutput(output.loss.detach(), output.metrics), gradients

        size = self.config.micro_batch_size
        chosen = [slice(start, start + size) for start in range(0, len(minibatch), size)]
        if self.num_threads <= 1 and not self.niceness:
            results = list(map(differentiate, chosen))
        else:
            tasks = [partial(differentiate, rows) for rows in chosen]
            results = on_threads(tasks, self.num_threads, self.niceness)
        add_gradients([gradients for _, gradients in results], [self.state.leaves.get(p, p) for p in trained])
        metrics: dict[str, Tensor] = {}
        for output, _ in results:
            for name, value in output.metrics.items():
                known = metrics.get(name)
                both = torch.maximum if is_largest(name) else torch.add
                metrics[name] = value if known is None else both(known, value)
        return torch.stack([output.loss for output, _ in results]).sum(), metrics

    def _named_or_all(self, parameters: Sequence[nn.Parameter] | None) -> Sequence[nn.Parameter]:
        return (*self.state.policy_parameters, *self.state.value_parameters) if parameters is None else parameters

    def evaluate_rows(self, compute: Callable[[Tensor], Tensor], chosen: Tensor, result: Tensor) -> None:
        parts = [rows for rows in chosen.split(self.config.micro_batch_size) if len(rows)]
        outputs = on_threads([lambda rows=rows: compute(rows) for rows in parts], self.num_threads, self.niceness)
        for rows, logprobs in zip(parts, outputs, strict=True):
            result[rows] = logprobs

    def _collect(self, parameters: Sequence[nn.Parameter] | None) -> Leaves:
        if parameters is not None:
            return {p: self.state.leaves.get(p, p) for p in parameters}
        # In optimizer order, in which their norms are summed.
        owner = {leaf: p for p, leaf in self.state.leaves.items()}
        stepped = [leaf for group in self.state.optimizer.param_groups for leaf in group["params"]]
        return {owner[leaf]: leaf for leaf in stepped}

    def _clip(self, leaves: Leaves) -> float:
        trained = [leaf for leaf in leaves.values() if leaf.grad is not None]
        norm = nn.utils.get_total_norm([leaf.grad for leaf in trained if leaf.grad is not None])
        if torch.isfinite(norm):  # else the gradients stay unchanged, so that the non-finite ones can be named
            nn.utils.clip_grads_with_norm_(trained, self.config.optim.clip_grad, norm)
        return float(norm)
