"""OpenVLA-OFT's additions to the OpenVLA network: empty positions for a chunk, a state token, and the L1 head.

Kim, Finn and Liang, "Fine-Tuning Vision-Language-Action Models: Optimizing Speed and Success", 2025. Attention is
bidirectional (``OpenVLAModel(config, causal=False)``). Shapes: B batch, P image, state and prompt tokens, S state
dimensions, D hidden size, N action tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from embodrl.models.common.init import init_linears
from embodrl.models.common.value_head import masked_mean
from embodrl.models.openvla.modeling import OpenVLAModel


class ProprioProjector(nn.Module):
    """Maps the robot's state to one language embedding; names as in ``proprio_projector--N_checkpoint.pt``."""

    def __init__(self, proprio_dim: int, hidden_size: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(proprio_dim, hidden_size)
        self.fc2 = nn.Linear(hidden_size, hidden_size)

    def init_weights(self, generator: torch.Generator) -> None:
        init_linears(self, generator)

    def forward(self, proprio: Tensor) -> Tensor:
        """Map ``[B,S]`` to ``[B,D]``."""
        return self.fc2(F.gelu(self.fc1(proprio)))


class _ResidualBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.ffn = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.ffn(x)


class _ResidualMlp(nn.Module):
    def __init__(self, input_dim: int, width: int, output_dim: int, num_blocks: int = 2) -> None:
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(input_dim)
        self.fc1 = nn.Linear(input_dim, width)
        self.mlp_resnet_blocks = nn.ModuleList(_ResidualBlock(width) for _ in range(num_blocks))
        self.layer_norm2 = nn.LayerNorm(width)
        self.fc2 = nn.Linear(width, output_dim)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.fc1(self.layer_norm1(x)))
        for block in self.mlp_resnet_blocks:
            x = block(x)
        return self.fc2(self.layer_norm2(x))


class ActionHead(nn.Module):
    """Maps the hidden states of an action's A tokens to the action; names as in ``action_head--N_checkpoint.pt``."""

    def __init__(self, hidden_size: int, action_dim: int) -> None:
        super().__init__()
        self.action_dim = action_dim
        self.model = _ResidualMlp(action_dim * hidden_size, hidden_size, action_dim)

    def init_weights(self, generator: torch.Generator) -> None:
        init_linears(self, generator)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map ``[B,C*A,D]`` to unbounded normalised actions ``float32[B,C,A]``."""
        return self.model(hidden.unflatten(1, (-1, self.action_dim)).flatten(2)).float()


def instruction_mean(model: OpenVLAModel, input_ids: Tensor, mask: Tensor, with_stop_token: bool) -> Tensor:
    """Return FiLM's input: the mean embedding ``[B,D]`` of a prompt ``int64[B,L]``, optionally with stop token."""
    if with_stop_token:
        input_ids = F.pad(input_ids, (0, 1), value=model.config.eos_id)
        mask = F.pad(mask, (0, 1), value=1)
    embeddings = model.language_model.model.embed_tokens(input_ids)
    return masked_mean(embeddings, mask).to(embeddings.dtype)


def append_action_places(model: OpenVLAModel, prefix: Tensor, num_tokens: int, keep_stop_token: bool) -> Tensor:
    """Return the sequence ``[B,P+N(+1),D]``: the prefix, zeros where actions are predicted, and the stop token if kept.

    A prediction is read one position earlier, so the first action comes from the last prompt token.
    """
    parts = [prefix, prefix.new_zeros(len(prefix), num_tokens, prefix.shape[2])]
    if keep_stop_token:
        stop = torch.full((len(prefix), 1), model.config.eos_id, device=prefix.device)
        parts.append(model.language_model.model.embed_tokens(stop).to(prefix.dtype))
    return torch.cat(parts, dim=1)


def at_action_places(hidden: Tensor, prefix_length: int, num_tokens: int) -> Tensor:
    """Return the hidden states ``[B,N,D]`` that predict actions, from those of the whole sequence."""
    return hidden[:, prefix_length - 1 : prefix_length - 1 + num_tokens]
