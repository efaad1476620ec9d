"""One environment of one task, and B of them as a VectorEnv.

Shapes: B environments, A action dimensions, V cameras, H x W image, S state dimensions.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import zlib
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import TypedDict, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from embodrl.envs.base import SavedState, axis_unknown
from embodrl.envs.stepping import CameraSettings, EpisodeRules, SteppingEnv, StepResult, make_spec
from embodrl.errors import EnvError
from embodrl.types import EnvSpec

_CHECKED_SEED = 1
_IMAGE_NOISE = 16  # of 255, between two renderings of one scene
Result = TypeVar("Result")


@dataclass(frozen=True)
class SimStep:
    """Outcome of one action.

    Attributes:
        success: the task is solved now.
        terminated: the episode can't continue for another reason.
        truncated: a step limit of the simulator's own was reached.
        diverged: the simulation has broken down, so that the other fields are meaningless: the episode ends as invalid.
    """

    reward: float
    success: bool
    terminated: bool = False
    truncated: bool = False
    diverged: bool = False


@functools.cache
def _loop() -> asyncio.Runner:
    """Return the event loop on which this process's simulators wait."""
    return asyncio.Runner()


def finished(results: Sequence[Result | Awaitable[Result]]) -> list[Result]:
    """Return results of methods, and those of ``async def`` methods once all of them have ended.

    Raises what the first of them raises, after the others have ended, too.
    """
    waiting = [result for result in results if inspect.isawaitable(result)]
    if not waiting:
        return cast(list[Result], list(results))

    async def together() -> list[Result | BaseException]:
        return await asyncio.gather(*waiting, return_exceptions=True)

    answers = _loop().run(together())
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    given = iter(cast(list[Result], answers))
    return [next(given) if inspect.isawaitable(result) else result for result in results]


class Simulator(ABC):
    """One environment of one task: the interface of a new simulator.

    ``reset`` and ``step`` may be ``async def``: all environments of a process then wait together, on one event loop.

    Attributes:
        action_low, action_high: bounds of an action, A numbers each: -1 and 1, which ``step`` maps to its own.
        state_dim: S, size of ``proprioception``; 0 for none.
        instruction: language instruction for the policy.
        control_hz: actions per second of robot time, recorded in videos and datasets.
        is_seeded: ``reset`` is known to depend only on its seed; otherwise one reset is repeated before a run, and
            compared.
    """

    action_low: tuple[float, ...]
    action_high: tuple[float, ...]
    state_dim: int = 0
    instruction: str = ""
    control_hz: float = EnvSpec.control_hz
    is_seeded: bool = False

    @abstractmethod
    def reset(self, seed: int) -> Awaitable[None] | None:
        """Start a new episode; everything that follows depends only on the seed and the actions."""

    @abstractmethod
    def step(self, action: NDArray[np.float32]) -> SimStep | Awaitable[SimStep]:
        """Execute ``action float32[A]`` for one control step, without rendering."""

    @abstractmethod
    def images(self) -> NDArray[np.uint8]:
        """Render the cameras, ``uint8[V,H,W,3]``."""

    def proprioception(self) -> NDArray[np.float32]:
        """Return the robot's state, ``float32[S]``."""
        return np.zeros(0, np.float32)

    def first_reward(self) -> float:
        """Return the dense reward of the initial state, the base of ``dense_delta``."""
        return 0.0

    def film(self) -> NDArray[np.uint8]:
        """Return a frame for people, ``uint8[H,W,3]``; by default the first camera's image."""
        return self.images()[0]

    def perturb(self, axis: str) -> None:
        """Perturb all episodes from now on along an axis of the spec; see ``SteppingEnv.perturb``."""
        raise axis_unknown(self, axis)

    def get_state(self) -> object:
        """Return the state as plain values and arrays; unsupported by default (see ``Replayed``)."""
        raise EnvError(
            f"{type(self).__name__} can't save its state, so a run can neither save checkpoints nor offload it",
            "implement get_state and set_state, or wrap it in embodrl.envs.simulator.Replayed",
            code="env-state-unsupported",
        )

    def set_state(self, state: SavedState) -> None:
        """Continue bit-exactly from a state of ``get_state``, possibly of another process."""
        raise EnvError(
            f"{type(self).__name__} can't restore a state", "give it set_state", code="env-state-unsupported"
        )

    def expert_reset(self) -> None:
        """Start a scripted expert in an episode that has just begun."""
        raise EnvError(
            f"{type(self).__name__} has no scripted expert",
            "collect demonstrations of another task",
            code="expert-missing",
        )

    def expert_action(self) -> NDArray[np.float32]:
        """Return the expert's action, ``float32[A]``."""
        raise EnvError(
            f"{type(self).__name__} has no scripted expert",
            "collect demonstrations of another task",
            code="expert-missing",
        )

    def signature(self) -> bytes:
        """Return a value that differs where states differ; ``Replayed`` compares it."""
        return self.proprioception().tobytes()

    def close(self) -> None:  # noqa: B027
        """Free resources."""


