"""OpenVLA-OFT's additions to the OpenVLA network: positions for a chunk, a state token, and continuous heads.

Kim, Finn and Liang, "Fine-Tuning Vision-Language-Action Models: Optimizing Speed and Success", 2025. Attention is
bidirectional (``OpenVLAModel(config, causal=False)``). Shapes: B batch, P image, state and prompt tokens, S state
dimensions, D hidden size, N action tokens.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from embodrl.models.common.init import init_linears
from embodrl.models.common.value_head import masked_mean
from embodrl.models.openvla.modeling import OpenVLAModel


class _Projector(nn.Module):
    def __init__(self, input_dim: int, hidden_size: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(input_dim, hidden_size)
        self.fc2 = nn.Linear(hidden_size, hidden_size)

    def init_weights(self, generator: torch.Generator) -> None:
        init_linears(self, generator)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x.to(self.fc1.weight.dtype))))


class ProprioProjector(_Projector):
    """Maps the robot's state ``[B,S]`` to one language embedding ``[B,D]``.

    Names as in ``proprio_projector--N_checkpoint.pt``.
    """


class NoisyActionProjector(_Projector):
    """Maps every number of a noisy chunk to an embedding; names as in ``noisy_action_projector--N_checkpoint.pt``."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__(1, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[B,C,A]`` to ``[B,C*A,D]``."""
        return super().forward(x.flatten(1)[..., None])


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

    def last_layer(self) -> nn.Linear:
        return self.model.fc2


class _NoisePredictor(nn.Module):
    def __init__(self, hidden_size: int, action_dim: int) -> None:
        super().__init__()
        self.mlp_resnet = _ResidualMlp(action_dim * hidden_size, hidden_size, action_dim)


class DiffusionHead(nn.Module):
    """Maps them to the noise in an action; names as in ``action_head--N_checkpoint.pt`` of a diffusion policy."""

    def __init__(self, hidden_size: int, action_dim: int) -> None:
        super().__init__()
        self.action_dim = action_dim
        self.noise_predictor = _NoisePredictor(hidden_size, action_dim)

    def init_weights(self, generator: torch.Generator) -> None:
        init_linears(self, generator)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map ``[B,C*A,D]`` to noise ``float32[B,C,A]``."""
        return self.noise_predictor.mlp_resnet(hidden.unflatten(1, (-1, self.action_dim)).flatten(2)).float()

    def last_layer(self) -> nn.Linear:
        return self.noise_predictor.mlp_resnet.fc2


def step_embedding(step: Tensor, width: int) -> Tensor:
    """Return sines, then cosines, ``float32[B,width]`` of diffusion steps ``[B]``; frequencies from 1 to 1e-4."""
    half = width // 2
    rates = torch.exp(torch.arange(half, device=step.device) * (-math.log(10000.0) / (half - 1)))
    phase = step.float()[:, None] * rates
    return torch.cat([phase.sin(), phase.cos()], dim=-1)


def instruction_mean(model: OpenVLAModel, input_ids: Tensor, mask: Tensor, with_stop_token: bool) -> Tensor:
    """Return FiLM's input: the mean embedding ``[B,D]`` of a prompt ``int64[B,L]``, optionally with stop token."""
    if with_stop_token:
        input_ids = F.pad(input_ids, (0, 1), value=model.config.eos_id)
        mask = F.pad(mask, (0, 1), value=1)
    embeddings = model.language_model.model.embed_tokens(input_ids)
    return masked_mean(embeddings, mask).to(embeddings.dtype)


def append_action_places(
    model: OpenVLAModel, prefix: Tensor, num_tokens: int, keep_stop_token: bool, noisy: Tensor | None = None
) -> Tensor:
    """Return the sequence ``[B,P+N(+1),D]``: the prefix, where actions are predicted, and the stop token if kept.

    There stand embeddings ``noisy [B,N,D]`` of noisy actions, else zeros. A prediction is read one position earlier, so
    the first action comes from the last prompt token.
    """
    places = prefix.new_zeros(len(prefix), num_tokens, prefix.shape[2]) if noisy is None else noisy.to(prefix.dtype)
    parts = [prefix, places]
    if keep_stop_token:
        stop = torch.full((len(prefix), 1), model.config.eos_id, device=prefix.device)
        parts.append(model.language_model.model.embed_tokens(stop).to(prefix.dtype))
    return torch.cat(parts, dim=1)


def at_action_places(hidden: Tensor, prefix_length: int, num_tokens: int) -> Tensor:
    """Return the hidden states ``[B,N,D]`` that predict actions, from those of the whole sequence."""
    return hidden[:, prefix_length - 1 : prefix_length - 1 + num_tokens]
