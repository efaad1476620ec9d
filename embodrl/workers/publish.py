"""Weights of a run, on disk for rollouts outside of it."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

from embodrl.errors import WeightSyncError
from embodrl.hybrid_engines.weight_sync.buckets import trained_names
from embodrl.hybrid_engines.weight_sync.disk import DiskSender
from embodrl.models.base import VLAPolicy

logger = logging.getLogger(__name__)

WEIGHTS_DIR = "weights"
KEPT = 2


class WeightPublisher:
    """Writes every version to ``RUN/weights``: the first one whole, then what trains. A disk that is full costs a
    version, not the run.

    Args:
        run_dir: of the run.
        policy: that trains.
        version: updates that its weights have seen; what an earlier process wrote after them is removed.
    """

    def __init__(self, run_dir: Path, policy: VLAPolicy, version: int) -> None:
        self._sender = DiskSender(run_dir / WEIGHTS_DIR, trained_names(policy), keep=KEPT)
        self._sender.drop_newer(version - 1)
        self._failed = False

    def publish(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Write a version, unless it is there already."""
        if self._sender.version is not None and version <= self._sender.version:
            return
        try:
            self._sender.send(weights, version, full=self._failed)
            self._failed = False
        except WeightSyncError as error:
            self._failed = True
            logger.error("%s", error)
