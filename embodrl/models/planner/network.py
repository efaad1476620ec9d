"""What the planner asks of a language model, whichever network it is.

Shapes: B batch, S tokens, N tokens so far, D hidden size, K choices.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from embodrl.errors import EmbodrlError
from embodrl.models.common.merging import linear_weight

Reader = Callable[[Tensor, Tensor], Tensor]
"""From new tokens ``int64[B,S]`` and their mask ``bool[B,S]`` to the last one's hidden state ``[B,D]``."""


class Network(ABC):
    """A language model with an output layer ``model.lm_head``.

    Attributes:
        model: the module, of public parameter names.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model: Any = model

    @property
    @abstractmethod
    def hidden_size(self) -> int:
        """D."""

    @property
    @abstractmethod
    def cached(self) -> tuple[int, int]:
        """Layers, and numbers per key of each."""

    @abstractmethod
    def reader(self) -> Reader:
        """Return a function that reads a batch piece by piece; each piece sees the earlier ones. No gradients."""

    @abstractmethod
    def states(self, ids: Tensor, mask: Tensor, first: int) -> Tensor:
        """Return the hidden states ``[B,S-first,D]`` of tokens ``first`` onwards."""

    def balanced_states(self, ids: Tensor, mask: Tensor, first: int, read: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``states``, and the load-balancing loss of the routers over the tokens ``read bool[B,S]``.

        Raises:
            EmbodrlError: no layer has several experts (``router-missing``).
        """
        raise EmbodrlError(
            "the language model has no experts whose load a loss could balance",
            "set algorithm.router_aux_loss_coef=0, or choose a mixture of experts",
            code="router-missing",
        )

    @abstractmethod
    def recompute(self) -> None:
        """Recompute the activations of every layer in the backward pass."""

    @abstractmethod
    def public_config(self) -> dict[str, Any]:
        """Return the content of config.json as transformers reads it."""

    @abstractmethod
    def public_weights(self) -> dict[str, Tensor]:
        """Return the weights as public files name and split them, with adapters merged."""

    @abstractmethod
    def save(self, directory: Path) -> None:
        """Write weights, with adapters merged, and config.json as transformers reads them."""

    def logits(self, hidden: Tensor, count: int) -> Tensor:
        """Return the logits ``float32[...,K]`` of the first ``count`` tokens."""
        with torch.autocast(hidden.device.type, enabled=False):
            return F.linear(hidden.float(), linear_weight(self.model.lm_head, slice(count)).float())
