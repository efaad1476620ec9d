"""Rewards of whole episodes: by a user function, a trained model, or SRPO.

Shapes: T policy steps (chunks), B environments, C actions in a chunk, E episodes, n actions of an episode.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import logging
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, InvalidStateError, wait
from dataclasses import dataclass
from typing import TypedDict, TypeVar

import torch
from torch import Tensor

from embodrl.algorithms.episodes import Episodes, split_episodes
from embodrl.algorithms.srpo import SrpoRewards, make_encoder, sample_frames
from embodrl.config.schema import Config, RewardConfig
from embodrl.data.trajectory import TrajectoryBatch
from embodrl.envs.base import EnvSpec
from embodrl.errors import CheckpointError, RewardError, user_location
from embodrl.fields import Fields
from embodrl.names import import_function
from embodrl.user_code import exits_raise, raised_by_embodrl
from embodrl.workers.episode import JUDGED, Episode, episode_of
from embodrl.workers.learned_reward import LearnedReward
from embodrl.workers.recorders import Judging

T = TypeVar("T")
logger = logging.getLogger(__name__)

CLIPS_AT_ONCE = 8
_POLL_S = 0.1
ANSWER_S = 1.0
"""Time the event loop of async functions may take to respond after one of them was too slow."""
_NONE = torch.tensor(float("nan"))
MODEL = "model"
"""Checkpoint key: checksum of the reward model."""


class Outcome(TypedDict):
    """Outcome of a reward call, as sent between processes and kept in checkpoints.

    ``reward`` is one number, or one per action; None with an ``error`` message if all attempts failed.
    """

    reward: float | list[float] | None
    error: str
    hint: str
    failed: int


class DetachedRewards(TypedDict):
    """Rewards of a batch that leaves the process that requested them; ``call_id`` indexes the outcomes.

    ``waited_s`` are the seconds that the rollout process waited for them after its last chunk.
    """

    outcomes: list[Outcome]
    waited_s: float


@dataclass
class _PendingCall:
    """A call of the reward function.

    Attributes:
        episode: argument of the call; None once it is no longer needed.
        since: number of batches paid before the call began.
        reported: the outcome is an error that has been reported.
    """

    episode: Episode | None
    call: Future[tuple[Tensor | RewardError, int]]
    since: int = 0
    reported: bool = False

    def __post_init__(self) -> None:
        self.call.add_done_callback(self._release)

    def result(self) -> tuple[Tensor | RewardError, int]:
        """Wait for the outcome, and the number of attempts that failed."""
        outcome, failed = self.call.result()
        self.reported = isinstance(outcome, RewardError)
        return outcome, failed

    def _release(self, call: Future[tuple[Tensor | RewardError, int]]) -> None:
        """Free the images of an episode that will not be judged again."""
        if not call.cancelled() and call.exception() is None and isinstance(call.result()[0], Tensor):
            self.episode = None


class RewardWorker:
    """Replaces the rewards of a rollout if the configuration says so."""

    def __init__(self, config: Config, tasks: tuple[str, ...]) -> None:
        self.tasks = tasks
        self.settings = config.reward
        self.calls: RewardCalls | None = None
        self.learned: LearnedReward | None = None
        if config.reward.fn is not None:
            self.calls = RewardCalls(import_function(config.reward.fn), self.settings)
        elif config.reward.model is not None:
            self.learned = LearnedReward(config.reward.model, config.model.num_action_chunks)
            self.calls = RewardCalls(self.learned, self.settings)
        elif config.reward.judge.url is not None:
            from embodrl.workers.rewards.judge import PictureJudge

            self.calls = RewardCalls(PictureJudge(config.reward.judge), self.settings)
        # A unique start: numbers of an earlier process may be in a checkpoint.
        self._numbers = itertools.count(time.time_ns())
        self._begun: dict[int, _PendingCall] = {}
        self._rewarded_batches = 0
        self._ahead = config.runner.max_staleness
        self._waited_s = 0.0  # by rollout processes, since the last paid batch
        self.on_paid: Callable[[list[Outcome]], None] | None = None
        """Called with the outcomes of a batch, in the order of its episodes."""
        self.replayed: list[Outcome] | None = None
        """Outcomes of the next batch, in place of calls."""
        srpo = config.algorithm.srpo
        self.srpo = SrpoRewards(srpo) if srpo.enabled else None
        self.encoder = make_encoder(srpo)

    @property
    def source(self) -> str:
        """What judges episodes: the function, the weights of the model, or the judge and its question; "" for none."""
        if self.learned is not None:
            model = self.learned
            return f"reward.model with weights {int(model.fingerprint):08x} from {model.threshold:g}"
        judge = self.settings.judge
        if judge.url is not None:
            return f"reward.judge {judge.model} at {judge.url} of {judge.num_frames} pictures: {judge.question}"
        return "" if self.settings.fn is None else f"reward.fn {self.settings.fn}"

    def replay(self, paid: Fields) -> None:
        """Have the next batch paid what a saved run paid, ``paid_by`` of that run.

        Raises:
            RewardError: something else paid there.
        """
        if (source := paid.text("by")) != self.source:
            raise _of_other_rewards(f"the saved rewards come from {source}, but this run's come from {self.source}")
        self.replayed = outcomes_of(paid, "outcomes")

    def paid_by(self, outcomes: list[Outcome]) -> dict[str, object]:
        """Return the outcomes of a batch for ``replay``."""
        return {"by": self.source, "outcomes": outcomes}

    @property
    def judging(self) -> Judging:
        """Requirements of the rewards on rollouts; ``judge`` is thread-safe and starts computing a reward."""
        return Judging(self.calls is not None or self.srpo is not None, None if self.calls is None else self.start)

    def start(self, episode: Episode) -> int:
        """Start computing an episode's reward; return the call number for ``call_id``."""
        assert self.calls is not None
        number = next(self._numbers)
        self._begun[number] = _PendingCall(episode, self.calls.start(episode), self._rewarded_batches)
        return number

    def detach(self, batch: TrajectoryBatch, should_stop: Callable[[], bool]) -> DetachedRewards:
        """Wait for the rewards of a batch, and renumber ``batch.call_id`` to indices into the list.

        Raises:
            InterruptedError: ``should_stop`` returned True.
        """
        clock = time.perf_counter()
        numbers = _numbers_of(batch)
        while not all(self._begun[number].call.done() for number in numbers):
            if should_stop():
                raise InterruptedError
            wait([self._begun[number].call for number in numbers], _POLL_S)
        rewards = self.known(batch)
        for number in numbers:
            del self._begun[number]
        return {"outcomes": rewards, "waited_s": time.perf_counter() - clock}

    def known(self, batch: TrajectoryBatch) -> list[Outcome]:
        """Return the outcomes of finished calls, and renumber ``batch.call_id``, with -1 for the others."""
        begun = [number for number in _numbers_of(batch) if number in self._begun]
        if self.learned is not None:  # fast, and not computable from the batch later
            wait([self._begun[number].call for number in begun])
        done = [number for number in begun if self._begun[number].call.done()]
        _renumber(batch, {number: place for place, number in enumerate(done)})
        return [_outcome(*self._begun[number].call.result()) for number in done]

    def adopt(self, batch: TrajectoryBatch, detached: DetachedRewards) -> None:
        """Adopt the rewards of a batch from ``detach`` or ``known``; thread-safe."""
        numbers: dict[int, int] = {}
        for place, outcome in enumerate(detached["outcomes"]):
            numbers[place] = next(self._numbers)
            self._begun[numbers[place]] = _ended_call(outcome, self._rewarded_batches)
        _renumber(batch, numbers)
        self._waited_s = max(self._waited_s, detached["waited_s"])

    def check(self, spec: EnvSpec) -> None:
        """Reject a reward model trained for other simulators.

        Raises:
            EmbodrlError: the simulators differ.
        """
        if self.learned is not None:
            self.learned.check(spec)

    def close(self) -> None:
        """Cancel pending calls."""
        if self.calls is not None:
            self.calls.close()

    def apply(self, batch: TrajectoryBatch) -> dict[str, float]:
        """Replace ``batch.rewards``, and mask (``valid``) episodes without a reward; return metrics.

        Raises:
            RewardError: every call failed, or one did and ``reward.on_error`` is ``raise``.
        """
        if self.calls is None and self.srpo is None:
            return {}
        episodes = split_episodes(batch.valid, batch.terminated, batch.truncated)
        return self._apply_srpo(batch, episodes) if self.calls is None else self._call_function(batch, episodes)

    def state(self) -> dict[str, Tensor]:
        """Return the tensors that a resumed run needs, by name."""
        if self.learned is not None:
            return {MODEL: self.learned.fingerprint}
        return {} if self.srpo is None else {str(task): kept for task, kept in self.srpo.memory.items()}

    def load_state(self, saved: dict[str, Tensor]) -> None:
        """Restore a saved state.

        Raises:
            CheckpointError: the state belongs to other rewards.
        """
        if self.learned is not None and torch.equal(saved.get(MODEL, _NONE), self.learned.fingerprint):
            return
        if self.srpo is None or not all(name.isdigit() and tensor.ndim == 2 for name, tensor in saved.items()):
            raise CheckpointError(
                "the checkpoint was made with other rewards than this run's",
                "resume with the checkpoint's settings",
                code="checkpoint-other-settings",
            )
        self.srpo.memory = {int(task): kept for task, kept in saved.items()}

    # -- SRPO ----------------------------------------------------------------------------------------------------------

    def _apply_srpo(self, batch: TrajectoryBatch, episodes: Episodes) -> dict[str, float]:
        assert self.srpo is not None and batch.success is not None
        # The outcome of an episode that a fault ended is unknown; such episodes are not trained on.
        complete = (~episodes.lost).nonzero().flatten()
        _pay(batch, episodes, {int(number): torch.zeros(()) for number in episodes.lost.nonzero()})
        if not len(complete):
            return {"srpo/failure_reward": 0.0, "srpo/tasks_without_reference": 0.0}
        success = episodes.of(batch.success)[complete]
        size = self.srpo.config.num_frames
        clips = [sample_frames(_frames(batch, episodes, number), size) for number in complete.tolist()]
        parts = [torch.stack(clips[i : i + CLIPS_AT_ONCE]) for i in range(0, len(clips), CLIPS_AT_ONCE)]
        embeddings = torch.cat([self.encoder(part) for part in parts])
        rewards = self.srpo(embeddings, success, episodes.of(batch.task_id)[complete])
        _pay(batch, episodes, dict(zip(complete.tolist(), rewards, strict=True)))
        failures = rewards[~success]
        return {
            "srpo/failure_reward": float(failures.mean()) if len(failures) else 0.0,
            "srpo/tasks_without_reference": float(self.srpo.without_reference),
        }

    # -- user function -------------------------------------------------------------------------------------------------

    def _call_function(self, batch: TrajectoryBatch, episodes: Episodes) -> dict[str, float]:
        clock = time.perf_counter()
        calls = self._calls_of(batch, episodes) if self.replayed is None else self._replayed(batch, episodes)
        unfinished = sum(not begun.call.done() for begun in calls)
        results = [begun.result() for begun in calls]
        waited = time.perf_counter() - clock + self._waited_s
        outcomes = [outcome for outcome, _ in results]
        failures = sum(failed for _, failed in results)
        errors = [outcome for outcome in outcomes if isinstance(outcome, RewardError)]
        if errors and len(errors) == len(outcomes):
            message = f"all {len(errors)} episodes have no reward: {errors[0].message}"
            raise RewardError(message, "fix the function, or raise reward.timeout_s or reward.retries")
        if errors and self.settings.on_error == "raise":
            raise errors[0]
        if self.on_paid is not None:
            self.on_paid([_outcome(*result) for result in results])
        if errors:
            logger.warning("%d of %d episodes have no reward: %s", len(errors), len(outcomes), errors[0].message)
        _pay(batch, episodes, {n: o for n, o in enumerate(outcomes) if not isinstance(o, RewardError)})
        batch.valid = batch.valid.clone()  # other nodes may share the column
        for number, outcome in enumerate(outcomes):
            if isinstance(outcome, RewardError):
                batch.valid[episodes.index == number] = False
        batch.call_id = None
        self._rewarded_batches = self._rewarded_batches + 1
        self._waited_s = 0.0
        granted = torch.stack(
            [outcome.sum() for outcome in outcomes if not isinstance(outcome, RewardError)] or [_NONE]
        )
        return {
            "reward/mean": float(granted.mean()),
            "reward/std": float(granted.std(correction=0)),
            "reward/errors": float(len(errors)),
            "reward/failed_calls": float(failures),
            "time/reward_wait_s": waited,
            "usage/queue_rewards": float(unfinished),
        }

    def _calls_of(self, batch: TrajectoryBatch, episodes: Episodes) -> list[_PendingCall]:
        """Return the call of each episode: the one started when it ended, or a new one."""
        assert self.calls is not None
        numbers = [-1] * len(episodes) if batch.call_id is None else episodes.of(batch.call_id).tolist()
        oldest = min((number for number in numbers if number >= 0), default=0)
        for number, begun in list(self._begun.items()):
            # Used, or from an interrupted rollout or a dropped group. A batch ahead of training may have older calls
            # than this one.
            if number < oldest and begun.since + self._ahead < self._rewarded_batches:
                del self._begun[number]
        calls: list[_PendingCall] = []
        for index, number in enumerate(numbers):
            begun = self._begun.get(number)
            again = begun is not None and begun.reported  # a retried node calls again
            if begun is None or (again and begun.episode is not None):
                episode = begun.episode if begun is not None else None
                episode = self._record(batch, episodes, index) if episode is None else episode
                begun = _PendingCall(episode, self.calls.start(episode), self._rewarded_batches)
                self._begun |= {number: begun} if number >= 0 else {}
            calls.append(begun)
        return calls

    def _replayed(self, batch: TrajectoryBatch, episodes: Episodes) -> list[_PendingCall]:
        outcomes = self.replayed or []
        lengths = [int(batch.valid[episodes.index == number].sum()) for number in range(len(episodes))]
        if len(outcomes) != len(lengths):
            raise _of_other_rewards(f"there are {len(lengths)} episodes, and saved rewards for {len(outcomes)}")
        for outcome, length in zip(outcomes, lengths, strict=True):
            paid = outcome["reward"]
            if isinstance(paid, list) and len(paid) != length:
                raise _of_other_rewards(f"an episode has {length} actions, and {len(paid)} saved rewards")
        return [_ended_call(outcome, self._rewarded_batches) for outcome in outcomes]

    def _record(self, batch: TrajectoryBatch, episodes: Episodes, number: int) -> Episode:
        chunks = episodes.index == number
        task = self.tasks[int(episodes.of(batch.task_id)[number])]
        return episode_of({name: batch[name][chunks] for name in JUDGED}, task)


