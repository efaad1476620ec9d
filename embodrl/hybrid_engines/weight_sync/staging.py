"""Where the buckets of a sync wait until all of them are there."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from embodrl.errors import TornSyncError, WeightChecksumError
from embodrl.hybrid_engines.weight_sync.base import Header
from embodrl.hybrid_engines.weight_sync.buckets import checksum, num_bytes

HINT = "the version before keeps acting; the next sync brings newer weights"


class Staging:
    """The tensors of one sync, in the memory of the host; nothing touches the policy before ``finish``.

    Args:
        header: which weights.
    """

    def __init__(self, header: Header) -> None:
        self.header = header
        self.tensors: dict[str, Tensor] = {}
        self.num_buckets = 0

    def add(self, index: int, tensors: Mapping[str, Tensor], checksums: Mapping[str, int] | None) -> None:
        """Keep the tensors of a bucket.

        Raises:
            TornSyncError: a bucket before it is missing.
            WeightChecksumError: a tensor has other bytes than it was sent with.
        """
        version = self.header.version
        if index != self.num_buckets:
            raise TornSyncError(
                f"weights of version {version}: bucket {index} came where {self.num_buckets} was due", HINT
            )
        for name, wanted in (checksums or {}).items():
            check_bytes(name, version, checksum(tensors[name]), wanted)
        self.tensors.update(tensors)
        self.num_buckets += 1

    def finish(self, num_buckets: int, num_tensors: int) -> None:
        """Find out whether everything is there.

        Raises:
            TornSyncError: a bucket or a tensor is missing.
        """
        if (num_buckets, num_tensors) != (self.num_buckets, len(self.tensors)):
            raise TornSyncError(
                f"weights of version {self.header.version}: {self.num_buckets} of {num_buckets} buckets with"
                f" {len(self.tensors)} of {num_tensors} tensors came",
                HINT,
            )

    @property
    def num_bytes(self) -> int:
        """Of all tensors."""
        return sum(num_bytes(tensor) for tensor in self.tensors.values())


def check_bytes(name: str, version: int, found: int, wanted: int) -> None:
    """Compare checksums.

    Raises:
        WeightChecksumError: they differ.
    """
    if found != wanted:
        raise WeightChecksumError(
            f"weights of version {version}: '{name}' has the checksum {found:08x} instead of {wanted:08x}", HINT
        )
