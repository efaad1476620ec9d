"""A training process that takes part in a collective call, or does not."""

from __future__ import annotations

import torch
import torch.distributed as dist

from embodrl.hybrid_engines.process_groups import join_mesh
from embodrl.hybrid_engines.training.sharding import DP
from embodrl.scheduler.worker import Worker, dispatch


class WaitingWorker(Worker):
    """One of two; ``channel`` ends the absence of rank 1."""

    def __init__(self, timeout_s: float) -> None:
        where = self.context.rendezvous
        self.mesh = join_mesh(torch.device("cpu"), where, self.rank, self.world_size, 1, timeout_s)

    @dispatch("one_to_all")
    def add(self, absent: bool) -> float:
        """Add up a number; with ``absent``, rank 1 waits for something else instead."""
        if absent and self.rank == 1:
            self.channel("go_on").get()
        total = torch.ones(())
        dist.all_reduce(total, group=self.mesh.get_group(DP))
        return float(total)
