"""A language model that writes one message per chunk: text or a tool call.

The policy chooses bytes until it chooses END, or until M tokens are written. Where a call is required, bytes that lead
to none of the permitted calls have probability 0, at rollout and in training.
Shapes: B batch, L prompt tokens, M tokens of a message, K choices, D hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from embodrl.data.rng import RandomSource
from embodrl.errors import EmbodrlError
from embodrl.models.base import VLAPolicy
from embodrl.models.common import checkpoint
from embodrl.models.common.chat import Conversation, WrittenText
from embodrl.models.common.config_file import CONFIG_FILE, OWN_SECTION, check_family, check_multiple, read_file, size
from embodrl.models.common.heads import build_value_head, save_heads
from embodrl.models.common.init import new_generator
from embodrl.models.common.llama import Llama, LlamaSpec, causal_mask, token_positions
from embodrl.models.common.merging import merged_state_dict
from embodrl.models.common.sampling import action_entropy, action_log_probs, draw, exponential_noise
from embodrl.models.common.value_head import ValueHead
from embodrl.models.load_report import LoadReport
from embodrl.models.planner.modeling import Writer, init_weights, logits_of
from embodrl.models.planner.page import Page
from embodrl.models.planner.spec import FAMILY, PlannerModelConfig
from embodrl.models.planner.tokenizer import END, PAD, VOCAB_SIZE, WRITABLE, decode, encode, longest
from embodrl.types import TOKEN_MASK, ActMode, EvalOutput, Observation, PolicyOutput, SamplingParams

TOKENS = "response_tokens"
ALLOWED = "allowed_tokens"


class PlannerPolicy(VLAPolicy):
    """Llama over bytes; A = 0, since a message is no action. ``value_head`` is the critic, or None."""

    draws_by_row = True
    writes_text = True

    def __init__(self, model: Llama, config: PlannerModelConfig, value_head: ValueHead | None = None) -> None:
        super().__init__()
        self.model = model
        self.value_head = value_head
        self.num_action_chunks = config.num_action_chunks
        self.action_dim = 0
        self.max_prompt = config.planner.max_prompt_tokens
        self.max_tokens = config.planner.max_new_tokens
        self.detach_value = config.value_head.detach

    # VLAPolicy -------------------------------------------------------------------------------------------------------

    def preprocess(self, observation: Observation) -> dict[str, Tensor]:
        """Return ``input_ids int64[B,L]`` and ``attention_mask bool[B,L]``, padded on the left.

        An instruction is a conversation (``models.common.chat``) or a message of the user. Raises ``EmbodrlError`` for
        a longer prompt.
        """
        ids = torch.full((observation.batch_size, self.max_prompt), PAD)
        for row, text in enumerate(observation.instruction):
            prompt = encode(Conversation.read(text))
            if len(prompt) > self.max_prompt:
                raise EmbodrlError(
                    f"a conversation has {len(prompt)} tokens, and there is room for {self.max_prompt}",
                    f"set model.planner.max_prompt_tokens={len(prompt)} or more, or shorten tools and messages",
                    code="planner-prompt-too-long",
                )
            ids[row, -len(prompt) :] = torch.tensor(prompt)
        return {"input_ids": ids.to(self.device), "attention_mask": (ids != PAD).to(self.device)}

    @torch.no_grad()
    def predict_action_batch(
        self,
        observation: Observation,
        mode: ActMode,
        sampling: SamplingParams,
        generator: RandomSource | None = None,
        compute_values: bool = True,
    ) -> PolicyOutput:
        """Write a message per row: sampled in ``train`` mode, the most probable tokens in ``eval`` mode.

        ``logprobs`` are ``float32[B,M,1]``; ``forward_inputs`` has the output of ``preprocess``, ``response_tokens
        int64[B,M]``, the mask of written ones ``token_mask bool[B,M]``, and the choices that the grammar left,
        ``allowed_tokens bool[B,M,K]``. Each call takes one block from ``generator``, whatever the tokens. ``actions``
        are empty, ``float32[B,C,0]``. Raises ``EmbodrlError`` if a permitted call has more than M tokens.
        """
        self.check_mode(mode)
        inputs = self.preprocess(observation)
        batch = observation.batch_size
        calls = [Conversation.read(text).calls for text in observation.instruction]
        if (most := max(map(longest, calls))) > self.max_tokens:
            raise EmbodrlError(
                f"a tool call has {most} tokens, but at most {self.max_tokens} are written",
                f"set model.planner.max_new_tokens={most} or more",
                code="planner-call-too-long",
            )
        noise = None
        if mode == "train":
            noise = exponential_noise((batch, self.max_tokens, WRITABLE), generator, self.device)
        first = self._first(inputs)
        writer = Writer(self.model)
        hidden = writer.run(inputs["input_ids"][:, first:], inputs["attention_mask"][:, first:])
        values = self._values(hidden) if compute_values else None
        page = Page(calls, self.max_tokens)
        logprobs = torch.zeros(batch, self.max_tokens)
        read = 0  # written tokens that the network has read
        for place in range(self.max_tokens):
            page.permit(place)
            chosen = page.only(place)
            if chosen is None:
                if read < place:
                    piece = page.tokens[:, read:place].to(self.device)
                    hidden = writer.run(piece, torch.ones_like(piece, dtype=torch.bool))
                    read = place
                logits = self._logits(hidden, page.allowed[:, place].to(self.device))
                drawn = draw(logits, sampling, None if noise is None else noise[:, place])
                found = action_log_probs(logits, drawn, sampling).cpu()
                chosen = drawn.cpu()
                logprobs[:, place] = torch.where(page.running, found, 0.0)
            if not page.write(place, chosen):
                break
        written = {TOKENS: page.tokens, TOKEN_MASK: page.mask, ALLOWED: page.allowed}
        return PolicyOutput(
            np.zeros((batch, self.num_action_chunks, 0), np.float32),
            logprobs.to(self.device)[..., None],
            values,
            {**inputs, **{name: part.to(self.device) for name, part in written.items()}},
        )

    @torch.no_grad()
    def predict_values(self, observation: Observation) -> Tensor:
        """Return values ``float32[B,1]`` from one pass over the prompt."""
        inputs = self.preprocess(observation)
        first = self._first(inputs)
        return self._values(Writer(self.model).run(inputs["input_ids"][:, first:], inputs["attention_mask"][:, first:]))

    def evaluate_actions(
        self,
        forward_inputs: dict[str, Tensor],
        sampling: SamplingParams,
        compute_entropy: bool = True,
        compute_values: bool = True,
    ) -> EvalOutput:
        """Return log-probs and entropy ``float32[B,M,1]``, 0 where nothing was written, and values, in one pass."""
        mask = forward_inputs[TOKEN_MASK]
        count = int(mask.sum(dim=1).max())
        first = self._first(forward_inputs)
        tokens = forward_inputs[TOKENS][:, :count]
        ids = torch.cat([forward_inputs["input_ids"][:, first:], tokens[:, :-1]], dim=1)
        seen = F.pad(forward_inputs["attention_mask"][:, first:], (0, count - 1), value=True)
        # From the last token of the prompt on, which the first written one follows.
        hidden = self.model.model(
            self.model.model.embed_tokens(ids), causal_mask(seen), token_positions(seen), ids.shape[1] - count
        )
        logits = self._logits(hidden, forward_inputs[ALLOWED][:, :count])
        index = tokens.clamp(max=END)  # what follows the end is not written, and not counted
        logprobs = _padded(action_log_probs(logits, index, sampling), mask)
        entropy = _padded(action_entropy(logits, index, sampling), mask) if compute_entropy else None
        return EvalOutput(logprobs, entropy, self._values(hidden[:, 0]) if compute_values else None)

    def text_of(self, forward_inputs: Mapping[str, Tensor]) -> list[WrittenText]:
        lengths = forward_inputs[TOKEN_MASK].sum(dim=1).tolist()
        prompts = forward_inputs["attention_mask"].sum(dim=1).tolist()
        rows = zip(forward_inputs[TOKENS].tolist(), lengths, prompts, strict=True)
        return [decode(row[:length], prompt) for row, length, prompt in rows]

    def parts(self) -> dict[str, nn.Module]:
        parts: dict[str, nn.Module] = {"language": self.model}
        return parts if self.value_head is None else {**parts, "value_head": self.value_head}

    def enable_gradient_checkpointing(self) -> None:
        self.model.model.gradient_checkpointing = True

    def positions(self, num_cameras: int) -> list[tuple[nn.Module, int]]:
        return [(self.model, self.max_prompt + self.max_tokens)]

    def cache_shape(self, num_cameras: int) -> tuple[int, int, int]:
        spec = self.model.spec
        return spec.num_hidden_layers, spec.num_key_value_heads * spec.head_dim, self.max_prompt + self.max_tokens

    def chosen_bytes(self, num_cameras: int) -> int:
        """Return the bytes of tokens, their mask, their choices, and log-probs."""
        per_token = torch.int64.itemsize + torch.bool.itemsize * (1 + WRITABLE) + torch.float32.itemsize
        return per_token * self.max_tokens

    def save_pretrained(self, directory: Path) -> None:
        """Write transformers' LlamaForCausalLM, and the critic apart."""
        with checkpoint.policy_directory(directory) as staging:
            checkpoint.save_weights(merged_state_dict(self.model, deferred=True), staging)
            save_heads(staging, self.value_head)
            config = {**_public(self.model.spec), OWN_SECTION: {"family": FAMILY}}
            checkpoint.write_json(staging / CONFIG_FILE, config)

    # Parts -----------------------------------------------------------------------------------------------------------

    def _first(self, inputs: Mapping[str, Tensor]) -> int:
        """Return the first column that is not padding in every row."""
        return int(inputs["attention_mask"].any(dim=0).int().argmax())

    def _logits(self, hidden: Tensor, allowed: Tensor) -> Tensor:
        """Return ``float32[...,K]``, -inf for what is not allowed."""
        return logits_of(self.model, hidden, WRITABLE).masked_fill(~allowed, -torch.inf)

    def _values(self, hidden: Tensor) -> Tensor:
        """Return values from hidden states ``[B,D]`` of the last prompt token."""
        if self.value_head is None:
            raise EmbodrlError(
                "the policy has no value head", "set model.add_value_head=true", code="value-head-missing"
            )
        return self.value_head(hidden.detach() if self.detach_value else hidden)


