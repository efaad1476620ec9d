"""pi0-FAST as a reinforcement-learning policy.

A chunk is written as ``BOS Action: CODES |``. The beginning is fixed; the policy chooses codes of the action tokenizer
until it chooses ``|``, or until M tokens are written. Its distribution is the network's over these K choices, so the
log-prob of the written tokens is exact whatever actions they decode to.
Shapes: B batch, C actions run, H actions in a chunk, A action dimensions, P images and prompt, W width, M tokens.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from embodrl.config.schema import ModelConfig
from embodrl.data.rng import RandomSource
from embodrl.errors import EmbodrlError
from embodrl.models.common import checkpoint
from embodrl.models.common.config_file import CONFIG_FILE
from embodrl.models.common.gripper import Convention, to_environment, to_model
from embodrl.models.common.heads import save_heads
from embodrl.models.common.merging import merged_state_dict
from embodrl.models.common.public_layout import PublicLayout
from embodrl.models.common.sampling import action_entropy, action_log_probs, draw, exponential_noise
from embodrl.models.common.value_head import ValueHead, masked_mean
from embodrl.models.flow.flow_policy import LEARNABLE
from embodrl.models.openpi.stats import PiStats
from embodrl.models.openpi.tokenizer import JSON_FILE, JsonTokenizer
from embodrl.models.openpi.weights import in_float32, neutral_norm
from embodrl.models.pi0_fast.codec import ActionCodec
from embodrl.models.pi0_fast.config import PUBLIC_FAST
from embodrl.models.pi0_fast.files import CODEC_DIRECTORY, public_state, state_dims, write_processors
from embodrl.models.pi0_fast.modeling import FastModel
from embodrl.models.pi0_fast.processing import FastProcessor
from embodrl.types import TOKEN_MASK, ActMode, EvalOutput, Observation, PolicyOutput, SamplingParams

BEGIN = "Action: "
END = "|"
TOKENS = "action_tokens"
SENTENCE = "sentence"
WRITTEN = "written"


class FastPolicy(PublicLayout):
    """PaliGemma that writes FAST tokens.

    Args:
        model: network.
        processor: prepares the network's inputs.
        codec: maps actions to tokens.
        stats: statistics of the robot.
        config: section ``model``: C, A, ``gripper``, and the value head's ``input`` and ``detach``.
        value_head: critic, or None.

    Raises:
        EmbodrlError: more actions are to be run than a chunk has, or the vocabularies do not fit.
    """

    draws_by_row = True

    one_file = True
    in_float32 = staticmethod(in_float32)
    neutral_norm = staticmethod(neutral_norm)

    def __init__(
        self,
        model: FastModel,
        processor: FastProcessor,
        codec: ActionCodec,
        stats: PiStats,
        config: ModelConfig,
        value_head: ValueHead | None = None,
    ) -> None:
        super().__init__()
        horizon = model.config.inputs.action_horizon
        if config.num_action_chunks > horizon:
            raise EmbodrlError(
                f"the model predicts {horizon} actions, {config.num_action_chunks} are to be run",
                f"set model.num_action_chunks to {horizon} or less",
                code="action-horizon",
            )
        self.model = model
        self.processor = processor
        self.codec = codec
        self.robot_stats = stats
        self.num_action_chunks = config.num_action_chunks
        self.action_dim = config.action_dim
        self.gripper: Convention = config.gripper
        self.value_input = "prompt_end" if config.value_head.input == "auto" else config.value_head.input
        self.detach_value = config.value_head.detach
        self.value_head = value_head
        self._set_vocabulary()

    def _set_vocabulary(self) -> None:
        text = self.processor.tokenizer
        sizes = self.model.config
        end = text.encode(END)
        last = sizes.inputs.vocab_size - 1 - sizes.skip_tokens
        codes = last - torch.arange(self.codec.num_codes)
        if len(end) != 1 or int(codes[-1]) < 0 or end[0] in codes.tolist():
            raise EmbodrlError(
                f"'{END}' is {len(end)} tokens, or there is no room for {self.codec.num_codes} action tokens among"
                f" {sizes.inputs.vocab_size} ids",
                "use the text and action tokenizers that the checkpoint was trained with",
                code="pi0-fast-vocabulary",
            )
        self.max_tokens = sizes.max_action_tokens
        self.end = self.codec.num_codes
        """Choice that ends a chunk."""
        begin = torch.tensor([text.bos_id, *text.encode(BEGIN)])
        device = self.device if self.device.type != "meta" else torch.device("cpu")
        self.register_buffer("_begin", begin.to(device), persistent=False)
        self.register_buffer("_choices", torch.cat([codes, torch.tensor(end)]).to(device), persistent=False)

    @property
    def action_horizon(self) -> int:
        return self.model.config.inputs.action_horizon

    # VLAPolicy -------------------------------------------------------------------------------------------------------

    def preprocess(self, observation: Observation) -> dict[str, Tensor]:
        """Return ``images uint8[B,V,h,w,3]``, ``input_ids int64[B,L]`` and ``attention_mask bool[B,L]``.

        Raises ``EmbodrlError`` for too many cameras, a missing or too large state, or a prompt that does not fit.
        """
        return self.processor(observation, self.device)

    @torch.no_grad()
    def predict_action_batch(
        self,
        observation: Observation,
        mode: ActMode,
        sampling: SamplingParams,
        generator: RandomSource | None = None,
        compute_values: bool = True,
    ) -> PolicyOutput:
        """Write a chunk per row: sampled in ``train`` mode, the most probable tokens in ``eval`` mode.

        ``logprobs`` are ``float32[B,M,1]``; ``forward_inputs`` has the output of ``preprocess``, the choices
        ``action_tokens int64[B,M]`` and the mask of written ones ``token_mask bool[B,M]``. Each call takes one block
        from ``generator``, whatever the tokens.
        """
        self.check_mode(mode)
        inputs = self.preprocess(observation)
        x, valid = self.prefix(inputs)
        noise = None
        if mode == "train":
            noise = exponential_noise((len(x), self.max_tokens, self.end + 1), generator, self.device)

        def choose(logits: Tensor, place: int) -> Tensor:
            return draw(logits, sampling, None if noise is None else noise[:, place])

        begin = self.get_buffer("_begin")
        choices = self.get_buffer("_choices")
        tokens, mask, logits, hidden = self.model.write(x, valid, begin, choices, self.end, self.max_tokens, choose)
        written = logits.shape[1]
        logprobs = action_log_probs(logits, tokens[:, :written], sampling)
        values = self._values(hidden, valid) if compute_values else None
        return PolicyOutput(
            self.actions_of(tokens, mask),
            self._padded(logprobs, mask),
            values,
            {**inputs, TOKENS: tokens, TOKEN_MASK: mask},
        )

    @torch.no_grad()
    def predict_values(self, observation: Observation) -> Tensor:
        """Return values from one forward pass over images and prompt."""
        x, valid = self.prefix(self.preprocess(observation))
        bos = self.get_buffer("_begin")[None, :1].expand(len(x), -1)
        return self._values(self.model.hidden_states(x, valid, bos)[:, : x.shape[1]], valid)

    def evaluate_actions(
        self,
        forward_inputs: dict[str, Tensor],
        sampling: SamplingParams,
        compute_entropy: bool = True,
        compute_values: bool = True,
    ) -> EvalOutput:
        """Return log-probs and entropy ``float32[B,M,1]``, 0 where nothing was written, and values, in one pass."""
        mask = forward_inputs[TOKEN_MASK]
        tokens = forward_inputs[TOKENS][:, : int(mask.sum(dim=1).max())]
        begin = self.get_buffer("_begin")
        choices = self.get_buffer("_choices")
        x, valid = self.prefix(forward_inputs)
        written = torch.cat([begin.expand(len(tokens), -1), choices[tokens[:, :-1]]], dim=1)
        hidden = self.model.hidden_states(x, valid, written)
        logits = self.model.logits(hidden[:, hidden.shape[1] - tokens.shape[1] :], choices)
        logprobs = self._padded(action_log_probs(logits, tokens, sampling), mask)
        entropy = self._padded(action_entropy(logits, tokens, sampling), mask) if compute_entropy else None
        values = self._values(hidden[:, : x.shape[1]], valid) if compute_values else None
        return EvalOutput(logprobs, entropy, values)

    def sft_inputs(self, observation: Observation, actions: Tensor) -> dict[str, Tensor]:
        """Return the output of ``preprocess``, the ids to write ``sentence int64[B,S]``, and ``written bool[B,S]``.

        Raises ``EmbodrlError`` if a chunk has more than M tokens.
        """
        raw = to_model(actions.detach().cpu().numpy().astype(np.float64), self.gripper)
        begin = self.get_buffer("_begin").cpu()
        choices = self.get_buffer("_choices").cpu()
        sentence = torch.zeros(len(raw), len(begin) + self.max_tokens, dtype=torch.int64)
        written = torch.zeros_like(sentence, dtype=torch.bool)
        for row, mask, codes in zip(
            sentence, written, self.codec.encode(self.robot_stats.actions.normalize(raw)), strict=True
        ):
            if len(codes) >= self.max_tokens:
                raise EmbodrlError(
                    f"a chunk of the data has {len(codes) + 1} tokens, but at most {self.max_tokens} are written",
                    f"set model.pi0_fast.max_action_tokens={len(codes) + 1} or more; far more than numbers in a chunk"
                    " mean that the statistics are not those of the data",
                    code="pi0-fast-chunk-too-long",
                )
            ids = torch.cat([begin, choices[[*codes, self.end]]])
            row[: len(ids)] = ids
            mask[: len(ids)] = True
        targets = {SENTENCE: sentence.to(self.device), WRITTEN: written.to(self.device)}
        return {**self.preprocess(observation), **targets}

    def out_of_range(self, actions: NDArray[np.floating], state: NDArray[np.floating]) -> NDArray[np.bool_]:
        """Return values at least ``LEARNABLE`` from 0 when normalised: their chunks have many rare tokens."""
        raw = to_model(np.asarray(actions, np.float64), self.gripper)
        return np.abs(self.robot_stats.actions.scale(raw)) >= LEARNABLE

    def sft_loss(self, batch: dict[str, Tensor], label_smoothing_bins: float = 0.0) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the cross-entropy over the whole vocabulary, as in openpi, and ``token_accuracy``.

        The mean is over a chunk's tokens, then over chunks, weighted by their actions within the episode, which
        ``action_mask bool[B,H]`` in ``batch`` marks, if present.
        """
        longest = int(batch[WRITTEN].sum(dim=1).max())
        sentence = batch[SENTENCE][:, :longest]
        mask = batch[WRITTEN][:, 1:longest].float()
        x, valid = self.prefix(batch)
        hidden = self.model.hidden_states(x, valid, sentence[:, :-1])[:, x.shape[1] :]
        logits = self.model.logits(hidden)
        targets = sentence[:, 1:]
        nll = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)
        weight = mask / mask.sum(dim=1, keepdim=True)
        actions = batch["action_mask"].sum(dim=1).float() if "action_mask" in batch else weight.new_ones(len(weight))
        weight = weight * (actions / actions.sum().clamp(min=1.0))[:, None]
        accuracy = ((logits.detach().argmax(dim=-1) == targets) * weight).sum()
        return (nll * weight).sum(), {"token_accuracy": accuracy}

    def parts(self) -> dict[str, nn.Module]:
        vlm = self.model.paligemma
        language = [vlm.language_model, *([] if self.model.config.tied else [self.model.output_layer])]
        parts: dict[str, nn.Module] = {
            "vision": vlm.vision_tower,
            "projector": vlm.multi_modal_projector,
            "language": nn.ModuleList(language),
        }
        return parts if self.value_head is None else {**parts, "value_head": self.value_head}

    def head_parameters(self) -> list[nn.Parameter]:
        """Return the output layer, normally also the embedding."""
        return list(self.model.output_layer.parameters())

    def enable_gradient_checkpointing(self) -> None:
        self.model.paligemma.vision_tower.enable_gradient_checkpointing()
        self.model.language.gradient_checkpointing = True

    # Files -----------------------------------------------------------------------------------------------------------

    def positions(self, num_cameras: int) -> list[tuple[nn.Module, int]]:
        parts = self.parts()
        inputs = self.model.config.inputs
        patches = num_cameras * inputs.siglip.num_patches
        text = inputs.max_prompt_tokens + self.max_tokens
        return [(parts["vision"], patches), (parts["projector"], patches), (parts["language"], patches + text)]

    def cache_shape(self, num_cameras: int) -> tuple[int, int, int]:
        inputs = self.model.config.inputs
        positions = num_cameras * inputs.siglip.num_patches + inputs.max_prompt_tokens + self.max_tokens
        return inputs.vlm.depth, inputs.vlm.num_kv_heads * inputs.vlm.head_dim, positions

    def chosen_bytes(self, num_cameras: int) -> int:
        """Return the bytes of tokens, their mask, and log-probs."""
        return (torch.int64.itemsize + torch.bool.itemsize + torch.float32.itemsize) * self.max_tokens

    def enlarge(self, own_tokenizer: bool) -> FastModel:
        self.model = FastModel(PUBLIC_FAST)
        return self.model

    def take_tokenizer(self, directory: Path | None) -> tuple[int, int]:
        if directory is not None:
            self.processor.tokenizer = JsonTokenizer(directory / JSON_FILE)
        return self.processor.tokenizer.vocab_size, self.model.config.vocab_size

    def public_state(self) -> dict[str, Tensor]:
        """Return the weights under lerobot's names, with adapters merged."""
        return public_state(merged_state_dict(self.model, deferred=True))

    def write_files(self, directory: Path) -> None:
        config = self.model.config
        stats = self.robot_stats
        dims = state_dims(stats) or config.inputs.max_action_dim
        precision = str(self.model.dtype).removeprefix("torch.")
        save_heads(directory, self.value_head)
        checkpoint.write_json(
            directory / CONFIG_FILE, config.to_dict(self.action_dim, dims, precision, config.inputs.num_images)
        )
        write_processors(directory, config, stats, self.action_dim, dims)
        self.processor.tokenizer.save(directory)
        self.codec.save(directory / CODEC_DIRECTORY)

    def public_name(self, module: str) -> str:
        """Return lerobot's name of a module of the network."""
        return f"model.{module}"

    # Parts -----------------------------------------------------------------------------------------------------------

    def prefix(self, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        """Return embeddings ``[B,P,W]`` and mask ``bool[B,P]`` of images and prompt; see ``embed_prefix``."""
        pixels = self.processor.pixels(inputs)
        return self.model.paligemma.embed_prefix(
            pixels, inputs["input_ids"], inputs["attention_mask"], inputs.get("image_mask")
        )

    def _padded(self, numbers: Tensor, mask: Tensor) -> Tensor:
        """Pad ``float32[B,T]`` of the first T tokens to ``[B,M,1]``, 0 where nothing was written."""
        full = F.pad(numbers, (0, mask.shape[1] - numbers.shape[1]))
        return torch.where(mask, full, 0.0)[..., None]

    def actions_of(self, tokens: Tensor, mask: Tensor) -> NDArray[np.float32]:
        """Return the actions ``float32[B,C,A]``, in environment units, of choices ``int64[B,T]``."""
        codes = [
            [code for code, there in zip(*row, strict=True) if there and code != self.end]
            for row in zip(tokens.tolist(), mask.tolist(), strict=True)
        ]
        chunk = self.codec.decode(codes, self.action_horizon, self.action_dim)[:, : self.num_action_chunks]
        return to_environment(self.robot_stats.actions.unnormalize(chunk), self.gripper).astype(np.float32)

    def _values(self, hidden: Tensor, valid: Tensor | None) -> Tensor:
        """Return values from the hidden states ``[B,P,W]`` of images and prompt."""
        if self.value_head is None:
            raise EmbodrlError(
                "the policy has no value head", "set model.add_value_head=true", code="value-head-missing"
            )
        if self.value_input == "prompt_mean":
            features = masked_mean(hidden, valid)
        elif valid is None:
            features = hidden[:, -1]
        else:
            places = torch.arange(valid.shape[1], device=valid.device)
            last = torch.where(valid, places, 0).amax(dim=1)
            features = hidden[torch.arange(len(hidden), device=hidden.device), last]
        return self.value_head(features.detach() if self.detach_value else features)
