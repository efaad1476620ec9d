"""Training in one of several processes that each take a share of the rows.

Every process calls the same methods with the same arguments. Losses are divided by the counts of the whole minibatch,
so that gradients and metrics are sums over the shares.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from embodrl.algorithms.losses import LossOutput, is_largest
from embodrl.data.shared_rows import share_of
from embodrl.errors import EmbodrlError
from embodrl.hybrid_engines.training.engine_state import HeldState
from embodrl.hybrid_engines.training.options import EngineOptions
from embodrl.hybrid_engines.training.policy_engine import Leaves, PolicyTrainEngine, RowsT
from embodrl.hybrid_engines.training.precision import autocast
from embodrl.hybrid_engines.training.sharding import DP, held
from embodrl.models.base import VLAPolicy
from embodrl.processes.liveness import report_work
from embodrl.types import EvalOutput

CLIP_EPS = 1e-6  # like torch.nn.utils.clip_grad_norm_


class SharedState(HeldState):
    """This process's part of a shared state, including its part of the reference weights."""

    is_shared = True

    def __init__(self, policy: VLAPolicy, options: EngineOptions, device: torch.device | str) -> None:
        super().__init__(policy, options, device)
        # Copies: the optimizer updates the weights in place.
        kept = self.policy_parameters if options.keep_reference else None
        self.reference = None if kept is None else [held(p).detach().clone() for p in kept]

    def _kept_of_reference(self) -> list[Tensor]:
        return self.reference or []

    @torch.no_grad()
    def swap_reference(self) -> None:
        """Swap the reference weights with the policy's.

        Raises:
            EmbodrlError: no reference is kept.
        """
        if self.reference is None:
            raise EmbodrlError(
                "the engine keeps no reference policy", "make it with keep_reference=True", code="reference-missing"
            )
        for parameter, other in zip(self.policy_parameters, self.reference, strict=True):
            mine = held(parameter)
            kept = mine.clone()
            # In place: the optimizer and FSDP hold these very tensors.
            mine.copy_(other)
            other.copy_(kept)


StateT = TypeVar("StateT", bound=SharedState)


class SharedTrainEngine(PolicyTrainEngine, Generic[StateT]):
    """AdamW on this process's part of the weights, with gradients of its share (``mesh[DP]``) of the rows."""

    state: StateT

    def __init__(self, state: StateT, options: EngineOptions, mesh: DeviceMesh) -> None:
        super().__init__(state, options)
        self.mesh = mesh
        self.group = mesh.get_group(DP)
        self.num_shares = mesh[DP].size()
        self.share = mesh.get_local_rank(DP)

    def _before_backward(self, last: bool) -> None:
        """Prepare for the gradients of a micro-batch; ``last`` marks the last one of a minibatch."""

    # -- gradients -----------------------------------------------------------------------------------------------------

    def _rows(self, num_rows: int) -> list[tuple[Tensor, bool]]:
        """Return this process's micro-batches, and whether they count: all processes get equally many.

        Gathering weights is a collective call, so a process without rows runs the first micro-batch as a dummy.
        """
        largest, own = (share_of(num_rows, self.num_shares, share) for share in (0, self.share))
        size = self.config.micro_batch_size
        mine = [(rows, True) for rows in own.split(size) if len(rows)]
        return mine + [(torch.zeros(1, dtype=torch.int64), False)] * (len(largest.split(size)) - len(mine))

    def forward_backward(
        self,
        minibatch: RowsT,
        loss_fn: Callable[[RowsT], LossOutput],
        parameters: Sequence[nn.Parameter] | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        total = torch.zeros((), device=self.device)
        metrics: dict[str, Tensor] = {}
        parts = self._rows(len(minibatch))
        for index, (rows, counts) in enumerate(parts):
            self._before_backward(last=index == len(parts) - 1)
            with autocast(self.precision, self.device):
                output = loss_fn(minibatch[rows].to(self.device, non_blocking=True))
            # Zero, not omitted: the backward pass of every process takes part in collective calls.
            loss = output.loss if counts else output.loss * 0.0
            loss.backward()
            report_work()
            total += loss.detach()
            for name, value in output.metrics.items():
                if is_largest(name):
                    metrics[name] = torch.maximum(metrics.get(name, value), value)
                else:
                    metrics[name] = metrics.get(name, 0.0) + (value if counts else value * 0.0)
        return self._sum_over_shares(total, metrics)

    def _sum_over_shares(self, loss: Tensor, metrics: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return loss and metrics of the whole minibatch, identical in all processes."""
        largest = [name for name in metrics if is_largest(name)]
        summed = [name for name in metrics if not is_largest(name)]
        # float64, so that the rounding of the sum over processes is negligible.
        values = torch.stack([loss, *(metrics[name].detach() for name in summed)]).double()
        dist.all_reduce(values, group=self.group)
        if largest:
            tops = torch.stack([metrics[name].detach().double() for name in largest])
            dist.all_reduce(tops, dist.ReduceOp.MAX, group=self.group)
            values = torch.cat([values, tops])
        names = [*summed, *largest]
        return values[0].float(), dict(zip(names, values[1:].float(), strict=True))

    def _num_copies(self, parameter: nn.Parameter) -> int:
        """Return the number of processes that hold the same part of a parameter."""
        raise NotImplementedError

    def _collect(self, parameters: Sequence[nn.Parameter] | None) -> Leaves:
        side = self.state.side
        if side is not None and parameters is not None:
            for parameter in side.own_parameters(parameters):
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad, group=self.group)
        return self._collect_policy(parameters)

    def _collect_policy(self, parameters: Sequence[nn.Parameter] | None) -> Leaves:
        """Split ``parameters`` into the policy's, with collected gradients, and the others, unchanged."""
        raise NotImplementedError

    def _clip(self, leaves: Leaves) -> float:
        square = torch.zeros((), dtype=torch.float64, device=self.device)
        for parameter, leaf in leaves.items():
            if leaf.grad is not None:
                total = leaf.grad.detach().float().square().sum(dtype=torch.float64)
                # A part held by several processes must count once in the sum over all of them.
                square += total.to(self.device) / self._num_copies(parameter)
        dist.all_reduce(square)
        norm = math.sqrt(float(square)) if torch.isfinite(square) else float(square)
        factor = self.config.optim.clip_grad / (norm + CLIP_EPS)
        if math.isfinite(norm) and factor < 1.0:  # otherwise the non-finite ones can still be named
            for leaf in leaves.values():
                if leaf.grad is not None:
                    leaf.grad.mul_(factor)
        return norm

    # -- log-probs -----------------------------------------------------------------------------------------------------

    def evaluate_rows(self, compute: Callable[[Tensor], Tensor], chosen: Tensor, result: Tensor) -> None:
        if not len(chosen):  # in no process
            return
        found = result.new_zeros(len(chosen), *result.shape[1:], device=self.device)
        for rows, counts in self._rows(len(chosen)):
            outputs = compute(chosen[rows])
            if counts:
                found[rows.to(self.device)] = outputs.to(self.device)
        # Each process has filled its own rows and left the others 0, so the sum is complete.
        dist.all_reduce(found, group=self.group)
        result[chosen] = found.to(result.device)

    @contextlib.contextmanager
    def reference_policy(self) -> Iterator[Callable[..., EvalOutput]]:
        self.onload()
        self.state.swap_reference()
        try:
            yield self.evaluate
        finally:
            self.state.swap_reference()
