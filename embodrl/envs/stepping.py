"""Stepping shared by all simulators: chunks, ends of episodes, auto-reset, rewards, success, rendering on request.

Two classes to build on: ``Simulator`` is one environment with reset, step and images, of which ``SimulatorVectorEnv``
runs B; most adapters use it. ``SteppingEnv`` is for simulators that step B environments together.

Shapes: B environments, C actions in a chunk, A action dimensions, V cameras, H x W image, S state dimensions.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypedDict

import numpy as np
from numpy.typing import NDArray

from embodrl.envs.axes import COMMON, noisy, recoloured, reworded
from embodrl.envs.base import SavedState, VectorEnv, axis_unknown
from embodrl.envs.pool.video import VideoWriter
from embodrl.errors import EnvError
from embodrl.fields import Fields
from embodrl.processes.codec import decode, encode
from embodrl.types import CameraSpec, EnvSpec, EnvStep, Observation

if TYPE_CHECKING:
    from embodrl.envs.real_time.real_time import RealTime

REPLAY = "replay"
"""Key of a row's state that is given by ``float32[n,A]``: what these actions lead to in the episode just begun."""
_EPISODE_STATE = ("task_id", "_elapsed", "_returned", "_solved", "episode_seed", "_potential", "_images", "_state")


def next_seed(seed: int) -> int:
    """Return the seed of the episode after the one of ``seed``; environments of a group thus stay alike."""
    return int(np.random.SeedSequence([seed, 0x5EED]).generate_state(1)[0] >> 1)


class CameraSettings(TypedDict):
    """A camera of ``env.cameras``: size in pixels, field of view, and pose (None: the simulator's own)."""

    name: str
    height: int
    width: int
    fov_rad: float | None
    eye: Sequence[float] | None
    target: Sequence[float] | None


class RewardOptions(TypedDict, total=False):
    """The fields of ``EpisodeRules`` except the number of steps, as keyword arguments."""

    reward_mode: str
    shaping_gamma: float
    discounts_actions: bool
    success_bonus: float
    auto_reset: bool
    ignore_terminations: bool


class RuleOptions(RewardOptions, total=False):
    """The fields of ``EpisodeRules``, as keyword arguments."""

    max_episode_steps: int


@dataclass(frozen=True)
class EpisodeRules:
    """End and reward of episodes; the keyword arguments of every environment.

    Attributes:
        max_episode_steps: environment steps after which an episode is truncated.
        reward_mode: ``dense`` is the simulator's own reward, ``dense_delta`` its change from step to step, ``sparse``
            only the bonus. ``potential`` is the change with the later value discounted, ``gamma phi' - phi``, with
            ``phi'`` 0 where the episode terminates: it preserves the optimal policy of the bonus alone (Ng, Harada &
            Russell 1999, theorem 1; Grzes 2017 for the end). ``dense_delta`` does so only at a discount of 1.
        success_bonus: added at the first success of an episode, in every mode.
        auto_reset: begin the next episode at the end of the chunk in which one has ended.
        ignore_terminations: neither success nor failure ends an episode, only a step limit.
        shaping_gamma: discount of ``potential`` per reward step: the chunk, or the action if ``discounts_actions``.
        discounts_actions: see ``shaping_gamma``.
    """

    max_episode_steps: int = 50
    reward_mode: str = "dense_delta"
    success_bonus: float = 1.0
    auto_reset: bool = True
    ignore_terminations: bool = False
    shaping_gamma: float = 1.0
    discounts_actions: bool = False

    @property
    def uses_change(self) -> bool:
        return self.reward_mode in ("dense_delta", "potential")


@dataclass(frozen=True)
class StepResult:
    """Outcome of one action in B environments; rows that were not stepped are undefined.

    Attributes:
        reward: ``float32[B]``, the simulator's own.
        success: ``bool[B]``, the task is solved now.
        terminated: ``bool[B]``, the episode can't continue for another reason, or None for never.
        truncated: ``bool[B]``, a step limit of the simulator's own was reached, or None for never.
        diverged: ``bool[B]``, the simulation has broken down, or None for never. The reward is then NaN in every mode,
            which tells ``EnvPool`` that the chunk is invalid.
    """

    reward: NDArray[np.float32]
    success: NDArray[np.bool_]
    terminated: NDArray[np.bool_] | None = None
    truncated: NDArray[np.bool_] | None = None
    diverged: NDArray[np.bool_] | None = None


