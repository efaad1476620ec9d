"""What OpenVLA-OFT adds to the OpenVLA network: empty places for a chunk of actions, and a token of the robot's state.

Kim, Finn and Liang, "Fine-Tuning Vision-Language-Action Models: Optimizing Speed and Success", 2025. Attention is
bidirectional (``OpenVLAModel(config, causal=False)``). Shapes: B batch, P image, state and prompt tokens, S state
dimensions, D hidden size, N action tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from embodrl.models.common.init import init_linears
from embodrl.models.openvla.modeling import OpenVLAModel


class ProprioProjector(nn.Module):
    """The robot's state to one embedding of the language model; names as in ``proprio_projector--N_checkpoint.pt``."""

    def __init__(self, proprio_dim: int, hidden_size: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(proprio_dim, hidden_size)
        self.fc2 = nn.Linear(hidden_size, hidden_size)

    def init_weights(self, generator: torch.Generator) -> None:
        """Draw weights for training from scratch."""
        init_linears(self, generator)

    def forward(self, proprio: Tensor) -> Tensor:
        """``[B,S]`` to ``[B,D]``."""
        return self.fc2(F.gelu(self.fc1(proprio)))


def append_action_places(model: OpenVLAModel, prefix: Tensor, num_tokens: int, keep_stop_token: bool) -> Tensor:
    """Return the sequence ``[B,P+N(+1),D]``: the prefix, zeros where actions are predicted, and the stop token.

    What is predicted for a place is read one position before it, so the first action comes from the last prompt token.

    Args:
        model: the network.
        prefix: ``[B,P,D]``.
        num_tokens: N.
        keep_stop_token: end with the stop token.
    """
    parts = [prefix, prefix.new_zeros(len(prefix), num_tokens, prefix.shape[2])]
    if keep_stop_token:
        stop = torch.full((len(prefix), 1), model.config.eos_id, device=prefix.device)
        parts.append(model.language_model.model.embed_tokens(stop).to(prefix.dtype))
    return torch.cat(parts, dim=1)


def at_action_places(hidden: Tensor, prefix_length: int, num_tokens: int) -> Tensor:
    """Return the hidden states ``[B,N,D]`` that actions are read from, of those of the whole sequence."""
    return hidden[:, prefix_length - 1 : prefix_length - 1 + num_tokens]
