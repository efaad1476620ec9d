"""A rollout engine that serves concurrent requests of many episodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodrl.data.rng import RandomSource
from embodrl.envs.environment import Tool
from embodrl.errors import EmbodrlError, RolloutEngineError
from embodrl.hybrid_engines.rollout.base import RolloutEngine
from embodrl.models.base import VLAPolicy
from embodrl.models.common.chat import Conversation, Message, ToolCall, ToolChoice, WrittenText, parse_calls
from embodrl.processes.batching import BatchPump, Request
from embodrl.types import TOKEN_MASK, Decoding, Observation, PolicyOutput


@dataclass(frozen=True)
class _Content:
    observation: Observation
    seed: tuple[int, ...] | None  # None for a request of values


class BatchedEngine(BatchPump[_Content, PolicyOutput | Tensor]):
    """Collects the requests that arrive while the engine is busy into one batch; a thread computes one batch at a time.

    Its methods belong to one event loop. Weights may be updated from any thread: ``RolloutEngine.update_weights`` swaps
    them between two batches, and every answer carries the version it was computed with.
    """

    def __init__(self, engine: RolloutEngine, compute_values: bool, max_batch: int, seed: Sequence[int] = (0,)) -> None:
        super().__init__("policy")
        self.engine = engine
        self.compute_values = compute_values
        self.max_batch = max_batch
        self._seed = tuple(seed)

    @property
    def version(self) -> int:
        """Number of updates behind the weights."""
        return self.engine.version

    def for_episode(self, *numbers: int) -> EpisodeEngine:
        """Return one episode's view of the engine; its actions depend only on the seed and these numbers."""
        return EpisodeEngine(self, (*self._seed, *numbers))

    async def act(self, observation: Observation, seed: tuple[int, ...]) -> PolicyOutput:
        """Sample a chunk of actions for an observation ``[1]``, with random numbers seeded from ``seed``.

        A policy without ``draws_by_row`` draws from the engine's generators, in batch order.
        """
        output = await self.submit(Request(_Content(observation, seed)))
        assert isinstance(output, PolicyOutput)
        return output

    async def values(self, observation: Observation) -> Tensor:
        """Return ``float32[1,K]`` on the CPU."""
        values = await self.submit(Request(_Content(observation, None)))
        assert isinstance(values, Tensor)
        return values

    def choose(
        self, waiting: list[Request[_Content, PolicyOutput | Tensor]]
    ) -> list[Request[_Content, PolicyOutput | Tensor]]:
        """Return the oldest requests of one kind."""
        wants_values = waiting[0].content.seed is None
        return [request for request in waiting if (request.content.seed is None) == wants_values][: self.max_batch]

    def _computed(self, contents: list[_Content]) -> Sequence[PolicyOutput | Tensor | Exception]:
        answers = super()._computed(contents)
        if len(contents) == 1 or not isinstance(answers[0], EmbodrlError) or not self.engine.policy.writes_text:
            return answers
        if isinstance(answers[0], RolloutEngineError):  # it ends the run, and each attempt may wait for long
            return answers
        # A conversation that is too long must not fail those of other episodes.
        return [answer for one in contents for answer in BatchPump._computed(self, [one])]

    def compute(self, batch: list[_Content]) -> Sequence[PolicyOutput | Tensor]:
        observation = Observation.concat([content.observation for content in batch])
        if batch[0].seed is None:
            return self.engine.values(observation).split(1)
        generators = self.engine.row_generators([content.seed or () for content in batch])
        output = self.engine.act(observation, self.compute_values, generators)
        return [select_output(output, row) for row in range(len(batch))]


class DecidingEngine(BatchedEngine):
    """Chooses actions as evaluations do, with one of the engine's decodings and without values.

    An episode's view is that of its reset seed: chunk n of a policy that draws by row gets the random numbers that
    ``workers.evaluator.chooser`` gives it. Other policies draw from ``generators``.
    """

    def __init__(
        self, engine: RolloutEngine, decoding: Decoding, max_batch: int, generators: Sequence[RandomSource] | None
    ) -> None:
        super().__init__(engine, False, max_batch, ())
        self.decoding: Decoding = decoding
        self.generators = generators

    def compute(self, batch: list[_Content]) -> Sequence[PolicyOutput | Tensor]:
        if batch[0].seed is None:
            return super().compute(batch)
        observation = Observation.concat([content.observation for content in batch])
        generators = None
        if self.decoding == "sampled":
            # Calls count from 1, chunks from 0.
            numbers = [(seed, call - 1) for seed, call in (content.seed or (0, 1) for content in batch)]
            generators = self.engine.row_generators(numbers) or self.generators
        output = self.engine.decide(observation, self.decoding, generators)
        return [select_output(output, row) for row in range(len(batch))]


