"""What every kind of weight sync has in common: versions, full and partial syncs, and what fits a policy."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from embodrl.errors import EmbodrlError, WeightLayoutError, WeightVersionError
from embodrl.hybrid_engines.weight_sync.buckets import DEFAULT_BUCKET_BYTES, Layout, Named, gathered, num_bytes

DEFAULT_STALL_TIMEOUT_S = 60.0


class WeightTarget(Protocol):
    """What takes weights over, between two batches: a rollout engine."""

    def update_weights(self, weights: Iterable[Named], version: int) -> None:
        """Take over weights that have seen ``version`` updates."""
        ...


@dataclass(frozen=True)
class Header:
    """Which weights a sync carries.

    Attributes:
        version: updates that they have seen.
        base: the full sync that it builds on; its own version if it is full.
    """

    version: int
    base: int

    @property
    def full(self) -> bool:
        """Every tensor of the policy travels."""
        return self.base == self.version


@dataclass(frozen=True)
class SyncReport:
    """What a sync moved.

    Attributes:
        version: updates that the weights have seen.
        full: every tensor, or only what trains.
        num_tensors: how many.
        num_bytes: of them together.
        seconds: from the first tensor to the last.
    """

    version: int
    full: bool
    num_tensors: int
    num_bytes: int
    seconds: float


def _finish(stream: Iterator[Named], error: Exception) -> None:
    """Gather what is left with the other ranks, which know of no error; should that fail as well, ``error`` tells."""
    try:
        for _ in stream:
            pass
    except Exception as further:  # noqa: BLE001 - it must not take the place of the error that is raised
        error.add_note(f"what was left could not be gathered either: {type(further).__name__}: {further}")


class WeightSender(ABC):
    """The side of the weights that train.

    Args:
        trained: names that travel after the first full sync (``trained_names``); None sends everything each time.
        bucket_bytes: tensors that are gathered and moved at a time.

    Attributes:
        version: of the last sync that was begun, None before the first.
        base: of the last full one.
    """

    def __init__(self, trained: Collection[str] | None = None, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> None:
        if bucket_bytes < 1:
            raise EmbodrlError(f"weight sync: bucket_bytes is {bucket_bytes}", "give at least 1, e.g. 268435456")
        self.trained = None if trained is None else frozenset(trained)
        self.bucket_bytes = bucket_bytes
        self.version: int | None = None
        self.base: int | None = None

    def send(self, weights: Iterable[Named], version: int, full: bool = False) -> SyncReport:
        """Send weights; every rank that holds shards of them calls this, with the same arguments.

        Args:
            weights: names and tensors; a ``DTensor`` is gathered when its turn comes.
            version: updates that they have seen, more than in the last call, whether that succeeded or not.
            full: send everything, though ``trained`` is given; for receivers that are new.

        Raises:
            WeightVersionError: the version does not grow.
            WeightLayoutError: a name of ``trained`` is not among the weights.
            WeightSyncError: they did not reach every receiver.
        """
        if self.version is not None and version <= self.version:
            raise WeightVersionError(
                f"weights of version {version} can't follow version {self.version}", "send only newer weights"
            )
        # Decided before anything can fail, so that all ranks that gather agree on what comes next.
        full = full or self.trained is None or self.base is None
        self.version, self.base = version, version if full else self.base
        assert self.base is not None
        clock, moved = time.perf_counter(), _Count()
        stream = self._stream(weights, full, moved)
        try:
            self._send(Header(version, self.base), stream)
        except Exception as error:
            _finish(stream, error)
            raise
        return SyncReport(version, full, moved.tensors, moved.num_bytes, time.perf_counter() - clock)

    def _stream(self, weights: Iterable[Named], full: bool, moved: _Count) -> Iterator[Named]:
        missing = set(self.trained or ())
        for name, tensor in weights:
            missing.discard(name)
            if full or (self.trained is not None and name in self.trained):
                moved.tensors += 1
                moved.num_bytes += num_bytes(tensor)
                yield name, self._whole(name, tensor)
        if missing:
            raise WeightLayoutError(
                f"{len(missing)} trained names are not among the weights, e.g. '{min(missing)}'",
                "take the names from trained_names() of the same policy",
            )

    def _whole(self, name: str, tensor: Tensor) -> Tensor:
        return gathered(tensor)

    @abstractmethod
    def _send(self, header: Header, stream: Iterator[Named]) -> None:
        """Move a stream of whole tensors."""

    def close(self) -> None:  # noqa: B027  (most hold nothing)
        """Free what the sender holds."""


@dataclass
class _Count:
    tensors: int = 0
    num_bytes: int = 0


class GatherOnly(WeightSender):
    """For the ranks of a sharded trainer that send nothing themselves: they only take part in gathering."""

    def _send(self, header: Header, stream: Iterator[Named]) -> None:
        for _ in stream:
            pass


class WeightReceiver(ABC):
    """The side of a policy that acts. A sync that fails leaves the policy as it was.

    Args:
        target: takes the weights over.
        layout: names and shapes of its policy (``layout_of``), which must be met before it is touched; None where
            the target itself checks them.

    Attributes:
        version: of the weights that it took over last, None before the first.
        base: of the last full sync among them.
    """

    def __init__(self, target: WeightTarget, layout: Layout | None = None) -> None:
        self.target, self.layout = target, layout
        self.version: int | None = None
        self.base: int | None = None

    @abstractmethod
    def receive(self, timeout_s: float = 0.0) -> SyncReport | None:
        """Take over newer weights, if there are some; call it between two chunks.

        Args:
            timeout_s: seconds to wait for a sync to begin.

        Returns:
            what was taken over, None if nothing has begun in time.

        Raises:
            TornSyncError: a sync began and did not come to its end.
            WeightChecksumError: a tensor has other bytes than it was sent with.
            WeightVersionError: the version does not grow, or its full sync was never received.
            WeightLayoutError: names or shapes are not those of the policy.
        """

    def close(self) -> None:  # noqa: B027  (most hold nothing)
        """Free what the receiver holds."""

    def _check_version(self, header: Header) -> None:
        if self.version is not None and header.version <= self.version:
            raise WeightVersionError(
                f"weights of version {header.version} came after version {self.version}",
                "make a new receiver if the run went back to an older checkpoint",
            )
        if not header.full and header.base != self.base:
            have = "no full version" if self.base is None else f"the full version {self.base}"
            raise WeightVersionError(
                f"version {header.version} holds only what trains and builds on version {header.base}; here is {have}",
                "send once with full=True",
            )

    def _check_layout(self, header: Header, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Find out before anything is copied."""
        if self.layout is None:
            return
        unknown = sorted(shapes.keys() - self.layout.keys())
        missing = sorted(self.layout.keys() - shapes.keys()) if header.full else []
        other = sorted(n for n, shape in shapes.items() if n in self.layout and self.layout[n] != shape)
        found = [f"{len(unknown)} unknown names, e.g. '{unknown[0]}'"] if unknown else []
        if missing:
            found.append(f"{len(missing)} names are missing, e.g. '{missing[0]}'")
        if other:
            first = f"'{other[0]}' is {shapes[other[0]]} instead of {self.layout[other[0]]}"
            found.append(f"{len(other)} have other shapes, e.g. {first}")
        if found:
            raise WeightLayoutError(
                f"weights of version {header.version} do not fit the policy: {'; '.join(found)}",
                "give trainer and rollout the same model settings",
            )

    def _took(self, header: Header) -> None:
        self.version, self.base = header.version, header.base


def shapes_of(tensors: Mapping[str, Tensor]) -> Layout:
    """Return the shapes of tensors by name."""
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}