def _padded(numbers: Tensor, mask: Tensor) -> Tensor:
    """Pad ``float32[B,T]`` of the first T tokens to ``[B,M,1]``, 0 where nothing was written."""
    full = F.pad(numbers, (0, mask.shape[1] - numbers.shape[1]))
    return torch.where(mask, full, 0.0)[..., None]


def build_planner(
    config: PlannerModelConfig, *, device: torch.device | str, dtype: torch.dtype, seed: int
) -> tuple[PlannerPolicy, LoadReport]:
    """Build the configured policy; see ``models.registry.build_policy``."""
    device = torch.device(device)
    directory, report = checkpoint.locate(config)
    spec = _spec(config, directory)
    generator = new_generator(device, seed)
    with torch.device("meta"):
        model = Llama(spec)
    files = [] if directory is None else checkpoint.weight_files(directory)
    checkpoint.fill(model, files, report, lambda: init_weights(model, generator), device=device, dtype=dtype)
    head = build_value_head(config, spec.hidden_size, directory, report, device, generator)
    return PlannerPolicy(model, config, head), report


def _spec(config: PlannerModelConfig, directory: Path | None) -> LlamaSpec:
    """Return the dimensions of the checkpoint, or the configured ones."""
    shape = config.planner
    length = shape.max_prompt_tokens + shape.max_new_tokens
    heads = shape.num_attention_heads
    wanted = LlamaSpec(
        VOCAB_SIZE, shape.hidden_size, shape.intermediate_size, shape.num_hidden_layers, heads, heads, length
    )
    if directory is None:
        return wanted
    fields = read_file(directory / CONFIG_FILE)
    check_family(fields, (FAMILY,))
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    found = replace(wanted, **{name: size(fields, name) for name in names})
    check_multiple(fields, "hidden_size", "num_attention_heads")
    check_multiple(fields, "num_attention_heads", "num_key_value_heads")
    if config.model_path is None:
        checkpoint.check_size(found, wanted, names, directory, "model.planner")
    return found


def _public(spec: LlamaSpec) -> dict[str, object]:
    return {
        **{"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
        **{name: value for name, value in asdict(spec).items() if name != "rope_theta"},
        **{"rope_parameters": {"rope_type": "default", "rope_theta": spec.rope_theta}, "tie_word_embeddings": False},
        **{"bos_token_id": None, "eos_token_id": END, "pad_token_id": PAD},
    }
