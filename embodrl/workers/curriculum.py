"""Reverse curriculum: episodes that begin within demonstrations, near their ends first.

RFCL (Tao et al. 2024, arXiv 2405.03379): each demonstration has a start of its own, which moves back once the policy
succeeds from it. Shapes: L actions of a demonstration, A action dimensions, S state dimensions.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embodrl.config.schema import Config, CurriculumConfig
from embodrl.data.demos import Demos, Outcomes
from embodrl.data.imitation import check_robot
from embodrl.data.load import is_lerobot, load_demos
from embodrl.errors import CheckpointError, EmbodrlError
from embodrl.fields import Fields
from embodrl.types import EnvSpec

KEY = "env.train.start_from_demos"


@dataclass
class Demonstration:
    """A demonstration to begin episodes in.

    Attributes:
        task: index of its task.
        actions: ``float32[L,A]``, as executed.
        states: ``float32[L,S]``, before each action; S = 0 if unknown.
        start: number of actions before an episode begins.
        recent: whether the last episodes from this start succeeded.
        done: the policy succeeds from the reset.
    """

    seed: int
    task: int
    actions: NDArray[np.float32]
    states: NDArray[np.float32]
    start: int
    recent: list[bool] = field(default_factory=list[bool])
    done: bool = False


class Curriculum:
    """The starts of all demonstrations, and how they move."""

    def __init__(self, demos: Sequence[Demonstration], settings: CurriculumConfig) -> None:
        self.demos = demos
        self.settings = settings

    def draw(self, rng: np.random.Generator, count: int, tasks: Container[int] | None = None) -> list[int]:
        """Return numbers of demonstrations that are not done, at most ``count``, each once if they suffice.

        ``tasks``: only demonstrations of these; None for all.
        """
        left = [
            number for number, demo in enumerate(self.demos) if not demo.done and (tasks is None or demo.task in tasks)
        ]
        if not left:
            return []
        return rng.choice(left, size=count, replace=count > len(left)).tolist()

    def cut(self, number: int, steps: int) -> None:
        """Begin earlier in a demonstration whose episode ended with this many of its actions."""
        demo = self.demos[number]
        demo.start = min(demo.start, max(0, steps - self.settings.step))
        demo.recent = []

    def learn(self, number: int, start: int, success: bool) -> None:
        """Count the outcome of an episode, unless the start has moved since it began."""
        demo = self.demos[number]
        if start != demo.start or demo.done:
            return
        demo.recent = [*demo.recent, success][-self.settings.window :]
        enough = len(demo.recent) == self.settings.window
        if enough and np.mean(demo.recent) >= self.settings.success_rate:
            demo.done = demo.start == 0
            demo.start = max(0, demo.start - self.settings.step)
            demo.recent = []

    def metrics(self) -> dict[str, float | None]:
        """Return the mean fraction of a demonstration before its start, and the fraction of those that are done."""
        return {
            "curriculum/mean_start": float(np.mean([demo.start / len(demo.actions) for demo in self.demos])),
            "curriculum/solved": float(np.mean([demo.done for demo in self.demos])),
        }

    def state(self) -> list[dict[str, Any]]:
        """Return JSON for ``load_state``."""
        return [
            {"seed": demo.seed, "start": demo.start, "recent": [int(each) for each in demo.recent], "done": demo.done}
            for demo in self.demos
        ]

    def load_state(self, saved: Sequence[Fields]) -> None:
        """Continue from ``state``.

        Raises:
            CheckpointError: it belongs to other demonstrations.
        """
        if [each.integer("seed") for each in saved] != [demo.seed for demo in self.demos]:
            raise CheckpointError(
                f"the demonstrations of {KEY} are not the ones the run started with",
                "resume with the same ones",
                code="checkpoint-other-settings",
            )
        for demo, each in zip(self.demos, saved, strict=True):
            demo.start = each.integer("start", high=len(demo.actions))
            demo.recent = [bool(number) for number in each.numbers("recent")]
            demo.done = each.flag("done")


def load_curriculum(config: Config, spec: EnvSpec) -> Curriculum | None:
    """Return the curriculum of ``env.train.start_from_demos``; None without.

    Raises:
        EmbodrlError: the demonstrations are missing or damaged, or can't be repeated in these environments.
    """
    source = config.env.train.start_from_demos
    if source is None:
        return None
    check_robot(config.model_copy(update={"sft": config.sft.model_copy(update={"data_dir": source})}))
    directory = Path(source)
    # Pictures are not needed, and only LeRobot's datasets can be read without.
    demos = load_demos(directory, cameras=() if is_lerobot(directory) else None, keys=config.sft.keys)
    if demos.outcomes is None:
        raise _unusable(source, "does not record executed actions")
    _check(demos, demos.outcomes, source, spec, config)
    first = np.flatnonzero(np.diff(demos.episode, prepend=-1))
    settings = config.env.train.curriculum
    found: list[Demonstration] = []
    for number, begin in enumerate(first.tolist()):
        seed = demos.seeds[number]
        assert seed is not None, "checked above"
        if demos.success[number] is False:
            continue
        frames = slice(begin, int(demos.last[begin]) + 1)
        length = min(frames.stop - begin, config.env.max_episode_steps)
        actions = demos.outcomes.executed[frames]
        start = max(0, length - settings.step)
        found.append(Demonstration(seed, spec.tasks.index(demos.tasks[number]), actions, demos.state[frames], start))
    if not found:
        raise _unusable(source, "holds no successful episode")
    return Curriculum(found, settings)


def _check(demos: Demos, outcomes: Outcomes, source: str, spec: EnvSpec, config: Config) -> None:
    if None in demos.seeds:
        raise _unusable(source, "does not record the seeds of its episodes")
    if others := sorted(set(demos.tasks) - set(spec.tasks)):
        raise _unusable(source, f"has other tasks than env.tasks ({', '.join(spec.tasks)}): {', '.join(others)}")
    if (found := outcomes.executed.shape[1]) != spec.action_dim:
        raise _unusable(source, f"has actions of {found} dimensions, and the environment takes {spec.action_dim}")
    first = config.env.eval.seed
    last = first + config.env.eval.num_episodes - 1
    if any(seed is not None and first <= seed <= last for seed in demos.seeds):
        raise _unusable(source, f"has seeds of the evaluation, {first} to {last} (env.eval)")


def _unusable(source: str, problem: str) -> EmbodrlError:
    return EmbodrlError(
        f"{source} {problem}, so that no episode can begin in it ({KEY})",
        "collect demonstrations in this environment with `embodrl collect`",
        code="demos-not-repeatable",
    )
