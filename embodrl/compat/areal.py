"""AReaL's spelling of a task runner (``areal.core.async_task_runner``) and of workflows (``areal.api``).

A workflow of AReaL's imports ``RolloutWorkflow``, ``ModelRequest`` and ``GenerationHyperparameters`` from here, and
gets ``Tokenizer`` as its tokenizer, and ``areal_openai.ArealOpenAI`` as its OpenAI client. Without a counterpart:
images, sampling by request (``algorithm.sampling`` is the run's), several samples of one episode
(``algorithm.group_size``), and the engine's ``submit``, ``wait`` and weights, which are of ``embodrl.Session``.
"""

from __future__ import annotations

import itertools
import logging
import random
import threading
import time
import uuid
from abc import abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, overload

import torch

from embodrl.envs.environment import Environment
from embodrl.errors import EmbodrlError, TaskIdTaken, TaskQueueFull, TaskRunnerError, WorkflowError
from embodrl.hybrid_engines.rollout.batched import Completion, EpisodeEngine
from embodrl.models.common.chat import Conversation
from embodrl.models.planner import tokenizer as planner
from embodrl.models.planner.policy import TOKENS
from embodrl.types import TOKEN_MASK, Observation, PolicyOutput
from embodrl.workers.workflows import task_runner, workflow
from embodrl.workers.workflows.workflow import EpisodeTask, Trajectory

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletion

T = TypeVar("T")
TaskQueueFullError = TaskQueueFull
_Call = tuple[Callable[..., Awaitable[T]], Sequence[Any], Mapping[str, Any]]


@dataclass
class TimedResult(Generic[T]):
    """Result of a task.

    Attributes:
        create_time: its start, of ``time.monotonic_ns``.
        data: what it returned; None if it raised.
        task_id: its id.
    """

    create_time: int
    data: T
    task_id: Hashable


