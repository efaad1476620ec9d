"""Continuous actions as tokens: uniform bins on [-1, 1], as in RT-2 and OpenVLA."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class ActionBins:
    """Maps normalised actions to token ids and back, with ``num_bins`` = n.

    There are n edges, ``linspace(-1, 1, n)``, and n - 1 centres between them. A value in ``[edge[k-1], edge[k])`` has
    the id ``action_vocab_size - k`` (k from 1); +1 has ``k = n``. Both k = n - 1 and k = n decode to the last centre:
    for OpenVLA (32000 ids) 31745 and 31744 mean the same action.
    """

    def __init__(self, action_vocab_size: int, num_bins: int = 256) -> None:
        self.action_vocab_size = action_vocab_size
        self.num_bins = num_bins
        self.first_id = action_vocab_size - num_bins
        self.edges: NDArray[np.float64] = np.linspace(-1.0, 1.0, num_bins)
        self.centers: NDArray[np.float64] = (self.edges[:-1] + self.edges[1:]) / 2.0
        order = np.clip(num_bins - 1 - np.arange(num_bins), 0, num_bins - 2)
        self._center_of_index = torch.from_numpy(self.centers[order])

    def encode(self, actions: NDArray[np.floating]) -> NDArray[np.int64]:
        """Return token ids of normalised actions of any shape; values beyond [-1, 1] are clipped."""
        k = np.digitize(np.clip(actions, -1.0, 1.0), self.edges)
        return (self.action_vocab_size - k).astype(np.int64)

    def decode(self, tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the normalised actions of token ids; ids outside the range are clamped to its nearest end."""
        index = np.clip(self.action_vocab_size - tokens - 1, 0, self.num_bins - 2)
        return self.centers[index]

    def index(self, tokens: Tensor) -> Tensor:
        """Return the ``int64`` index of each token id among the 256 action logits."""
        return tokens - self.first_id

    def value_of_index(self, indices: Tensor) -> Tensor:
        """Return the normalised action ``float32`` for each index among the action logits."""
        return self._center_of_index.to(indices.device, torch.float32)[indices]