class SteppingEnv(VectorEnv):
    """B environments in one process; subclasses add the simulator by the methods from ``assign`` on.

    Videos get one frame per step, at ``video_fps`` frames per second; None is ``spec.control_hz``.
    """

    def __init__(self, spec: EnvSpec, rules: EpisodeRules, video_fps: float | None = None) -> None:
        self.spec = spec
        self.rules = rules
        batch = spec.num_envs
        camera = spec.cameras[0]
        self._images = np.zeros((batch, len(spec.cameras), camera.height, camera.width, 3), np.uint8)
        self._state = np.zeros((batch, spec.state_dim), np.float32)
        self.task_id = np.zeros(batch, np.int32)
        self._elapsed = np.zeros(batch, np.int32)
        self._returned = np.zeros(batch, np.float32)
        self._solved = np.zeros(batch, np.bool_)
        self._solved_now = np.zeros(batch, np.bool_)
        self.episode_seed = np.full(batch, -1, np.int64)
        self._potential = np.zeros(batch, np.float32)
        self._video = VideoWriter(spec.control_hz if video_fps is None else video_fps)
        self.axis: str | None = None
        self.real_time: RealTime | None = None

    # -- the simulator's own ------------------------------------------------------------------------------------------

    @abstractmethod
    def assign(self, rows: NDArray[np.int64], task_ids: NDArray[np.int32]) -> None:
        """Set the tasks of the next episodes, as indices into ``spec.tasks``; ``begin`` follows."""

    @abstractmethod
    def begin(self, rows: NDArray[np.int64], seeds: NDArray[np.int64]) -> None:
        """Start new episodes in ``rows``, determined by their seeds, whatever happened before."""

    @abstractmethod
    def step_rows(self, actions: NDArray[np.float32], running: NDArray[np.bool_]) -> StepResult:
        """Execute ``actions float32[B,A]`` for one step where ``running bool[B]``."""

    @abstractmethod
    def draw(self, rows: NDArray[np.int64], images: NDArray[np.uint8], state: NDArray[np.float32]) -> None:
        """Render into ``images uint8[B,V,H,W,3]`` and write ``state float32[B,S]``, in ``rows`` only."""

    @abstractmethod
    def instruction(self, task_id: int) -> str:
        """Return the instructions for the policy."""

    @abstractmethod
    def get_sim_state(self) -> object:
        """Return the state of the simulators as plain values and arrays."""

    @abstractmethod
    def set_sim_state(self, state: SavedState) -> None:
        """Continue bit-exactly from a state of ``get_sim_state``; the tasks of all rows are already set."""

    @abstractmethod
    def get_sim_row(self, row: int) -> object:
        """Return the state of one row's simulator as plain values and arrays."""

    @abstractmethod
    def set_sim_row(self, row: int, state: SavedState) -> None:
        """Continue ``row``, whose task is set, bit-exactly from a state of ``get_sim_row``, possibly of another row."""

    def perturb(self, axis: str) -> None:
        """Perturb all episodes from now on; ``axis`` is one of the spec's that is not in ``axes.COMMON``."""
        raise axis_unknown(self, axis)

    def first_reward(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the dense reward of the initial states, ``float32[len(rows)]``, for ``dense_delta``."""
        return np.zeros(len(rows), np.float32)

    def film(self, row: int) -> NDArray[np.uint8]:
        """Return a frame for people, ``uint8[H,W,3]``; by default the first camera's image."""
        images = np.empty_like(self._images)
        state = np.empty_like(self._state)
        self.draw(np.array([row]), images, state)
        return images[row, 0]

    # -- stepping -----------------------------------------------------------------------------------------------------

    def reset(self, seeds: NDArray[np.int64], task_ids: NDArray[np.int32], indices: NDArray[np.int64]) -> Observation:
        self.task_id[indices] = task_ids
        self.assign(indices, task_ids)
        self._begin(indices, seeds)
        self._draw(indices)
        return self._observation()

    def chunk_step(self, actions: NDArray[np.float32], active: NDArray[np.bool_]) -> EnvStep:
        num_envs, chunk, _ = actions.shape
        reward = np.zeros((num_envs, chunk), np.float32)
        valid, terminated, truncated = (np.zeros((num_envs, chunk), np.bool_) for _ in range(3))
        running = active.copy()
        for column in range(chunk):
            if not running.any():
                break
            valid[:, column] = running
            reward[:, column], terminated[:, column], truncated[:, column] = self._substep(
                actions[:, column], running, column == chunk - 1
            )
            running &= ~(terminated[:, column] | truncated[:, column])
        return self._finish(active, reward, valid, terminated, truncated)

    def _substep(
        self, actions: NDArray[np.float32], running: NDArray[np.bool_], last: bool
    ) -> tuple[NDArray[np.float32], NDArray[np.bool_], NDArray[np.bool_]]:
        """Execute an action, the last of its chunk or not, in running rows.

        Returns reward ``float32[B]``, terminated and truncated ``bool[B]``.
        """
        result = self.step_rows(actions, running) if self.real_time is None else self._timed(actions, self.real_time)
        first_success = running & result.success & ~self._solved
        self._solved_now = np.where(running, result.success, self._solved_now)
        self._solved |= first_success
        self._elapsed += running
        terminated = first_success if result.terminated is None else first_success | running & result.terminated
        terminated = terminated & (not self.rules.ignore_terminations)
        at_limit = self._elapsed >= self.rules.max_episode_steps
        truncated = at_limit if result.truncated is None else at_limit | result.truncated
        truncated = running & ~terminated & truncated
        reward = self.rules.success_bonus * first_success.astype(np.float32)
        if self.rules.uses_change:
            reward += np.where(running, result.reward - self._potential, 0)
            self._potential = np.where(running, result.reward, self._potential)
            if self.rules.reward_mode == "potential":
                counts = truncated | last | self.rules.discounts_actions
                kept = np.where(terminated, 0.0, np.where(counts, self.rules.shaping_gamma, 1.0))
                reward -= np.where(running, (1 - kept) * self._potential, 0).astype(np.float32)
        elif self.rules.reward_mode == "dense":
            reward += np.where(running, result.reward, 0)
        broken = ~np.isfinite(result.reward)  # also if the reward mode ignores the reward
        reward[running & (broken if result.diverged is None else broken | result.diverged)] = np.nan
        self._returned += reward
        for row in self._video.rows(running):
            self._video.add(row, self.film(row), bool(self._solved[row]))
        return reward, terminated, truncated

    def _timed(self, actions: NDArray[np.float32], real_time: RealTime) -> StepResult:
        """Execute the action of the only row at its due time and return when it has ended, or stop."""
        action = real_time.admit(actions[0])
        if action is None:
            return StepResult(self._potential.copy(), np.zeros(1, np.bool_), np.ones(1, np.bool_))
        result = self.step_rows(action[None], np.ones(1, np.bool_))
        real_time.pacer.wait()
        if real_time.sees_every_step:
            self._draw(np.zeros(1, np.int64))
        succeeded, failed = real_time.judged()
        failure = failed if result.terminated is None else failed | result.terminated
        return replace(
            result, success=result.success | succeeded, terminated=np.asarray(failure | np.zeros(1, np.bool_))
        )

    def _finish(
        self,
        active: NDArray[np.bool_],
        reward: NDArray[np.float32],
        valid: NDArray[np.bool_],
        terminated: NDArray[np.bool_],
        truncated: NDArray[np.bool_],
    ) -> EnvStep:
        """Render the policy's next observation, begin new episodes, and assemble the result."""
        final_mask = np.asarray(truncated.any(axis=1))
        done = final_mask | np.asarray(terminated.any(axis=1))
        # Of the episode that ends here, before an auto-reset clears it.
        success = self._solved.copy()
        episode_return = self._returned.copy()
        episode_length = self._elapsed.copy()
        episode_seed = self.episode_seed.copy()
        final_observation = None
        if final_mask.any():
            self._draw(np.flatnonzero(final_mask))
            final_observation = self._observation()
        for row in self._video.rows(done):
            self._video.finish(row, bool(self._solved[row]))
        ended = np.flatnonzero(done)
        if self.rules.auto_reset and len(ended):
            self._begin(ended, np.array([next_seed(int(seed)) for seed in self.episode_seed[ended]], np.int64))
        self._draw(np.flatnonzero(active & (~done | self.rules.auto_reset)))
        return EnvStep(
            observation=self._observation(),
            reward=reward,
            valid=valid,
            terminated=terminated,
            truncated=truncated,
            success=success,
            episode_return=episode_return,
            episode_length=episode_length,
            episode_seed=episode_seed,
            final_mask=final_mask,
            final_observation=final_observation,
        )

    def _begin(self, rows: NDArray[np.int64], seeds: NDArray[np.int64]) -> None:
        if self.real_time is not None:
            self.real_time.hold()
        self.begin(rows, seeds)
        if self.real_time is not None:
            self.real_time.begin(int(seeds[0]))
        self._elapsed[rows] = 0
        self._returned[rows] = 0
        self._solved[rows] = False
        self.episode_seed[rows] = seeds
        if self.rules.uses_change:
            self._potential[rows] = self.first_reward(rows)

    def _draw(self, rows: NDArray[np.int64]) -> None:
        if not len(rows):
            return
        self.draw(rows, self._images, self._state)
        if self.axis == "noise":
            for row in rows.tolist():
                self._images[row] = noisy(self._images[row], int(self.episode_seed[row]), int(self._elapsed[row]))
        if self.real_time is not None:
            self.real_time.observe(self._images[0], self._state[0])

    def _observation(self) -> Observation:
        instructions = [self._instruction(row) for row in range(self.spec.num_envs)]
        return Observation(self._images.copy(), self._state.copy(), instructions, self.task_id.copy())

    def _instruction(self, row: int) -> str:
        text = self.instruction(int(self.task_id[row]))
        seed = int(self.episode_seed[row])
        if seed < 0:  # no episode yet
            return text
        return {"instruction": reworded, "colours": recoloured}.get(self.axis or "", lambda same, _: same)(text, seed)

    # -- state and requests -------------------------------------------------------------------------------------------

    def get_state(self) -> bytes:
        return encode({"sim": self.get_sim_state(), **{name: getattr(self, name) for name in _EPISODE_STATE}})

    def set_state(self, state: bytes) -> None:
        content = decode(state)
        for name in filter(content.__contains__, _EPISODE_STATE):
            saved = content[name]
            present = getattr(self, name)
            if saved.shape != present.shape:
                raise EnvError(
                    f"the state belongs to other environments: {name.strip('_')} {list(saved.shape)}, here"
                    f" {list(present.shape)}",
                    "restore it with the same number of environments, cameras and env.include_state",
                    code="env-state-shape",
                )
            setattr(self, name, saved)
        self.assign(np.arange(self.spec.num_envs), self.task_id)
        self.set_sim_state(content["sim"])

    def get_row_state(self, row: int) -> dict[str, object]:
        return {"sim": self.get_sim_row(row), **{name: getattr(self, name)[row].copy() for name in _EPISODE_STATE}}

    def set_row_state(self, row: int, state: Mapping[str, SavedState]) -> dict[str, object] | None:
        if REPLAY in state:
            steps, ended = _replay(self, row, state[REPLAY])
            return {"steps": steps, "ended": ended}
        for name in _EPISODE_STATE:
            getattr(self, name)[row] = state[name]
        self.assign(np.array([row]), self.task_id[[row]])
        self.set_sim_row(row, state["sim"])

    def set_axis(self, axis: str) -> None:
        self.axis = axis
        if axis not in COMMON:
            self.perturb(axis)

    def set_real_time(self, settings: Mapping[str, object]) -> None:
        from embodrl.envs.real_time.real_time import RealTime  # most environments have no clock

        if self.spec.num_envs != 1:
            raise EnvError(
                f"{self.spec.num_envs} environments in a process can't share one clock",
                "run each in its own process",
                code="one-robot-per-process",
            )
        self.real_time = RealTime(Fields(settings, "env.real_time", EnvError), self)
        self.spec = replace(self.spec, control_hz=self.real_time.control_hz)

    def status(self) -> dict[str, float]:
        return {} if self.real_time is None else self.real_time.status()

    def set_auto_reset(self, value: bool) -> None:
        self.rules = replace(self.rules, auto_reset=value)

    def set_ignore_terminations(self, value: bool) -> None:
        self.rules = replace(self.rules, ignore_terminations=value)

    def solved_now(self) -> NDArray[np.bool_]:
        return self._solved_now.copy()

    def start_video(self, row: int, path: str) -> None:
        self._video.start(row, path)

    def close(self) -> None:
        self._video.close()


def _replay(env: SteppingEnv, row: int, actions: NDArray[np.float32]) -> tuple[int, bool]:
    """Execute ``actions float32[n,A]`` in an episode that has just begun, and render the result only.

    Their steps count towards the step limit, their rewards not. If the episode is solved or ends on the way, it begins
    again. Returns the number of executed actions, and whether that happened.
    """
    num_envs = env.spec.num_envs
    every = np.zeros((num_envs, env.spec.action_dim), np.float32)
    running = np.arange(num_envs) == row
    place = np.array([row])
    steps = 0
    ended = False
    for action in actions:
        every[row] = action
        reward, terminated, truncated = env._substep(every, running, True)
        steps += 1
        ended = bool(env._solved[row] | terminated[row] | truncated[row] | ~np.isfinite(reward[row]))
        if ended:
            env._begin(place, env.episode_seed[place])
            break
    env._returned[row] = 0
    env._draw(place)
    return steps, ended


def make_spec(
    num_envs: int,
    tasks: list[str] | tuple[str, ...],
    cameras: Sequence[CameraSettings],
    bounds: tuple[tuple[float, ...], tuple[float, ...]],
    state_dim: int,
    max_chunk: int,
    control_hz: float = EnvSpec.control_hz,
) -> EnvSpec:
    """Return the EnvSpec for ``cameras [{name, height, width, ...}]`` and ``bounds``, lowest and highest action."""
    return EnvSpec(
        num_envs=num_envs,
        cameras=tuple(CameraSpec(camera["name"], camera["height"], camera["width"]) for camera in cameras),
        state_dim=state_dim,
        action_dim=len(bounds[0]),
        action_low=bounds[0],
        action_high=bounds[1],
        max_chunk=max_chunk,
        tasks=tuple(tasks),
        control_hz=control_hz,
    )