class _Replay(TypedDict):
    """Replay record of ``Replayed``: ``actions float32[n,A]`` from the seed; None before the first reset."""

    seed: int | None
    actions: NDArray[np.float32]
    checksum: int


class Replayed(Simulator):
    """Adds a state to a simulator whose episodes depend only on seed and actions: the seed and the actions.

    Repeating the same calls restores everything hidden in a simulator, its wrappers, counters and generators
    bit-exactly. The replay is deferred until the episode continues, since a reset mostly comes first, and is checked
    step by step.

    Args:
        simulator: resets to the same episode from the same seed, whatever happened before.
    """

    def __init__(self, simulator: Simulator) -> None:
        self.simulator = simulator
        self.action_low = simulator.action_low
        self.action_high = simulator.action_high
        self.state_dim = simulator.state_dim
        self.instruction = simulator.instruction
        self.control_hz = simulator.control_hz
        self.is_seeded = simulator.is_seeded
        self._seed: int | None = None
        self._actions: list[NDArray[np.float32]] = []
        self._checksum = 0
        self._behind = False

    def reset(self, seed: int) -> Awaitable[None] | None:
        result = self.simulator.reset(seed)
        if inspect.isawaitable(result):
            return self._reset_then(result, seed)
        return self._was_reset(seed)

    async def _reset_then(self, result: Awaitable[None], seed: int) -> None:
        await result
        self._was_reset(seed)

    def _was_reset(self, seed: int) -> None:
        self._seed = seed
        self._actions = []
        self._behind = False
        self._checksum = zlib.crc32(self.simulator.signature())

    def step(self, action: NDArray[np.float32]) -> SimStep | Awaitable[SimStep]:
        self._catch_up()
        result = self.simulator.step(action)
        if inspect.isawaitable(result):
            return self._step_then(result, action)
        return self._stepped(result, action)

    async def _step_then(self, result: Awaitable[SimStep], action: NDArray[np.float32]) -> SimStep:
        return self._stepped(await result, action)

    def _stepped(self, result: SimStep, action: NDArray[np.float32]) -> SimStep:
        self._actions.append(action.copy())
        self._checksum = zlib.crc32(np.float64(result.reward).tobytes() + self.simulator.signature(), self._checksum)
        return result

    def _catch_up(self) -> None:
        """Replay the actions before the saved state; EnvError if the replay diverges."""
        if not self._behind:
            return
        actions = self._actions
        expected = self._checksum
        seed = self._seed
        assert seed is not None
        finished([self.reset(seed)])
        for action in actions:
            finished([self.step(action)])
        if self._checksum != expected:
            raise EnvError(
                f"'{self.instruction}': {len(actions)} actions from seed {seed} led to a different state: the"
                " environment is not a function of its seed and actions and can't be restored",
                "seed all of its random generators in reset, or implement get_state and set_state in its Simulator",
                code="env-not-deterministic",
            )

    def images(self) -> NDArray[np.uint8]:
        self._catch_up()
        return self.simulator.images()

    def proprioception(self) -> NDArray[np.float32]:
        self._catch_up()
        return self.simulator.proprioception()

    def first_reward(self) -> float:
        return self.simulator.first_reward()

    def film(self) -> NDArray[np.uint8]:
        self._catch_up()
        return self.simulator.film()

    def perturb(self, axis: str) -> None:
        self.simulator.perturb(axis)

    def expert_reset(self) -> None:
        self._catch_up()
        self.simulator.expert_reset()

    def expert_action(self) -> NDArray[np.float32]:
        self._catch_up()
        return self.simulator.expert_action()

    def get_state(self) -> _Replay:
        actions = np.stack(self._actions) if self._actions else np.zeros((0, len(self.action_low)), np.float32)
        return {"seed": self._seed, "actions": actions, "checksum": self._checksum}

    def set_state(self, state: _Replay) -> None:
        self._seed = state["seed"]
        self._actions = list(state["actions"])
        self._checksum = state["checksum"]
        self._behind = state["seed"] is not None

    def close(self) -> None:
        self.simulator.close()


