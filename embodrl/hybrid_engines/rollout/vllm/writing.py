"""What vLLM needs to know of a message to draw its tokens, in whichever of its processes samples.

Shapes: R rows of a step, M tokens of a message, K choices, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from embodrl.models.common.sampling import action_log_probs, penalised
from embodrl.models.planner.page import draw_tokens
from embodrl.models.planner.vocabulary import CallTree
from embodrl.types import SamplingParams

_tree = functools.lru_cache(maxsize=16)(CallTree.of)


@dataclass(frozen=True)
class RowWriting:
    """How a row is written.

    Attributes:
        texts: the texts among which it has to be, as tokens with their end; empty where it is free.
        sampling: temperature and top k, and what a client of a server asks for.
        noise: what ``draw_tokens`` draws its tokens with, ``float32[M,K]`` or ``[M]``; None takes the most probable.
        num_choices: K.
    """

    texts: tuple[tuple[int, ...], ...]
    sampling: SamplingParams
    noise: Tensor | None
    num_choices: int

    def choices(self, done: Sequence[int]) -> Tensor:
        """Return ``bool[K]``: what may follow the tokens written so far."""
        if not self.texts:
            return torch.ones(self.num_choices, dtype=torch.bool)
        node = _tree(self.texts).root
        for token in done:
            node = node.following[token]
        choices = torch.zeros(self.num_choices, dtype=torch.bool)
        choices[list(node.following)] = True
        return choices


def draw_next(logits: Tensor, rows: Sequence[tuple[RowWriting, Sequence[int]]]) -> Tensor:
    """Draw the next token of rows with the tokens written so far; ``logits float32[R,V]`` are overwritten.

    What remains of them is the drawn token's log-prob, and -inf elsewhere.
    """
    first = rows[0][0]
    choices = torch.stack([writing.choices(done) for writing, done in rows]).to(logits.device)
    kept = logits[:, : first.num_choices].masked_fill(~choices, -torch.inf)
    written = [torch.tensor(list(done), dtype=torch.int64) for _, done in rows]
    ids = torch.nn.utils.rnn.pad_sequence(written, batch_first=True, padding_value=-1)
    kept = penalised(kept, ids.clamp(min=0), ids >= 0, first.sampling)
    mine = [writing.noise[len(done)] for writing, done in rows if writing.noise is not None]
    drawn = draw_tokens(kept, first.sampling, torch.stack(mine).to(logits.device) if mine else None)
    found = action_log_probs(kept, drawn, first.sampling)
    return logits.fill_(-torch.inf).scatter_(1, drawn[:, None], found[:, None])
