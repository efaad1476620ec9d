"""A language model that writes one message per chunk: text or a tool call.

The policy chooses tokens until it chooses an end, or until M tokens are written. Where a call is required, tokens that
lead to none of the permitted calls have probability 0, at rollout and in training.
Shapes: B batch, L prompt tokens, M tokens of a message, K choices, P bytes of K bits, D hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from embodrl.data.rng import RandomSource
from embodrl.errors import EmbodrlError
from embodrl.models.base import VLAPolicy
from embodrl.models.common import checkpoint
from embodrl.models.common.chat import Conversation, LiveToken, WrittenText
from embodrl.models.common.heads import save_heads
from embodrl.models.common.live import OnToken
from embodrl.models.common.sampling import action_entropy, action_log_probs, exponential_noise, penalised, uniform_noise
from embodrl.models.common.value_head import ValueHead
from embodrl.models.planner.network import Network
from embodrl.models.planner.page import Page, draw_tokens, unpack
from embodrl.models.planner.spec import PlannerModelConfig
from embodrl.models.planner.vocabulary import Vocabulary
from embodrl.types import TOKEN_MASK, ActMode, EvalOutput, Observation, PolicyOutput, SamplingParams

TOKENS = "response_tokens"
ALLOWED = "allowed_tokens"


class PlannerPolicy(VLAPolicy):
    """A language model; A = 0, since a message is no action. ``value_head`` is the critic, or None."""

    draws_by_row = True
    writes_text = True

    def __init__(
        self,
        network: Network,
        vocabulary: Vocabulary,
        config: PlannerModelConfig,
        value_head: ValueHead | None = None,
    ) -> None:
        super().__init__()
        self.model: nn.Module = network.model
        self.network = network
        self.vocabulary = vocabulary
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
        ids = torch.full((observation.batch_size, self.max_prompt), self.vocabulary.pad)
        mask = torch.zeros(ids.shape, dtype=torch.bool)
        for row, text in enumerate(observation.instruction):
            prompt = self.vocabulary.encode(Conversation.read(text))
            if len(prompt) > self.max_prompt:
                raise EmbodrlError(
                    f"a conversation has {len(prompt)} tokens, and there is room for {self.max_prompt}",
                    f"set model.planner.max_prompt_tokens={len(prompt)} or more, or shorten tools and messages",
                    code="planner-prompt-too-long",
                )
            ids[row, -len(prompt) :] = torch.tensor(prompt)
            mask[row, -len(prompt) :] = True
        return {"input_ids": ids.to(self.device), "attention_mask": mask.to(self.device)}

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
        ``allowed_tokens uint8[B,M,P]``. Each call takes one block from ``generator``, whatever the tokens. ``actions``
        are empty, ``float32[B,C,0]``. Raises ``EmbodrlError`` if a permitted call has more than M tokens.
        """
        return self._write(observation, mode, sampling, generator, compute_values)

    @torch.no_grad()
    def write_live(
        self,
        observation: Observation,
        mode: ActMode,
        sampling: SamplingParams,
        generator: RandomSource | None,
        on_token: OnToken,
    ) -> PolicyOutput:
        return self._write(observation, mode, sampling, generator, False, on_token)

    def _write(
        self,
        observation: Observation,
        mode: ActMode,
        sampling: SamplingParams,
        generator: RandomSource | None,
        compute_values: bool,
        on_token: OnToken | None = None,
    ) -> PolicyOutput:
        self.check_mode(mode)
        inputs = self.preprocess(observation)
        batch = observation.batch_size
        page = self.page(observation)
        noise = self.noise(batch, generator) if mode == "train" else None
        first = self._first(inputs)
        read_on = self.network.reader()
        hidden = read_on(inputs["input_ids"][:, first:], inputs["attention_mask"][:, first:])
        values = self._values(hidden) if compute_values else None
        report = None if on_token is None else _Report(on_token, self.vocabulary, batch)
        logprobs = torch.zeros(batch, self.max_tokens)
        read = 0  # written tokens that the network has read
        for place in range(self.max_tokens):
            choices = page.permit(place)
            chosen = page.only(choices)
            if chosen is None:
                if read < place:
                    piece = page.tokens[:, read:place].to(self.device)
                    hidden = read_on(piece, torch.ones_like(piece, dtype=torch.bool))
                    read = place
                logits = self._logits(hidden, choices.to(self.device))
                logits = penalised(logits, page.tokens[:, :place], page.mask[:, :place], sampling)
                drawn = draw_tokens(logits, sampling, None if noise is None else noise[:, place])
                found = action_log_probs(logits, drawn, sampling).cpu()
                chosen = drawn.cpu()
                logprobs[:, place] = torch.where(page.running, found, 0.0)
            goes_on = page.write(place, chosen)
            if report is not None:
                report.of(place, chosen, logprobs[:, place], page.mask[:, place])
            if not goes_on:
                break
        return self.make_output(inputs, page, logprobs, values)

    def page(self, observation: Observation) -> Page:
        """Return an empty page for the messages of a batch; ``EmbodrlError`` if a permitted call has over M tokens."""
        trees = [self.vocabulary.tree(Conversation.read(text).calls) for text in observation.instruction]
        if (most := max(tree.longest for tree in trees)) > self.max_tokens:
            raise EmbodrlError(
                f"a tool call has {most} tokens, but at most {self.max_tokens} are written",
                f"set model.planner.max_new_tokens={most} or more",
                code="planner-call-too-long",
            )
        return Page([tree if tree.longest else None for tree in trees], self.vocabulary, self.max_tokens)

    def noise(self, batch: int, generator: RandomSource | None) -> Tensor:
        """Return what ``draw_tokens`` draws M tokens with, ``float32[B,M,K]`` or ``[B,M]``."""
        shape = batch, self.max_tokens
        if self.vocabulary.whole_noise:
            return exponential_noise((*shape, self.vocabulary.size), generator, self.device)
        return uniform_noise(shape, generator, self.device)

    def make_output(
        self, inputs: Mapping[str, Tensor], page: Page, logprobs: Tensor, values: Tensor | None
    ) -> PolicyOutput:
        """Return a written page, with ``logprobs float32[B,M]``, as ``predict_action_batch`` does."""
        written = {TOKENS: page.tokens, TOKEN_MASK: page.mask, ALLOWED: page.allowed}
        return PolicyOutput(
            np.zeros((len(logprobs), self.num_action_chunks, 0), np.float32),
            logprobs.to(self.device)[..., None],
            values,
            {**inputs, **{name: part.to(self.device) for name, part in written.items()}},
        )

    @torch.no_grad()
    def predict_values(self, observation: Observation) -> Tensor:
        """Return values ``float32[B,1]`` from one pass over the prompt."""
        inputs = self.preprocess(observation)
        first = self._first(inputs)
        read = self.network.reader()
        return self._values(read(inputs["input_ids"][:, first:], inputs["attention_mask"][:, first:]))

    def evaluate_actions(
        self,
        forward_inputs: dict[str, Tensor],
        sampling: SamplingParams,
        compute_entropy: bool = True,
        compute_values: bool = True,
        compute_router_loss: bool = False,
    ) -> EvalOutput:
        """Return log-probs and entropy ``float32[B,M,1]``, 0 where nothing was written, and values, in one pass.

        ``router_loss`` is over the tokens that are read: prompts, and what was written but its last token.
        """
        mask = forward_inputs[TOKEN_MASK]
        count = int(mask.sum(dim=1).max())
        first = self._first(forward_inputs)
        tokens = forward_inputs[TOKENS][:, :count]
        ids = torch.cat([forward_inputs["input_ids"][:, first:], tokens[:, :-1]], dim=1)
        seen = F.pad(forward_inputs["attention_mask"][:, first:], (0, count - 1), value=True)
        # From the last token of the prompt on, which the first written one follows.
        router_loss = None
        if compute_router_loss:
            read = torch.cat([forward_inputs["attention_mask"][:, first:], mask[:, 1:count]], dim=1)
            hidden, router_loss = self.network.balanced_states(ids, seen, ids.shape[1] - count, read)
        else:
            hidden = self.network.states(ids, seen, ids.shape[1] - count)
        logits = self._logits(hidden, unpack(forward_inputs[ALLOWED][:, :count], self.vocabulary.size))
        index = tokens.clamp(max=self.vocabulary.size - 1)  # what follows the end is not written, and not counted
        logprobs = _padded(action_log_probs(logits, index, sampling), mask)
        entropy = _padded(action_entropy(logits, index, sampling), mask) if compute_entropy else None
        values = self._values(hidden[:, 0]) if compute_values else None
        return EvalOutput(logprobs, entropy, values, router_loss=router_loss)

    def text_of(self, forward_inputs: Mapping[str, Tensor]) -> list[WrittenText]:
        lengths = forward_inputs[TOKEN_MASK].sum(dim=1).tolist()
        prompts = forward_inputs["attention_mask"].sum(dim=1).tolist()
        rows = zip(forward_inputs[TOKENS].tolist(), lengths, prompts, strict=True)
        return [self.vocabulary.decode(row[:length], prompt) for row, length, prompt in rows]

    def parts(self) -> dict[str, nn.Module]:
        parts: dict[str, nn.Module] = {"language": self.model}
        return parts if self.value_head is None else {**parts, "value_head": self.value_head}

    def enable_gradient_checkpointing(self) -> None:
        self.network.recompute()

    def positions(self, num_cameras: int) -> list[tuple[nn.Module, int]]:
        return [(self.model, self.max_prompt + self.max_tokens)]

    def cache_shape(self, num_cameras: int) -> tuple[int, int, int]:
        return *self.network.cached, self.max_prompt + self.max_tokens

    def chosen_bytes(self, num_cameras: int) -> int:
        """Return the bytes of tokens, their mask, their choices, and log-probs."""
        choices = (self.vocabulary.size + 7) // 8
        per_token = torch.int64.itemsize + torch.bool.itemsize + choices + torch.float32.itemsize
        return per_token * self.max_tokens

    def save_pretrained(self, directory: Path) -> None:
        """Write a directory that transformers reads, and the critic in a file of its own."""
        with checkpoint.policy_directory(directory) as staging:
            self.network.save(staging)
            self.vocabulary.save(staging)
            save_heads(staging, self.value_head)

    # Parts -----------------------------------------------------------------------------------------------------------

    def _first(self, inputs: Mapping[str, Tensor]) -> int:
        """Return the first column that is not padding in every row."""
        return int(inputs["attention_mask"].any(dim=0).int().argmax())

    def _logits(self, hidden: Tensor, allowed: Tensor) -> Tensor:
        """Return ``float32[...,K]``, -inf for what is not allowed."""
        return self.network.logits(hidden, self.vocabulary.size).masked_fill(~allowed, -torch.inf)

    def _values(self, hidden: Tensor) -> Tensor:
        """Return values from hidden states ``[B,D]`` of the last prompt token."""
        if self.value_head is None:
            raise EmbodrlError(
                "the policy has no value head", "set model.add_value_head=true", code="value-head-missing"
            )
        return self.value_head(hidden.detach() if self.detach_value else hidden)


class _Report:
    """Reports the tokens of a batch as they are chosen."""

    def __init__(self, on_token: OnToken, vocabulary: Vocabulary, batch: int) -> None:
        self._on_token = on_token
        self._ends = vocabulary.ends
        self._spellers = [vocabulary.speller() for _ in range(batch)]

    def of(self, place: int, chosen: Tensor, logprobs: Tensor, written: Tensor) -> None:
        """Report the tokens ``int64[B]`` at a place, where they were ``written bool[B]`` and end no message."""
        for row in written.nonzero().flatten().tolist():
            token = int(chosen[row])
            if token not in self._ends:
                self._on_token(row, LiveToken(place, self._spellers[row](token), float(logprobs[row])))


def _padded(numbers: Tensor, mask: Tensor) -> Tensor:
    """Pad ``float32[B,T]`` of the first T tokens to ``[B,M,1]``, 0 where nothing was written."""
    full = F.pad(numbers, (0, mask.shape[1] - numbers.shape[1]))
    return torch.where(mask, full, 0.0)[..., None]
