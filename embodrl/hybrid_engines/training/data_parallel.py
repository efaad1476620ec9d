"""Training in one of several controllers, each of which has the whole weights and rows of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from embodrl.algorithms.losses import LossOutput, is_largest
from embodrl.data.batch import Batch
from embodrl.hybrid_engines.controllers import Controllers
from embodrl.hybrid_engines.training.native import NativeTrainEngine
from embodrl.hybrid_engines.training.options import EngineOptions
from embodrl.hybrid_engines.training.policy_engine import Leaves, PolicyTrainEngine, RowsT
from embodrl.models.base import VLAPolicy


class ControllerEngine(PolicyTrainEngine):
    """An engine of one of several controllers, whose minibatches have rows of that one only.

    ``spare`` is a row that can stand for an empty minibatch where all have to compute.
    """

    controllers: Controllers
    spare: Batch | None = None


class DataParallelTrainEngine(ControllerEngine, NativeTrainEngine):
    """Like ``NativeTrainEngine``, with losses, metrics and gradients summed over the controllers.

    Losses are divided by the counts of all their rows. A minibatch may be empty here, but not in all controllers.
    """

    def __init__(
        self,
        policy: VLAPolicy,
        options: EngineOptions,
        device: torch.device | str,
        num_threads: int,
        controllers: Controllers,
    ) -> None:
        super().__init__(policy, options, device, num_threads)
        self.controllers = controllers

    def forward_backward(
        self,
        minibatch: RowsT,
        loss_fn: Callable[[RowsT], LossOutput],
        parameters: Sequence[nn.Parameter] | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        mine: list[object] = [0.0, {}]
        if len(minibatch):
            loss, metrics = super().forward_backward(minibatch, loss_fn, parameters)
            mine = [float(loss), {name: float(value) for name, value in metrics.items()}]
        found = self.controllers.exchange("loss", mine)
        total: dict[str, list[float]] = {}
        for _, metrics in found:
            for name, value in metrics.items():
                total.setdefault(name, []).append(value)
        summed = {name: max(values) if is_largest(name) else sum(values) for name, values in total.items()}
        return torch.tensor(sum(one for one, _ in found)), {name: torch.tensor(x) for name, x in summed.items()}

    def _collect(self, parameters: Sequence[nn.Parameter] | None) -> Leaves:
        leaves = super()._collect(parameters)
        self.controllers.sum_gradients(list(leaves.values()))
        return leaves
