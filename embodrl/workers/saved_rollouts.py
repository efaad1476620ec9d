"""Rollouts in files, and collectors that write them or train on them in place of simulators."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from torch import Tensor

from embodrl.config.schema import Config
from embodrl.data.trajectory import TrajectoryBatch, batch_from_tensors, batch_to_tensors
from embodrl.errors import BatchError, EmbodrlError, FileFormatError
from embodrl.fields import Fields, parse_fields, read_fields
from embodrl.storage.atomic import ELSEWHERE_OF_RUNS, atomic_file
from embodrl.storage.files import write_safetensors
from embodrl.storage.json_file import write_json_file
from embodrl.storage.tensor_files import open_tensors
from embodrl.workers.collector import Collector, Metrics, NoCollector, RolloutState
from embodrl.workers.reward import RewardWorker

ROLLOUTS_DIR = "rollouts"
FACTS = "embodrl_rollout"
HINT = "name the directory rollouts/ of a run with runner.save_rollouts=true"


def rollout_file(directory: Path, iteration: int, epoch: int = 0) -> Path:
    """Return the path of a saved batch.

    Args:
        directory: directory of the batches.
        iteration: updates done before.
        epoch: 0 for the batch of the iteration, above 0 for those gathered in addition (dynamic sampling).
    """
    suffix = f"_{epoch}" if epoch else ""
    return directory / f"iteration_{iteration + 1:06d}{suffix}.safetensors"


def save_rollout(path: Path, batch: TrajectoryBatch, metrics: Metrics) -> None:
    """Write a batch, as gathered, atomically.

    Raises:
        OutputError: the file can't be written.
    """
    batch = batch.with_inputs()
    facts = {"batch_size": list(batch.batch_size), "meta": batch.meta, "metrics": metrics}
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in batch_to_tensors(batch).items()}
    with atomic_file(path, ELSEWHERE_OF_RUNS) as partial:
        write_safetensors(partial, tensors, {FACTS: json.dumps(facts)})


def load_rollout(path: Path) -> tuple[TrajectoryBatch, Metrics]:
    """Read a batch of ``save_rollout``; its metrics come without the times, which nothing takes in a replay.

    Raises:
        FileFormatError: the file is missing, damaged, or not a rollout (``rollout-unreadable``).
    """
    try:
        with open_tensors(path) as reader:
            known: dict[str, str] = reader.metadata() or {}
            tensors: dict[str, Tensor] = {name: reader.get_tensor(name) for name in reader.keys()}  # noqa: SIM118
    except OSError as error:
        message = f"{path} can't be read: {error.strerror}"
        raise FileFormatError(message, HINT, code="rollout-unreadable") from error
    if FACTS not in known:
        raise FileFormatError(f"{path} is not a rollout of embodrl", HINT, code="rollout-unreadable")
    facts = parse_fields(known[FACTS], str(path), FileFormatError, HINT)
    sizes = [int(size) for size in facts.numbers("batch_size")]
    try:
        batch = batch_from_tensors(tensors, sizes, dict(facts.fields("meta").content))
    except BatchError as error:
        message = f"{path} is damaged: {error.message}"
        raise FileFormatError(message, HINT, code="rollout-unreadable") from error
    if missing := [name for name in TrajectoryBatch.required() if name not in batch]:
        message = f"{path} is damaged: it has no {', '.join(missing)}"
        raise FileFormatError(message, HINT, code="rollout-unreadable")
    return batch, _metrics(facts.fields("metrics"))


def _metrics(fields: Fields) -> Metrics:
    kept = {name: value for name, value in fields.content.items() if not name.startswith("time/")}
    return {name: None if value is None else fields.number(name) for name, value in kept.items()}


def rewards_file(directory: Path, iteration: int) -> Path:
    """Return the path of what ``reward.fn``, ``model`` or ``judge`` paid in an iteration."""
    return directory / f"iteration_{iteration + 1:06d}_rewards.json"


class SavingCollector(Collector):
    """Writes every batch that another collector gathers, and the rewards of its episodes.

    Args:
        inner: gathers the batches.
        directory: of the files.
        rewards: judges the episodes.
    """

    def __init__(self, inner: Collector, directory: Path, rewards: RewardWorker) -> None:
        self.config = inner.config
        self.inner = inner
        self.directory = directory
        self.rewards = rewards

    def gather(self, iteration: int) -> tuple[TrajectoryBatch, Metrics]:
        batch, metrics = self.inner.gather(iteration)
        save_rollout(rollout_file(self.directory, iteration), batch, metrics)
        path = rewards_file(self.directory, iteration)
        self.rewards.on_paid = lambda outcomes: write_json_file(path, self.rewards.paid_by(outcomes))
        return batch, metrics

    def gather_more(self, iteration: int, epoch: int, groups: int) -> tuple[TrajectoryBatch, Metrics]:
        batch, metrics = self.inner.gather_more(iteration, epoch, groups)
        save_rollout(rollout_file(self.directory, iteration, epoch), batch, metrics)
        return batch, metrics

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        self.inner.update_weights(weights, version)

    def undo(self) -> None:
        self.inner.undo()

    def drain(self) -> None:
        self.inner.drain()

    def paused(self) -> AbstractContextManager[None]:
        return self.inner.paused()

    def reset_history(self) -> None:
        self.inner.reset_history()

    def state(self) -> RolloutState:
        return self.inner.state()

    def load_state(self, saved: RolloutState, version: int) -> None:
        self.inner.load_state(saved, version)

    def close(self) -> None:
        self.inner.close()


class ReplayedRollouts(NoCollector):
    """Gives the saved batches of another run in place of new ones.

    ``config`` and ``engine`` are as for ``NoCollector``; ``rollout.replay`` names the directory, and ``rewards`` pay
    what the other run paid. Raises EmbodrlError for batches of another policy or age.
    """

    rewards: RewardWorker | None = None

    def gather(self, iteration: int) -> tuple[TrajectoryBatch, Metrics]:
        if self.rewards is not None and self.rewards.calls is not None:
            assert self.config.rollout.replay is not None
            path = rewards_file(Path(self.config.rollout.replay), iteration)
            self.rewards.replay(read_fields(path, FileFormatError, HINT))
        return self._load(iteration, 0)

    def gather_more(self, iteration: int, epoch: int, groups: int) -> tuple[TrajectoryBatch, Metrics]:
        return self._load(iteration, epoch)

    def _load(self, iteration: int, epoch: int) -> tuple[TrajectoryBatch, Metrics]:
        assert self.config.rollout.replay is not None
        path = rollout_file(Path(self.config.rollout.replay), iteration, epoch)
        batch, metrics = load_rollout(path)
        check_policy(str(path), batch, self.config)
        check_age(str(path), batch, iteration, self.config)
        if batch.call_id is not None:
            batch.call_id = None  # numbers of reward calls in the run that saved it
        return batch, metrics


def check_age(source: str, batch: TrajectoryBatch, iteration: int, config: Config) -> None:
    """Reject a batch from ``source`` by weights that ``runner.max_staleness`` excludes.

    Args:
        source: its file, for messages.
        batch: with ``policy_version``, the updates behind the weights of each chunk.
        iteration: updates done before the batch is trained on.
        config: of the run that trains on it.

    Raises:
        EmbodrlError: a chunk is by older weights, or by weights that did not exist yet (``rollout-of-another-age``).
    """
    versions = batch.policy_version[batch.valid.any(-1)]
    if not len(versions):
        return
    oldest = iteration - int(versions.min())
    newest = iteration - int(versions.max())
    allowed = config.runner.max_staleness
    if newest < 0 or oldest > allowed:
        found = f"{oldest} updates old" if newest >= 0 else "by weights of a later update"
        raise EmbodrlError(
            f"{source} has chunks {found}, and runner.max_staleness is {allowed}",
            "train with the runner.max_staleness of the run that saved it",
            code="rollout-of-another-age",
        )


def check_policy(source: str, batch: TrajectoryBatch, config: Config) -> None:
    """Reject a batch from ``source`` if its chunks have another shape than the run's policy gives.

    Raises:
        EmbodrlError: another number of actions in a chunk, or of numbers in an action.
    """
    wanted: dict[str, Any] = {"actions per chunk": config.model.num_action_chunks}
    found: dict[str, Any] = {"actions per chunk": batch.rewards.shape[-1]}
    if batch.token_mask is None:
        wanted["numbers per action"] = config.model.action_dim
        found["numbers per action"] = batch.logprobs.shape[-1]
    if found != wanted:
        pairs = [(name, found[name], wanted[name]) for name in wanted if found[name] != wanted[name]]
        differ = ", ".join(f"{ours} {name} instead of {theirs}" for name, ours, theirs in pairs)
        raise EmbodrlError(
            f"{source} is of another policy: {differ}",
            "train with the model settings of the run that saved it",
            code="rollout-of-another-policy",
        )
