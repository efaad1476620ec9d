"""Weight sync: what all transports share: versions, full and partial syncs, checksums, fit with the policy.

A sync is a header, the tensors in buckets, and an end with their number. Receivers keep the buckets in host memory and
touch the policy only when everything has arrived and fits: a sync that fails leaves the policy as it was.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from embodrl.errors import (
    EmbodrlError,
    IncompleteSyncError,
    WeightChecksumError,
    WeightLayoutError,
    WeightSyncError,
    WeightVersionError,
)
from embodrl.hybrid_engines.weight_sync.buckets import (
    DEFAULT_BUCKET_BYTES,
    Layout,
    Named,
    buckets,
    checksum,
    gathered,
    num_bytes,
)

HINT = "the previous version stays in use; the next sync brings newer weights"


def no_check() -> None:
    """Check nothing: the default where nothing can have died."""


class WeightTarget(Protocol):
    """A policy in use that accepts new weights between two batches: a rollout engine."""

    def update_weights(self, weights: Iterable[Named], version: int) -> None:
        """Use weights of this version (the number of updates behind them) from now on."""
        ...


@dataclass(frozen=True)
class Header:
    """Which weights a sync carries.

    Attributes:
        version: number of updates behind them.
        base: version of the full sync that this one builds on; its own version if it is full.
    """

    version: int
    base: int

    @property
    def full(self) -> bool:
        """Every tensor of the policy is included."""
        return self.base == self.version


@dataclass(frozen=True)
class SyncReport:
    """What a sync moved.

    Attributes:
        version: number of updates behind the weights.
        full: every tensor, or only the trained ones.
        num_tensors: how many.
        num_bytes: their total size.
        seconds: from the first tensor to the last.
    """

    version: int
    full: bool
    num_tensors: int
    num_bytes: int
    seconds: float


class WeightSender(ABC):
    """The sending side.

    Args:
        trained: names to send after the first full sync (``trained_names``); None sends everything each time.
        bucket_bytes: size of the tensors that are gathered and moved at a time.

    Attributes:
        version: of the last sync that was started, None before the first.
        base: of the last full one.

    Raises:
        EmbodrlError: ``bucket_bytes`` is not positive.
    """

    def __init__(self, trained: Collection[str] | None = None, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> None:
        if bucket_bytes < 1:
            raise EmbodrlError(f"weight sync: bucket_bytes is {bucket_bytes}", "use at least 1, e.g. 268435456")
        self.trained = None if trained is None else frozenset(trained)
        self.bucket_bytes = bucket_bytes
        self.version: int | None = None
        self.base: int | None = None

    def send(
        self, weights: Iterable[Named], version: int, full: bool = False, check: Callable[[], None] = no_check
    ) -> SyncReport:
        """Send weights; all ranks that hold shards of them call this, with the same arguments.

        Args:
            weights: names and tensors; a ``DTensor`` is gathered when its turn comes.
            version: number of updates behind them, above that of the last call, whether that succeeded or not.
            full: send everything although ``trained`` is set; for new receivers.
            check: called while the sender waits; raises if a receiver has died.

        Raises:
            WeightVersionError: the version does not increase.
            WeightLayoutError: a name of ``trained`` is not among the weights.
            WeightSyncError: they did not reach every receiver.
        """
        if self.version is not None and version <= self.version:
            raise WeightVersionError(
                f"weights of version {version} cannot follow version {self.version}", "send only newer weights"
            )
        # Decided before anything can fail: all ranks that gather must agree on what the next sync contains.
        full = full or self.trained is None or self.base is None
        self.version, self.base = version, version if full else self.base
        assert self.base is not None
        clock, moved = time.perf_counter(), [0, 0]
        stream = self._stream(weights, full, moved)
        try:
            self._send(Header(version, self.base), stream, check)
        except Exception as error:  # whatever fails here, the other ranks gather to the end
            # The other ranks do not know of the error and gather to the end, which needs this rank.
            try:
                for _ in stream:
                    pass
            except Exception as further:  # noqa: BLE001 - must not replace the error that is raised
                error.add_note(f"gathering the remaining weights failed, too: {type(further).__name__}: {further}")
            raise
        return SyncReport(version, full, moved[0], moved[1], time.perf_counter() - clock)

    def _stream(self, weights: Iterable[Named], full: bool, moved: list[int]) -> Iterator[Named]:
        """Yield whole tensors, and count them and their bytes in ``moved``."""
        missing = set(self.trained or ())
        for name, tensor in weights:
            missing.discard(name)
            if full or (self.trained is not None and name in self.trained):
                moved[0] += 1
                moved[1] += num_bytes(tensor)
                yield name, gathered(tensor)
        if missing:
            raise WeightLayoutError(
                f"{len(missing)} trained names are not among the weights, e.g. '{min(missing)}'",
                "take the names from trained_names() of the same policy",
            )

    @abstractmethod
    def _send(self, header: Header, stream: Iterator[Named], check: Callable[[], None]) -> None:
        """Move a stream of whole tensors."""

    def close(self) -> None:  # noqa: B027  (most hold nothing)
        """Release what the sender holds."""


class GatherOnly(WeightSender):
    """For the ranks of a sharded trainer that send nothing themselves: they only take part in gathering."""

    def _send(self, header: Header, stream: Iterator[Named], check: Callable[[], None]) -> None:
        for _ in stream:
            pass


class StreamSender(WeightSender):
    """Sends header, buckets and end as messages; a transport says how."""

    def _send(self, header: Header, stream: Iterator[Named], check: Callable[[], None]) -> None:
        num_buckets = num_tensors = 0
        failure: Exception | None = None
        end: dict[str, Any]
        try:
            self._put({"sync": "begin", "version": header.version, "base": header.base}, (), check)
            for bucket in buckets(stream, self.bucket_bytes):
                message = {"sync": "bucket", "version": header.version, "index": num_buckets}
                self._put(message, bucket, check)
                num_buckets += 1
                num_tensors += len(bucket)
            end = {"buckets": num_buckets, "tensors": num_tensors}
        except Exception as error:  # noqa: BLE001 - raised by _finish, after the receivers know
            failure, end = error, {"reason": str(error)}
        self._finish({"sync": "end", "version": header.version, **end}, failure, check)

    @abstractmethod
    def _put(self, message: dict[str, Any], bucket: Iterable[Named], check: Callable[[], None]) -> None:
        """Send a message to all receivers, with the tensors of a bucket."""

    @abstractmethod
    def _finish(self, end: dict[str, Any], failure: Exception | None, check: Callable[[], None]) -> None:
        """Send the last message, and raise ``failure`` if there is one."""


class WeightReceiver(ABC):
    """The receiving side. A sync that fails leaves the policy as it was.

    Args:
        target: accepts the weights.
        layout: names and shapes of its policy (``layout_of``), compared before it is touched; None where the target
            checks them itself.

    Attributes:
        version: of the weights that were accepted last, None before the first.
        base: of the last full sync among them.
    """

    def __init__(self, target: WeightTarget, layout: Layout | None = None) -> None:
        self.target, self.layout = target, layout
        self.version: int | None = None
        self.base: int | None = None

    @property
    def is_broken(self) -> bool:
        """Nothing can be received any more."""
        return False

    @abstractmethod
    def receive(self, timeout_s: float = 0.0) -> SyncReport | None:
        """Accept newer weights if there are any; to be called between two chunks.

        Args:
            timeout_s: seconds to wait for a sync to begin.

        Returns:
            what was accepted, None if nothing began in time.

        Raises:
            IncompleteSyncError: a sync began and did not complete.
            WeightChecksumError: the bytes of a tensor changed on the way.
            WeightVersionError: the version does not increase, or the full sync that it builds on was never received.
            WeightLayoutError: names or shapes do not fit the policy.
        """

    def close(self) -> None:  # noqa: B027  (most hold nothing)
        """Release what the receiver holds."""

    def _check_version(self, header: Header) -> None:
        if self.version is not None and header.version <= self.version:
            raise WeightVersionError(
                f"weights of version {header.version} came after version {self.version}",
                "create a new receiver if the run went back to an older checkpoint",
            )
        if not header.full and header.base != self.base:
            have = "no full version" if self.base is None else f"the full version {self.base}"
            raise WeightVersionError(
                f"version {header.version} holds only trained weights and builds on version {header.base}; this"
                f" receiver has {have}",
                "send once with full=True",
            )

    def _accept(self, header: Header, tensors: Mapping[str, Tensor], clock: float) -> SyncReport:
        self.target.update_weights(tensors.items(), header.version)
        self.version, self.base = header.version, header.base
        size = sum(num_bytes(tensor) for tensor in tensors.values())
        return SyncReport(header.version, header.full, len(tensors), size, time.perf_counter() - clock)


class StreamReceiver(WeightReceiver):
    """Receives header, buckets and end as messages; a transport says how."""

    def receive(self, timeout_s: float = 0.0) -> SyncReport | None:
        begin = self._begin(timeout_s)
        if begin is None:
            return None
        clock = time.perf_counter()
        header = Header(begin["version"], begin["base"])
        tensors: dict[str, Tensor] = {}
        num_buckets, failure = 0, None
        try:
            self._check_version(header)
        except WeightSyncError as error:
            failure = error
        # After a failure, too, it reads to the end: the others of a collective wait for it, and a pipe must be empty.
        while (message := self._next(header, num_buckets))["sync"] != "end":
            if failure is None:
                try:
                    tensors |= self._unpacked(header, message, num_buckets)
                except WeightSyncError as error:
                    failure = error
                num_buckets += 1
        try:
            if failure is None:
                self._check_complete(header, message, num_buckets, len(tensors))
                check_layout(header.version, {n: tuple(t.shape) for n, t in tensors.items()}, self.layout, header.full)
        except WeightSyncError as error:
            failure = error
        agreed = self._vote(failure is None)
        if failure is not None:
            raise failure
        if not agreed:
            raise IncompleteSyncError(f"another receiver refused the weights of version {header.version}", HINT)
        return self._accept(header, tensors, clock)

    @abstractmethod
    def _begin(self, timeout_s: float) -> dict[str, Any] | None:
        """Return the first message of a sync, None if none comes in time."""

    @abstractmethod
    def _next(self, header: Header, num_buckets: int) -> dict[str, Any]:
        """Return the next message; raise if there will be none."""

    @abstractmethod
    def _tensors(self, message: dict[str, Any]) -> dict[str, Tensor]:
        """Return the tensors of a bucket."""

    def _vote(self, agree: bool) -> bool:
        """Return whether all receivers of this sync can accept it."""
        return agree

    def _unpacked(self, header: Header, message: dict[str, Any], expected: int) -> dict[str, Tensor]:
        if message["index"] != expected:
            raise IncompleteSyncError(
                f"weights of version {header.version}: bucket {message['index']} came where {expected} was due", HINT
            )
        tensors = self._tensors(message)
        for name, crc32 in (message["checksums"] or {}).items():
            check_bytes(name, header.version, checksum(tensors[name]), crc32)
        return tensors

    def _check_complete(self, header: Header, end: dict[str, Any], num_buckets: int, num_tensors: int) -> None:
        if "reason" in end:
            raise IncompleteSyncError(
                f"weights of version {header.version} stopped after {num_buckets} buckets: the sender failed with:"
                f" {end['reason']}",
                HINT,
            )
        if (end["buckets"], end["tensors"]) != (num_buckets, num_tensors):
            raise IncompleteSyncError(
                f"weights of version {header.version}: {num_buckets} of {end['buckets']} buckets with"
                f" {num_tensors} of {end['tensors']} tensors came",
                HINT,
            )


def check_layout(version: int, shapes: Layout, layout: Layout | None, full: bool) -> None:
    """Compare the names and shapes of weights with those of a policy.

    Raises:
        WeightLayoutError: they differ.
    """
    if layout is None:
        return
    unknown = sorted(shapes.keys() - layout.keys())
    missing = sorted(layout.keys() - shapes.keys()) if full else []
    other = sorted(n for n, shape in shapes.items() if n in layout and layout[n] != shape)
    found = [f"{len(unknown)} unknown names, e.g. '{unknown[0]}'"] if unknown else []
    if missing:
        found.append(f"{len(missing)} names are missing, e.g. '{missing[0]}'")
    if other:
        first = f"'{other[0]}' is {shapes[other[0]]} instead of {layout[other[0]]}"
        found.append(f"{len(other)} have other shapes, e.g. {first}")
    if found:
        raise WeightLayoutError(
            f"weights of version {version} do not fit the policy: {'; '.join(found)}",
            "use the same model settings for trainer and rollout",
        )


def check_bytes(name: str, version: int, found: int, expected: int) -> None:
    """Compare checksums.

    Raises:
        WeightChecksumError: they differ.
    """
    if found != expected:
        raise WeightChecksumError(
            f"weights of version {version}: '{name}' has the checksum {found:08x} instead of {expected:08x}", HINT
        )
