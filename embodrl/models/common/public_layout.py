"""Policies whose published checkpoint layout embodrl can write, as `embodrl model random` needs."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import ClassVar

from torch import Tensor, nn

from embodrl.models.base import VLAPolicy
from embodrl.models.common import checkpoint


class PublicLayout(VLAPolicy):
    """A policy with its publisher's checkpoint layout; base class of families whose spec sets ``public_layout``.

    ``one_file``: the layout has a single weight file, never shards.
    """

    one_file: ClassVar[bool] = False

    def save_pretrained(self, directory: Path) -> None:
        """Write weights and other files atomically, with adapters merged.

        embodrl's additions to the network go to separate files, so that the rest is a plain checkpoint of the layout.
        """
        with checkpoint.policy_directory(directory) as staging:
            checkpoint.save_weights(self.public_state(), staging, one_file=self.one_file)
            self.write_files(staging)

    @abstractmethod
    def public_state(self) -> dict[str, Tensor]:
        """Return the weights under public names, with adapters merged."""

    @abstractmethod
    def write_files(self, directory: Path) -> None:
        """Write the files that accompany the weights."""

    @abstractmethod
    def enlarge(self, own_tokenizer: bool) -> nn.Module:
        """Replace the network by one of published size, on torch's current device, and return it.

        ``own_tokenizer``: the model's own tokenizer will be used instead of the small one that embodrl ships.
        """

    @abstractmethod
    def take_tokenizer(self, directory: Path | None) -> tuple[int, int]:
        """Set the tokenizer from a directory, if given; return its token count and the network's embedding count."""

    @staticmethod
    def in_float32(name: str) -> bool:
        """Return whether the publisher keeps a weight in float32 in a bfloat16 model."""
        return False

    @staticmethod
    def neutral_norm(name: str) -> int:
        """Return the norm weight that leaves the input unscaled."""
        return 1