def _numbers_of(batch: TrajectoryBatch) -> list[int]:
    """Return the numbers of the calls started during the batch's rollout, in order."""
    return [] if batch.call_id is None else sorted(number for number in batch.call_id.flatten().tolist() if number >= 0)


def _renumber(batch: TrajectoryBatch, numbers: dict[int, int]) -> None:
    if batch.call_id is not None:
        renumbered = [numbers.get(number, -1) for number in batch.call_id.flatten().tolist()]
        batch.call_id = torch.tensor(renumbered, dtype=torch.int64).view(batch.call_id.shape)


def _outcome(result: Tensor | RewardError, failed: int) -> Outcome:
    if isinstance(result, RewardError):
        return {"reward": None, "error": result.message, "hint": result.hint, "failed": failed}
    return {"reward": result.tolist(), "error": "", "hint": "", "failed": failed}


def _of_other_rewards(problem: str) -> RewardError:
    hint = "replay with the settings of the run that saved them, or without reward.fn, model and judge"
    return RewardError(problem, hint, code="rollout-of-other-rewards")


def _ended_call(outcome: Outcome, since: int) -> _PendingCall:
    """Return a call that was made in another process or run."""
    call: Future[tuple[Tensor | RewardError, int]] = Future()
    call.set_result(_restored(outcome))
    return _PendingCall(None, call, since)


