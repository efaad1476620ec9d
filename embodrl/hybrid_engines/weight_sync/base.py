"""Common parts of all weight-sync transports: versions, full and partial syncs, checksums, layout checks.

A sync is a stream of messages: a begin, the tensors in buckets, and an end with their number. Receivers stage the
buckets in host memory and touch the policy only when everything has arrived and fits: a failed sync leaves the policy
unchanged.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Protocol, Self

from torch import Tensor

from embodrl.errors import (
    EmbodrlError,
    IncompleteSyncError,
    WeightChecksumError,
    WeightLayoutError,
    WeightSyncError,
    WeightVersionError,
)
from embodrl.fields import Fields
from embodrl.hybrid_engines.weight_sync.buckets import (
    DEFAULT_BUCKET_BYTES,
    Layout,
    Named,
    buckets,
    checksum,
    gathered,
    layout_of,
    layout_problems,
    num_bytes,
)
from embodrl.hybrid_engines.weight_sync.patches import ReceivedCopies, SentCopies

HINT = "the previous version stays in use; the next sync brings newer weights"
Check = Callable[[], None]
"""Called while waiting; raises if a process has died."""


def no_check() -> None:
    """Check nothing: the default if no other process can die."""


class WeightTarget(Protocol):
    """A policy in use that accepts new weights between two batches: a rollout engine."""

    def update_weights(self, weights: Iterable[Named], version: int) -> None:
        """Use weights of this version (the number of updates behind them) from now on."""
        ...


@dataclass(frozen=True)
class Header:
    """Contents of a sync: its version, and the version of the full sync it builds on (its own if full)."""

    version: int
    base: int

    @property
    def full(self) -> bool:
        """Whether every tensor of the policy is included."""
        return self.base == self.version


@dataclass(frozen=True)
class Message(Header):
    """A step of a sync.

    Attributes:
        sync: ``begin``, ``bucket`` or ``end``.
        index: index of a bucket, from 0; for the end, the number of buckets.
        num_tensors: number of all tensors, at the end.
        problem: reason why the sender stopped, or why a bucket is unreadable.
        checksums: checksums of a bucket's tensors by name; empty if not checked.
        tensors: tensors of a bucket, by name; see ``patches``.
        previous: version that patches change; -1 without patches.
        patches: tensors that later patches may change, with the number of values that this one changes, see
            ``weight_sync/patches.py``; their checksums are those of the whole tensors.
    """

    sync: str
    index: int = 0
    num_tensors: int = 0
    problem: str = ""
    checksums: Mapping[str, int] = field(default_factory=dict[str, int])
    tensors: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    previous: int = -1
    patches: Mapping[str, int] = field(default_factory=dict[str, int])

    @classmethod
    def read(cls, fields: Fields) -> Self:
        """Parse a delivered message; raises an error of ``fields`` if it is malformed."""
        checksums = fields.fields("checksums", {})
        tensors = fields.fields("tensors", {}).content
        patches = fields.fields("patches", {})
        return cls(
            fields.integer("version"),
            fields.integer("base"),
            fields.text("sync"),
            fields.integer("index"),
            fields.integer("num_tensors"),
            fields.text("problem"),
            {name: checksums.integer(name) for name in checksums},
            {name: tensor for name, tensor in tensors.items() if isinstance(tensor, Tensor)},
            fields.integer("previous", -1, low=-1),
            {name: patches.integer(name, low=-1) for name in patches},
        )


@dataclass
class Received:
    """What a receiver was sent, in contrast to the tensors that it has afterwards.

    Attributes:
        num_bytes: bytes of tensors and patches.
        num_values: values of the tensors that were compared with the previous version.
        num_changed: those with other bits.
    """

    num_bytes: int = 0
    num_values: int = 0
    num_changed: int = 0

    def count(self, message: Message, whole: Mapping[str, Tensor]) -> None:
        """Add a bucket, given its whole tensors."""
        self.num_bytes += sum(map(num_bytes, message.tensors.values()))
        for name, changed in message.patches.items():
            if changed >= 0:
                self.num_values += whole[name].numel()
                self.num_changed += changed


@dataclass(frozen=True)
class SyncReport:
    """Tensors moved by a sync: all if it was full, else the trained ones. ``received`` only from receivers."""

    version: int
    full: bool
    num_tensors: int
    num_bytes: int
    received: Received | None = None


# -- sending -----------------------------------------------------------------------------------------------------------


class WeightSender(ABC):
    """The sending side. Keeps the version of the last started sync, and its base.

    Args:
        trained: names to send after the first full sync (``trained_names``); None sends everything each time.
        bucket_bytes: size of the tensors gathered and moved at a time.
    """

    def __init__(self, trained: Collection[str] | None = None, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> None:
        if bucket_bytes < 1:
            raise EmbodrlError(
                f"weight sync: bucket_bytes is {bucket_bytes}",
                "use at least 1, e.g. 268435456",
                code="weight-sync-settings",
            )
        self.trained = None if trained is None else frozenset(trained)
        self.bucket_bytes = bucket_bytes
        self.version: int | None = None
        self.base: int | None = None

    def send(self, weights: Iterable[Named], version: int, full: bool = False, check: Check = no_check) -> SyncReport:
        """Send weights; all ranks that hold shards of them call this, with the same arguments.

        Args:
            weights: names and tensors; a ``DTensor`` is gathered when its turn comes.
            version: number of updates behind them, above the last call's, whether that succeeded or not.
            full: send everything although ``trained`` is set; for new receivers.
            check: called while the sender waits; raises if a receiver has died.

        Raises:
            WeightSyncError: the version does not increase, a name of ``trained`` is missing in the weights, or a
                receiver was not reached.
        """
        if self.version is not None and version <= self.version:
            raise WeightVersionError(
                f"weights of version {version} cannot follow version {self.version}", "send only newer weights"
            )
        # Decided before anything can fail: all gathering ranks must agree on the contents of the next sync.
        full = full or self.trained is None or self.base is None
        self.version = version
        self.base = version if full or self.base is None else self.base
        moved = [0, 0]
        stream = self._stream(weights, full, moved)
        try:
            self._send(Header(version, self.base), stream, check)
        except (
            Exception
        ) as error:  # any error: the other ranks do not know of it and keep gathering, so this rank must, too
            try:
                for _ in stream:
                    pass
            except Exception as further:  # noqa: BLE001 - must not replace the original error
                error.add_note(f"gathering the remaining weights failed, too: {type(further).__name__}: {further}")
            raise
        return SyncReport(version, full, moved[0], moved[1])

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
    def _send(self, header: Header, stream: Iterator[Named], check: Check) -> None:
        """Move a stream of whole tensors."""

    def close(self) -> None:  # noqa: B027  (most senders hold no resources)
        """Release the sender's resources."""


