"""Training in other processes, as seen by the training loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from embodrl.config.schema import Config
from embodrl.data.rng import generator_state, restore_generator
from embodrl.data.shared_inputs import SHARED, RowInputs
from embodrl.data.shared_rows import separate
from embodrl.data.trajectory import TrajectoryBatch
from embodrl.errors import WorkerError
from embodrl.hybrid_engines.base import Counters, EngineState, FileFacts, TrainEngine
from embodrl.hybrid_engines.offload import Offload, OffloadReport
from embodrl.hybrid_engines.process_groups import Call, cause_of
from embodrl.hybrid_engines.training.options import VALUE_GROUP
from embodrl.hybrid_engines.training.state_shapes import StateShapes, buckets, check_fit, num_bytes_of
from embodrl.models.base import VLAPolicy
from embodrl.names import import_object

BUCKET_BYTES = 256 << 20
"""Bytes of tensors in transit between the training processes and the driver at a time."""


class PendingCall(Call, Protocol):
    """A call whose answers can be awaited."""

    def result(self) -> Any:
        """Wait for the answers and return them."""
        ...


class TrainerGroup(Protocol):
    """The training processes; ``WorkerGroup`` of ``ActorWorker``."""

    def call(self, method: str, *args: object) -> PendingCall:
        """Start a call on all processes."""
        ...

    def check(self) -> None:
        """Raise WorkerDied if a process has died."""
        ...

    def kill(self) -> None:
        """Kill the processes immediately."""
        ...

    def close(self) -> None:
        """Stop the processes."""
        ...


@dataclass(frozen=True)
class Sharing:
    """How an update's rows are shared out.

    Attributes:
        version: of the engine.
        has_critic: value weights train.
    """

    config: Config
    num_shares: int
    version: int
    has_critic: bool


class RemoteTrainEngine(TrainEngine):
    """Trains in a group of processes; the driver's own policy gets the trained weights on demand (``fetch``).

    ``num_shares`` is the number of processes with rows of their own.
    """

    def __init__(
        self, policy: VLAPolicy, group: TrainerGroup, memory: Offload | None = None, num_shares: int = 1
    ) -> None:
        self.policy = policy
        self.group = group
        self.memory = memory
        self.num_shares = num_shares
        self._kinds: list[tuple[Any, Config]] = []  # class and configuration of each update
        self._behind = False  # whether the driver's policy is older than the trained one
        self._shapes: StateShapes | None = None
        self._counters: Counters = {"version": 0, "nonfinite_in_row": 0}
        trained = {id(p) for group in policy.trainable_groups().values() for p in group}
        self._trained = {name: p for name, p in policy.named_parameters() if id(p) in trained}

    @property
    def version(self) -> int:
        return self._counters["version"]

    def attach(self, update: str, config: Config, on_step: Callable[[int, int], None] | None = None) -> Any:
        self._kinds.append((import_object(update), config))
        return RemoteUpdate(self, self._call("attach", update, config)[0])

    def call_update(self, number: int, method: str, args: Sequence[object]) -> Any:
        """Call a method of an update in every process; return the answer of rank 0.

        Updates are numbered in attachment order. Random generators among ``args`` are copied to every process, and
        continue here from their final state there. Iterators arrive as lists. Of a batch every process gets only the
        policy inputs that it reads, as far as the update knows them (``Update.rows_of_shares``); inputs in shared
        memory it reads there.
        """
        args, held = self._inputs_apart(number, method, args)
        generators = {place: arg for place, arg in enumerate(args) if isinstance(arg, torch.Generator)}
        sent = [None if isinstance(arg, torch.Generator) else arg for arg in args]
        plain = [list(arg) if isinstance(arg, Iterator) else arg for arg in sent]
        states = {place: generator_state(generator) for place, generator in generators.items()}
        answer, states, counters = self._call("call_update", number, method, plain, states, held)[0]
        for place, state in states.items():
            restore_generator(generators[place], state)
        self._take_counters(counters)
        return answer

    def _inputs_apart(
        self, number: int, method: str, args: Sequence[object]
    ) -> tuple[Sequence[object], Sequence[RowInputs] | None]:
        """Return the arguments without a batch's inputs, and these for each share, if processes get them so."""
        batch = args[0] if args else None
        if isinstance(batch, TrajectoryBatch) and SHARED in batch.meta:
            small = batch.replace(frames=None)
            shared = small.meta.pop(SHARED)
            return [small, *args[1:]], [shared] * self.num_shares
        kind, config = self._kinds[number]
        sharing = Sharing(config, self.num_shares, self.version, bool(self.policy.trainable_groups().get(VALUE_GROUP)))
        rows = kind.rows_of_shares(sharing, method, args) if self.num_shares > 1 else None
        if rows is None:
            return args, None
        small, parts = separate(cast(TrajectoryBatch, batch), rows)
        return [small, *args[1:]], parts

    def _take_counters(self, counters: Counters) -> None:
        self._behind = self._behind or counters["version"] != self.version
        self._counters = counters

    def complete_update(self) -> None:
        self._take_counters(self._call("complete_update")[0])

    @torch.no_grad()
    def fetch(self) -> None:
        self.onload()
        if not self._behind:
            return
        names = {name: p.numel() * p.element_size() for name, p in self._trained.items()}
        for name, tensor in self._stream("policy", names):
            self._trained[name].copy_(tensor)
        self._behind = False

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
        # Rejected before any process has changed.
        check_fit(saved.tensors, self.shapes(), saved.state)
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

    def counters(self) -> Counters:
        return dict(self._counters)

    def save_shards(self, directory: Path) -> FileFacts:
        facts: FileFacts = {}
        for found in self._call("save_shards", str(directory.absolute())):
            if isinstance(found, tuple):
                # Returned, not raised, by a process, since an error of one process ends the whole group.
                raise OSError(*found)
            facts |= found
        return facts

    def load_shards(self, directory: Path, counters: Mapping[str, int]) -> None:
        """See ``TrainEngine``. Reads only weights here."""
        from embodrl.hybrid_engines.training.sharded_checkpoint import read_index, read_whole  # see sharding

        check_fit(read_index(directory), self.shapes(), counters)
        self.onload()
        self._call("load_shards", str(directory.absolute()), dict(counters))
        read_whole(directory, "policy", self.policy.state_dict())
        self._behind = False
        self._counters = dict(counters)

    def shapes(self) -> StateShapes:
        """Queried once, after all updates are attached."""
        if self._shapes is None:
            self._shapes = cast(StateShapes, self._call("shapes")[0])
        return self._shapes

    def offload(self) -> OffloadReport | None:
        """Offload the weights as well, since the rollout has its own copy; bytes are totals over the processes."""
        found = [report for report in self._call("offload") if report is not None]
        return OffloadReport.total([OffloadReport(torch.device(name), *num_bytes) for name, *num_bytes in found])

    def take_peak_memory(self) -> int | None:
        return max((peak for peak in self._call("take_peak_memory") if peak is not None), default=None)

    def check(self) -> None:
        self.group.check()

    def close(self) -> None:
        self.group.close()

    def _stream(self, section: str, sizes: Mapping[str, int]) -> Iterator[tuple[str, Tensor]]:
        """Yield whole tensors, with one bucket in transit at a time."""
        for names in buckets(sizes, BUCKET_BYTES):
            yield from self._call("gather", section, names)[0].items()

    def _call(self, method: str, *args: object) -> Any:
        """Return the processes' answers; if one fails, all are stopped, because the others would wait for it."""
        call: PendingCall | None = None
        try:
            self.group.check()
            call = self.group.call(method, *args)
            return call.result()
        except WorkerError as error:
            cause = error if call is None else cause_of(call, error)
            self.group.kill()
            raise cause from (None if cause is error else error)


class RemoteUpdate:
    """Proxy of an update in every training process: method calls are forwarded."""

    def __init__(self, engine: RemoteTrainEngine, number: int) -> None:
        self._engine = engine
        self._number = number

    def __getattr__(self, method: str) -> Callable[..., Any]:
        if method.startswith("_"):
            raise AttributeError(method)
        return partial(self._call, method)

    def _call(self, method: str, *args: object) -> Any:
        return self._engine.call_update(self._number, method, args)