def outcomes_of(fields: Fields, name: str) -> list[Outcome]:
    """Read a list of outcomes from JSON; raises the error of ``fields``."""
    outcomes: list[Outcome] = []
    for one in fields.objects(name):
        paid = one.numbers("reward") if isinstance(one.content.get("reward"), list) else one.number("reward", None)
        told = (one.text("error"), one.text("hint"))
        outcomes.append({"reward": paid, "error": told[0], "hint": told[1], "failed": one.integer("failed")})
    return outcomes


def _restored(outcome: Outcome) -> tuple[Tensor | RewardError, int]:
    reward = outcome["reward"]
    if reward is None:
        return RewardError(outcome["error"], outcome["hint"]), outcome["failed"]
    return torch.tensor(reward, dtype=torch.float32), outcome["failed"]


def _frames(batch: TrajectoryBatch, episodes: Episodes, number: int) -> Tensor:
    assert batch.frames is not None
    return batch.frames[episodes.index == number]


def _pay(batch: TrajectoryBatch, episodes: Episodes, rewards: dict[int, Tensor]) -> None:
    """Write episode rewards into the batch: a single number goes to the last action, otherwise one per action."""
    # A copy: other nodes of the pipeline may share the column.
    batch.rewards = batch.rewards.clone()
    for number, reward in rewards.items():
        chunks = episodes.index == number
        valid = batch.valid[chunks]
        granted = torch.zeros(valid.shape)
        if reward.ndim:
            granted[valid] = reward
        else:
            row, action = valid.nonzero()[-1].tolist()
            granted[row, action] = reward
        batch.rewards[chunks] = granted


