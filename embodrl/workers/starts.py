"""Where the episodes of rollouts begin: in which tasks, at fresh seeds, again at failed ones, or in demonstrations.

Shapes: b environments of a collector, A action dimensions, S state dimensions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embodrl.config.schema import Config
from embodrl.envs.pool.pool import EnvPool
from embodrl.errors import CheckpointError, EmbodrlError
from embodrl.fields import Fields
from embodrl.workers.curriculum import load_curriculum
from embodrl.workers.lockstep import ReplayedPrefix
from embodrl.workers.outcomes import EndedEpisode
from embodrl.workers.task_curriculum import TaskCurriculum

_CHOICE, _TASKS = 2, 3  # seed random streams other than the schedule's
_LARGEST_ERROR = 0.1
"""Median difference, in rad or m, between demonstrated and repeated states that other physics alone explain."""
STARTS = "starts"
"""Key of this state in the state of a collector."""


@dataclass(frozen=True)
class Starts:
    """Beginnings of a rollout's episodes.

    Attributes:
        seeds, tasks: ``int64[b]`` and ``int32[b]``.
        prefixes: actions ``float32[n,A]`` to execute before the policy acts, by row.
    """

    seeds: NDArray[np.int64]
    tasks: NDArray[np.int32]
    prefixes: Mapping[int, NDArray[np.float32]]

    def within(self, rows: slice) -> dict[int, NDArray[np.float32]]:
        """Return the prefixes of some rows, numbered from the first of them."""
        return {row - rows.start: prefix for row, prefix in self.prefixes.items() if rows.start <= row < rows.stop}


class FailedSeeds:
    """Remembers the outcomes of the last ``size`` seeds and tasks; the newest outcome of a seed replaces older ones."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.solved: dict[tuple[int, int], bool] = {}

    def learn(self, ended: Sequence[EndedEpisode]) -> None:
        """Add the episodes of a rollout that began at a reset; a seed is solved if all of its episodes were."""
        found: dict[tuple[int, int], bool] = {}
        for episode in ended:
            key = (episode.seed, episode.task)
            found[key] = found.get(key, True) and episode.success
        for key, success in found.items():
            self.solved.pop(key, None)  # the newest are last
            self.solved[key] = success
        for key in list(self.solved)[: -self.size]:
            del self.solved[key]

    def failed(self) -> list[tuple[int, int]]:
        """Return seeds and tasks whose newest outcome is a failure."""
        return [key for key, success in self.solved.items() if not success]

    def draw(self, rng: np.random.Generator, count: int) -> list[tuple[int, int]]:
        """Return at most ``count`` failed seeds with their tasks, each once."""
        known = self.failed()
        return [known[chosen] for chosen in rng.permutation(len(known))[:count]]

    def state(self) -> dict[str, Any]:
        """Return JSON for ``load_state``."""
        return {
            "seeds": [seed for seed, _ in self.solved],
            "tasks": [task for _, task in self.solved],
            "solved": [int(success) for success in self.solved.values()],
        }

    def load_state(self, fields: Fields) -> None:
        """Continue from ``state``."""
        seeds = fields.numbers("seeds")
        tasks, solved = (fields.numbers(name, len(seeds)) for name in ("tasks", "solved"))
        episodes = zip(seeds, tasks, solved, strict=True)
        self.solved = {(int(seed), int(task)): bool(success) for seed, task, success in episodes}


