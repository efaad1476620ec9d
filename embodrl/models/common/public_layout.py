"""Policies whose published checkpoints embodrl can write: what `embodrl model random` needs to know of them."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import ClassVar

from torch import Tensor, nn

from embodrl.models.base import VLAPolicy
from embodrl.models.common import checkpoint


class PublicLayout(VLAPolicy):
    """A policy with a checkpoint layout of its publisher's. Families whose spec says ``public_layout`` derive from it.

    Attributes:
        one_file: the layout has one file of weights, never shards.
    """

    one_file: ClassVar[bool] = False

    def save_pretrained(self, directory: Path) -> None:
        """Write weights and the files beside them; the directory appears, or is replaced, in one step.

        Adapters are merged into the weights. What embodrl adds to the network goes to files of its own, so that the
        rest is a plain checkpoint of the publisher's layout.
        """
        with checkpoint.policy_directory(directory) as staging:
            checkpoint.save_weights(self.public_state(), staging, one_file=self.one_file)
            self.write_files(staging)

    @abstractmethod
    def public_state(self) -> dict[str, Tensor]:
        """Return the weights under the names of the public layout, with adapters merged."""

    @abstractmethod
    def write_files(self, directory: Path) -> None:
        """Write what ``save_pretrained`` writes beside the weights."""

    @abstractmethod
    def enlarge(self, own_tokenizer: bool) -> nn.Module:
        """Replace the network by one of the published dimensions, on torch's current device, and return it.

        Args:
            own_tokenizer: it is used with the model's own tokenizer, not the small one that embodrl ships.
        """

    @abstractmethod
    def take_tokenizer(self, directory: Path | None) -> tuple[int, int]:
        """Return how many tokens there are, and how many the network has embeddings for.

        Args:
            directory: with a tokenizer to use from now on.
        """

    @staticmethod
    def in_float32(name: str) -> bool:
        """Whether the publisher keeps a weight in float32 in a model of bfloat16."""
        return False

    @staticmethod
    def neutral_norm(name: str) -> int:
        """Return the value of a norm's weight that leaves its input unscaled."""
        return 1