class GatherOnly(WeightSender):
    """For the ranks of a sharded trainer that send nothing themselves and only take part in gathering."""

    def _send(self, header: Header, stream: Iterator[Named], check: Check) -> None:
        for _ in stream:
            pass


class StreamSender(WeightSender):
    """Sends a sync as messages. With ``verify`` they carry checksums; on a GPU this costs a copy to the host.

    With ``patches``, only changed values of what the receivers already have; this costs the same, and a copy of what
    is sent more than once. The first sync, one with ``full=True`` and the first after a failed one carry everything.
    """

    def __init__(self, trained: Collection[str] | None, bucket_bytes: int, verify: bool, patches: bool) -> None:
        super().__init__(trained, bucket_bytes)
        self.verify = verify
        self._copies = SentCopies(self.trained) if patches else None

    def send(self, weights: Iterable[Named], version: int, full: bool = False, check: Check = no_check) -> SyncReport:
        if full and self._copies is not None:
            self._copies.forget()
        return super().send(weights, version, full, check)

    def _send(self, header: Header, stream: Iterator[Named], check: Check) -> None:
        copies = self._copies
        if copies is None:
            self._send_messages(Message(header.version, header.base, "begin"), stream, check)
            return
        try:
            begin = Message(header.version, header.base, "begin", previous=copies.begin())
            self._send_messages(begin, stream, check)
        except Exception:  # raised again: it is unknown which version the receivers have
            copies.forget()
            raise
        copies.version = header.version

    def _send_messages(self, begin: Message, stream: Iterator[Named], check: Check) -> None:
        num_buckets = num_tensors = 0
        failure: Exception | None = None
        sums: dict[str, int] = {}
        changed: dict[str, int] = {}
        try:
            self._put(begin, check)
            for bucket in buckets(self._prepared(stream, sums, changed), self.bucket_bytes):
                num_tensors += len(bucket)
                # Without the tensor that did not fit. And the tensors are not kept in a variable: that would keep them
                # alive while the next bucket is gathered.
                mine = [{name: of.pop(name) for name, _ in bucket if name in of} for of in (sums, changed)]
                self._put(
                    replace(
                        begin,
                        sync="bucket",
                        index=num_buckets,
                        checksums=mine[0],
                        tensors=dict(bucket),
                        patches=mine[1],
                    ),
                    check,
                )
                num_buckets += 1
        except Exception as error:  # noqa: BLE001 - raised by _finish, after the receivers know
            failure = error
        problem = "" if failure is None else f"the sender failed with: {failure}"
        end = replace(begin, sync="end", index=num_buckets, num_tensors=num_tensors, problem=problem)
        self._finish(end, failure, check)

    def _prepared(self, stream: Iterator[Named], sums: dict[str, int], changed: dict[str, int]) -> Iterator[Named]:
        """Yield tensors as they are sent; add checksums of the whole ones, and numbers of changed values."""
        for name, tensor in stream:
            patch = None if self._copies is None else self._copies.patch(name, tensor)
            if patch is None:
                if self.verify:
                    sums[name] = checksum(tensor)
                yield name, tensor
            else:
                sums[name] = patch.crc32
                changed[name] = patch.changed
                yield name, patch.data
            # The loop variables would keep a tensor alive while the next one is gathered.
            del tensor, patch

    @abstractmethod
    def _put(self, message: Message, check: Check) -> None:
        """Send a message to all receivers."""

    @abstractmethod
    def _finish(self, end: Message, failure: Exception | None, check: Check) -> None:
        """Send the last message, and raise ``failure`` if there is one."""