class EpisodeStarts:
    """Replaces some of the episodes that a schedule begins rollouts with, and learns from their outcomes.

    Whole groups of ``algorithm.group_size`` are replaced. Choices depend on the seeds of the run, the iteration, the
    epoch, and the outcomes so far. Without ``env.train.failed_seed_fraction``, ``start_from_demos`` and
    ``task_curriculum`` nothing is.

    Raises:
        EmbodrlError: the demonstrations can't be used.
    """

    def __init__(self, config: Config, pool: EnvPool) -> None:
        self.config = config
        train = config.env.train
        self.failed = FailedSeeds(train.failed_seed_memory) if train.failed_seed_fraction else None
        self.curriculum = load_curriculum(config, pool.spec)
        tasks = train.task_curriculum
        self.tasks = TaskCurriculum(pool.spec.tasks, tasks) if tasks.parts else None
        # Demonstration and start of each row that begins in one; a start of -1 is unknown.
        self._begun: dict[int, tuple[int, int]] = {}

    def choose(self, iteration: int, epoch: int, seeds: NDArray[np.int64], tasks: NDArray[np.int32]) -> Starts:
        """Return how to begin, given the seeds ``int64[b]`` and tasks ``int32[b]`` of the schedule."""
        self._begun = {}
        if self.failed is None and self.curriculum is None and self.tasks is None:
            return Starts(seeds, tasks, {})
        config = self.config
        train = config.env.train
        size = config.algorithm.group_size
        groups = len(seeds) // size
        source = (config.runner.seed, train.seed, iteration, epoch)
        rng = np.random.default_rng([*source, _CHOICE])
        places = rng.permutation(groups).tolist()
        seeds = seeds.copy()
        tasks = tasks.copy()
        prefixes: dict[int, NDArray[np.float32]] = {}
        played: Sequence[int] | None = None
        if self.tasks is not None:
            tasks = np.repeat(self.tasks.draw(np.random.default_rng([*source, _TASKS]), groups), size)
            played = np.flatnonzero(self.tasks.probabilities()).tolist()
        if self.curriculum is not None:
            for number in self.curriculum.draw(rng, round(train.curriculum.fraction * groups), played):
                demo = self.curriculum.demos[number]
                first = places.pop() * size
                seeds[first : first + size], tasks[first : first + size] = demo.seed, demo.task
                for row in range(first, first + size):
                    self._begun[row] = (number, demo.start)
                    if demo.start:
                        prefixes[row] = demo.actions[: demo.start]
        if self.failed is not None:
            count = min(round(train.failed_seed_fraction * groups), len(places))
            for seed, task in self.failed.draw(rng, count):
                first = places.pop() * size
                seeds[first : first + size], tasks[first : first + size] = seed, task
        return Starts(seeds, tasks, prefixes)

    def replayed(
        self, first: int, asked: Sequence[int], found: Mapping[int, ReplayedPrefix], states: NDArray[np.float32]
    ) -> int:
        """Take note of executed prefixes; return the number of their steps.

        Args:
            first: first row of the group of environments whose rows the other arguments count.
            asked: rows with a prefix.
            found: what was executed, by row.
            states: ``float32[.,S]``, observed afterwards.

        Raises:
            EmbodrlError: the environments are not where the demonstrations were.
        """
        assert self.curriculum is not None
        errors: list[float] = []
        for row in asked:
            number, start = self._begun[first + row]
            demo = self.curriculum.demos[number]
            if row not in found:
                self._begun[first + row] = (number, -1)
            elif found[row].ended:
                self.curriculum.cut(number, found[row].steps)
                self._begun[first + row] = (number, 0)
            elif demo.states.shape[1] == states.shape[1] > 0:
                errors.append(float(np.abs(demo.states[start] - states[row]).max()))
        if errors and np.median(errors) > _LARGEST_ERROR:
            raise EmbodrlError(
                f"the actions of {self.config.env.train.start_from_demos} do not lead to its states again: half of"
                f" them are off by more than {np.median(errors):.2g}",
                "collect demonstrations with these settings of env, or leave env.train.start_from_demos out",
                code="demos-not-repeatable",
            )
        return sum(each.steps for each in found.values())

    def learn(self, ended: Sequence[EndedEpisode]) -> None:
        """Learn from the episodes that ended in a rollout, numbered by the collector's rows."""
        begun = {episode: self._begun.get(episode.row) for episode in ended if episode.number == 0}
        if self.curriculum is not None:
            for episode, start in begun.items():
                if start is not None:
                    self.curriculum.learn(*start, episode.success)
        # One that began within a demonstration says nothing about its seed or task.
        whole = [episode for episode in ended if (begun.get(episode) or (0, 0))[1] == 0]
        if self.failed is not None:
            self.failed.learn(whole)
        if self.tasks is not None:
            self.tasks.learn([(episode.task, episode.success) for episode in whole])

    def metrics(self) -> dict[str, float | None]:
        """Return metrics; none if nothing is replaced."""
        failed = {} if self.failed is None else {"rollout/failed_seeds": float(len(self.failed.failed()))}
        demos = {} if self.curriculum is None else self.curriculum.metrics()
        return failed | demos | ({} if self.tasks is None else self.tasks.metrics())

    def state(self) -> dict[str, Any]:
        """Return JSON for ``load_state``; empty if nothing is replaced."""
        failed = {} if self.failed is None else {"failed": self.failed.state()}
        demos = {} if self.curriculum is None else {"demos": self.curriculum.state()}
        return failed | demos | ({} if self.tasks is None else {"tasks": self.tasks.state()})

    def load_state(self, saved: Mapping[str, object]) -> None:
        """Continue from ``state``.

        Raises:
            CheckpointError: the state is damaged, or of other demonstrations or tasks.
        """
        fields = Fields(saved, "the starts of episodes", CheckpointError)
        if self.failed is not None and "failed" in fields:
            self.failed.load_state(fields.fields("failed"))
        if self.curriculum is not None and "demos" in fields:
            self.curriculum.load_state(fields.objects("demos"))
        if self.tasks is not None and "tasks" in fields:
            self.tasks.load_state(fields.fields("tasks"))