class AsyncTaskRunner(Generic[T]):
    """``embodrl.AsyncTaskRunner`` with the names and errors of AReaL's.

    Tasks start at once; a task that raises is logged, and its result is None.

    Args:
        max_queue_size: tasks queued and running together; twice as many results wait for ``wait``.
        poll_wait_time, poll_sleep_time: seconds by which AReaL may notice an event late; here none is polled for.
        enable_tracing: log every start and end.
    """

    def __init__(
        self,
        max_queue_size: int,
        poll_wait_time: float = 0.05,
        poll_sleep_time: float = 0.5,
        enable_tracing: bool = False,
    ) -> None:
        self.max_queue_size = max_queue_size
        self.poll_wait_time = poll_wait_time
        self.poll_sleep_time = poll_sleep_time
        self.enable_tracing = enable_tracing
        self.logger = logging.getLogger(__name__)
        self._lock = threading.Lock()
        self._ids: set[Hashable] = set()
        self._numbers = itertools.count()
        self._late: deque[TimedResult[T]] = deque()  # taken by a ``wait`` that timed out
        self._runner: task_runner.AsyncTaskRunner | None = None

    def initialize(self, logger: logging.Logger | None = None) -> None:
        """Start the thread of the tasks.

        Raises:
            TaskRunnerError: ``max_queue_size`` is below 1.
        """
        self.logger = logger or self.logger
        self._runner = task_runner.AsyncTaskRunner(self.max_queue_size, self.max_queue_size)

    def destroy(self, timeout: float = 30.0) -> None:
        """Cancel all tasks, drop their results, and wait for the thread; may be initialized again.

        Raises:
            TaskRunnerError: a task has not ended after ``timeout`` seconds.
        """
        runner, self._runner = self._runner, None
        if runner is not None:
            runner.close(timeout)
        self._ids.clear()
        self._late.clear()

    def submit(
        self, async_fn: Callable[..., Awaitable[T]], *args: Any, task_id: Hashable = None, **kwargs: Any
    ) -> Hashable:
        """Queue ``async_fn(*args, **kwargs)``; return its id, the next number by default.

        Raises:
            TaskQueueFullError: ``max_queue_size`` tasks have not ended.
            TaskIdTaken: a task with the id has not ended.
            TaskRunnerError: not initialized, or destroyed.
        """
        runner = self._running()
        with self._lock:
            if task_id is None:
                task_id = next(number for number in self._numbers if number not in self._ids)
            elif task_id in self._ids:
                raise TaskIdTaken(f"Duplicate task_id: {task_id}", "wait for it, or choose another id")
            if len(self._ids) >= self.max_queue_size:
                raise TaskQueueFullError(
                    f"Input queue full: {len(self._ids)} tasks have not ended", "wait(), or raise max_queue_size"
                )
            self._ids.add(task_id)
        if self.enable_tracing:
            self.logger.info("task %s is submitted", task_id)
        runner.submit(self._timed, async_fn, args, kwargs, task_id)
        return task_id

    def submit_batch(self, tasks: Sequence[_Call[T]]) -> None:
        """Queue function, arguments and keyword arguments of several tasks. Raises as ``submit``."""
        for async_fn, args, kwargs in tasks:
            self.submit(async_fn, *args, **kwargs)

    @overload
    def wait(self, count: int, timeout: float | None = None, with_timing: Literal[False] = False) -> list[T]: ...
    @overload
    def wait(self, count: int, timeout: float | None = None, *, with_timing: Literal[True]) -> list[TimedResult[T]]: ...
    def wait(
        self, count: int, timeout: float | None = None, with_timing: bool = False
    ) -> list[T] | list[TimedResult[T]]:
        """Return ``count`` results in random order, as in AReaL; None for a task that raised.

        Raises:
            TimeoutError: fewer came within ``timeout`` seconds; the next ``wait`` returns them.
            TaskRunnerError: not initialized, or destroyed.
        """
        runner = self._running()
        found: list[TimedResult[T]] = []
        while self._late and len(found) < count:
            found.append(self._late.popleft())
        if len(found) < count:
            found += [result.value for result in runner.wait(count - len(found), timeout) if result.status == "ok"]
        if len(found) < count:
            self._late.extendleft(reversed(found))
            _ = self._running()
            raise TimeoutError(f"Timed out waiting for {count} results, only received {len(found)}.")
        random.shuffle(found)
        return found if with_timing else [result.data for result in found]

    def pause(self) -> None:
        """Start no more tasks; running ones continue."""
        self._running().pause()

    def resume(self) -> None:
        """Start tasks again."""
        self._running().resume()

    def get_queue_sizes(self) -> tuple[int, int]:
        """Return the numbers of tasks that have not started, and of results to wait for."""
        health = self._running().health()
        return health.queued, health.undelivered + len(self._late)

    def get_input_queue_size(self) -> int:
        """Return the number of tasks that have not started."""
        return self.get_queue_sizes()[0]

    def get_output_queue_size(self) -> int:
        """Return the number of results to wait for."""
        return self.get_queue_sizes()[1]

    def _check_thread_health(self) -> None:  # pyright: ignore[reportUnusedFunction]  (AReaL's own tests call it)
        if (error := self._running().health().fatal_error) is not None:
            raise TaskRunnerError("the event loop of the tasks has failed", "make a new runner") from error

    def _running(self) -> task_runner.AsyncTaskRunner:
        if self._runner is None:
            raise TaskRunnerError("the task runner has no thread", "call initialize() first, and destroy() last")
        return self._runner

    async def _timed(
        self, async_fn: Callable[..., Awaitable[T]], args: Sequence[Any], kwargs: Mapping[str, Any], task_id: Hashable
    ) -> TimedResult[T | None]:
        started = time.monotonic_ns()
        data = None
        try:
            data = await async_fn(*args, **kwargs)
        except (SystemExit, KeyboardInterrupt):
            raise  # ends the loop
        except BaseException as error:
            if self._runner is not None:  # else ``destroy`` has cancelled it
                self.logger.error("task %s failed: %r", task_id, error, exc_info=error)
        finally:
            with self._lock:
                self._ids.discard(task_id)
        if self.enable_tracing:
            self.logger.info("task %s has ended", task_id)
        return TimedResult(started, data, task_id)