@dataclass(frozen=True)
class Completion:
    """A message that the policy wrote.

    Attributes:
        written: its tokens.
        tool_calls: the calls that the text is or has (``models.common.chat``); empty for any other text.
        output: tokens, log-probs and values, a batch of one, for ``Trajectory.add_message``.
    """

    written: WrittenText
    tool_calls: tuple[ToolCall, ...]
    output: PolicyOutput

    @property
    def text(self) -> str:
        """The message."""
        return self.written.text

    @staticmethod
    def of(
        policy: VLAPolicy, output: PolicyOutput, max_tokens: int | None = None, parallel_tool_calls: bool = True
    ) -> Completion:
        """Return the message in an output of one row, of at most ``max_tokens`` tokens, or of one call alone.

        A message that stops there has the probability that it would have if the policy had been stopped.
        """
        if max_tokens is not None:
            mask = output.forward_inputs[TOKEN_MASK].clone()
            mask[:, max_tokens:] = False
            inputs = {**output.forward_inputs, TOKEN_MASK: mask}
            output = replace(output, logprobs=output.logprobs * mask[..., None], forward_inputs=inputs)
        written = policy.text_of(output.forward_inputs)[0]
        calls = parse_calls(written.text)
        if parallel_tool_calls or len(calls) < 2:
            return Completion(written, calls, output)
        cut = Completion.of(policy, output, written.tokens_of_one_call())
        return replace(cut, written=replace(cut.written, has_its_call=True), tool_calls=calls[:1])


class EpisodeEngine:
    """The engine as seen by one episode."""

    def __init__(self, shared: BatchedEngine, seed: tuple[int, ...]) -> None:
        self._shared = shared
        self._seed = seed
        self._calls = 0

    @property
    def version(self) -> int:
        """Number of updates behind the weights."""
        return self._shared.version

    @property
    def temperature(self) -> float:
        """Temperature of sampled messages (``algorithm.sampling.temperature``)."""
        return self._shared.engine.sampling.temperature

    @property
    def has_values(self) -> bool:
        """Whether values are wanted and ``act`` computes them."""
        return self._shared.compute_values

    async def act(self, observation: Observation) -> PolicyOutput:
        """Sample a chunk of actions ``float32[1,C,A]`` for an observation of one row."""
        # An episode's samples depend on its call number, not on the time of the answer.
        self._calls += 1
        return await self._shared.act(observation, (*self._seed, self._calls))

    async def generate(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool | Mapping[str, Any]] | None = None,
        tool_choice: ToolChoice = "auto",
        max_tokens: int | None = None,
        parallel_tool_calls: bool = True,
    ) -> Completion:
        """Write the next message of a conversation, in one batch with those of other episodes.

        Args:
            messages: in the form of OpenAI's chat API, ``{"role": ..., "content": text}``.
            tools: what the policy may call, as ``Tool`` or in OpenAI's form.
            tool_choice: ``required`` decodes one of the tools' calls, whose arguments must have lists of values.
            max_tokens: where the message is cut; None for the policy's own limit.
            parallel_tool_calls: False cuts it behind its first call.

        Raises:
            EmbodrlError: the policy writes no text, a message or tool has another form, or the conversation is too
                long.
        """
        policy = self._shared.engine.policy
        if not policy.writes_text:
            policy.text_of({})  # raises
        output = await self.act(conversation(messages, tools, tool_choice))
        return Completion.of(policy, output, max_tokens, parallel_tool_calls)

    async def values(self, observation: Observation | Sequence[Message]) -> Tensor:
        """Return ``float32[1,K]``, the values of an observation of one row; needs a policy with a value head.

        For a policy that writes text, those of a conversation, given as messages.
        """
        if not isinstance(observation, Observation):
            observation = conversation(observation, None, "auto")
        return await self._shared.values(observation)


def conversation(
    messages: Sequence[Message], tools: Sequence[Tool | Mapping[str, Any]] | None, choice: ToolChoice
) -> Observation:
    """Return a conversation as an observation ``[1]`` without images: its instruction."""
    functions = [vars(tool) if isinstance(tool, Tool) else tool for tool in tools or ()]
    text = Conversation.of(messages, functions, choice).to_text()
    nothing = np.zeros((1, 0), np.float32)
    return Observation(np.zeros((1, 0, 1, 1, 3), np.uint8), nothing, [text], np.zeros(1, np.int32))


def select_output(output: PolicyOutput, row: int) -> PolicyOutput:
    """Return one row of an output as a batch of one, on the CPU."""
    rows = slice(row, row + 1)

    def pick(tensor: Tensor) -> Tensor:
        # A copy: a view of one row would keep the whole batch in memory.
        return tensor[rows].to("cpu", copy=True)

    return replace(
        output,
        actions=output.actions[rows].copy(),
        logprobs=pick(output.logprobs).to(torch.float32),
        values=None if output.values is None else pick(output.values).to(torch.float32),
        forward_inputs={name: pick(tensor) for name, tensor in output.forward_inputs.items()},
    )
