"""Batches of frames from the episodes in a store."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from embodrl.config.schema import Config
from embodrl.data.imitation import FrameBatches
from embodrl.errors import StoreError
from embodrl.fields import Fields
from embodrl.store.config import store_settings
from embodrl.store.shards import ShardReader
from embodrl.types import Observation


class FollowedBatches:
    """Batches of frames from a growing store of episodes, as ``FrameBatches``.

    Args:
        horizon: actions that the policy learns per frame.
        check: called with the first episodes; raises if they do not fit the policy.
    """

    def __init__(self, reader: ShardReader, config: Config, horizon: int, check: Callable[[Any], None]) -> None:
        self._reader = reader
        self._config = config
        self._horizon = horizon
        self._check = check
        self._batches: FrameBatches | None = None
        self._rng = dict[str, Any]()

    @property
    def num_episodes(self) -> int:
        """Episodes read, each counted once."""
        return len(self._reader.ids)

    @property
    def is_ready(self) -> bool:
        return self._batches is not None

    def poll(self) -> None:
        """Read new shards. Raises StoreError if the store can't be reached, or a shard is damaged."""
        if self._reader.poll():
            self._renew()

    def _renew(self) -> None:
        demos = self._reader.demos
        config = self._config
        if demos is None:
            return
        if self._batches is None:
            self._check(demos)
        else:
            self._rng = self._batches.state()[0]
        seed = config.runner.seed
        include_state = config.env.include_state
        only = store_settings(config).corrections_only
        batches = FrameBatches(demos, config.sft, self._horizon, seed, include_state, only)
        self._batches = batches if len(batches.frames) else None  # there may be no corrections yet
        if self._rng and self._batches is not None:
            self._batches.load_state(self._rng, torch.zeros(0, dtype=torch.int64))

    def next(self) -> tuple[Observation, Tensor, Tensor]:
        assert self._batches is not None, "asked only when it is ready"
        return self._batches.next()

    def state(self) -> tuple[dict[str, Any], Tensor]:
        """Return the read shards and the state of the frame order."""
        rng = self._rng
        order = torch.zeros(0, dtype=torch.int64)
        if self._batches is not None:
            rng, order = self._batches.state()
        return {"rng": rng, "store": self._reader.state()}, order

    def load_state(self, rng: dict[str, Any], order: Tensor) -> None:
        """Read the shards of the window again, and continue."""
        saved = Fields(rng, "the checkpoint's data_rng", StoreError)
        self._reader.restore(saved.fields("store"))
        self._rng = dict(saved.fields("rng").content)
        self._renew()
        if self._batches is not None and self._rng:
            self._batches.load_state(self._rng, order)

    def finished(self) -> list[str]:
        """Return the shards that are no longer needed."""
        return self._reader.finished