class SimulatorVectorEnv(SteppingEnv):
    """B simulators, stepped one after the other, or together where ``step`` is ``async def``.

    Subclasses implement ``make_simulator`` for each of ``tasks``.

    Simulators are lent to the environments that run their task, and another one is built when none is free. Initially
    there is one for the first task, which determines the spec; with a single task there are B of it.

    Args:
        cameras: ``[{name, height, width, fov_rad, eye, target}]``, all of one size.
        rules: end and reward of episodes.
        include_state: add the proprioception to the observation.
        video_fps: frames per second of videos; None for the control rate.
        include_images: False skips rendering for the policy; its images are black.
    """

    def __init__(
        self,
        num_envs: int,
        tasks: list[str] | tuple[str, ...],
        cameras: Sequence[CameraSettings],
        rules: EpisodeRules,
        include_state: bool = False,
        max_chunk: int = 8,
        video_fps: float | None = None,
        include_images: bool = True,
    ) -> None:
        self._tasks = tuple(tasks)
        self._include_images = include_images
        self._idle: list[list[Simulator]] = [[] for _ in tasks]
        self._sims: list[Simulator | None] = [None] * num_envs
        self._sim_tasks = np.zeros(num_envs, np.int32)
        self._with_expert = np.zeros(num_envs, np.bool_)
        self._instructions: dict[int, str] = {}
        self._perturbed: str | None = None
        first = self._sim(0)
        if len(self._tasks) == 1:  # building may take long, and a start has more time than a reset
            for row in range(1, num_envs):
                self._sim(row)
        spec = make_spec(
            num_envs,
            tasks,
            cameras,
            (first.action_low, first.action_high),
            first.state_dim if include_state else 0,
            max_chunk,
            first.control_hz,
        )
        super().__init__(spec, rules, video_fps)

    @abstractmethod
    def make_simulator(self, task: str) -> Simulator:
        """Return a new simulator of a task."""

    def _sim(self, row: int) -> Simulator:
        """Return the simulator of a row; if it has none yet, an idle one of its task, or a new one."""
        sim = self._sims[row]
        if sim is None:
            task = int(self._sim_tasks[row])
            sim = self._idle[task].pop() if self._idle[task] else self._new_simulator(task)
            self._sims[row] = sim
            self._instructions[task] = sim.instruction
        return sim

    def _new_simulator(self, task: int) -> Simulator:
        sim = self.make_simulator(self._tasks[task])
        if self._perturbed is not None:
            sim.perturb(self._perturbed)
        return sim

    def perturb(self, axis: str) -> None:
        self._perturbed = axis
        for sim in [*self._sims, *(sim for idle in self._idle for sim in idle)]:
            if sim is not None:
                sim.perturb(axis)

    def assign(self, rows: NDArray[np.int64], task_ids: NDArray[np.int32]) -> None:
        self._with_expert[rows] = False  # the expert belonged to another episode, possibly of another task
        pairs = zip(rows.tolist(), task_ids.tolist(), strict=True)
        changed = [(row, task) for row, task in pairs if self._sim_tasks[row] != task]
        for row, task in changed:
            sim = self._sims[row]
            if sim is not None:
                self._idle[self._sim_tasks[row]].append(sim)
            self._sims[row] = None
            self._sim_tasks[row] = task
        for row, _ in changed:
            self._sim(row)

    def begin(self, rows: NDArray[np.int64], seeds: NDArray[np.int64]) -> None:
        finished([self._sim(row).reset(seed) for row, seed in zip(rows.tolist(), seeds.tolist(), strict=True)])

    def step_rows(self, actions: NDArray[np.float32], running: NDArray[np.bool_]) -> StepResult:
        num_envs = self.spec.num_envs
        reward = np.zeros(num_envs, np.float32)
        success, terminated, truncated, diverged = (np.zeros(num_envs, np.bool_) for _ in range(4))
        stepping = np.flatnonzero(running).tolist()
        steps: list[object] = finished([self._sim(row).step(actions[row]) for row in stepping])
        for row, step in zip(stepping, steps, strict=True):
            if not isinstance(step, SimStep):
                raise EnvError(
                    f"step() of {type(self._sim(row)).__name__} returned {type(step).__name__}, not a SimStep",
                    "return SimStep(reward=..., success=...)",
                    code="simulator-step",
                )
            reward[row] = step.reward
            success[row] = step.success
            terminated[row] = step.terminated
            truncated[row] = step.truncated
            diverged[row] = step.diverged
        return StepResult(reward, success, terminated, truncated, diverged)

    def _checked_images(self, row: int) -> NDArray[np.uint8]:
        found = self._sim(row).images()
        cameras = self.spec.cameras
        shape = (len(cameras), cameras[0].height, cameras[0].width, 3)
        if found.dtype != np.uint8 or found.shape != shape:
            raise EnvError(
                f"images() of {type(self._sim(row)).__name__} returned {found.dtype}{list(found.shape)}, not"
                f" uint8{list(shape)} ([V,H,W,3])",
                "scale to 0..255 and convert: (images * 255).astype(np.uint8)"
                if found.dtype != np.uint8
                else "return one image of env.cameras' height and width for each camera",
                code="simulator-images",
            )
        return found

    def check_episodes(self) -> list[str]:
        sim = self._sim(0)
        found = [] if sim.instruction else ["instruction-empty"]
        if not sim.is_seeded:
            seen: list[tuple[NDArray[np.int16], NDArray[np.float32]]] = []
            for _ in range(2):
                finished([sim.reset(_CHECKED_SEED)])
                image = self._checked_images(0) if self._include_images else np.zeros(1)
                seen.append((image.astype(np.int16), np.array(sim.proprioception())))
            (image, state), (other_image, other_state) = seen
            if np.abs(image - other_image).max() > _IMAGE_NOISE or not np.allclose(state, other_state, atol=1e-4):
                found.append("seed-ignored")
        return found

    def draw(self, rows: NDArray[np.int64], images: NDArray[np.uint8], state: NDArray[np.float32]) -> None:
        for row in rows.tolist():
            if self._include_images:
                images[row] = self._checked_images(row)
            if self.spec.state_dim:
                state[row] = self._sim(row).proprioception()

    def instruction(self, task_id: int) -> str:
        return self._instructions[task_id]

    def first_reward(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        return np.array([self._sim(row).first_reward() for row in rows.tolist()], np.float32)

    def film(self, row: int) -> NDArray[np.uint8]:
        return self._sim(row).film()

    def get_sim_state(self) -> list[object]:
        return [self.get_sim_row(row) for row in range(self.spec.num_envs)]

    def check_state(self) -> str:
        sim = self._sim(0)
        return f"{type(sim).__name__} has no get_state" if type(sim).get_state is Simulator.get_state else ""

    def set_sim_state(self, state: list[SavedState]) -> None:
        for row, content in zip(range(self.spec.num_envs), state, strict=True):
            self.set_sim_row(row, content)

    def get_sim_row(self, row: int) -> object:
        """None for a row that has never run."""
        sim = self._sims[row]
        return None if sim is None else sim.get_state()

    def set_sim_row(self, row: int, state: SavedState) -> None:
        if state is not None:
            self._sim(row).set_state(state)

    def expert_reset(self, rows: list[int]) -> None:
        for row in rows:
            self._sim(row).expert_reset()
        self._with_expert[rows] = True

    def expert_actions(self) -> NDArray[np.float32]:
        """Return 0 in rows whose expert has not started."""
        actions = np.zeros((self.spec.num_envs, self.spec.action_dim), np.float32)
        for row in np.flatnonzero(self._with_expert).tolist():
            actions[row] = self._sim(row).expert_action()
        return actions

    def close(self) -> None:
        super().close()
        for sim in [*self._sims, *(sim for idle in self._idle for sim in idle)]:
            if sim is not None:
                sim.close()