class RewardCalls:
    """Calls a reward function, sync or async, for several episodes concurrently, from an event loop in a thread.

    The function maps an episode to a number, or to one number per action. Each call of a sync function gets its own
    thread; async calls share an event loop in another thread. A call that takes too long and cannot be stopped is
    abandoned with its thread, and its result ignored.
    """

    def __init__(self, function: Callable[[Episode], object], settings: RewardConfig) -> None:
        self.function = function
        self.settings = settings
        self._room = asyncio.Semaphore(settings.max_concurrency)
        # Episodes end in the threads of several stages, which share one event loop.
        self._starting = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._user: _UserLoop | None = None

    def start(self, episode: Episode) -> Future[tuple[Tensor | RewardError, int]]:
        """Start a call; thread-safe. Its result: ``float32[]``, ``float32[n]`` or an error; and the failed attempts."""
        with self._starting:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._serve, args=(self._loop,), name="rewards", daemon=True).start()
        return asyncio.run_coroutine_threadsafe(self._call(episode), self._loop)

    def close(self) -> None:
        """Cancel pending calls."""
        with self._starting:
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._loop = None

    def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        _serve(loop)
        if self._user is not None:  # its calls have been cancelled by now
            self._user.stop()

    async def _call(self, episode: Episode) -> tuple[Tensor | RewardError, int]:
        settings = self.settings
        failed = 0
        name = next(iter(settings.judges), "the reward function")
        problem = RewardError("")
        async with self._room:
            for attempt in range(settings.retries + 1):
                clock = asyncio.timeout(settings.timeout_s)
                try:
                    async with clock:
                        result = await self._invoke(episode)
                    return _as_reward(result, len(episode.rewards)), failed
                except Exception as error:  # noqa: BLE001  (user function may raise anything; counted)
                    # The function itself may also raise TimeoutError.
                    over = isinstance(error, TimeoutError) and clock.expired()
                    place = f" at {where}" if (where := user_location(error)) else ""
                    failure = f"failed{place}: {type(error).__name__}: {error}"
                    why = f"took more than {settings.timeout_s:g} s{await self._leave_blocked()}" if over else failure
                failed += 1
                problem = RewardError(
                    f"{name} {why} (attempt {attempt + 1} of {settings.retries + 1})",
                    "fix the function, raise reward.timeout_s or reward.retries, or set reward.on_error=drop to train"
                    " without such episodes",
                )
        return problem, failed

    async def _invoke(self, episode: Episode) -> object:
        if not _is_async(self.function):
            return await _in_thread(self.function, episode)
        if self._user is None:
            self._user = _UserLoop()
        result, error = await self._user.run(_settled(self.function, episode))
        if error is not None:
            raise error
        return result

    async def _leave_blocked(self) -> str:
        """Abandon the loop of async functions if a call blocks it; return a description for the error."""
        user = self._user
        if user is None or await user.answers():
            return ""
        if user is self._user:  # the first of the calls waiting for it
            self._user = None
            user.stop()
        return (
            f": {_name_of(self.function)} blocks the event loop{user.place()}; await slow operations, or drop `async`"
        )


