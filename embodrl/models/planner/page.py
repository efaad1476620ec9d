"""The messages of a batch while they are written, and what the grammar of each row permits next.

Shapes: B batch, M tokens of a message, K choices.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from embodrl.models.planner.tokenizer import END, PAD, WRITABLE, TextPrefix, tree


class Page:
    """Tokens ``int64[B,M]``, their mask ``bool[B,M]`` and the choices ``allowed bool[B,M,K]``, on the CPU.

    Args:
        calls: for each row the texts among which its message has to be; empty where it is free.
        length: M.
    """

    def __init__(self, calls: Sequence[tuple[str, ...]], length: int) -> None:
        batch = len(calls)
        self.tokens = torch.full((batch, length), PAD)
        self.mask = torch.zeros(batch, length, dtype=torch.bool)
        self.allowed = torch.ones(batch, length, WRITABLE, dtype=torch.bool)
        self.running = torch.ones(batch, dtype=torch.bool)
        self._nodes: list[TextPrefix | None] = [tree(texts) if texts else None for texts in calls]

    def permit(self, place: int) -> None:
        """Set the choices at a place."""
        for row in self.running.nonzero().flatten().tolist():
            node = self._nodes[row]
            if node is not None:
                self.allowed[row, place] = False
                self.allowed[row, place, list(node.following)] = True

    def only(self, place: int) -> Tensor | None:
        """Return the tokens ``int64[B]`` if no running row has a choice, so that the network need not be asked."""
        choices = self.allowed[:, place]
        return None if (choices.sum(dim=1) > 1)[self.running].any() else choices.int().argmax(dim=1)

    def write(self, place: int, chosen: Tensor) -> bool:
        """Write ``chosen int64[B]`` where messages go on; return whether any goes on after it."""
        self.tokens[:, place] = torch.where(self.running, chosen, PAD)
        self.mask[:, place] = self.running
        self.running = self.running & (chosen != END)
        for row in self.running.nonzero().flatten().tolist():
            node = self._nodes[row]
            if node is not None:
                self._nodes[row] = node.following[int(chosen[row])]
        return bool(self.running.any())
