"""Training in other processes, as the training loop sees it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from embodrl.algorithms.advantages import Advantages
from embodrl.config.schema import AlgorithmConfig, Config
from embodrl.data.batch import Batch
from embodrl.data.rng import generator_state, restore_generator
from embodrl.data.trajectory import TrajectoryBatch
from embodrl.errors import WorkerError
from embodrl.hybrid_engines.base import Counters, EngineState, FileFacts, TrainEngine
from embodrl.hybrid_engines.offload import Offload, OffloadReport
from embodrl.hybrid_engines.process_groups import Call, cause_of
from embodrl.hybrid_engines.training.engine_state import (
    FLOAT32_BYTES,
    StateShapes,
    buckets,
    check_fit,
    num_bytes_of,
)
from embodrl.hybrid_engines.training.policy_engine import VALUE_GROUP
from embodrl.models.base import VLAPolicy

BUCKET_BYTES = 256 << 20
"""Of tensors in transit between the training processes and the driver at a time."""


class PendingCall(Call, Protocol):
    """A call whose answers can be waited for."""

    def result(self) -> Any:
        """Wait, and return the answers."""
        ...


class TrainerGroup(Protocol):
    """The training processes; ``WorkerGroup`` of ``ActorWorker``."""

    def call(self, method: str, *args: object) -> PendingCall:
        """Begin a call on all processes."""
        ...

    def check(self) -> None:
        """Raise WorkerDied if a process has died."""
        ...

    def kill(self) -> None:
        """End the processes at once."""
        ...

    def close(self) -> None:
        """End the processes."""
        ...


class RemoteTrainEngine(TrainEngine):
    """Trains in a group of processes; the driver has a policy of its own.

    Args:
        config: the run.
        policy: policy of the driver, on its device.
        group: group of the training processes, started.
        sends_weights: the processes send their weights to the rollout processes themselves, and the driver's policy
            gets them when they are needed (``fetch``) instead of with every update.
        memory: the weights of the driver's policy, where they may be offloaded between rollouts.
    """

    def __init__(
        self,
        config: Config,
        policy: VLAPolicy,
        group: TrainerGroup,
        sends_weights: bool = False,
        memory: Offload | None = None,
    ) -> None:
        self.policy = policy
        self.group = group
        self._sends_weights = sends_weights
        self.memory = memory
        self._behind = False  # the driver's policy is older than the trained one
        self.version = 0
        self._counters: Counters = {"version": 0, "nonfinite_in_row": 0}
        groups = policy.trainable_groups()
        trained = {id(p): name for name, group in groups.items() for p in group}
        parameters = dict(policy.named_parameters())
        self._trained = {name: p for name, p in parameters.items() if id(p) in trained}
        kept = config.algorithm.kl.coef > 0
        reference = {name: p for name, p in self._trained.items() if kept and trained[id(p)] != VALUE_GROUP}
        copies = config.actor.optim.master_weights is not False  # megatron's on a CPU has none: this is a bound
        masters = [name for name, p in self._trained.items() if copies and p.dtype.itemsize < FLOAT32_BYTES]
        self._shapes = StateShapes.of(policy, self._trained, reference, masters)

    def update(
        self, batch: TrajectoryBatch, advantages: Advantages, algorithm: AlgorithmConfig, generator: torch.Generator
    ) -> dict[str, float]:
        columns = {"advantages": advantages.advantages, "returns": advantages.returns, "valid": advantages.valid}
        results = self._call("update", batch, columns, algorithm.model_dump_json(), generator_state(generator))
        # All processes answer the same.
        metrics, shuffled, counters = results[0]
        # They shuffled with a copy of this generator, which continues where theirs has come to.
        restore_generator(generator, shuffled)
        self._behind = True
        if not self._sends_weights:
            self.fetch()
        self._counters = counters
        self.version = counters["version"]
        return metrics

    def imitate(self, batch: Batch, learning_rate: float, label_smoothing_bins: float) -> dict[str, float]:
        metrics, counters = self._call("imitate", batch, learning_rate, label_smoothing_bins)[0]
        self._behind = True
        self._counters = counters
        self.version = counters["version"]
        return metrics

    def imitation_step(
        self, batch: Batch, learning_rate: float, label_smoothing_bins: float, num_actions: float | None = None
    ) -> dict[str, float]:
        self._behind = True
        return self._call("imitation_step", batch, learning_rate, label_smoothing_bins, num_actions)[0]

    def complete_update(self) -> None:
        self._counters = self._call("complete_update")[0]
        self.version = self._counters["version"]
        if not self._sends_weights:
            self.fetch()

    @torch.no_grad()
    def fetch(self) -> None:
        self.onload()
        if not self._behind:
            return
        names = {name: p.numel() * p.element_size() for name, p in self._trained.items()}
        for name, tensor in self._stream("policy", names):
            self._trained[name].copy_(tensor)
        self._behind = False

    def reference_logprobs(self, batch: TrajectoryBatch, algorithm: AlgorithmConfig) -> Tensor:
        return self._call("reference_logprobs", batch, algorithm.model_dump_json())[0]

    def proximal(
        self, batch: TrajectoryBatch, algorithm: AlgorithmConfig, every_chunk: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        return self._call("proximal", batch, algorithm.model_dump_json(), every_chunk)[0]

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        self.fetch()
        yield from self.policy.state_dict().items()

    def state_dict(self) -> EngineState:
        """Return weights, optimizer state and counters; all but the weights are copies."""
        self.fetch()
        inventory = self._call("inventory")[0]
        tensors = {s: dict(self._stream(s, names)) for s, names in inventory.items() if s != "policy"}
        return EngineState({"policy": dict(self.policy.state_dict()), **tensors}, dict(self._counters))

    def load_state_dict(self, saved: EngineState) -> None:
        # Refused before any process has changed.
        check_fit(saved.tensors, self._shapes, saved.state)
        self.onload()
        mine = self.policy.state_dict()
        self._call("start_load")
        for section, tensors in saved.tensors.items():
            for names in buckets(num_bytes_of(tensors), BUCKET_BYTES):
                self._call("put", section, {name: tensors[name] for name in names})
        with torch.no_grad():
            for name, tensor in saved.tensors["policy"].items():
                mine[name].copy_(tensor)
        self._behind = False
        self._counters = dict(saved.state)
        self._call("set_counters", self._counters)
        self.version = int(saved.state["version"])

    def counters(self) -> Counters:
        return dict(self._counters)

    def save_shards(self, directory: Path) -> FileFacts:
        facts: FileFacts = {}
        for found in self._call("save_shards", str(directory.absolute())):
            if isinstance(found, tuple):
                # Answered and not raised by a process, since an error of one process ends the whole group.
                raise OSError(*found)
            facts |= found
        return facts

    def load_shards(self, directory: Path, counters: Mapping[str, int]) -> None:
        """See ``TrainEngine``. Only weights are read here."""
        from embodrl.hybrid_engines.training.sharded_checkpoint import read_index, read_whole  # see sharding

        check_fit(read_index(directory), self._shapes, counters)
        self.onload()
        self._call("load_shards", str(directory.absolute()), dict(counters))
        read_whole(directory, "policy", self.policy.state_dict())
        self._behind = False
        self._counters = dict(counters)
        self.version = int(counters["version"])

    def state_num_bytes(self) -> int:
        return self._shapes.num_bytes

    def offload(self) -> OffloadReport | None:
        """Weights leave as well, since what acts has its own. Bytes are those of all processes."""
        found = [report for report in self._call("offload") if report is not None]
        return OffloadReport.total([OffloadReport(torch.device(name), *num_bytes) for name, *num_bytes in found])

    def take_peak_memory(self) -> int | None:
        return max((peak for peak in self._call("take_peak_memory") if peak is not None), default=None)

    def check(self) -> None:
        self.group.check()

    def close(self) -> None:
        self.group.close()

    def _stream(self, section: str, sizes: Mapping[str, int]) -> Iterator[tuple[str, Tensor]]:
        """Yield whole tensors; one bucket of them is on its way at a time."""
        for names in buckets(sizes, BUCKET_BYTES):
            yield from self._call("gather", section, names)[0].items()

    def _call(self, method: str, *args: object) -> Any:
        """Return what the processes return; if one of them fails, all end: the others would wait for it.

        Raises:
            WorkerError: one died or raised.
        """
        call: PendingCall | None = None
        try:
            self.group.check()
            call = self.group.call(method, *args)
            return call.result()
        except WorkerError as error:
            cause = error if call is None else cause_of(call, error)
            self.group.kill()
            raise cause from (None if cause is error else error)
