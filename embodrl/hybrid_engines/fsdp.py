"""Training in several processes that hold a part of the weights each (FSDP2), with tensor parallelism if asked for.

Every process calls the same methods with the same arguments. Of each minibatch it takes its share of the rows; losses
are divided by the counts of the whole minibatch, so that gradients and metrics are sums over the processes.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from embodrl.algorithms.losses import LossOutput
from embodrl.config.schema import ActorConfig, AlgorithmConfig
from embodrl.data.trajectory import TrajectoryBatch
from embodrl.errors import EmbodrlError
from embodrl.hybrid_engines.base import EngineState
from embodrl.hybrid_engines.objective import is_largest
from embodrl.hybrid_engines.policy_engine import PolicyTrainEngine
from embodrl.hybrid_engines.precision import autocast
from embodrl.hybrid_engines.sharding import DP, TP, fsdp_modules, held, like, num_copies, part_of, shard_policy, whole
from embodrl.hybrid_engines.tensor_parallel import cut_layers
from embodrl.models.base import VLAPolicy
from embodrl.types import EvalOutput, SamplingParams

CLIP_EPS = 1e-6  # as torch.nn.utils.clip_grad_norm_


class FsdpTrainEngine(PolicyTrainEngine):
    """AdamW on the parts of the weights that this process holds.

    Args:
        policy: whole, the same in all processes, on the device; cut up in place, and only to be used by the engine
            from then on.
        config: batch sizes over all processes but ``micro_batch_size``, which is that of one; precision, optimizer.
        total_iterations: length of the run, for the learning-rate schedule.
        mesh: of the device that the policy trains on, with the dimensions ``dp`` and ``tp``.
        keep_reference: keep the weights as they are now; a process keeps its part of what trains.
        may_be_stale: see ``PolicyTrainEngine``.
    """

    def __init__(
        self,
        policy: VLAPolicy,
        config: ActorConfig,
        total_iterations: int,
        mesh: DeviceMesh,
        keep_reference: bool = False,
        may_be_stale: bool = False,
    ) -> None:
        device = policy.device
        self.mesh = mesh
        self.group = mesh.get_group(DP)
        self.num_shares, self.share = mesh[DP].size(), mesh.get_local_rank(DP)
        self.tensor_group = mesh.get_group(TP)
        partial = set(cut_layers(policy, mesh[TP])) if mesh[TP].size() > 1 else set[str]()
        self.module = shard_policy(policy, mesh, config.fsdp)
        self.partial = [p for name, p in policy.named_parameters() if name in partial]
        self.policy_trains = True
        super().__init__(policy, config, total_iterations, device, may_be_stale)
        self.reference = [held(p).detach().clone() for p in self.policy_parameters] if keep_reference else None

    def _make_leaves(self) -> dict[nn.Parameter, nn.Parameter]:
        # AdamW works element by element, so plain tensors of the parts do, whatever they are cut along.
        trained = (*self.policy_parameters, *self.value_parameters)
        return {p: nn.Parameter(held(p).detach()) for p in trained}

    def evaluate(self, forward_inputs: dict[str, Tensor], sampling: SamplingParams, **wanted: bool) -> EvalOutput:
        logprobs, entropy, values = self.module(forward_inputs, sampling, wanted)
        if not torch.is_grad_enabled():
            # Without a backward pass nothing else gives up what was gathered, and it would be used again.
            for part in fsdp_modules(self.module):
                part.reshard()
        return EvalOutput(logprobs, entropy, values)

    def _let_policy_train(self, train_policy: bool) -> None:
        self.policy_trains = train_policy

    # -- gradients ----------------------------------------------------------------------------------------------------

    def _rows(self, num_rows: int) -> list[tuple[Tensor, bool]]:
        """Return the micro-batches of this process, and whether they count: all processes get as many.

        Gathering weights is a collective call, so that a process without rows runs the first one for nothing.
        """
        shares = [
            rows.split(self.config.micro_batch_size) for rows in torch.arange(num_rows).tensor_split(self.num_shares)
        ]
        mine = [(rows, True) for rows in shares[self.share] if len(rows)]
        return mine + [(torch.zeros(1, dtype=torch.int64), False)] * (len(shares[0]) - len(mine))

    def forward_backward(
        self, minibatch: TrajectoryBatch, loss_fn: Callable[[TrajectoryBatch], LossOutput]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        root = cast(FSDPModule, self.module)
        total = torch.zeros((), device=self.device)
        metrics: dict[str, Tensor] = {}
        parts = self._rows(len(minibatch))
        for index, (rows, counts) in enumerate(parts):
            last = index == len(parts) - 1
            root.set_requires_gradient_sync(last or self.config.fsdp.reduce_every_micro_batch)
            with autocast(self.precision, self.device):
                output = loss_fn(minibatch[rows].to(self.device, non_blocking=True))
            loss = output.loss if counts else output.loss * 0.0
            loss.backward()
            total += loss.detach()
            for name, value in output.metrics.items():
                if is_largest(name):
                    metrics[name] = torch.maximum(metrics.get(name, value), value)
                else:
                    metrics[name] = metrics.get(name, 0.0) + (value if counts else value * 0.0)
        return self._sum_over_shares(total, metrics)

    def _sum_over_shares(self, loss: Tensor, metrics: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return loss and metrics of the whole minibatch, the same in all processes."""
        largest = [name for name in metrics if is_largest(name)]
        summed = [name for name in metrics if not is_largest(name)]
        values = torch.stack([loss, *(metrics[name].detach() for name in summed)]).double()
        dist.all_reduce(values, group=self.group)
        if largest:
            tops = torch.stack([metrics[name].detach().double() for name in largest])
            dist.all_reduce(tops, dist.ReduceOp.MAX, group=self.group)
            values = torch.cat([values, tops])
        names = [*summed, *largest]
        return values[0].float(), dict(zip(names, values[1:].float(), strict=True))

    def _clip_gradients(self) -> float:
        if not self.policy_trains:
            for parameter in self.policy_parameters:
                parameter.grad = None
        for parameter in self.partial:
            if parameter.grad is not None:
                dist.all_reduce(held(parameter.grad), group=self.tensor_group)
        square = torch.zeros((), dtype=torch.float64, device=self.device)
        for parameter, leaf in self.leaves.items():
            leaf.grad = None if parameter.grad is None else held(parameter.grad)
            if leaf.grad is not None:
                copies = num_copies(parameter, dist.get_world_size())
                square += leaf.grad.detach().float().square().sum(dtype=torch.float64).to(self.device) / copies
        dist.all_reduce(square)
        norm = math.sqrt(float(square)) if torch.isfinite(square) else float(square)
        factor = self.config.optim.clip_grad / (norm + CLIP_EPS)
        if factor < 1.0:
            for leaf in self.leaves.values():
                if leaf.grad is not None:
                    leaf.grad.mul_(factor)
        return norm

    def _clear_gradients(self) -> None:
        super()._clear_gradients()
        for parameter in self.leaves:
            parameter.grad = None

    # -- log-probs ----------------------------------------------------------------------------------------------------

    def _evaluate_rows(self, compute: Callable[[Tensor], Tensor], chosen: Tensor, result: Tensor) -> None:
        found = result.new_zeros(len(chosen), *result.shape[1:], device=self.device)
        for rows, counts in self._rows(len(chosen)):
            outputs = compute(chosen[rows])
            if counts:
                found[rows.to(self.device)] = outputs.to(self.device)
        dist.all_reduce(found, group=self.group)
        result[chosen] = found.to(result.device)

    def reference_logprobs(self, batch: TrajectoryBatch, algorithm: AlgorithmConfig) -> Tensor:
        with self._weights_of_reference():
            return self._logprobs(self.evaluate, batch, algorithm)

    @contextlib.contextmanager
    def _weights_of_reference(self) -> Iterator[None]:
        """Put the weights of the reference in the place of the policy's."""
        if self.reference is None:
            raise EmbodrlError("the engine keeps no reference policy", "make it with keep_reference=True")
        self._swap(self.reference)
        try:
            yield
        finally:
            self._swap(self.reference)

    @torch.no_grad()
    def _swap(self, others: list[Tensor]) -> None:
        for parameter, other in zip(self.policy_parameters, others, strict=True):
            mine = held(parameter)
            kept = mine.clone()
            mine.copy_(other)
            other.copy_(kept)

    # -- state --------------------------------------------------------------------------------------------------------

    def reference_weights(self) -> dict[str, Tensor]:
        if self.reference is None:
            return {}
        names = {id(p): name for name, p in self.policy.named_parameters()}
        pairs = zip(self.policy_parameters, self.reference, strict=True)
        return {names[id(p)]: like(kept, p) for p, kept in pairs}

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self.policy.state_dict().items():
            yield name, whole(tensor)

    def _moment(self, parameter: nn.Parameter, key: str) -> Tensor:
        moment = super()._moment(parameter, key)
        return moment if key == "step" else like(moment, parameter)

    def state_dict(self) -> EngineState:
        """Return weights, optimizer state and counters in one piece: a collective call. What is whole is not copied."""
        shards = self.shards()
        tensors = {section: {n: whole(t) for n, t in parts.items()} for section, parts in shards.items()}
        return EngineState(tensors, self.counters())

    def _part(self, whole: Tensor, like: Tensor) -> Tensor:
        return part_of(whole, like)

    def _assign(self, target: Tensor, whole: Tensor) -> None:
        held(target).copy_(part_of(whole, target))