# -- receiving ---------------------------------------------------------------------------------------------------------


class WeightReceiver(ABC):
    """The receiving side; keeps the version accepted last, and its base. A failed sync leaves the policy unchanged.

    ``layout`` has the names and shapes of the target's policy (``layout_of``), compared before it is touched; None if
    the target checks them itself.
    """

    def __init__(self, target: WeightTarget, layout: Layout | None = None) -> None:
        self.target = target
        self.layout = layout
        self.version: int | None = None
        self.base: int | None = None

    @property
    def is_broken(self) -> bool:
        """Whether nothing can be received any more."""
        return False

    @abstractmethod
    def receive(self, timeout_s: float = 0.0) -> SyncReport | None:
        """Accept newer weights between two chunks; return None if no sync begins within ``timeout_s``.

        Raises:
            IncompleteSyncError: a sync began and did not complete.
            WeightChecksumError: the bytes of a tensor changed in transit.
            WeightVersionError: the version does not increase, or the full sync it builds on was never received.
            WeightLayoutError: names or shapes do not match the policy.
        """

    def close(self) -> None:  # noqa: B027  (most receivers hold no resources)
        """Release the receiver's resources."""

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

    def _check_layout(self, version: int, shapes: Layout, full: bool) -> None:
        problems = [] if self.layout is None else layout_problems(shapes, self.layout, full)
        if problems:
            raise WeightLayoutError(
                f"weights of version {version} do not fit the policy: {'; '.join(problems)}",
                "use the same model settings for trainer and rollout",
            )

    def _accept(self, header: Header, tensors: Mapping[str, Tensor], received: Received | None = None) -> SyncReport:
        # The version is recorded after the target has the weights: an error there keeps the previous version.
        self.target.update_weights(tensors.items(), header.version)
        self.version = header.version
        self.base = header.base
        size = sum(map(num_bytes, tensors.values()))
        return SyncReport(header.version, header.full, len(tensors), size, received)


