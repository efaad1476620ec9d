"""The logits processor of messages, which vLLM imports by its name; it draws by ``writing.draw_next``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from vllm.v1.sample.logits_processor import LogitsProcessor  # pyright: ignore[reportMissingImports]
from vllm.v1.sample.logits_processor.builtin import process_dict_updates  # pyright: ignore[reportMissingImports]

from embodrl.hybrid_engines.rollout.vllm.writing import RowWriting, draw_next


class WrittenTokens(LogitsProcessor):
    """Draws a token for each row and makes all others impossible."""

    def __init__(self, vllm_config: object, device: torch.device, is_pin_memory: bool) -> None:
        # Position in vLLM's batch -> how it is written, and the list of tokens drawn so far, which vLLM appends to.
        self._rows: dict[int, tuple[RowWriting, Sequence[int]]] = {}

    def is_argmax_invariant(self) -> bool:
        """Tell that the most probable token changes."""
        return False

    def update_state(self, batch_update: object) -> None:
        """Follow vLLM's batch."""
        process_dict_updates(self._rows, batch_update, lambda p, _, done: (p.extra_args["writing"], done))

    def apply(self, logits: Tensor) -> Tensor:
        """Overwrite the logits ``float32[R,V]`` of a step."""
        return draw_next(logits, [self._rows[place] for place in range(len(logits))])