# -- workflows ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GenerationHyperparameters:
    """How a request is answered. ``InferenceEngine.agenerate`` refuses what is not the run's.

    Attributes:
        n_samples: 1 in requests.
        max_new_tokens: where a message is cut, besides ``model.planner.max_new_tokens``.
        max_tokens: the same, with the prompt.
        temperature: the run's, or None.
        top_p, frequency_penalty, greedy, stop: AReaL's defaults alone, since training needs the run's distribution.
        stop_token_ids: of ``Tokenizer``'s end and padding.
    """

    n_samples: int = 1
    max_new_tokens: int = 16384
    max_tokens: int = 32768
    temperature: float | None = None
    top_p: float = 1.0
    frequency_penalty: float = 0.0
    greedy: bool = False
    stop: list[str] | None = None
    stop_token_ids: tuple[int, ...] = ()

    def new(self, **changes: Any) -> GenerationHyperparameters:
        """Return a copy with other values."""
        return replace(self, **changes)

    def new_with_stop_and_pad_token_ids(self, tokenizer: Tokenizer) -> GenerationHyperparameters:
        """Return a copy that stops at the tokenizer's end and padding, as all messages do."""
        ids = {*self.stop_token_ids, tokenizer.pad_token_id, tokenizer.eos_token_id}
        return self.new(stop_token_ids=tuple(sorted(ids)))

    def unlike(self, temperature: float) -> list[str]:
        """Return the settings that a run of a temperature can't give to a request."""
        neutral = GenerationHyperparameters()
        named = ("n_samples", "top_p", "frequency_penalty", "greedy", "stop")
        wrong = [name for name in named if getattr(self, name) != getattr(neutral, name)]
        wrong += ["temperature"] * (self.temperature not in (None, temperature))
        return wrong + ["stop_token_ids"] * bool({*self.stop_token_ids} - {planner.END, planner.PAD})