class StreamReceiver(WeightReceiver):
    """Receives a sync as messages; a transport defines how."""

    def __init__(self, target: WeightTarget, layout: Layout | None = None) -> None:
        super().__init__(target, layout)
        self._copies = ReceivedCopies()

    def receive(self, timeout_s: float = 0.0) -> SyncReport | None:
        begin = self._begin(timeout_s)
        if begin is None:
            return None
        tensors = dict[str, Tensor]()
        kept: list[str] = []
        received = Received()
        messages = self._messages(begin)
        failure = None
        try:
            self._check_version(begin)
            self._copies.check(begin.version, begin.previous)
            for index, message in enumerate(messages):
                bucket = _checked(message, index, len(tensors), self._copies)
                received.count(message, bucket)
                kept += message.patches
                tensors |= bucket
            self._check_layout(begin.version, layout_of(tensors), begin.full)
        except WeightSyncError as error:
            # The group has lost a process, and nothing more can be read.
            if self.is_broken:
                raise
            failure = error
            for _ in messages:  # to the end: the others of a collective wait for it, and a pipe must be emptied
                pass
        # Only after everything has been read: either all receivers accept a version, or none does.
        agreed = self._vote(failure is None)
        if failure is not None:
            raise failure
        if not agreed:
            raise IncompleteSyncError(f"another receiver refused the weights of version {begin.version}", HINT)
        report = self._accept(begin, tensors, received)
        self._copies.keep(begin.version, tensors, kept)
        return report

    def _messages(self, begin: Message) -> Iterator[Message]:
        for num_buckets in count():
            message = self._next(begin, num_buckets)
            yield message
            if message.sync == "end":
                return

    @abstractmethod
    def _begin(self, timeout_s: float) -> Message | None:
        """Return the first message of a sync, or None if none arrives in time."""

    @abstractmethod
    def _next(self, begin: Message, num_buckets: int) -> Message:
        """Return the next message; raise if there is none."""

    def _vote(self, agree: bool) -> bool:
        """Return whether all receivers of this sync can accept it."""
        return agree


def _checked(message: Message, num_buckets: int, num_tensors: int, copies: ReceivedCopies) -> Mapping[str, Tensor]:
    """Return the whole tensors of a message if it is intact and expected after these buckets and tensors."""
    weights = f"weights of version {message.version}"
    if message.problem:
        raise IncompleteSyncError(f"{weights} stopped after {num_buckets} buckets: {message.problem}", HINT)
    if message.sync == "end" and (message.index, message.num_tensors) != (num_buckets, num_tensors):
        came = f"{num_buckets} of {message.index} buckets with {num_tensors} of {message.num_tensors} tensors came"
        raise IncompleteSyncError(f"{weights}: {came}", HINT)
    if message.index != num_buckets:
        raise IncompleteSyncError(f"{weights}: bucket {message.index} came where {num_buckets} was due", HINT)
    tensors = copies.whole(message.tensors, message.patches)
    for name, crc32 in message.checksums.items():
        check_bytes(name, message.version, checksum(tensors[name]), crc32)
    return tensors


def check_bytes(name: str, version: int, found: int, expected: int) -> None:
    """Compare checksums.

    Raises:
        WeightChecksumError: they differ.
    """
    if found != expected:
        raise WeightChecksumError(
            f"weights of version {version}: '{name}' has the checksum {found:08x} instead of {expected:08x}", HINT
        )
