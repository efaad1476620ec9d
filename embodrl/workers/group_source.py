"""Batches of rollout processes, in turns with training or ahead of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor

from embodrl.config.schema import Config
from embodrl.data.trajectory import TrajectoryBatch
from embodrl.errors import CheckpointError
from embodrl.workers.collector import Metrics, RolloutState, rollout_metrics
from embodrl.workers.lockstep import Shard


class Processes(Protocol):
    """The rollout processes; ``RolloutGroup``."""

    config: Config
    size: int

    def ask(
        self,
        method: str,
        arguments: Sequence[tuple[Any, ...]],
        ranks: Sequence[int] | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> list[dict[str, Any]]:
        """Return the answers to a request that can be interrupted."""
        ...

    def all(self, method: str, *arguments: Sequence[Any]) -> list[Any]:
        """Return the answers to a request that takes no time."""
        ...

    def ask_one(self, rank: int, method: str) -> Any:
        """Return the answer of one process to a request that takes no time."""
        ...

    def remember(self, random: Sequence[list[str]]) -> None:
        """Keep where the random numbers of each process are, for one that takes its place."""
        ...

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Let all act with these weights."""
        ...


class RemoteCollector:
    """The batches of all processes as one, while nothing else happens. See Collector.

    Args:
        rollouts: started.
    """

    def __init__(self, rollouts: Processes) -> None:
        self.rollouts, self.config = rollouts, rollouts.config

    def gather(self, iteration: int) -> tuple[TrajectoryBatch, Metrics]:
        """See Collector."""
        parts = self.rollouts.ask("gather", [(iteration,)] * self.rollouts.size)
        return self._join(parts, self.config.algorithm.rollout_epoch)

    def gather_more(self, iteration: int, epoch: int) -> tuple[TrajectoryBatch, Metrics]:
        """See Collector."""
        return self._join(self.rollouts.ask("gather_more", [(iteration, epoch)] * self.rollouts.size), 1)

    def _join(self, parts: list[dict[str, Any]], num_epochs: int) -> tuple[TrajectoryBatch, Metrics]:
        """Return one batch, rollout after rollout, as if one process had played all environments."""
        batches: list[TrajectoryBatch] = [part["batch"] for part in parts]
        env_steps = sum(int(batch.meta.pop("env_steps")) for batch in batches)
        size = len(batches[0]) // num_epochs
        rows = [slice(epoch * size, (epoch + 1) * size) for epoch in range(num_epochs)]
        whole = TrajectoryBatch.concat([batch[mine] for mine in rows for batch in batches])
        whole.meta["env_steps"] = env_steps
        metrics = rollout_metrics([meta for part in parts for meta in part["metas"]])
        each = [rollout_metrics(part["metas"]) for part in parts]
        # They play at the same time.
        metrics |= {name: max(one[name] or 0.0 for one in each) for name in ("time/env_s", "time/policy_s")}
        return whole, metrics

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """See Collector."""
        self.rollouts.update_weights(weights, version)

    def undo(self) -> None:
        """See Collector."""
        self.rollouts.remember(self.rollouts.all("undo"))

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """See Collector; between two rollouts nothing plays."""
        yield

    def forget_history(self) -> None:
        """See Collector."""
        self.rollouts.all("forget_history")

    def state(self) -> RolloutState:
        """See Collector; that of one process is as if the main process played."""
        states = [RolloutState(**state) for state in self.rollouts.all("state")]
        if len(states) == 1:
            return states[0]
        return RolloutState(
            {"processes": [state.state for state in states]},
            {f"{rank}_{name}": group for rank, state in enumerate(states) for name, group in state.tensors.items()},
            {f"rollout_{rank}_{name}": blob for rank, state in enumerate(states) for name, blob in state.blobs.items()},
        )

    def load_state(self, saved: RolloutState, version: int) -> None:
        """See Collector."""
        size = self.rollouts.size
        count = len(saved.state.get("processes", [None]))
        if count != size:
            raise CheckpointError(
                f"the checkpoint was made with {count} rollout process(es), not with {size}",
                f"resume with {count} of them in cluster.component_placement",
            )
        states = [saved] if size == 1 else [self._part(saved, rank) for rank in range(size)]
        found = self.rollouts.all("load_state", *zip(*((s.state, s.tensors, s.blobs) for s in states), strict=True))
        self.rollouts.remember(found)

    def _part(self, saved: RolloutState, rank: int) -> RolloutState:
        mine = f"rollout_{rank}_"
        return RolloutState(
            saved.state["processes"][rank],
            {},
            {name.removeprefix(mine): blob for name, blob in saved.blobs.items() if name.startswith(mine)},
        )

    def close(self) -> None:
        """See Collector; nothing is under way between two rollouts."""


class RemoteRunner:
    """A rollout process, for AsyncCollector. See EpisodeRunner.

    Args:
        rollouts: started.
        rank: of the process.
    """

    def __init__(self, rollouts: Processes, rank: int) -> None:
        self.rollouts, self.rank = rollouts, rank

    def play(self, shard: Shard, should_stop: Callable[[], bool]) -> TrajectoryBatch:
        """See EpisodeRunner."""
        return self.rollouts.ask("play", [(dict(vars(shard)),)], [self.rank], should_stop)[0]["batch"]

    def rebuild(self) -> None:
        """See EpisodeRunner."""
        self.rollouts.ask_one(self.rank, "rebuild")
