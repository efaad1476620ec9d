"""The messages of a batch while they are written, and what the grammar of each row permits next.

Shapes: B batch, M tokens of a message, K choices, P bytes of K bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from embodrl.models.common.sampling import draw, draw_quantile
from embodrl.models.planner.vocabulary import CallTree, TextPrefix, Vocabulary
from embodrl.types import SamplingParams

_BITS = tuple(range(8))


def unpack(packed: Tensor, count: int) -> Tensor:
    """Return the first ``count`` choices ``bool[...,K]`` of ``uint8[...,P]``, eight to a byte, the lowest bit first."""
    bits = torch.tensor(_BITS, dtype=torch.uint8, device=packed.device)
    return ((packed[..., None] >> bits) & 1).bool().flatten(-2)[..., :count]


def draw_tokens(logits: Tensor, sampling: SamplingParams, noise: Tensor | None) -> Tensor:
    """Return tokens ``int64[B]`` from ``float32[B,K]``; noise is ``[B,K]`` from Exp(1), or ``[B]`` from [0, 1)."""
    if noise is None or noise.ndim == logits.ndim:
        return draw(logits, sampling, noise)
    return draw_quantile(logits, sampling, noise)


class Page:
    """Tokens ``int64[B,M]``, their mask ``bool[B,M]`` and the choices ``allowed uint8[B,M,P]``, on the CPU.

    Args:
        calls: for each row the texts among which its message has to be; None where it is free.
        vocabulary: what is written with.
        length: M.
    """

    def __init__(self, calls: Sequence[CallTree | None], vocabulary: Vocabulary, length: int) -> None:
        batch = len(calls)
        self.tokens = torch.full((batch, length), vocabulary.pad)
        self.mask = torch.zeros(batch, length, dtype=torch.bool)
        self.allowed = torch.full((batch, length, (vocabulary.size + 7) // 8), 255, dtype=torch.uint8)
        self.running = torch.ones(batch, dtype=torch.bool)
        self._size = vocabulary.size
        self._ends = torch.tensor(vocabulary.ends)
        self.calls = tuple(calls)
        self._nodes: list[TextPrefix | None] = [None if tree is None else tree.root for tree in calls]

    def permit(self, place: int) -> Tensor:
        """Set the choices at a place and return them, ``bool[B,K]``."""
        for row in self.running.nonzero().flatten().tolist():
            node = self._nodes[row]
            if node is not None:
                self.allowed[row, place] = 0
                for token in node.following:
                    self.allowed[row, place, token // 8] |= 1 << token % 8
        return unpack(self.allowed[:, place], self._size)

    def only(self, choices: Tensor) -> Tensor | None:
        """Return the tokens ``int64[B]`` if no running row has a choice, so that the network need not be asked."""
        return None if (choices.sum(dim=1) > 1)[self.running].any() else choices.int().argmax(dim=1)

    def copy(self, tokens: Tensor) -> None:
        """Write messages ``int64[B,M]`` that keep to the grammar; what follows an end is not read."""
        for place in range(tokens.shape[1]):
            self.permit(place)
            if not self.write(place, tokens[:, place]):
                break

    def write(self, place: int, chosen: Tensor) -> bool:
        """Write ``chosen int64[B]`` where messages go on; return whether any goes on after it."""
        pad = self.tokens[:, place]
        self.tokens[:, place] = torch.where(self.running, chosen, pad)
        self.mask[:, place] = self.running
        self.running = self.running & ~torch.isin(chosen, self._ends)
        for row in self.running.nonzero().flatten().tolist():
            node = self._nodes[row]
            if node is not None:
                self._nodes[row] = node.following[int(chosen[row])]
        return bool(self.running.any())
