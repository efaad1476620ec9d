"""A collection of demonstrations: numbered attempts become a dataset, in the order of their numbers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from embodrl.config.identity import changes, describe, record_of, settings_read
from embodrl.config.schema import Config
from embodrl.data.dataset_writer import DatasetWriter
from embodrl.errors import EmbodrlError, EnvError
from embodrl.fields import Fields
from embodrl.workers.demonstrations import Attempted
from embodrl.workers.policy import RecordedPolicy

logger = logging.getLogger(__name__)

MAX_ATTEMPTS_PER_EPISODE = 10
COMMIT_EPISODES = 50
"""Commit interval in episodes: a kill loses at most this many."""
OPEN_PER_ENV = 4
"""Attempts per environment that may wait for earlier ones; their episodes are held in memory."""
_FREE = (r"collect\.(num_episodes|output_dir)", r"env\.train\.total_num_envs")
"""Settings that may change when an interrupted collection continues."""


def collection_settings(config: Config, policy: RecordedPolicy | None) -> dict[str, object]:
    """Return the settings that episodes depend on, by key; ``policy`` is the actor, null for the experts."""
    settings = settings_read(config, "collect" if policy is None else "record", _FREE)
    acting = {"policy": None} if policy is None else {"policy": policy.name, "policy.weights": policy.fingerprint}
    return {**acting, **settings}


def _older_settings(content: Mapping[str, object]) -> dict[str, object]:
    """Return, by key, the settings recorded by collections that predate the complete record."""
    found = {f"collect.{name}": value for name, value in content.items() if name not in ("env", "tasks", "policy")}
    return found | {
        "env.env_type": content.get("env"),
        "env.tasks": content.get("tasks"),
        "policy": content.get("policy"),
    }


class AttemptQueue:
    """Hands out the numbers of attempts, and puts their outcomes back in order, whoever plays them and how fast.

    Args:
        start: first number.
        most: limit on the numbers handed out whose outcomes have not been taken with ``pop``.
    """

    def __init__(self, start: int, most: int) -> None:
        self._next = start
        self._most = most
        self._open: dict[int, Attempted | None] = {}

    @property
    def first(self) -> int:
        """The first number whose outcome has not been taken."""
        return next(iter(self._open), self._next)

    def take(self, count: int, is_wanted: Callable[[int], bool]) -> list[int]:
        """Return at most ``count`` numbers to play next, of those that are wanted; some must be."""
        found: list[int] = []
        while len(found) < count and len(self._open) < self._most:
            if is_wanted(self._next):
                found.append(self._next)
                self._open[self._next] = None
            self._next += 1
        return found

    @property
    def waits(self) -> bool:
        """Whether outcomes have not been taken."""
        return bool(self._open)

    def put(self, outcome: Attempted) -> None:
        """Keep an outcome; one that is known already, or of a number that is no longer wanted, is dropped."""
        if outcome.number in self._open and self._open[outcome.number] is None:
            self._open[outcome.number] = outcome

    def pop(self, is_wanted: Callable[[int], bool]) -> Attempted | None:
        """Return the next outcome in the order of wanted numbers; None if it is not known yet."""
        while self._open:
            number = self.first
            outcome = self._open[number]
            if outcome is None and is_wanted(number):
                return None
            del self._open[number]
            if outcome is not None and is_wanted(number):
                return outcome
        return None


class DemoCollector:
    """Keeps the first successful attempts at each task, or the first attempts, as a dataset.

    Attempt n belongs to task n mod T. The dataset depends only on the outcomes of attempts by number, not on who plays
    them, how many at once, or interruptions.

    Args:
        config: run configuration; section ``collect``.
        tasks: names of the T tasks.
        writer: episode writer; episodes of the interrupted collection that it continues count.
        policy: policy that acts instead of the experts.

    Attributes:
        kept, tried, solved: ``int64[T]``, episodes of each task that were kept, completed, and successful.
        lost: ``int64[T]``, episodes ended by a fault.

    Raises:
        EmbodrlError: the interrupted collection has other settings.
    """

    def __init__(
        self, config: Config, tasks: Sequence[str], writer: DatasetWriter, policy: RecordedPolicy | None = None
    ) -> None:
        self.settings = config.collect
        self._env_type = config.env.env_type
        self._policy = None if policy is None else policy.name
        self._identity = collection_settings(config, policy)
        self.tasks = tuple(tasks)
        self.writer = writer
        self.kept = np.zeros(len(self.tasks), np.int64)
        self.tried = np.zeros(len(self.tasks), np.int64)
        self.solved = np.zeros(len(self.tasks), np.int64)
        self.lost = np.zeros(len(self.tasks), np.int64)
        self.wanted = np.array(
            [len(part) for part in np.array_split(np.arange(self.settings.num_episodes), len(self.tasks))]
        )
        start = 0 if writer.progress is None else self._continue(writer.progress)
        self._queue = AttemptQueue(start, OPEN_PER_ENV * config.env.train.total_num_envs)
        self.tell: Callable[[int, str], None] = lambda done, note: None

    def _continue(self, progress: Fields) -> int:
        """Restore the counts, and return the first number to play."""
        record: Mapping[str, object] = progress.fields("identity", {}).content
        now = self._identity
        if not record:
            logger.warning("an earlier version started the collection and recorded only some of its settings")
            record = {"settings": _older_settings(progress.fields("settings").content)}
            now = now | {"env.tasks": list(self.tasks)}
        if changed := changes(record, now):
            raise EmbodrlError(
                f"{self.writer.staging} holds an interrupted collection with other settings: {describe(changed)}",
                f"continue it with its original settings, or remove it: rm -r {self.writer.staging}",
                code="collect-other-settings",
            )
        for name in ("kept", "tried", "solved", "lost"):
            getattr(self, name)[:] = progress.numbers(name, len(self.tasks))
        return progress.integer("attempts")

    def commit(self) -> None:
        """Make the episodes so far durable, so that another process can continue the collection."""
        counts = {name: getattr(self, name).tolist() for name in ("kept", "tried", "solved", "lost")}
        self.writer.commit({"identity": record_of(self._identity), "attempts": self._queue.first, **counts})

    @property
    def finished(self) -> bool:
        """Whether every task has enough episodes."""
        return bool((self.kept >= self.wanted).all())

    @property
    def missing(self) -> int:
        """Number of episodes that are still to be kept."""
        return int(np.maximum(self.wanted - self.kept, 0).sum())

    @property
    def waits(self) -> bool:
        """Whether outcomes of attempts that were handed out are missing."""
        return self._queue.waits

    def take(self, count: int) -> list[int]:
        """Return the numbers of at most ``count`` attempts to play next; none if too many wait for earlier ones."""
        return [] if self.finished else self._queue.take(count, self._is_wanted)

    def _is_wanted(self, number: int) -> bool:
        task = number % len(self.tasks)
        return bool(self.kept[task] < self.wanted[task])

    def add(self, outcome: Attempted) -> None:
        """Add the outcome of an attempt, and write the episodes that wait for no earlier one.

        Raises:
            EmbodrlError: the experts or the simulator fail too often.
        """
        self._queue.put(outcome)
        while (outcome_in_order := self._queue.pop(self._is_wanted)) is not None:
            self._count(outcome_in_order)
        self.tell(int(self.kept.sum()), f"success {self.solved.sum() / max(self.tried.sum(), 1):.0%}")

    def _count(self, outcome: Attempted) -> None:
        task = outcome.number % len(self.tasks)
        if outcome.success is None:
            self.lost[task] += 1
            self._refuse_losing_simulators()
            return
        self.tried[task] += 1
        self.solved[task] += outcome.success
        if outcome.episode is None:
            self._refuse_failing_actors()
            return
        self.kept[task] += 1
        self.writer.add(outcome.episode)
        if self.kept.sum() % COMMIT_EPISODES == 0:
            self.commit()

    def _refuse_failing_actors(self) -> None:
        failing = (self.tried > 50) & (self.tried > MAX_ATTEMPTS_PER_EPISODE * self.solved)
        if self.settings.keep_failures or not failing.any():
            return
        names = ", ".join(np.array(self.tasks)[failing])
        if self._policy is not None:
            raise EmbodrlError(
                f"the policy fails more than 9 times in 10 on {names}",
                "set collect.keep_failures=true to record its failures as well",
                code="policy-fails",
            )
        raise EmbodrlError(
            f"the expert fails more than 9 times in 10 on {names}",
            "lower collect.noise_std, or raise env.max_episode_steps",
            code="expert-fails",
        )

    def _refuse_losing_simulators(self) -> None:
        losing = (self.lost > 50) & (self.lost > (MAX_ATTEMPTS_PER_EPISODE - 1) * self.tried)
        if losing.any():
            names = ", ".join(np.array(self.tasks)[losing])
            raise EnvError(
                f"the simulator loses more than 9 episodes in 10 of {names} to faults",
                "the warnings above list them; see the logs of the simulator processes",
                code="too-many-faults",
            )

    def close(self, meta: dict[str, object]) -> None:
        """Complete the dataset, with the actor's success rate over all completed episodes."""
        who = "expert" if self._policy is None else "policy"
        known: dict[str, object] = {"robot_type": self._env_type, "collect": self.settings.model_dump()}
        known |= {f"{who}_success_rate": self.success_rate(), **meta}
        known |= {} if self._policy is None else {"policy": self._policy}
        self.writer.close(known | {"stopped_early": not self.finished})

    def success_rate(self) -> dict[str, float | None]:
        """Return the fraction of solved episodes by task; None where no episode was completed."""
        counts = zip(self.tasks, self.solved.tolist(), self.tried.tolist(), strict=True)
        return {task: solved / tried if tried else None for task, solved, tried in counts}
