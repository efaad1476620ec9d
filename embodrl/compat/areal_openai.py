"""AReaL's OpenAI client (``areal.experimental.openai``): completions of an episode, with rewards, in its process.

An episode returns ``export_interactions``. Without a counterpart: the Responses API, ``stop`` and ``top_p`` of training
requests, and ``store=False``, since what an episode writes is trained on.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, cast

from embodrl.compat.areal import (
    InferenceEngine,
    InteractionWithTokenLogpReward,
    Tokenizer,
    respond,
    without_counterpart,
)
from embodrl.errors import MissingDependencyError
from embodrl.serving.wire.chat_api import ChatChoice, ChatRequest, ChatStream, completion_body, completion_head
from embodrl.workers.workflows.agent_server import MODEL, write

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletion, ChatCompletionChunk

Style = Literal["individual", "concat"]


class ArealOpenAI:
    """A client whose ``chat.completions.create`` takes and returns what OpenAI's does.

    Requests choose what ``POST /v1/chat/completions`` of agents does: the run says how messages are sampled.

    Args:
        engine: the episode's.
        tokenizer: of the responses.
        tool_call_parser, reasoning_parser: AReaL's defaults alone.
        chat_template_type: ``concat`` permits to export conversations; each message is trained with its own prompt.

    Raises:
        EmbodrlError: another setting (``areal-counterpart``).
        MissingDependencyError: openai is not installed.
    """

    def __init__(
        self,
        engine: InferenceEngine,
        tokenizer: Tokenizer | None = None,
        tool_call_parser: str = "qwen",
        reasoning_parser: str = "qwen3",
        chat_template_type: str = "hf",
        **others: object,
    ) -> None:
        wrong = [name for name, value in others.items() if value is not None and name != "api_key"]
        wrong += ["tool_call_parser"] * (tool_call_parser != "qwen")
        wrong += ["reasoning_parser"] * (reasoning_parser != "qwen3")
        wrong += ["chat_template_type"] * (chat_template_type not in ("hf", "concat"))
        if wrong:
            raise without_counterpart(f"a client sets {', '.join(wrong)}", "leave it out")
        self._types = _openai_types()
        self._engine = engine
        self._tokenizer = tokenizer
        self._template = chat_template_type
        self._interactions: dict[str, InteractionWithTokenLogpReward] = {}
        self._is_discounted = False
        self.chat = SimpleNamespace(completions=SimpleNamespace(create=self._create))

    async def _create(
        self, *, messages: Iterable[Any], stream: object = None, **given: Any
    ) -> ChatCompletion | AsyncIterator[ChatCompletionChunk]:
        """Write the next message of a conversation; raises WireError (``chat-request``) for what is not offered."""
        plain = [_plain(message) for message in messages]
        content = {name: _plain(value) for name, value in given.items() if _is_given(value)}
        if not content.pop("store", True):
            raise without_counterpart("store=False", "leave it out: what an episode writes is trained on")
        extra = content.pop("extra_body", {})
        body = {"model": MODEL, **content, **extra, "messages": plain}
        asked = ChatRequest.read(json.dumps(body | {"stream": _is_given(stream) and stream is True}).encode())
        name = f"chatcmpl-{secrets.token_hex(12)}"
        interaction = InteractionWithTokenLogpReward(plain, self._template, self._parent_of(plain))
        self._interactions[name] = interaction
        try:
            found = await write(self._engine.episode, asked)
        except BaseException:
            del self._interactions[name]
            raise
        calls = found.tool_calls if asked.tools else ()
        logprobs = found.output.logprobs[0, :, 0].tolist() if asked.logprobs else None
        choices = [ChatChoice(found.written, calls, logprobs)]
        head = completion_head(name, asked.model, int(time.time()), found.output.version)
        answer: ChatCompletion = self._types.ChatCompletion.model_validate(completion_body(head, choices))
        interaction.completion, interaction.generated = answer, found
        interaction.model_response = respond(found, self._tokenizer)
        interaction.output_message_list = [answer.choices[0].message.model_dump(exclude_none=True)]
        self._engine.completions.append(found)
        return self._chunks(ChatStream(head, asked).finish(choices)) if asked.stream else answer

    async def _chunks(self, events: bytes) -> AsyncIterator[ChatCompletionChunk]:
        for event in events.decode().split("\n\n"):
            text = event.removeprefix("data: ")
            if text and text != "[DONE]":
                yield self._types.ChatCompletionChunk.model_validate_json(text)

    def _parent_of(self, messages: list[dict[str, Any]]) -> InteractionWithTokenLogpReward | None:
        begins = [
            (len(one.messages), one)
            for one in self._interactions.values()
            if one.output_message_list is not None
            and messages[: len(one.messages) + 1] == one.messages + one.output_message_list
        ]
        return max(begins, key=lambda pair: pair[0], default=(0, None))[1]

    def get_interaction(self, id: str) -> InteractionWithTokenLogpReward | None:
        """Return a completion with its tokens and its reward; None if there is none of this id."""
        return self._interactions.get(id)

    get_completions = get_interaction  # its name in earlier versions

    def set_reward(self, id: str, reward: float) -> None:
        """Set the reward of a completion; raises KeyError for an unknown id."""
        self._interactions[id].reward = float(reward)

    def set_last_reward(self, reward: float) -> None:
        """Set the reward of the newest completion; raises RuntimeError without one."""
        if not self._interactions:
            raise RuntimeError("there is no completion to set a reward for")
        self.set_reward(next(reversed(self._interactions)), reward)

    def apply_reward_discount(self, turn_discount: float = 1.0) -> dict[str, InteractionWithTokenLogpReward]:
        """Add later rewards to earlier ones: ``reward[i] += turn_discount * reward[i + 1]``, in order of the requests.

        Raises:
            RuntimeError: called twice.
        """
        if self._is_discounted:
            raise RuntimeError("apply_reward_discount may be called once")
        self._is_discounted = True
        later = 0.0
        for one in reversed(self._interactions.values()):
            later = (one.reward or 0.0) + turn_discount * later
            one.reward, one.has_later_rewards = later, True
        return dict(self._interactions)

    def export_interactions(self, style: Style = "individual") -> dict[str, InteractionWithTokenLogpReward]:
        """Return completions by id, for the episode to return: all, or with ``concat`` those that none continues.

        Raises:
            ValueError: there is no such style, or the client's ``chat_template_type`` is not ``concat``.
        """
        written = {name: one for name, one in self._interactions.items() if one.completion is not None}
        if style == "individual":
            return written
        if style != "concat" or self._template != "concat":
            raise ValueError(f"style={style!r} with chat_template_type={self._template!r}: use 'individual'")
        continued = [one.parent for one in written.values()]
        return {name: one for name, one in written.items() if not any(one is other for other in continued)}

    def export_completions(self, turn_discount: float = 1.0) -> dict[str, InteractionWithTokenLogpReward]:
        """Apply the discount and return all completions, as earlier versions do."""
        self.apply_reward_discount(turn_discount)
        return self.export_interactions("individual")


def _openai_types() -> Any:
    try:
        import openai.types.chat
    except ImportError as error:
        raise MissingDependencyError(f"AReaL's client needs openai: {error}", "pip install openai") from error
    return openai.types.chat


def _is_given(value: object) -> bool:
    return value is not None and type(value).__name__ not in ("NotGiven", "Omit")


def _plain(value: Any) -> Any:
    """Return JSON's types for what clients pass: pydantic's models, mappings and iterables, without None."""
    if hasattr(value, "model_dump"):
        value = value.model_dump(exclude_none=True)
    if isinstance(value, Mapping):
        return {name: _plain(one) for name, one in cast("Mapping[str, Any]", value).items() if _is_given(one)}
    if isinstance(value, (str, int, float)) or value is None:
        return value
    return [_plain(one) for one in value]