class Tokenizer:
    """The bytes of ``model=planner``, with the methods of a tokenizer of transformers that workflows call."""

    eos_token_id = planner.END
    pad_token_id = planner.PAD

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
    ) -> list[int] | str:
        """Return the tokens of messages; with ``add_generation_prompt`` also those that the answer follows.

        Without ``tokenize`` a text to read or to judge, in which marks stand as ``<|user|>``.
        """
        ids = planner.encode(Conversation.of(messages, tools))
        ids = ids if add_generation_prompt else ids[:-1]
        return ids if tokenize else planner.marked_text(ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, without marks."""
        return planner.decode(list(ids), 0).text


@dataclass
class ModelRequest:
    """A prompt to be continued.

    Attributes:
        input_ids: tokens of ``Tokenizer.apply_chat_template``.
        metadata: ``tool_choice`` as in ``EpisodeEngine.generate``; anything else is the workflow's.
        image_data: empty, since policies that write text read no images.
    """

    rid: str = field(default_factory=lambda: uuid.uuid4().hex)
    input_ids: list[int] = field(default_factory=list[int])
    gconfig: GenerationHyperparameters = field(default_factory=GenerationHyperparameters)
    metadata: dict[str, Any] = field(default_factory=dict[str, Any])
    tokenizer: Tokenizer | None = None
    image_data: list[str] | None = None


@dataclass
class ModelResponse:
    """What was written, token by token.

    Attributes:
        stop_reason: ``length`` if the message was cut off after ``model.planner.max_new_tokens``.
    """

    input_tokens: list[int]
    output_tokens: list[int]
    output_logprobs: list[float]
    output_versions: list[int]
    stop_reason: Literal["length", "stop"]
    tokenizer: Tokenizer | None = None

    @property
    def input_len(self) -> int:
        """Tokens of the prompt."""
        return len(self.input_tokens)

    @property
    def output_len(self) -> int:
        """Tokens written."""
        return len(self.output_tokens)

    @property
    def output_tokens_without_stop(self) -> list[int]:
        """Tokens written, without the end."""
        return self.output_tokens[:-1] if self.stop_reason == "stop" else self.output_tokens


class InferenceEngine:
    """The engine as an episode of AReaL's sees it.

    Attributes:
        episode: the engine.
        completions: messages written so far.
    """

    def __init__(self, engine: EpisodeEngine) -> None:
        self.episode = engine
        self.completions: list[Completion] = []

    def get_version(self) -> int:
        """Return the number of updates behind the weights."""
        return self.episode.version

    async def act(self, observation: Observation) -> PolicyOutput:
        """Choose a chunk of actions, as ``EpisodeEngine.act``; AReaL's engine has none."""
        return await self.episode.act(observation)

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        """Generate the next message of a prompt; requests of concurrent episodes are batched.

        Raises:
            EmbodrlError: it sets what is the run's, has images, or the policy's tokens are no bytes
                (``areal-counterpart``), the tokens are no prompt (``planner-prompt``), or the policy writes no text
                (``policy-writes-no-text``).
        """
        if wrong := req.gconfig.unlike(self.episode.temperature) + ["image_data"] * bool(req.image_data):
            hint = "ask for one sample of a text; algorithm.sampling says how it is chosen"
            raise without_counterpart(f"a request sets {', '.join(wrong)}", hint)
        room = min(req.gconfig.max_new_tokens, req.gconfig.max_tokens - len(req.input_ids))
        if room < 1:
            raise without_counterpart(f"a request leaves room for {room} tokens", "raise gconfig.max_tokens")
        prompt = planner.read(req.input_ids)
        messages = [{"role": role, "content": text} for role, text in prompt.messages]
        choice = req.metadata.get("tool_choice", "auto")
        completion = await self.episode.generate(messages, prompt.tools, choice, room)
        response = respond(completion, req.tokenizer)
        if response.input_tokens != planner.encode(prompt):
            raise without_counterpart(
                "a public language model's tokens",
                "derive from embodrl.RolloutWorkflow, whose engine.generate writes texts",
            )
        self.completions.append(completion)
        return response


def respond(completion: Completion, tokenizer: Tokenizer | None) -> ModelResponse:
    """Return the tokens of a message of ``model=planner``."""
    output, inputs = completion.output, completion.output.forward_inputs
    mask = inputs[TOKEN_MASK][0]
    written: list[int] = inputs[TOKENS][0][mask].tolist()
    return ModelResponse(
        inputs["input_ids"][0][inputs["attention_mask"][0]].tolist(),
        written,
        output.logprobs[0, :, 0][mask].tolist(),
        [output.version] * len(written),
        "stop" if completion.written.ended else "length",
        tokenizer,
    )


@dataclass
class InteractionWithTokenLogpReward:
    """A completion of an episode.

    Attributes:
        messages: the request's.
        chat_template_type: the client's.
        parent: the interaction whose messages and answer ``messages`` begin with, the longest one; None without.
        completion: the answer; None until it is written, and so are the three next.
        model_response: its tokens.
        generated: what is trained on.
        output_message_list: its message.
        reward: its own, or what ``apply_reward_discount`` made of it; None if none was given.
        has_later_rewards: ``reward`` has the discounted ones of later interactions.
    """

    messages: list[dict[str, Any]]
    chat_template_type: str = "hf"
    parent: InteractionWithTokenLogpReward | None = None
    completion: ChatCompletion | None = None
    model_response: ModelResponse | None = None
    generated: Completion | None = None
    output_message_list: list[dict[str, Any]] | None = None
    reward: float | None = None
    has_later_rewards: bool = False

    @property
    def interaction_id(self) -> str | None:
        """Id of the completion."""
        return None if self.completion is None else self.completion.id


def add_interactions(trajectory: Trajectory, interactions: Sequence[InteractionWithTokenLogpReward]) -> None:
    """Append the messages of an episode's result.

    The rewards from a message on sum up to the exported one, if that has later rewards. A single one of a ``concat``
    client brings the messages that it continues, whose own rewards do not count, as in AReaL.

    Raises:
        WorkflowError: several conversations are exported with ``concat`` (``workflow-trajectory``).
    """
    chain = list(interactions)
    orphans = [one for one in chain if one.parent is not None and not any(one.parent is other for other in chain)]
    is_concat = any(one.chat_template_type == "concat" for one in orphans)
    if is_concat and len(chain) > 1:
        raise WorkflowError(
            f"arun_episode returned {len(chain)} conversations",
            "export them with style='individual', or run one conversation; algorithm.group_size makes groups",
            code="workflow-trajectory",
        )
    while is_concat and (parent := chain[0].parent) is not None:
        chain.insert(0, parent)
    for number, one in enumerate(chain):
        assert one.generated is not None
        ends = number + 1 == len(chain)
        reward = one.reward or 0.0
        if is_concat:
            reward = reward if ends else 0.0
        elif one.has_later_rewards and not ends:
            reward -= chain[number + 1].reward or 0.0
        solved = ends and (one.reward or 0.0) > 0
        trajectory.add_message(one.generated, reward, terminated=ends, success=solved)


class RolloutWorkflow(workflow.RolloutWorkflow):
    """A workflow with AReaL's method; ``rollout.workflow`` and ``EpisodePlayer.submit`` take it.

    Messages are trained on as they were generated, in this order, and the last one gets the episode's reward; it counts
    as solved if that is above 0.
    """

    @abstractmethod
    async def arun_episode(
        self, engine: InferenceEngine, data: dict[str, Any]
    ) -> Mapping[str, Any] | Trajectory | None:
        """Run one episode.

        Args:
            engine: writes messages, and chooses actions.
            data: what was submitted, with the environment, ``env``, and the task, ``episode`` (``EpisodeTask``).

        Returns:
            a mapping with ``rewards``, of one element; its ``loss_mask``, if any, covers all that was written. Or what
            ``ArealOpenAI`` exports, a ``Trajectory``, or None to reject the episode.
        """

    async def run_episode(self, engine: EpisodeEngine, env: Environment, task: EpisodeTask) -> Trajectory | None:
        """Run an episode of AReaL's; see ``embodrl.RolloutWorkflow``.

        Raises:
            WorkflowError: what it returned is not one episode of the messages written (``workflow-trajectory``).
        """
        seen = InferenceEngine(engine)
        found = await self.arun_episode(seen, {**task.data, "env": env, "episode": task})
        if found is None or isinstance(found, Trajectory):
            return found
        if found and all(isinstance(one, InteractionWithTokenLogpReward) for one in found.values()):
            trajectory = Trajectory(task)
            add_interactions(trajectory, list(found.values()))
            return trajectory
        written = sum(int(each.output.forward_inputs[TOKEN_MASK].sum()) for each in seen.completions)
        rewards = torch.as_tensor(found.get("rewards", ())).flatten().tolist()
        problem = hint = ""
        if not seen.completions or len(rewards) != 1:
            problem = f"{len(rewards)} rewards for {len(seen.completions)} messages"
            hint = "return one sample with rewards of one element; algorithm.group_size makes groups"
        elif "loss_mask" in found and int(torch.as_tensor(found["loss_mask"]).sum()) != written:
            problem, hint = "a loss_mask of other tokens than those written", "set it to 1 where tokens were written"
        if problem:
            raise WorkflowError(f"arun_episode returned {problem}", hint, code="workflow-trajectory")
        trajectory = Trajectory(task)
        for number, completion in enumerate(seen.completions, 1):
            ends = number == len(seen.completions)
            reward = rewards[0] if ends else 0.0
            trajectory.add_message(completion, reward, terminated=ends, success=ends and reward > 0)
        return trajectory


def without_counterpart(what: str, hint: str) -> EmbodrlError:
    """Return the error for what AReaL has and is not here."""
    return EmbodrlError(f"{what}, which has no counterpart here", hint, code="areal-counterpart")
