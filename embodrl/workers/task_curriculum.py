"""Curriculum over the tasks of a run: how often each is played, by its success so far.

Parts give every task a weight, and the product of their weights is proportional to its probability.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embodrl.config.schema import TaskCurriculumConfig, TaskPartConfig
from embodrl.errors import CheckpointError
from embodrl.fields import Fields

KEY = "env.train.task_curriculum"


class Stages:
    """Tasks join in their order: the next one once the mean success rate of those before is high enough."""

    def __init__(self, settings: TaskPartConfig) -> None:
        self.settings = settings
        self.joined = 1

    def learn(self, rates: Sequence[float | None]) -> None:
        """Let tasks join, given success rates by task; None: too few outcomes are known."""
        assert self.settings.success_rate is not None  # a rule checks it
        while self.joined < len(rates):
            known = [rate for rate in rates[: self.joined] if rate is not None]
            if len(known) < self.joined or np.mean(known) < self.settings.success_rate:
                return
            self.joined += 1

    def weights(self, rates: Sequence[float | None]) -> list[float]:
        """Return 1 for tasks that have joined, else 0."""
        return [float(number < self.joined) for number in range(len(rates))]


class Between:
    """Tasks whose success rate is unknown, or lies within bounds, are played ``factor`` times as often as others."""

    joined = 0

    def __init__(self, settings: TaskPartConfig) -> None:
        self.settings = settings

    def learn(self, rates: Sequence[float | None]) -> None:
        """Do nothing: the weights follow from the rates alone."""

    def weights(self, rates: Sequence[float | None]) -> list[float]:
        """Return ``factor`` or 1 for each task."""
        low, high = self.settings.low, self.settings.high
        factor = self.settings.factor
        assert low is not None and high is not None and factor is not None  # a rule checks it
        return [factor if rate is None or low <= rate <= high else 1.0 for rate in rates]


_PARTS = {"stages": Stages, "between": Between}


class TaskCurriculum:
    """Draws the tasks of groups, and learns from the outcomes of their episodes.

    Args:
        tasks: names, by index.
        settings: with at least one part.
    """

    def __init__(self, tasks: Sequence[str], settings: TaskCurriculumConfig) -> None:
        self.tasks = tuple(tasks)
        self.window = settings.window
        self.parts: list[Stages | Between] = [_PARTS[part.kind](part) for part in settings.parts]
        self.recent: list[list[bool]] = [[] for _ in tasks]

    def rates(self) -> list[float | None]:
        """Return the success rate of the last ``window`` episodes of each task; None as long as there are fewer."""
        return [float(np.mean(recent)) if len(recent) == self.window else None for recent in self.recent]

    def probabilities(self) -> NDArray[np.float64]:
        """Return how often each task is played, ``float64[tasks]``, summing to 1."""
        rates = self.rates()
        weights = np.prod([part.weights(rates) for part in self.parts], axis=0)
        return weights / weights.sum()

    def draw(self, rng: np.random.Generator, count: int) -> NDArray[np.int32]:
        """Return the tasks of ``count`` groups, ``int32[count]``."""
        return rng.choice(len(self.tasks), size=count, p=self.probabilities()).astype(np.int32)

    def learn(self, outcomes: Sequence[tuple[int, bool]]) -> None:
        """Add outcomes of episodes that began at a reset: task and success, in order."""
        for task, success in outcomes:
            self.recent[task] = [*self.recent[task], success][-self.window :]
        for part in self.parts:
            part.learn(self.rates())

    def metrics(self) -> dict[str, float | None]:
        """Return the probability of each task in the next rollout."""
        found = zip(self.tasks, self.probabilities().tolist(), strict=True)
        return {f"curriculum/{task}/probability": probability for task, probability in found}

    def state(self) -> dict[str, Any]:
        """Return JSON for ``load_state``."""
        return {
            "tasks": list(self.tasks),
            "recent": [{"solved": [int(success) for success in recent]} for recent in self.recent],
            "parts": [part.settings.kind for part in self.parts],
            "joined": [part.joined for part in self.parts],
        }

    def load_state(self, fields: Fields) -> None:
        """Continue from ``state``.

        Raises:
            CheckpointError: it is damaged, or of other tasks or parts.
        """
        kinds = [part.settings.kind for part in self.parts]
        if tuple(fields.texts("tasks")) != self.tasks or fields.texts("parts") != kinds:
            raise CheckpointError(
                f"the tasks or the parts of {KEY} are not the ones that the run started with",
                "resume with the same ones",
                code="checkpoint-other-settings",
            )
        recent = [[bool(number) for number in each.numbers("solved")] for each in fields.objects("recent")]
        if len(recent) != len(self.tasks):
            fields.refuse(f"it has outcomes of {len(recent)} tasks")
        self.recent = [outcomes[-self.window :] for outcomes in recent]
        joined = fields.numbers("joined", len(self.parts))
        for part, number in zip(self.parts, joined, strict=True):
            part.joined = int(number)
