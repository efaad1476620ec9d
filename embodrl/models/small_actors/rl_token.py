"""The RL token: a frozen VLA's image and prompt features as one small vector.

Physical Intelligence 2026, "RL Token: Bootstrapping Online RL with Vision-Language-Action Models",
https://www.pi.website/research/rlt. A transformer reads the VLA's prefix states and a learned query, whose output is
``z_rl``; a decoder has to reconstruct the states from it. After training only the encoder is used.
Shapes: B batch, P prefix tokens, G width of the VLA, Z size of the token.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from embodrl.errors import CheckpointError, PolicyFileError
from embodrl.fields import read_fields
from embodrl.models.common.checkpoint import check_link, readable
from embodrl.storage.files import write_safetensors
from embodrl.storage.integrity import check_checksums
from embodrl.storage.tensor_files import load_tensors

TOKEN_CONFIG = "rl_token.json"
TOKEN_WEIGHTS = "rl_token.safetensors"


@dataclass(frozen=True)
class RLTokenSpec:
    """Dimensions of an RL token.

    Attributes:
        width: G.
        places: P of the longest training prompt; later tokens count as the last one.
        size: Z, also the width of encoder and decoder.
        layers: layers of encoder and of decoder.
        heads: attention heads of both.
    """

    width: int
    places: int
    size: int = 64
    layers: int = 2
    heads: int = 4


class RLToken(nn.Module):
    """Encoder of prefix states, and its training decoder; ``facts`` are recorded with the token as JSON."""

    mean: Tensor
    std: Tensor

    def __init__(self, spec: RLTokenSpec, facts: Mapping[str, object] | None = None) -> None:
        super().__init__()
        self.spec = spec
        self.facts = dict(facts or {})
        self.register_buffer("mean", torch.zeros(spec.places, spec.width))
        self.register_buffer("std", torch.ones(spec.width))
        self.project = nn.Linear(spec.width, spec.size)
        self.out = nn.Linear(spec.size, spec.width)
        self.query = nn.Parameter(torch.randn(spec.size) * 0.02)
        self.encoder, self.decoder = (_transformer(spec) for _ in range(2))
        self.norm = nn.LayerNorm(spec.size)

    def standardize(self, hidden: Tensor, mask: Tensor) -> None:
        """Set each position's mean and deviation from states ``[N,P,G]``, where ``mask bool[N,P]``.

        States differ mostly by their position in the prompt, which says nothing about the scene.
        """
        there = mask[..., None].float()
        self.mean = (hidden.float() * there).sum(0) / there.sum(0).clamp_min(1.0)
        squares = ((hidden.float() - self.mean) * there).square().sum((0, 1))
        self.std = (squares / there.sum()).sqrt().clamp_min(1e-6)

    def standardized(self, hidden: Tensor) -> Tensor:
        """Return states ``float32[B,P,G]`` with mean 0 and deviation 1 at each position, without gradients."""
        places = torch.arange(hidden.shape[1], device=hidden.device).clamp(max=self.spec.places - 1)
        return (hidden.detach().float() - self.mean[places]) / self.std

    def encode(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        """Return ``z_rl float32[B,Z]`` of prefix states ``hidden [B,P,G]``; ``mask [B,P]`` is 0 at padding."""
        tokens = self._tokens(self.standardized(hidden))
        x = torch.cat([tokens, self.query.expand(len(tokens), 1, -1)], 1)
        ignored = None if mask is None else F.pad(mask == 0, (0, 1), value=False)
        return self.norm(self.encoder(x, src_key_padding_mask=ignored)[:, -1])

    def reconstruction_loss(self, hidden: Tensor, mask: Tensor | None, kept: Tensor) -> Tensor:
        """Return the mean squared error of the reconstructed states, relative to their variance at each position.

        The decoder sees ``z_rl`` and, of the states before the predicted one, those in ``kept bool[B,P]`` (all in the
        paper; equation 2). For ``hidden`` and ``mask`` see ``encode``.
        """
        return self.decoding_loss(self.encode(hidden, mask), hidden, mask, kept)

    def decoding_loss(self, z: Tensor, hidden: Tensor, mask: Tensor | None, kept: Tensor) -> Tensor:
        """Return ``reconstruction_loss`` for a given ``z_rl float32[B,Z]``."""
        targets = self.standardized(hidden)
        seen = self._tokens(targets * kept[..., None])
        x = torch.cat([z[:, None], seen[:, :-1]], 1)
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        error = (self.out(self.decoder(x, mask=later)) - targets).square().mean(-1)
        valid = torch.ones_like(error) if mask is None else (mask != 0).float()
        return (error * valid).sum() / valid.sum()

    def _tokens(self, states: Tensor) -> Tensor:
        return self.project(states) + positions(states.shape[1], self.spec.size, states.device)

    def save(self, directory: Path) -> None:
        """Write both files into a directory that is being written."""
        write_safetensors(directory / TOKEN_WEIGHTS, self.state_dict())
        (directory / TOKEN_CONFIG).write_text(json.dumps({**asdict(self.spec), "facts": self.facts}, indent=2) + "\n")

    @classmethod
    def load(cls, directory: Path) -> RLToken:
        """Load the token in a policy directory; raise ``CheckpointError`` if missing or damaged."""
        hint = "train one: embodrl model token POLICY DATA --output DIR"
        if not (directory / TOKEN_CONFIG).is_file() or not (directory / TOKEN_WEIGHTS).is_file():
            raise CheckpointError(f"{directory} has no RL token", hint, code="rl-token-missing")
        for name in (TOKEN_CONFIG, TOKEN_WEIGHTS):
            check_link(directory / name, directory)
        check_checksums(directory, [TOKEN_CONFIG, TOKEN_WEIGHTS])
        fields = read_fields(directory / TOKEN_CONFIG, PolicyFileError, hint)
        sizes = {name: fields.integer(name, low=1, high=2**14) for name in ("width", "places", "size")}
        sizes |= {name: fields.integer(name, low=1, high=64) for name in ("layers", "heads")}
        if sizes["size"] % sizes["heads"]:
            fields.refuse("'size' is not a multiple of 'heads'")
        with torch.device("meta"):  # until the weights' sizes are checked
            token = cls(RLTokenSpec(**sizes), fields.fields("facts", {}).content)
        try:
            with readable(directory / TOKEN_WEIGHTS):
                token.load_state_dict(load_tensors(directory / TOKEN_WEIGHTS), assign=True)
        except (RuntimeError, ValueError) as error:
            raise CheckpointError(f"{directory / TOKEN_WEIGHTS}: {error}", hint, code="rl-token-weights") from error
        return token.float().eval().requires_grad_(False)


def positions(length: int, size: int, device: torch.device) -> Tensor:
    """Return sines and cosines ``float32[length,size]`` (Vaswani et al. 2017, section 3.5)."""
    rates = torch.exp(torch.arange(0, size, 2, device=device) * (-math.log(10_000.0) / size))
    angles = torch.arange(length, device=device)[:, None] * rates
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(1)[:, :size]


def _transformer(spec: RLTokenSpec) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(
        spec.size, spec.heads, 4 * spec.size, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
    )
    return nn.TransformerEncoder(layer, spec.layers, enable_nested_tensor=False)
