"""Shared base of OpenVLA and OpenVLA-OFT: action tokens, log-probs, values, imitation loss, and files.

Shapes: B batch, V cameras, C actions in a chunk, A action dimensions, H x W pixels, L prompt tokens, D hidden size,
P image and prompt tokens.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from embodrl.config.schema import ModelConfig
from embodrl.errors import EmbodrlError
from embodrl.models.common import checkpoint
from embodrl.models.common.action_bins import ActionBins
from embodrl.models.common.config_file import CONFIG_FILE, OWN_SECTION
from embodrl.models.common.gripper import Convention, to_environment, to_model
from embodrl.models.common.heads import save_heads
from embodrl.models.common.images import normalize
from embodrl.models.common.merging import merged_state_dict
from embodrl.models.common.norm_stats import ActionStats, stats_content
from embodrl.models.common.public_layout import PublicLayout
from embodrl.models.common.sampling import action_entropy, action_log_probs, smoothed_targets
from embodrl.models.common.tokenizer import PromptTokenizer
from embodrl.models.common.value_head import ValueHead, masked_mean
from embodrl.models.openvla.config import DINO_MEAN, DINO_STD, LLAMA_PROMPT_END, PUBLIC, SIGLIP_MEAN, SIGLIP_STD
from embodrl.models.openvla.modeling import OpenVLAModel
from embodrl.models.openvla.processing import OpenVLAProcessor
from embodrl.types import EvalOutput, Observation, PolicyOutput, SamplingParams


class TokenPolicy(PublicLayout):
    """A policy on the OpenVLA network with A tokens of 256 bins for each of the C actions.

    A family defines ``predict_action_batch``, ``predict_values`` and ``action_logits``.

    Args:
        model: network.
        processor: prepares the network's inputs.
        stats: action statistics of the robot.
        config: section ``model``: C, ``gripper``, and the value head's ``input`` and ``detach``.
        value_head: critic, or None.
    """

    draws_by_row = True
    decodings = ("greedy", "sampled", "mean")

    def __init__(
        self,
        model: OpenVLAModel,
        processor: OpenVLAProcessor,
        stats: ActionStats,
        config: ModelConfig,
        value_head: ValueHead | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.processor = processor
        self.stats = stats
        self.num_action_chunks = config.num_action_chunks
        self.action_dim = stats.action_dim
        self.gripper: Convention = config.gripper
        self.value_input = "prompt_end" if config.value_head.input == "auto" else config.value_head.input
        self.detach_value = config.value_head.detach
        self.vision_is_frozen = config.freeze_vision or config.trainable == "head"
        self.value_head = value_head
        self.bins = ActionBins(model.config.action_vocab_size, model.config.n_action_bins)
        for name, values in (("mean", (DINO_MEAN, SIGLIP_MEAN)), ("std", (DINO_STD, SIGLIP_STD))):
            self.register_buffer(f"_pixel_{name}", torch.tensor(values, device=self.device), persistent=False)

    # Defined by families ---------------------------------------------------------------------------------------------

    @abstractmethod
    def action_logits(self, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return logits ``float32[B,C*A,256]`` and the value head's input ``[B,D]``, with gradients, in one pass.

        ``inputs`` has the output of ``preprocess`` and ``action_tokens int64[B,C,A]``.
        """

    def state_tokens(self, inputs: dict[str, Tensor]) -> Tensor | None:
        """Return embeddings ``[B,E,D]`` to insert after the image patches, or None."""
        return None

    def film_input(self, input_ids: Tensor, mask: Tensor) -> Tensor | None:
        """Return FiLM's input ``[B,D]`` for a prompt and its mask ``int64[B,L]``; None without FiLM."""
        return None

    # VLAPolicy -------------------------------------------------------------------------------------------------------

    def check_instructions(self, instructions: Sequence[str], num_cameras: int) -> None:
        for text in instructions:
            self.processor.prompt_row(text)

    def preprocess(self, observation: Observation) -> dict[str, Tensor]:
        """Return the processor's inputs on the policy's device."""
        return self.processor(observation, self.device)

    def evaluate_actions(
        self,
        forward_inputs: dict[str, Tensor],
        sampling: SamplingParams,
        compute_entropy: bool = True,
        compute_values: bool = True,
    ) -> EvalOutput:
        """Return log-probs, entropy and values of stored actions, with gradients, in one pass."""
        logits, features = self.action_logits(forward_inputs)
        tokens = forward_inputs["action_tokens"]
        index = self.bins.index(tokens.flatten(1))
        logprobs = action_log_probs(logits, index, sampling).view(tokens.shape)
        entropy = action_entropy(logits, index, sampling).view(tokens.shape) if compute_entropy else None
        return EvalOutput(logprobs, entropy, self.values_from(features) if compute_values else None)

    def sft_inputs(self, observation: Observation, actions: Tensor) -> dict[str, Tensor]:
        """Return the output of ``preprocess`` and ``action_tokens int64[B,C,A]`` of ``actions float32[B,C,A]``."""
        raw = to_model(actions.detach().cpu().numpy().astype(np.float64), self.gripper)
        tokens = torch.from_numpy(self.bins.encode(self.stats.normalize(raw))).to(self.device)
        return {**self.preprocess(observation), "action_tokens": tokens}

    def out_of_range(self, actions: NDArray[np.floating], state: NDArray[np.floating]) -> NDArray[np.bool_]:
        """Return the values beyond the bins, which would be clipped."""
        return self.stats.outside(to_model(np.asarray(actions, np.float64), self.gripper))

    def sft_loss(self, batch: dict[str, Tensor], label_smoothing_bins: float = 0.0) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the mean cross-entropy over action tokens (nats), ``token_accuracy`` and ``l1`` (normalised units).

        ``action_mask bool[B,C]`` in ``batch``, if present, excludes actions. ``label_smoothing_bins`` is the standard
        deviation, in bins, of the Gaussian target around the correct bin; 0 is one-hot.
        """
        logits, _ = self.action_logits(batch)
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
        """Return each vision tower's last block and pooling head, kept only for the checkpoint."""
        vision = self.model.vision_backbone
        return [p for tower in (vision.featurizer, vision.fused_featurizer) for p in tower.unused_parameters()]

    def enable_gradient_checkpointing(self) -> None:
        self.model.language_model.model.gradient_checkpointing = True
        for tower in (self.model.vision_backbone.featurizer, self.model.vision_backbone.fused_featurizer):
            tower.gradient_checkpointing = True

    # Files -----------------------------------------------------------------------------------------------------------

    def positions(self, num_cameras: int) -> list[tuple[nn.Module, int]]:
        parts = self.parts()
        patches = num_cameras * self.model.config.num_patches
        text = self.processor.max_prompt_tokens + self.num_action_chunks * self.action_dim
        return [(parts["vision"], patches), (parts["projector"], patches), (parts["language"], patches + text)]

    def enlarge(self, own_tokenizer: bool) -> OpenVLAModel:
        tiny = self.model.config
        end = LLAMA_PROMPT_END if own_tokenizer else tiny.prompt_end_id
        self.model = OpenVLAModel(replace(PUBLIC, norm_stats=tiny.norm_stats, prompt_end_id=end), causal=True)
        return self.model

    def take_tokenizer(self, directory: Path | None) -> tuple[int, int]:
        config = self.model.config
        if directory is not None:
            path = directory / "tokenizer.json"
            self.processor.tokenizer = PromptTokenizer(path, config.bos_id, config.prompt_end_id)
        return self.processor.tokenizer.vocab_size, config.llama.vocab_size

    def public_state(self) -> dict[str, Tensor]:
        return merged_state_dict(self.model, deferred=True)

    def write_files(self, directory: Path) -> None:
        config = self.model.config
        self.save_extras(directory)
        checkpoint.write_json(directory / CONFIG_FILE, {**config.to_dict(), OWN_SECTION: self.own_section()})
        checkpoint.write_json(directory / "dataset_statistics.json", stats_content(config.norm_stats))
        checkpoint.write_json(directory / "preprocessor_config.json", preprocessor_config(config.image_size))
        self.processor.tokenizer.save(directory)

    def own_section(self) -> dict[str, object]:
        """Return the section ``embodrl`` of config.json."""
        return {**self.model.config.own_section(), "resize_filter": self.processor.resize_filter}

    def save_extras(self, directory: Path) -> None:
        """Write parts outside of the network."""
        save_heads(directory, self.value_head)

    # Parts -----------------------------------------------------------------------------------------------------------

    def _pixels(self, images: Tensor) -> Tensor:
        """Map ``uint8[B,(V,)H,W,3]`` to ``[B,6V,H,W]``, with each image normalised for DINOv2 and for SigLIP."""
        mean = self.get_buffer("_pixel_mean")
        std = self.get_buffer("_pixel_std")
        flat = images.flatten(0, -4)
        halves = [normalize(flat, mean[i], std[i]) for i in range(2)]
        pixels = torch.cat(halves, dim=1).to(self.model.projector.fc1.weight.dtype)
        return pixels.view(len(images), -1, *pixels.shape[2:])

    def prompt_embeddings(self, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        """Return embeddings ``[B,P,D]`` and mask ``int64[B,P]`` of images and prompt, without all-padding columns.

        The mask is None without padding, which enables attention's fast path.
        """
        input_ids, mask = prompt_of(inputs)
        patches = inputs.get("patches")
        if patches is None:
            patches = self.model.vision_backbone(self._pixels(inputs["images"]), self.film_input(input_ids, mask))
        embeddings = self.model.join_prefix(patches, input_ids, self.state_tokens(inputs))
        if bool(mask.all()):
            return embeddings, None
        middle = mask.new_ones(len(mask), embeddings.shape[1] - mask.shape[1])
        return embeddings, torch.cat([mask[:, :1], middle, mask[:, 1:]], dim=1)

    def with_patches(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return training inputs; with frozen vision, images are replaced by features ``patches [B,V*N,D1+D2]``."""
        if not self.vision_is_frozen:
            return inputs
        patches = self.model.vision_backbone(self._pixels(inputs["images"])).float()  # messages have no bfloat16
        return {**{name: value for name, value in inputs.items() if name != "images"}, "patches": patches}

    def chosen_bytes(self, num_cameras: int) -> int:
        """Return stored bytes; with frozen vision also its features, minus the replaced images."""
        chosen = super().chosen_bytes(num_cameras)
        if not self.vision_is_frozen:
            return chosen
        config = self.model.config
        features = config.num_patches * (config.dino.width + config.siglip.width)
        return chosen + num_cameras * (torch.float32.itemsize * features - 3 * config.image_size**2)

    def first_read(self, length: int) -> int:
        """Return the first token whose hidden state is read; images and prompt are ``length`` tokens."""
        return length - 1 if self.value_input == "prompt_end" else 0

    def _features(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        """Return the value head's input ``[B,D]`` from the hidden states ``[B,P,D]`` of images and prompt."""
        if self.value_input == "prompt_end":
            return hidden[:, -1]
        return masked_mean(hidden, mask)

    def values_from(self, features: Tensor) -> Tensor:
        """Return the values ``float32[B,K]`` of features ``[B,D]``; raise ``EmbodrlError`` without a value head."""
        if self.value_head is None:
            raise EmbodrlError(
                "the policy has no value head", "set model.add_value_head=true", code="value-head-missing"
            )
        return self.value_head(features.detach() if self.detach_value else features)

    def make_output(
        self, inputs: dict[str, Tensor], index: Tensor, logits: Tensor, values: Tensor | None, sampling: SamplingParams
    ) -> PolicyOutput:
        """Return the record of chosen bins ``int64[B,C*A]`` and the logits ``[B,C*A,256]`` they were drawn from."""
        shape = (len(index), self.num_action_chunks, self.action_dim)
        tokens = (index + self.bins.first_id).view(shape)
        actions = self.stats.unnormalize(self.bins.decode(tokens.cpu().numpy()))
        return PolicyOutput(
            to_environment(actions, self.gripper).astype(np.float32),
            action_log_probs(logits, index, sampling).view(shape),
            values,
            {**inputs, "action_tokens": tokens},
        )


def prompt_of(inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the prompt and its mask ``int64[B,L]`` without columns that are all padding."""
    input_ids = inputs["input_ids"]
    mask = inputs["attention_mask"]
    longest = int(mask.sum(dim=1).max())
    keep = slice(mask.shape[1] - (longest - 1), None)
    return (
        torch.cat([input_ids[:, :1], input_ids[:, keep]], dim=1),
        torch.cat([mask[:, :1], mask[:, keep]], dim=1),
    )


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
