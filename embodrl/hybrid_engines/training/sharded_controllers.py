"""Training in one of several controllers, each of which has a shard of the weights (FSDP2) and rows of its own."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Container, Iterator, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from embodrl.algorithms.losses import LossOutput, is_largest
from embodrl.hybrid_engines.base import EngineState
from embodrl.hybrid_engines.controllers import Controllers
from embodrl.hybrid_engines.training.data_parallel import ControllerEngine
from embodrl.hybrid_engines.training.fsdp import FsdpTrainEngine
from embodrl.hybrid_engines.training.options import EngineOptions
from embodrl.hybrid_engines.training.policy_engine import Leaves, RowsT
from embodrl.hybrid_engines.training.sharding import whole
from embodrl.models.base import VLAPolicy


class ShardedControllerEngine(ControllerEngine, FsdpTrainEngine):
    """Like ``FsdpTrainEngine``, whose processes are the controllers.

    A minibatch may be empty here, but not in all controllers. All call the same methods in the same order.

    Args:
        policy: acts, whole, on its device, and gets the trained weights by ``fetch``; a copy of it is sharded.
        options: engine options of the run.
        mesh: of all controllers.
        controllers: the controllers, of which this is one.
    """

    def __init__(self, policy: VLAPolicy, options: EngineOptions, mesh: DeviceMesh, controllers: Controllers) -> None:
        super().__init__(copy.deepcopy(policy), options, mesh)
        self.controllers = controllers
        self.acting = policy
        self._is_behind = False  # whether the acting policy is older than the trained one

    # -- gradients -----------------------------------------------------------------------------------------------------

    def _rows(self, num_rows: int) -> list[tuple[Tensor, bool]]:
        """Return the micro-batches of this controller's rows, and whether they count: all get equally many."""
        most = max(self.controllers.exchange("micro-batches", num_rows))
        size = self.config.micro_batch_size
        mine = [(rows, True) for rows in torch.arange(num_rows).split(size) if len(rows)]
        return mine + [(torch.zeros(1, dtype=torch.int64), False)] * (-(-most // size) - len(mine))

    def forward_backward(
        self,
        minibatch: RowsT,
        loss_fn: Callable[[RowsT], LossOutput],
        parameters: Sequence[nn.Parameter] | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        with self.controllers.together("loss", computes=True):
            if len(minibatch):
                return super().forward_backward(minibatch, loss_fn, parameters)
            return super().forward_backward(cast(RowsT, self.spare), _without_effect(loss_fn), parameters)

    def _clip(self, leaves: Leaves) -> float:
        with self.controllers.together("gradient norm", computes=True):
            return super()._clip(leaves)

    def evaluate_rows(self, compute: Callable[[Tensor], Tensor], chosen: Tensor, result: Tensor) -> None:
        with self.controllers.together("log-probs", computes=True):
            for rows, counts in self._rows(len(chosen)):
                outputs = compute(chosen[rows] if counts else rows)  # any row may take part without counting
                if counts:
                    result[chosen[rows]] = outputs.to(result.device)

    # -- weights and state ---------------------------------------------------------------------------------------------

    def complete_update(self) -> None:
        super().complete_update()
        self._is_behind = True

    @torch.no_grad()
    def fetch(self) -> None:
        if not self._is_behind:
            return
        targets = dict(self.acting.named_parameters())
        self.controllers.exchange("weights", None)
        with self.present(), self.controllers.together("weights", computes=True):
            for name, parameter in self.state.moments.trained.items():
                targets[name].copy_(whole(parameter))
        self._is_behind = False

    def weights(self, wanted: Container[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield whole tensors of the acting policy, brought up to date: a collective call."""
        self.fetch()
        yield from (named for named in self.acting.state_dict().items() if wanted is None or named[0] in wanted)

    def state_dict(self) -> EngineState:
        """Return weights, optimizer state and counters, in main memory; other controllers than the first get no tensor.

        A collective call.
        """
        self.fetch()
        self.controllers.exchange("state of the engine", None)
        first = self.controllers.rank == 0
        tensors: dict[str, dict[str, Tensor]] = {"policy": dict(self.acting.state_dict())} if first else {}
        with self.controllers.together("state of the engine", computes=True):
            for section, names in self.state.inventory().items():
                for name in names if section != "policy" else ():
                    for found, tensor in self.state.gather(section, [name]).items():
                        if first:
                            tensors.setdefault(section, {})[found] = tensor.cpu()
        return EngineState(tensors, self.counters())

    @torch.no_grad()
    def load_state_dict(self, saved: EngineState) -> None:
        super().load_state_dict(saved)
        mine = self.acting.state_dict()
        for name, tensor in saved.tensors["policy"].items():
            mine[name].copy_(tensor)
        self._is_behind = False


def _without_effect(loss_fn: Callable[[RowsT], LossOutput]) -> Callable[[RowsT], LossOutput]:
    """Return the loss of rows that only let this controller take part in the collective calls of the others."""

    def compute(rows: RowsT) -> LossOutput:
        output = loss_fn(rows)
        metrics = {n: torch.full_like(x, -math.inf) if is_largest(n) else x * 0.0 for n, x in output.metrics.items()}
        return LossOutput(output.loss * 0.0, metrics)

    return compute
