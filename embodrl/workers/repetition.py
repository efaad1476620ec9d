"""Recorded episodes repeated open-loop in their simulator.

Shapes: B episodes, N frames, V cameras, H x W image, S state dimensions, A action dimensions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from embodrl.config.schema import Config
from embodrl.data.demos import Demos
from embodrl.envs.pool.pool import EnvPool
from embodrl.errors import EmbodrlError
from embodrl.types import Observation, PolicyOutput
from embodrl.workers.env import check_simulator, make_single_pool
from embodrl.workers.play import Play, take_turns

STATE_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Repeated:
    """Episodes that were repeated.

    Attributes:
        images: ``uint8[B,V,H,W,3]``, the first ones.
        success: ``bool[B]``, solved again.
        state_difference: ``float64[B]``, largest difference of a state number from the recorded one, before any action;
            NaN if states were not recorded, or have other dimensions.
    """

    images: NDArray[np.uint8]
    success: NDArray[np.bool_]
    state_difference: NDArray[np.float64]


@dataclass(frozen=True)
class ReplayedEpisode:
    """A recorded episode, and what came of its actions.

    Attributes:
        number: index in the dataset.
        task: its name.
        seed: reset seed.
        success: the task was solved again.
        recorded_success: it was solved when recorded; None if unknown.
        state_difference: largest difference of a state number from the recorded one; None if not comparable.
    """

    number: int
    task: str
    seed: int
    success: bool
    recorded_success: bool | None
    state_difference: float | None

    @property
    def agrees(self) -> bool:
        """Whether success and states (up to 1e-4) are the recorded ones, as far as these are known."""
        same = self.recorded_success in (None, self.success)
        return same and (self.state_difference is None or self.state_difference <= STATE_TOLERANCE)


def repeatable(demos: Demos, config: Config) -> list[int]:
    """Return the episodes whose seed is known and whose task is one of ``env.tasks``."""
    tasks = list(config.env.tasks)
    return [n for n, seed in enumerate(demos.seeds) if seed is not None and demos.tasks[n] in tasks]


def repeat(demos: Demos, episodes: Sequence[int], actions: NDArray[np.float32], pool: EnvPool) -> Repeated:
    """Repeat ``actions float32[N,A]`` of B episodes, one in each environment of a pool of single actions."""
    spans = [np.flatnonzero(demos.episode == n) for n in episodes]
    success = np.zeros(len(spans), np.bool_)
    difference = np.full(len(spans), np.nan)

    def schedule(play: Play) -> NDArray[np.bool_] | None:
        if play.last is not None:
            success[play.last.active & play.last.step.success] = True
        active = np.array([play.number < len(span) for span in spans])
        return active if active.any() else None

    def choose(observation: Observation, active: NDArray[np.bool_], number: int) -> PolicyOutput:
        frames = [span[min(number, len(span) - 1)] for span in spans]
        recorded = demos.state[frames]
        if recorded.shape[1] and recorded.shape == observation.state.shape:
            found = np.abs(recorded.astype(np.float64) - observation.state).max(axis=1)
            difference[active] = np.fmax(difference[active], found[active])
        return PolicyOutput(actions[frames][:, None], torch.zeros(0), None, {})

    play = Play(pool, choose, [], schedule)
    seeds = np.array([demos.seeds[n] or 0 for n in episodes], np.int64)
    play.begin(seeds, np.array([pool.spec.tasks.index(demos.tasks[n]) for n in episodes], np.int32))
    assert play.observation is not None
    seen = play.observation.images.copy()
    take_turns([play])
    return Repeated(seen, success, difference)


def repeat_groups(
    demos: Demos, config: Config, rows: Sequence[int], actions: NDArray[np.float32]
) -> Iterator[tuple[list[int], Repeated]]:
    """Yield groups of episodes, repeated in simulators of their own, ``env.num_processes`` at once.

    Raises:
        EmbodrlError: the simulator cannot run, or could not be started.
    """
    check_simulator(config)
    width = config.env.num_processes
    with make_single_pool(config, width) as pool:
        for first in range(0, len(rows), width):
            group = list(rows[first : first + width])
            found = repeat(demos, [*group, *([group[-1]] * (width - len(group)))], actions, pool)
            kept = slice(len(group))
            yield group, Repeated(found.images[kept], found.success[kept], found.state_difference[kept])


def replay(demos: Demos, config: Config, episodes: Sequence[int] | None) -> list[ReplayedEpisode]:
    """Repeat the executed actions of episodes, all that can be by default, in the simulator of a configuration.

    Raises:
        EmbodrlError: an episode has no seed, no task of ``env.tasks``, or other actions (``replay-impossible``), or the
            simulator cannot run.
    """
    known = repeatable(demos, config)
    rows = known if episodes is None else list(episodes)
    wrong = sorted(set(rows) - set(known))
    if wrong or not rows or demos.actions.shape[1] != config.model.action_dim:
        why = f"{demos.actions.shape[1]} action dimensions, not {config.model.action_dim}"
        why = f"no seed and task of env.tasks for {wrong[:5] or 'any episode'}" if wrong or not rows else why
        raise EmbodrlError(
            f"the episodes can't be replayed in {config.env.env_type}: {why}",
            "replay episodes recorded with the env, env.tasks and cameras of this configuration",
            code="replay-impossible",
        )
    actions = np.clip(demos.actions, -1, 1) if demos.outcomes is None else demos.outcomes.executed
    found: list[ReplayedEpisode] = []
    for group, result in repeat_groups(demos, config, rows, actions):
        for row, n in enumerate(group):
            difference = float(result.state_difference[row])
            found.append(
                ReplayedEpisode(
                    number=n,
                    task=demos.tasks[n],
                    seed=demos.seeds[n] or 0,
                    success=bool(result.success[row]),
                    recorded_success=demos.success[n],
                    state_difference=None if np.isnan(difference) else difference,
                )
            )
    return found
