"""OpenVLA as a reinforcement-learning policy.

Legend: B batch, C actions in a chunk, A action dimensions, H x W pixels, L prompt tokens, D hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from embodrl.errors import EmbodrlError
from embodrl.models.base import VLAPolicy
from embodrl.models.common import checkpoint
from embodrl.models.common.action_bins import ActionBins
from embodrl.models.common.images import normalize
from embodrl.models.common.norm_stats import ActionStats
from embodrl.models.common.sampling import action_entropy, action_log_probs, draw, smoothed_targets
from embodrl.models.common.value_head import ValueHead
from embodrl.models.openvla.config import DINO_MEAN, DINO_STD, SIGLIP_MEAN, SIGLIP_STD
from embodrl.models.openvla.decode import ActionDecoder
from embodrl.models.openvla.modeling import OpenVLAModel
from embodrl.models.openvla.processing import OpenVLAProcessor
from embodrl.types import EvalOutput, Observation, PolicyOutput, SamplingParams

VALUE_HEAD_FILE = "value_head.safetensors"


class OpenVLAPolicy(VLAPolicy):
    """Seven action tokens for each of the C actions, decoded one after the other; C = 1 is the public model.

    Args:
        model: the network.
        processor: makes its inputs.
        stats: action statistics of the robot.
        num_action_chunks: C.
        value_head: the critic on the hidden state of the last prompt token, or None.
        freeze_vision: do not train the vision backbone.
    """

    def __init__(
        self,
        model: OpenVLAModel,
        processor: OpenVLAProcessor,
        stats: ActionStats,
        num_action_chunks: int = 1,
        value_head: ValueHead | None = None,
        freeze_vision: bool = False,
    ) -> None:
        super().__init__()
        self.model = model
        self.processor = processor
        self.stats = stats
        self.num_action_chunks = num_action_chunks
        self.action_dim = stats.action_dim
        self.value_head = value_head
        self.bins = ActionBins(model.config.action_vocab_size, model.config.n_action_bins)
        vision = model.vision_backbone
        if freeze_vision:
            vision.requires_grad_(False)
        for tower in (vision.featurizer, vision.fused_featurizer):
            for parameter in tower.unused_parameters():
                parameter.requires_grad_(False)
        for name, values in (("mean", (DINO_MEAN, SIGLIP_MEAN)), ("std", (DINO_STD, SIGLIP_STD))):
            self.register_buffer(f"_pixel_{name}", torch.tensor(values, device=self.device), persistent=False)

    # Inference -------------------------------------------------------------------------------------------------------

    def preprocess(self, observation: Observation) -> dict[str, Tensor]:
        """Return ``images uint8[B,H,W,3]``, ``input_ids`` and ``attention_mask`` ``int64[B,L]`` on the policy's device.

        Raises:
            EmbodrlError: several cameras, or a prompt that does not fit.
        """
        return self.processor(observation, self.device)

    @torch.no_grad()
    def predict_action_batch(
        self,
        observation: Observation,
        mode: Literal["train", "eval"],
        sampling: SamplingParams,
        generator: torch.Generator | None = None,
        compute_values: bool = True,
    ) -> PolicyOutput:
        """Choose a chunk of actions for each row: sampled in ``train`` mode, the most probable bins in ``eval`` mode.

        ``forward_inputs`` has what ``preprocess`` returns and ``action_tokens int64[B,C,A]``. Of its randomness, each
        call takes one block from ``generator``, whatever the tokens.

        Raises:
            EmbodrlError: see ``preprocess``; or values are wanted and there is no value head.
        """
        inputs = self.preprocess(observation)
        prefix, mask = self._prefix(inputs)
        batch, num_tokens = len(prefix), self.num_action_chunks * self.action_dim
        noise = None
        if mode == "train":
            noise = exponential_noise((batch, num_tokens, self.bins.num_bins), generator, self.device)

        def choose(logits: Tensor, place: int) -> Tensor:
            index = draw(logits, sampling, None if noise is None else noise[:, place])
            return index + self.bins.first_id

        decoder = ActionDecoder(self.model, batch, prefix.shape[1] + num_tokens)
        tokens, logits, hidden = decoder.run(prefix, mask, num_tokens, choose)
        logprobs = action_log_probs(logits, self.bins.index(tokens), sampling)
        shape = (batch, self.num_action_chunks, self.action_dim)
        actions = self.stats.unnormalize(self.bins.decode(tokens.cpu().numpy()).reshape(shape)).astype(np.float32)
        values = self._values(hidden) if compute_values else None
        return PolicyOutput(actions, logprobs.view(shape), values, {**inputs, "action_tokens": tokens.view(shape)})

    @torch.no_grad()
    def predict_values(self, observation: Observation) -> Tensor:
        """See VLAPolicy; one forward pass over images and prompt.

        Raises:
            EmbodrlError: see ``preprocess``; or there is no value head.
        """
        prefix, mask = self._prefix(self.preprocess(observation))
        return self._values(self.model.hidden_states(prefix, mask)[:, -1])

    # Training --------------------------------------------------------------------------------------------------------

    def evaluate_actions(
        self,
        forward_inputs: dict[str, Tensor],
        sampling: SamplingParams,
        compute_entropy: bool = True,
        compute_values: bool = True,
    ) -> EvalOutput:
        """Return log-probs, entropy and values of stored actions, with gradients, in one teacher-forced pass.

        Raises:
            EmbodrlError: values are wanted and there is no value head.
        """
        logits, hidden = self._teacher_forced(forward_inputs)
        tokens = forward_inputs["action_tokens"]
        index = self.bins.index(tokens.flatten(1))
        logprobs = action_log_probs(logits, index, sampling).view(tokens.shape)
        entropy = action_entropy(logits, index, sampling).view(tokens.shape) if compute_entropy else None
        return EvalOutput(logprobs, entropy, self._values(hidden) if compute_values else None)

    def sft_inputs(self, observation: Observation, actions: Tensor) -> dict[str, Tensor]:
        """Return what ``preprocess`` returns and ``action_tokens int64[B,C,A]`` of ``actions float32[B,C,A]``."""
        normalized = self.stats.normalize(actions.detach().cpu().numpy())
        tokens = torch.from_numpy(self.bins.encode(normalized)).to(self.device)
        return {**self.preprocess(observation), "action_tokens": tokens}

    def sft_loss(self, batch: dict[str, Tensor], label_smoothing_bins: float = 0.0) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the mean cross-entropy over action tokens (nats), ``token_accuracy`` and ``l1`` (normalised units).

        Args:
            batch: from ``sft_inputs``; ``action_mask bool[B,C]``, if there is one, leaves actions out.
            label_smoothing_bins: standard deviation, in bins, of the Gaussian target around the right bin; 0 is
                one-hot.
        """
        logits, _ = self._teacher_forced(batch)
        tokens = batch["action_tokens"]
        index = self.bins.index(tokens.flatten(1))
        logp = logits.log_softmax(dim=-1)
        if label_smoothing_bins > 0:
            targets = smoothed_targets(self.bins.num_bins, label_smoothing_bins, logits.device)[index]
            nll = -(targets * logp).sum(dim=-1)
        else:
            nll = -logp.gather(-1, index[..., None]).squeeze(-1)
        weight = torch.ones_like(nll)
        if "action_mask" in batch:
            weight = batch["action_mask"][:, :, None].expand_as(tokens).flatten(1).to(nll.dtype)
        total = weight.sum().clamp(min=1.0)
        with torch.no_grad():
            guess = logits.argmax(dim=-1)
            error = (self.bins.value_of_index(guess) - self.bins.value_of_index(index)).abs()
            scalars = {
                "token_accuracy": ((guess == index) * weight).sum() / total,
                "l1": (error * weight).sum() / total,
            }
        return (nll * weight).sum() / total, scalars

    def parts(self) -> dict[str, nn.Module]:
        """See VLAPolicy."""
        parts: dict[str, nn.Module] = {
            "vision": self.model.vision_backbone,
            "projector": self.model.projector,
            "language": self.model.language_model,
        }
        return parts if self.value_head is None else {**parts, "value_head": self.value_head}

    def head_parameters(self) -> list[nn.Parameter]:
        """Return the weight of lm_head."""
        return list(self.model.language_model.lm_head.parameters())

    def unused_parameters(self) -> list[nn.Parameter]:
        """Return the last block and the pooling head of each vision tower, which only the checkpoint knows."""
        vision = self.model.vision_backbone
        return [p for tower in (vision.featurizer, vision.fused_featurizer) for p in tower.unused_parameters()]

    def enable_gradient_checkpointing(self) -> None:
        """Recompute the activations of every block in the backward pass."""
        self.model.language_model.gradient_checkpointing_enable({"use_reentrant": False})
        for tower in (self.model.vision_backbone.featurizer, self.model.vision_backbone.fused_featurizer):
            tower.gradient_checkpointing = True

    # Files -----------------------------------------------------------------------------------------------------------

    def save_pretrained(self, directory: Path) -> None:
        """Write config.json, safetensors, tokenizer.json, dataset_statistics.json and preprocessor_config.json.

        The value head goes to a file of its own, so that the rest is a plain OpenVLA checkpoint. The directory
        appears, or is replaced, in one step.
        """
        config = self.model.config
        with checkpoint.atomic_directory(directory) as staging:
            checkpoint.save_weights(self.model.state_dict(), staging)
            if self.value_head is not None:
                checkpoint.save_file(self.value_head.state_dict(), staging / VALUE_HEAD_FILE)
            checkpoint.write_json(staging / "config.json", config.to_dict())
            checkpoint.write_json(staging / "dataset_statistics.json", config.norm_stats)
            checkpoint.write_json(staging / "preprocessor_config.json", preprocessor_config(config.image_size))
            self.processor.tokenizer.save(staging)

    # Parts -----------------------------------------------------------------------------------------------------------

    def _pixels(self, images: Tensor) -> Tensor:
        mean, std = self.get_buffer("_pixel_mean"), self.get_buffer("_pixel_std")
        halves = [normalize(images, mean[i], std[i]) for i in range(2)]
        return torch.cat(halves, dim=1).to(self.model.projector.fc1.weight.dtype)

    def _prefix(self, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        """Return embeddings ``[B,P,D]`` and mask ``int64[B,P]`` of images and prompt, without columns of mere padding.

        The mask is None where nothing is padded, which lets attention take its fast causal path.
        """
        input_ids, mask = inputs["input_ids"], inputs["attention_mask"]
        longest = int(mask.sum(dim=1).max())
        keep = slice(mask.shape[1] - (longest - 1), None)
        input_ids = torch.cat([input_ids[:, :1], input_ids[:, keep]], dim=1)
        mask = torch.cat([mask[:, :1], mask[:, keep]], dim=1)
        embeddings = self.model.embed_prefix(self._pixels(inputs["images"]), input_ids)
        if bool(mask.all()):
            return embeddings, None
        patches = mask.new_ones(len(mask), self.model.config.num_patches)
        return embeddings, torch.cat([mask[:, :1], patches, mask[:, 1:]], dim=1)

    def _teacher_forced(self, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return logits ``float32[B,C*A,256]`` and the hidden state ``[B,D]`` of the last prompt token."""
        prefix, mask = self._prefix(inputs)
        tokens = inputs["action_tokens"].flatten(1)
        known = self.model.language_model.model.embed_tokens(tokens[:, :-1])
        if mask is not None:
            mask = F.pad(mask, (0, known.shape[1]), value=1)
        hidden = self.model.hidden_states(torch.cat([prefix, known.to(prefix.dtype)], dim=1), mask)
        at_actions = hidden[:, prefix.shape[1] - 1 :]
        return self.model.action_logits(at_actions), at_actions[:, 0]

    def _values(self, hidden: Tensor) -> Tensor:
        if self.value_head is None:
            raise EmbodrlError("the policy has no value head", "set model.add_value_head=true")
        return self.value_head(hidden)


def exponential_noise(shape: Sequence[int], generator: torch.Generator | None, device: torch.device) -> Tensor:
    """Return draws ``float32`` from Exp(1), made on the generator's device, for sampling by ``argmax(p / noise)``."""
    source = device if generator is None else generator.device
    return torch.empty(*shape, device=source).exponential_(generator=generator).to(device)


def preprocessor_config(image_size: int) -> dict[str, object]:
    """Return the public preprocessor_config.json."""
    size = [3, image_size, image_size]
    return {
        "image_processor_type": "PrismaticImageProcessor",
        "processor_class": "PrismaticProcessor",
        "image_resize_strategy": "resize-naive",
        "input_sizes": [size, size],
        "interpolations": ["bicubic", "bicubic"],
        "means": [list(DINO_MEAN), list(SIGLIP_MEAN)],
        "stds": [list(DINO_STD), list(SIGLIP_STD)],
        "use_fused_vision_backbone": True,
    }
