"""OpenVLA as a reinforcement-learning policy.

Shapes: B batch, C actions in a chunk, A action dimensions, H x W pixels, L prompt tokens, D hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from embodrl.data.rng import RandomSource
from embodrl.models.common.sampling import draw, expected, exponential_noise
from embodrl.models.openvla.decode import ActionDecoder
from embodrl.models.openvla.token_policy import TokenPolicy
from embodrl.types import ActMode, Observation, PolicyOutput, SamplingParams


class OpenVLAPolicy(TokenPolicy):
    """Decodes seven action tokens for each of the C actions autoregressively; C = 1 is the public model.

    ``preprocess`` returns ``images uint8[B,H,W,3]``, ``input_ids`` and ``attention_mask`` ``int64[B,L]``.
    """

    reads_cameras = False

    def cache_shape(self, num_cameras: int) -> tuple[int, int, int]:
        llama = self.model.config.llama
        width = llama.num_key_value_heads * (llama.hidden_size // llama.num_attention_heads)
        text = self.processor.max_prompt_tokens + self.num_action_chunks * self.action_dim
        return llama.num_hidden_layers, width, num_cameras * self.model.config.num_patches + text

    @torch.no_grad()
    def predict_action_batch(
        self,
        observation: Observation,
        mode: ActMode,
        sampling: SamplingParams,
        generator: RandomSource | None = None,
        compute_values: bool = True,
    ) -> PolicyOutput:
        """Choose a chunk of actions per row: sampled in ``train`` mode, the most probable bins in ``eval`` mode.

        In ``mean`` mode each token is the bin nearest to the mean, given the earlier tokens. ``forward_inputs`` has the
        output of ``preprocess`` and ``action_tokens int64[B,C,A]``. Each call takes one block from ``generator``,
        whatever the tokens.
        """
        inputs = self.with_patches(self.preprocess(observation))
        prefix, mask = self.prompt_embeddings(inputs)
        batch = len(prefix)
        num_tokens = self.num_action_chunks * self.action_dim
        noise = None
        if mode == "train":
            noise = exponential_noise((batch, num_tokens, self.bins.num_bins), generator, self.device)

        def choose(logits: Tensor, place: int) -> Tensor:
            if mode == "mean":
                return expected(logits, sampling) + self.bins.first_id
            index = draw(logits, sampling, None if noise is None else noise[:, place])
            return index + self.bins.first_id

        decoder = ActionDecoder(self.model, batch, prefix.shape[1] + num_tokens)
        tokens, logits, hidden = decoder.run(prefix, mask, num_tokens, choose, self.first_read(prefix.shape[1]))
        values = self.values_from(self._features(hidden, mask)) if compute_values else None
        return self.make_output(inputs, self.bins.index(tokens), logits, values, sampling)

    @torch.no_grad()
    def predict_values(self, observation: Observation) -> Tensor:
        """Return values from one forward pass over images and prompt."""
        prefix, mask = self.prompt_embeddings(self.preprocess(observation))
        hidden = self.model.hidden_states(prefix, mask, self.first_read(prefix.shape[1]))
        return self.values_from(self._features(hidden, mask))

    def action_logits(self, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Compute each token's logits from the actual earlier tokens (teacher forcing)."""
        hidden, features = self.action_states(inputs)
        return self.model.action_logits(hidden), features

    def action_states(self, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the hidden states ``[B,C*A,D]`` that predict action tokens, and the input of the value head."""
        prefix, prefix_mask = self.prompt_embeddings(inputs)
        known = self.model.language_model.model.embed_tokens(inputs["action_tokens"].flatten(1)[:, :-1])
        mask = None if prefix_mask is None else F.pad(prefix_mask, (0, known.shape[1]), value=1)
        length = prefix.shape[1]
        first = self.first_read(length)
        hidden = self.model.hidden_states(torch.cat([prefix, known.to(prefix.dtype)], dim=1), mask, first)
        return hidden[:, length - 1 - first :], self._features(hidden[:, : length - first], prefix_mask)