class _UserLoop:
    """An event loop in its own thread, since the coroutines that run on it may block it."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=_serve, args=(self._loop,), name="async rewards", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[object, object, T]) -> asyncio.Future[T]:
        """Start a coroutine; cancelling the returned future cancels it."""
        return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))

    async def answers(self) -> bool:
        """Return whether the loop still runs other callbacks."""
        return bool((await asyncio.wait([self.run(asyncio.sleep(0))], timeout=ANSWER_S))[0])

    def place(self) -> str:
        """Describe the current position of its thread."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        return "" if frame is None else f" at {frame.f_code.co_filename}:{frame.f_lineno}"

    def stop(self) -> None:
        """Stop as soon as possible; thread-safe."""
        self._loop.call_soon_threadsafe(self._loop.stop)


def _name_of(function: object) -> str:
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def _is_async(function: object) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        # Cancelled before the loop closes, so that the user function's coroutines can clean up.
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        loop.close()


async def _awaited(function: Callable[[Episode], object], episode: Episode) -> object:
    try:
        running = function(episode)
        assert inspect.isawaitable(running)
        return await running
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():  # timed out
            raise
        raise _as_exception(error) from None
    except (SystemExit, KeyboardInterrupt) as error:
        if raised_by_embodrl(error):  # the run is stopping
            raise
        raise _as_exception(error) from None
    except BaseException as error:  # noqa: BLE001  (re-raised as an error of the function)
        raise _as_exception(error) from None


