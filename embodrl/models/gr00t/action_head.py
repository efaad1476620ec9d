"""GR00T's action head with the parameter names of its public checkpoints (NVIDIA, "GR00T N1.5", 2025, and later).

It maps image and prompt features, the state and a noisy action chunk to the chunk's velocity. Its time runs from noise
(0) to data (1), opposite to ``flow/flow.py``. Encoder and decoder weights are per embodiment (robot).
Shapes: B batch, H actions, D padded action dimensions, S tokens of images and prompt, E their width, W width of the
diffusion transformer, F its output width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from embodrl.models.flow.gemma import per_token
from embodrl.models.gr00t.config import ActionHeadSpec
from embodrl.models.gr00t.dit import ContextMask, DiffusionTransformer, KeyValue, SelfAttentionTransformer

MAX_PERIOD = 10000.0
TOKEN_STD = 0.5
LAST_LAYER_GAIN = 0.1
TIME_ROUNDING = 1e-3

Embodiment = int | Tensor
"""One embodiment for the whole batch, or ``int64[B]``."""


class EmbodimentLinear(nn.Module):
    """A linear layer with separate weights per embodiment."""

    def __init__(self, num_embodiments: int, input_dim: int, output_dim: int) -> None:
        super().__init__()
        self.W = nn.Parameter(torch.empty(num_embodiments, input_dim, output_dim))
        self.b = nn.Parameter(torch.empty(num_embodiments, output_dim))

    def forward(self, x: Tensor, embodiment: Embodiment) -> Tensor:
        """Map ``[B,L,input_dim]`` to ``[B,L,output_dim]``.

        One embodiment for all rows avoids a per-row copy of its weights, which at full size are gigabytes.
        """
        if isinstance(embodiment, int):
            return x @ self.W[embodiment] + self.b[embodiment]
        return torch.bmm(x, self.W[embodiment]) + self.b[embodiment][:, None]

    def init_weights(self, generator: torch.Generator, gain: float = 1.0) -> None:
        """Draw weights of variance ``gain^2 / fan_in``."""
        self.W.data.normal_(0.0, gain / math.sqrt(self.W.shape[1]), generator=generator)
        nn.init.zeros_(self.b)


class EmbodimentMlp(nn.Module):
    """Two layers with ReLU in between."""

    def __init__(self, num_embodiments: int, input_dim: int, hidden_dim: int, output_dim: int) -> None:
        super().__init__()
        self.layer1 = EmbodimentLinear(num_embodiments, input_dim, hidden_dim)
        self.layer2 = EmbodimentLinear(num_embodiments, hidden_dim, output_dim)

    def forward(self, x: Tensor, embodiment: Embodiment) -> Tensor:
        """Map ``[B,L,input_dim]`` to ``[B,L,output_dim]``."""
        return self.layer2(F.relu(self.layer1(x, embodiment)), embodiment)


class ActionEncoder(nn.Module):
    """Encodes noisy actions and the time as tokens."""

    def __init__(self, num_embodiments: int, action_dim: int, width: int) -> None:
        super().__init__()
        self.W1 = EmbodimentLinear(num_embodiments, action_dim, width)
        self.W2 = EmbodimentLinear(num_embodiments, 2 * width, width)
        self.W3 = EmbodimentLinear(num_embodiments, width, width)

    def forward(self, actions: Tensor, bucket: Tensor, embodiment: Embodiment) -> Tensor:
        """Map actions ``[B,H,D]`` and time ``int64[B]`` or ``int64[B,H]`` to ``[B,H,W]``."""
        embedded = self.W1(actions, embodiment)
        time = per_token(sinusoids(bucket, embedded.shape[-1])).to(embedded.dtype).expand_as(embedded)
        hidden = F.silu(self.W2(torch.cat([embedded, time], dim=-1), embodiment))
        return self.W3(hidden, embodiment)


def sinusoids(bucket: Tensor, width: int) -> Tensor:
    """Return ``float32[...,width]``: sin, cos of ``t * 10000^(-i / h)``, i from 0 to h - 1 and h half the width.

    Operations follow the reference's order: at angles of a thousand, float32 rounding shows.
    """
    half = width // 2
    exponent = -torch.arange(half, dtype=torch.float32, device=bucket.device) * (math.log(MAX_PERIOD) / half)
    angle = bucket.float()[..., None] * exponent.exp()
    return torch.cat([angle.sin(), angle.cos()], dim=-1)


class FlowActionHead(nn.Module):
    """All of GR00T after its vision-language model."""

    def __init__(self, spec: ActionHeadSpec) -> None:
        super().__init__()
        self.spec = spec
        robots = spec.num_embodiments
        width = spec.dit.width
        self.model = DiffusionTransformer(spec.dit, spec.backbone_dim, spec.hidden_size)
        self.state_encoder = EmbodimentMlp(robots, spec.max_state_dim, spec.hidden_size, width)
        self.action_encoder = ActionEncoder(robots, spec.action_dim, width)
        self.action_decoder = EmbodimentMlp(robots, spec.hidden_size, spec.hidden_size, spec.action_dim)
        if spec.num_future_tokens:
            self.future_tokens = nn.Embedding(spec.num_future_tokens, width)
        self.position_embedding = nn.Embedding(spec.max_seq_len, width)
        self.vlln = nn.LayerNorm(spec.backbone_dim)
        self.vl_self_attention = SelfAttentionTransformer(spec.vl)

    def process_features(self, features: Tensor, mask: Tensor | None) -> Tensor:
        """Return the features ``[B,S,E]`` that actions attend to; ``mask bool[B,1,1,S]`` is False at padding."""
        return self.vl_self_attention(self.vlln(features), mask)

    def seen(self, mask: Tensor | None, at_images: Tensor) -> ContextMask:
        """Return the features that each block of the diffusion transformer attends to.

        In N1.5 all features; in later versions cross-attending blocks attend to images, except that every
        ``text_every``-th, starting with the first, attends to the rest. ``mask bool[B,S]`` is False at padding,
        ``at_images bool[B,S]`` True at image patches.
        """
        every = self.spec.text_every
        if every is None:
            return None if mask is None else mask[:, None, None]
        valid = torch.ones_like(at_images) if mask is None else mask
        images, text = ((valid & part)[:, None, None] for part in (at_images, ~at_images))
        return [text if block % (2 * every) == 0 else images for block in range(self.spec.dit.num_layers)]

    def encode_state(self, state: Tensor, embodiment: Embodiment) -> Tensor:
        """Map ``[B,1,state_dim]`` to ``[B,1,W]``."""
        return self.state_encoder(state, embodiment)

    def buckets(self, time: Tensor) -> Tensor:
        """Return ``int(1000 t)`` as ``int64[...]`` for t ``float32[...]``.

        A thousandth of a bucket is added first, so that float32 0.6 does not become 599.
        """
        return (time * self.spec.num_timestep_buckets + TIME_ROUNDING).long()

    def forward(
        self,
        actions: Tensor,
        bucket: Tensor,
        state: Tensor,
        known: list[KeyValue | None],
        mask: ContextMask,
        embodiment: Embodiment,
    ) -> tuple[Tensor, Tensor]:
        """Return the velocity ``[B,H,D]``, data minus noise, and the features ``[B,H,F]`` that it is decoded from.

        Args:
            actions: ``[B,H,D]``, between noise and data.
            bucket: time, 0 (noise) to 1000 (data), ``int64[B]``, or ``int64[B,H]`` per action, where the last also
                applies to non-action tokens.
            state: output of ``encode_state``.
            known: output of ``self.model.key_values`` for the processed features.
            mask: output of ``seen``.
            embodiment: embodiment whose weights are used.
        """
        horizon = actions.shape[1]
        tokens = self.action_encoder(actions, bucket, embodiment) + self.position_embedding.weight[:horizon]
        parts = [state, tokens]
        if self.spec.num_future_tokens:
            parts.insert(1, self.future_tokens.weight.expand(len(tokens), -1, -1).to(tokens.dtype))
        sequence = torch.cat(parts, dim=1)
        if bucket.dim() == 2:
            others = bucket[:, -1:].expand(-1, sequence.shape[1] - horizon)
            bucket = torch.cat([others, bucket], dim=1)
        features = self.model(sequence, bucket, known, mask)[:, -horizon:]
        return self.action_decoder(features, embodiment), features

    def enable_gradient_checkpointing(self) -> None:
        self.model.gradient_checkpointing = self.vl_self_attention.gradient_checkpointing = True

    def init_weights(self, generator: torch.Generator) -> None:
        """Draw weights for training from scratch."""
        self.model.init_weights(generator)
        self.vl_self_attention.init_weights(generator)
        for module in self.modules():
            if isinstance(module, EmbodimentLinear):
                module.init_weights(generator, LAST_LAYER_GAIN if module is self.action_decoder.layer2 else 1.0)
        for embedding in (getattr(self, "future_tokens", None), self.position_embedding):
            if embedding is not None:
                embedding.weight.data.normal_(0.0, TOKEN_STD, generator=generator)
        nn.init.ones_(self.vlln.weight)
        nn.init.zeros_(self.vlln.bias)
