"""Detection and counting of faults, and the step that ends an episode lost to one.

Shapes: B environments, C actions in a chunk.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from embodrl.errors import EnvQuarantined
from embodrl.types import EnvStep, Observation

if TYPE_CHECKING:
    from embodrl.envs.pool.episodes import EnvEpisodes
    from embodrl.envs.pool.manager import EnvManager

logger = logging.getLogger("embodrl.envs")

_COUNTING = threading.Lock()
_NO_ROWS = np.zeros(0, np.int64)


@dataclass
class FaultCounts:
    """Fault counts of a run.

    Attributes:
        lost_episodes: episodes ended as invalid, for whatever reason.
        quarantined: lost episodes with a non-finite or out-of-bounds reward or state.
        rollout_restarts: restarted rollout processes, each with its simulators.
    """

    restarts: int = 0
    lost_episodes: int = 0
    quarantined: int = 0
    rollout_restarts: int = 0

    def count(self, name: str, number: int = 1) -> None:
        """Add to the count ``name``. Thread-safe, since pools of several threads share these counts."""
        with _COUNTING:
            setattr(self, name, getattr(self, name) + number)


@dataclass(frozen=True)
class Bounds:
    """Largest absolute reward and state entry; larger numbers count as a simulator fault, like non-finite ones."""

    reward: float = 1e6
    state: float = 1e6

    def broken_states(self, observation: Observation) -> NDArray[np.bool_]:
        """Return ``bool[B]``: where the state is invalid."""
        return _beyond(observation.state, self.state)

    def hold(self, step: EnvStep) -> bool:
        """Whether nothing in a step can be broken: a fast check that avoids ``broken_rows``.

        Unused rows of the final observation are included, so that False means only a suspicion.
        """
        states = [step.observation.state]
        if step.final_observation is not None:
            states.append(step.final_observation.state)
        return _within(step.reward, self.reward) and all(_within(state, self.state) for state in states)

    def broken_rows(self, step: EnvStep) -> NDArray[np.bool_]:
        """Return ``bool[B]``: where a reward or a state, including the final one, is invalid."""
        bad = _beyond(step.reward, self.reward) | self.broken_states(step.observation)
        if step.final_observation is not None:
            bad |= step.final_mask & self.broken_states(step.final_observation)
        return bad

    def reason(self, step: EnvStep, row: int) -> str:
        """Describe why a row of ``broken_rows`` is broken."""
        seen = [step.observation.state[row]]
        if step.final_observation is not None and step.final_mask[row]:
            seen.append(step.final_observation.state[row])
        reward = ("reward", step.reward[row], self.reward)
        state = ("state", np.concatenate(seen), self.state)
        for name, values, bound in (reward, state):
            # The negated comparison also catches NaN, for which both `<=` and `>` are False.
            broken = values[~(np.abs(values) <= bound)]
            if len(broken):
                how = f"beyond env.max_abs_{name}={bound:g}" if np.isfinite(broken[0]) else "not finite"
                return f"{broken[0]:g} in its {name} is {how}"
        return "nothing"


def count_invalid(episodes: EnvEpisodes, step: EnvStep, bounds: Bounds, limit: int, place: str) -> NDArray[np.int64]:
    """Return the rows whose reward or state is invalid, and count consecutive episodes lost this way.

    Args:
        episodes: episodes of the step's manager; they keep the counts, since pools come and go.
        step: outcome of a chunk, still unchanged.
        bounds: bounds of valid numbers.
        limit: consecutive episodes per environment that may end this way.
        place: index of the manager in its pool, for messages.

    Raises:
        EnvQuarantined: the limit is exceeded.
    """
    # A manager with earlier invalid episodes is checked in full: an episode that ends normally must reset its count.
    if bounds.hold(step) and not episodes.refused.any():
        return _NO_ROWS
    bad = bounds.broken_rows(step)
    # Only consecutive invalid episodes point to a broken environment, so one that ends normally resets the count.
    episodes.refused[step.valid.any(axis=1) & step.done & ~bad] = 0
    episodes.refused[bad] += 1
    rows = np.flatnonzero(bad)
    for row in rows.tolist():
        task = episodes.spec.tasks[int(episodes.task_ids[row])]
        seed = step.episode_seed[row]
        what = f"environment {episodes.first_env + row} (task {task}, seed {seed}): {bounds.reason(step, row)}"
        logger.warning("%s: %s", episodes, what)
        if episodes.refused[row] > limit:
            raise EnvQuarantined(
                f"quarantined: {limit} consecutive invalid episodes (env.max_restarts), {place}, {what}; {episodes}",
                "look at the log of its process; if such values are expected, raise env.max_abs_reward or"
                " env.max_abs_state",
            )
    return rows


def forget_refused(managers: Sequence[EnvManager]) -> None:
    """Reset the counts of consecutive invalid episodes, since the next episodes are chosen for having been invalid."""
    for manager in managers:
        manager.episodes.refused[:] = 0


def clear_frames(error: BaseException) -> None:
    """Clear the frames of a handled error, which hold the memory of an ended process."""
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = None
        link = link.__context__


def _within(values: NDArray[np.float32], bound: float) -> bool:
    """Whether all numbers are finite and within the bound: a comparison with NaN is False."""
    return not values.size or (float(values.max()) <= bound and float(values.min()) >= -bound)


def _beyond(values: NDArray[np.float32], bound: float) -> NDArray[np.bool_]:
    """Return ``bool[B]`` for ``float32[B,N]``: some number is NaN or beyond the bound."""
    return np.asarray(~(np.abs(values) <= bound).all(axis=1))


def lost_step(
    observation: Observation, seeds: NDArray[np.int64], chunk: int, rows: NDArray[np.int64], last: Observation | None
) -> EnvStep:
    """Return the outcome of a chunk that was not simulated because the shard's process was restarted.

    Args:
        observation: observation of the newly begun episodes.
        seeds: ``int64[B]``, their seeds.
        chunk: C.
        rows: environments whose episodes were in progress.
        last: observation before the chunk; None if there was none.
    """
    batch = len(seeds)
    step = EnvStep(
        observation=observation,
        reward=np.zeros((batch, chunk), np.float32),
        valid=np.zeros((batch, chunk), np.bool_),
        terminated=np.zeros((batch, chunk), np.bool_),
        truncated=np.zeros((batch, chunk), np.bool_),
        success=np.zeros(batch, np.bool_),
        episode_return=np.zeros(batch, np.float32),
        episode_length=np.zeros(batch, np.int32),
        # ``seeds`` is the live array of EnvEpisodes, which the next reset overwrites.
        episode_seed=seeds.copy(),
        final_mask=np.zeros(batch, np.bool_),
        final_observation=None,
    )
    terminate_invalid(step, rows, last)
    return step


def terminate_invalid(step: EnvStep, rows: NDArray[np.int64], last: Observation | None) -> None:
    """End the episodes of ``rows`` with an invalid chunk, ``truncated`` at its first action.

    Args:
        step: outcome in private memory, modified in place.
        rows: ``int64[N]``.
        last: last good observation, which becomes the final one.
    """
    for array in (step.reward, step.valid, step.terminated, step.truncated, step.success):
        array[rows] = 0
    step.episode_return[rows] = 0.0
    step.episode_length[rows] = 0
    # Truncated, not terminated: the policy's previous step bootstraps from the final observation instead of 0.
    step.truncated[rows, 0] = True
    step.final_mask[rows] = last is not None
    if last is None:
        return
    if step.final_observation is None:
        step.final_observation = last
        return
    final = step.final_observation
    final.images[rows] = last.images[rows]
    final.state[rows] = last.state[rows]
    final.task_id[rows] = last.task_id[rows]
    for row in rows.tolist():
        final.instruction[row] = last.instruction[row]