async def _settled(function: Callable[[Episode], object], episode: Episode) -> tuple[object, Exception | None]:
    # Event loops rebuild a TimeoutError without its traceback.
    try:
        return await _awaited(function, episode), None
    except Exception as error:  # noqa: BLE001  (re-raised where it is awaited)
        return None, error


async def _in_thread(function: Callable[[Episode], object], episode: Episode) -> object:
    future: Future[object] = Future()

    def work() -> None:
        try:
            with exits_raise(_ended):
                result = function(episode)
        except BaseException as error:  # noqa: BLE001  (re-raised where it is awaited)
            _settle(future.set_exception, _as_exception(error))
        else:
            _settle(future.set_result, result)

    # No thread pool: Python would wait at exit for a call that never returns.
    threading.Thread(target=work, name="reward", daemon=True).start()
    return await asyncio.wrap_future(future)


def _ended(code: object) -> RuntimeError:
    return RuntimeError(f"it ended the process with exit code {code}; return a reward, or raise an exception")


def _as_exception(error: BaseException) -> Exception:
    """Return an error of the user function as an Exception: other BaseExceptions would end the run or its loop."""
    if isinstance(error, SystemExit):
        return _ended(error.code).with_traceback(error.__traceback__)
    if isinstance(error, Exception) and not isinstance(error, StopIteration):  # futures cannot hold it
        return error
    text = f"it raised {type(error).__name__} ({error}), which is not an Exception; raise one with a message"
    return RuntimeError(text).with_traceback(error.__traceback__)


def _settle(setter: Callable[[T], None], value: T) -> None:
    """Deliver a result unless the call was cancelled."""
    try:
        setter(value)
    except InvalidStateError:  # the call was cancelled
        logger.debug("a reward came too late")


def _as_reward(result: object, num_actions: int) -> Tensor:
    try:
        reward = torch.as_tensor(result, dtype=torch.float32)  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError, RuntimeError):
        text = f"it returned {result!r:.60} ({type(result).__name__})"
        raise ValueError(f"{text}; return one number, or one for each of {num_actions} actions") from None
    if reward.ndim > 1 or (reward.ndim == 1 and len(reward) != num_actions):
        raise ValueError(f"shape {list(reward.shape)}; return one number, or one for each of {num_actions} actions")
    if not bool(reward.isfinite().all()):
        raise ValueError("the reward is not finite")
    return reward
