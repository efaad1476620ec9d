"""Rollouts that continue while the policy trains.

Each pipeline stage has a thread that runs one shard after another: T chunks of the stage's environments from fresh
episodes or branches of them, or one workflow episode per environment. A StalenessGate decides when a shard may begin
and which shards an update takes.

Shapes: T policy steps (chunks), B environments.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from torch import Tensor

from embodrl.config.identity import ABSENT, changes, describe, record_of, settings_read
from embodrl.config.schema import Config
from embodrl.config.yaml_text import flow
from embodrl.data.shared_inputs import SHARED
from embodrl.data.trajectory import TrajectoryBatch, batch_from_tensors, batch_to_tensors
from embodrl.envs.pool.pool import EnvPool
from embodrl.errors import CheckpointError
from embodrl.hybrid_engines.rollout.base import RolloutEngine
from embodrl.hybrid_engines.weight_sync.base import WeightTarget
from embodrl.processes.liveness import stop_requested
from embodrl.specs import WORKFLOW_RUNNERS, WorkflowRunnerSpec
from embodrl.workers.collector import EpisodeSchedule, Metrics, RolloutState, make_lockstep_runners, rollout_metrics
from embodrl.workers.lockstep import Shard, ShardMeta, meta_of
from embodrl.workers.recorders import NOT_JUDGED, Judging
from embodrl.workers.reward import RewardWorker
from embodrl.workers.staleness import RunningLimit, StalenessGate
from embodrl.workers.streaming import ShardStream

logger = logging.getLogger(__name__)

# Polling interval for stop signals, in seconds.
_POLL_S = 0.1
# Time for threads to end after a stop signal, as a fraction of runner.stop_timeout_s.
_JOIN = 0.5
# Simulators keep a journal for bit-exact resume of synchronous runs; asynchronous runs never read it, so it would only
# grow.
_SHARDS_A_JOURNAL = 64
PLAYERS = "players"
"""Non-setting inputs of the shard numbering: the number of shards that a rollout of all environments takes."""


class EpisodeRunner(Protocol):
    """A group of environments with its own thread."""

    def roll_out(self, shard: Shard, should_stop: Callable[[], bool]) -> TrajectoryBatch:
        """Return the shard, with ``shard_meta``.

        Raises:
            InterruptedError: ``should_stop`` returned True.
        """
        ...

    def rebuild(self) -> None:
        """Make the simulators drop their history."""
        ...


def workflow_runner() -> WorkflowRunnerSpec:
    """Return the runner factory of ``rollout.workflow``: the first one registered."""
    return WORKFLOW_RUNNERS.all()[0]


def make_runners(
    config: Config, pool: EnvPool, engine: RolloutEngine, judging: Judging = NOT_JUDGED
) -> list[EpisodeRunner]:
    """Return one runner per pipeline stage; ``engine`` has its own copy of the weights."""
    if config.rollout.workflow is None:
        return [*make_lockstep_runners(config, pool, engine, judging)]
    parts = pool.split(config.rollout.pipeline_stages)
    make = cast("Callable[..., EpisodeRunner]", WORKFLOW_RUNNERS.get(workflow_runner().name))
    return [make(config, part, engine, judging) for part in parts]


@dataclass
class _Shards:
    """Shards by number.

    Attributes:
        next: number of the next shard that was never begun.
        again: numbers to begin again.
        finished: shards that wait for an update, or were given to the current one.
        env_steps_dropped: steps of shards that were too old, since the last update.
    """

    next: int = 0
    again: list[int] = field(default_factory=list[int])
    finished: dict[int, TrajectoryBatch] = field(default_factory=dict[int, TrajectoryBatch])
    env_steps_dropped: int = 0


@dataclass
class _Update:
    """The current update: shards requested beyond its batch, groups so far, seconds waited, and its rollouts."""

    extra: int = 0
    num_groups: int = 0
    waited_s: float = 0.0
    metas: list[ShardMeta] = field(default_factory=list[ShardMeta])


class AsyncCollector:
    """Gathers like ``SyncCollector``, up to ``runner.max_staleness`` updates ahead.

    The weights are swapped between two chunks, so one episode may span several versions; each chunk records its
    version. The choice of episodes is the same as in a synchronous run; their course depends on when weights arrive.

    Args:
        schedule: episodes of all environments, divided equally among the runners.
        runners: runners in the order of their environments.
        target: receives the weights that the runners act with.
        should_stop: polled while waiting; if it returns True, ``gather`` raises InterruptedError.
        rewards: computes the rewards of the shards; checkpoints keep the rewards that are already known.

    Attributes:
        num_parts: shards that all environments run at once.
    """

    def __init__(
        self,
        config: Config,
        schedule: EpisodeSchedule,
        runners: Sequence[EpisodeRunner | ShardStream],
        target: WeightTarget,
        should_stop: Callable[[], bool],
        rewards: RewardWorker | None = None,
    ) -> None:
        self.config = config
        self.runners = runners
        self.target = target
        self.should_stop = should_stop
        self.schedule = schedule
        self.rewards = rewards
        self.num_parts = count = sum(
            runner.num_shards if isinstance(runner, ShardStream) else 1 for runner in self.runners
        )
        self.gate = StalenessGate(config.runner.max_staleness, count * config.algorithm.rollout_epoch, count)
        if (low := config.rollout.min_running_shards) is not None:
            self.gate.limit = RunningLimit(low, count, count)
        self._shards = _Shards()
        self._update = _Update()
        # Guards the gate and the fields that both the trainer and the stages change.
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        self._drained = False
        self._closing = False
        self._threads: list[threading.Thread] = []

    # -- trainer side --------------------------------------------------------------------------------------------------

    def gather(self, iteration: int) -> tuple[TrajectoryBatch, Metrics]:
        """Return the shards of an update once they are ready; the same shards if called again."""
        self.undo()
        self._update = _Update()
        return self._gather(self.gate.batch_size)

    def gather_more(self, iteration: int, epoch: int, groups: int) -> tuple[TrajectoryBatch, Metrics]:
        """Return the oldest further shards that have together at least so many groups."""
        of_a_shard = self.schedule.num_envs // self.num_parts // self.config.algorithm.group_size
        count = -(-groups // of_a_shard)
        with self._changed:
            self._update.extra += count
            self._changed.notify_all()
        return self._gather(count, more=True)

    def _gather(self, count: int, more: bool = False) -> tuple[TrajectoryBatch, Metrics]:
        clock = time.perf_counter()
        self._start()
        with self._changed:
            rejected = self.gate.rejected
            waited = False
            while (chosen := self._choose(count)) is None:
                if self.should_stop():
                    raise InterruptedError
                waited = True
                self._changed.wait(_POLL_S)
            self.gate.give_out(chosen)
            limit = self.gate.limit
            if limit is not None and not more:
                limit.adapt(waited, len(self.gate.waiting), self.gate.rejected - rejected)
            batches = [self._shards.finished[shard] for shard in chosen]
            # Steps of dropped shards count once, with the first batch of the update.
            dropped = 0 if more else self._shards.env_steps_dropped
            metrics: Metrics = {
                "staleness/queue": float(len(self.gate.waiting)),
                "staleness/running": float(len(self.gate.running)),
                "staleness/rejected_shards": float(self.gate.rejected),
            }
            if limit is not None:
                metrics["staleness/running_limit"] = float(limit.now)
            self._changed.notify_all()
        self._update.waited_s += time.perf_counter() - clock
        self._update.metas += [meta_of(batch) for batch in batches]
        metrics["time/wait_s"] = self._update.waited_s
        whole = join_shards(batches, dropped, self._update.num_groups)
        self._update.num_groups = int(whole["group_id"].max()) + 1
        return whole, rollout_metrics(self._update.metas) | metrics

    def _choose(self, count: int) -> list[int] | None:
        if self._failure is not None:
            raise self._failure
        # Shards that are too old were simulated, so their steps still count as environment steps.
        for shard in self.gate.drop_too_old():
            self._shards.env_steps_dropped += int(self._shards.finished.pop(shard).meta["env_steps"])
        return self.gate.choose(count)

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        # Outside the lock: sending takes long, and a stage that finishes a shard meanwhile needs it.
        self.target.update_weights(weights, version)
        # Only now: until the update is complete, ``undo`` may requeue them.
        with self._changed:
            for shard in self.gate.given_out:
                del self._shards.finished[shard]
            self.gate.update(version)
            self._update.extra = 0  # counted as rejected from now on
            self._shards.env_steps_dropped = 0
            self._changed.notify_all()

    def drain(self) -> None:
        """Nothing to wait for: only the collector's threads make requests, and a signal does not interrupt them."""

    def undo(self) -> None:
        """Requeue the current update's shards for the next update."""
        with self._changed:
            self.gate.take_back()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Finish the running shards without starting new ones.

        Raises:
            InterruptedError: ``should_stop`` returned True.
        """
        with self._changed:
            self._drained = True
            try:
                while self.gate.running:
                    if self._failure is not None:
                        raise self._failure
                    if self.should_stop():
                        raise InterruptedError
                    self._changed.wait(_POLL_S)
            except BaseException:  # also after a signal, which is re-raised: the threads must continue
                self._drained = False
                self._changed.notify_all()
                raise
        try:
            yield
        finally:
            with self._changed:
                self._drained = False
                self._changed.notify_all()

    def close(self) -> None:
        """Interrupt running shards and join the threads; hung threads are abandoned if the run is about to end."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        deadline = time.monotonic() + _JOIN * self.config.runner.stop_timeout_s
        while any(thread.is_alive() for thread in self._threads):
            if stop_requested.is_set() and time.monotonic() > deadline:
                logger.warning("a hung rollout is abandoned because the run is ending")
                return
            for thread in self._threads:
                thread.join(_POLL_S)

    # -- the side of the stages ----------------------------------------------------------------------------------------

    def _start(self) -> None:
        if not self._threads:
            for number, episode_runner in enumerate(self.runners):
                # Daemons: a simulator that hangs must not keep the process alive after ``close`` has given up.
                self._threads.append(
                    threading.Thread(target=self._work, args=(episode_runner,), name=f"rollout-{number}", daemon=True)
                )
            for thread in self._threads:
                thread.start()

    def _work(self, episode_runner: EpisodeRunner | ShardStream) -> None:
        try:
            if isinstance(episode_runner, ShardStream):
                episode_runner.run(self, _SHARDS_A_JOURNAL * episode_runner.num_shards)
                return
            # Kept until the end: a simulator that this thread restarted would die with it.
            rolled_out = 0
            while (number := self._begin()) is not None:
                batch = self._roll_out(episode_runner, number)
                rolled_out += 1
                if rolled_out % _SHARDS_A_JOURNAL == 0:
                    episode_runner.rebuild()
                if batch is None:
                    self.interrupted([number])
                else:
                    self.finished(number, batch)
        except BaseException as error:  # noqa: BLE001  (re-raised in the waiting trainer)
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _begin(self) -> int | None:
        """Wait until a shard may begin; return its number, or None when no shard is left."""
        with self._changed:
            while not self.is_over():
                if (number := self._number_now()) is not None:
                    return number
                self._changed.wait()
        return None

    def _number_now(self) -> int | None:
        """Return the number of a shard that begins now, if one may; call with the lock."""
        # The last updates need exactly their own shards; rejected and extra shards are replaced.
        replaced = self.gate.rejected + self._update.extra
        wanted = self.config.runner.max_iterations * self.gate.batch_size + replaced
        enough = self._shards.next - len(self._shards.again) >= wanted
        if enough or self._drained or not self.gate.capacity():
            return None
        shard = self._shards.again.pop(0) if self._shards.again else self._shards.next
        self._shards.next = max(self._shards.next, shard + 1)
        self.gate.begin(shard)
        self._changed.notify_all()
        return shard

    def _shard(self, number: int) -> Shard:
        # A shard is determined by its number alone, so it is the same on any stage and after a resume.
        iteration, place = divmod(number, self.gate.batch_size)
        epoch, part = divmod(place, self.num_parts)
        size = self.schedule.num_envs // self.num_parts
        rows = slice(part * size, (part + 1) * size)
        # Group numbers are local to the shard: ``join_shards`` renumbers the groups of the whole batch.
        return self.schedule.shard(iteration, epoch, (self.config.runner.seed, number), rows)

    def _roll_out(self, episode_runner: EpisodeRunner, number: int) -> TrajectoryBatch | None:
        try:
            return episode_runner.roll_out(self._shard(number), self.is_over)
        except InterruptedError:
            return None

    # A ``ShardSource``.

    def begin_now(self) -> tuple[int, Shard] | None:
        with self._changed:
            number = None if self.is_over() else self._number_now()
        return None if number is None else (number, self._shard(number))

    def finished(self, number: int, batch: TrajectoryBatch) -> None:
        with self._changed:
            self.gate.finish(number)
            self._shards.finished[number] = batch
            self._changed.notify_all()

    def interrupted(self, numbers: Sequence[int]) -> None:
        with self._changed:
            for number in numbers:
                self.gate.abandon(number)
                self._shards.again.append(number)
            self._changed.notify_all()

    def wait(self) -> None:
        with self._changed:
            self._changed.wait(_POLL_S)

    def is_over(self) -> bool:
        """Return whether no more shards are needed; a running shard starts over when the run resumes."""
        return self._closing or self._failure is not None or stop_requested.is_set()

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def reset_history(self) -> None:
        """Do nothing: ``state`` holds no simulators, since a running shard starts over."""

    def state(self) -> RolloutState:
        """Return the waiting shards and the numbers of the shards to start over."""
        with self._changed:
            # An error may have left an update unfinished; its shards are needed again.
            waiting = self.gate.waiting | self.gate.given_out
            # Copies: checkpoints renumber the calls of rewards.
            batches = {shard: self._shards.finished[shard].with_inputs().replace() for shard in waiting}
            shards = {
                str(shard): {
                    "began": began,
                    "batch_size": list(batches[shard].batch_size),
                    "meta": batches[shard].meta,
                    "rewards": [] if self.rewards is None else self.rewards.known(batches[shard]),
                }
                for shard, began in waiting.items()
            }
            tensors = {f"shard_{shard}": batch_to_tensors(batch) for shard, batch in batches.items()}
            state: dict[str, object] = {
                "shards": shards,
                # Running shards start over as well: a checkpoint does not wait for them.
                "again": sorted([*self._shards.again, *self.gate.running]),
                "next_shard": self._shards.next,
                "rejected": self.gate.rejected,
                "running_limit": None if self.gate.limit is None else self.gate.limit.now,
                "env_steps_dropped": self._shards.env_steps_dropped,
                **record_of(shard_settings(self.config, self.num_parts)),
            }
        return RolloutState(state, tensors)

    def load_state(self, saved: RolloutState, version: int) -> None:
        state = saved.state
        if "shards" not in state:
            raise CheckpointError(
                "the checkpoint belongs to a synchronous run",
                "resume with runner.max_staleness=0",
                code="checkpoint-other-settings",
            )
        before = state["settings"]
        now = shard_settings(self.config, self.num_parts)
        players = int(before.get(PLAYERS, now[PLAYERS]))
        before, now = ({key: value for key, value in each.items() if key != PLAYERS} for each in (before, now))
        record = {"version": state.get("version"), "settings": before}
        if other := changes(record, now):
            hint = " ".join(f"{name}={flow(old)}" for name, (old, _) in other.items() if old is not ABSENT)
            raise CheckpointError(
                f"the checkpoint holds rollouts made with other settings: {describe(other)}",
                f"resume with {hint}" if hint else "resume with the settings that the run started with",
                code="checkpoint-other-settings",
            )
        if players != self.num_parts:
            self._follow_others(state, players, version)
            return
        with self._changed:
            self.gate.version = version
            self.gate.rejected = state["rejected"]
            if (limit := self.gate.limit) is not None:
                limit.now = max(limit.low, state.get("running_limit") or limit.high)
            self.gate.waiting = {int(shard): entry["began"] for shard, entry in state["shards"].items()}
            self._shards.finished = {
                int(shard): batch_from_tensors(saved.tensors[f"shard_{shard}"], entry["batch_size"], entry["meta"])
                for shard, entry in state["shards"].items()
            }
            for shard, entry in state["shards"].items():
                if self.rewards is not None:
                    self.rewards.adopt(
                        self._shards.finished[int(shard)], {"outcomes": entry.get("rewards", []), "waited_s": 0.0}
                    )
            self._shards.again = list(state["again"])
            self._shards.next = state["next_shard"]
            self._shards.env_steps_dropped = state["env_steps_dropped"]

    def _follow_others(self, state: Mapping[str, Any], players: int, version: int) -> None:
        """Continue after another number of runners, whose shards have other environments.

        Those that no update has taken are rejected: their numbers are used up, and their steps count.
        """
        rollouts = -(-int(state["next_shard"]) // (players * self.config.algorithm.rollout_epoch))
        steps = [int(entry["meta"]["env_steps"]) for entry in state["shards"].values()]
        with self._changed:
            self.gate.version = version
            self._shards.next = rollouts * self.gate.batch_size
            self.gate.rejected = self._shards.next - version * self.gate.batch_size
            self._shards.env_steps_dropped = state["env_steps_dropped"] + sum(steps)
        logger.warning(
            "%d finished rollouts of %d runners are dropped, since this run has %d",
            len(steps),
            players,
            self.num_parts,
        )


_EPISODES = (
    *("env.", "reward.", "protocol", "rollout.pipeline_stages", "rollout.workflow"),
    *("model.model_type", "model.num_action_chunks", "model.action_dim"),
    "rollout.streaming",
    *("algorithm.group_size", "algorithm.rollout_epoch", "algorithm.loss_type", "algorithm.bootstrap_type"),
    *("algorithm.reward_type", "algorithm.sampling.", "algorithm.srpo."),
)
"""Settings that the episodes of shards depend on; all other settings affect only learning."""


def shard_settings(config: Config, num_runners: int) -> dict[str, object]:
    """Return the settings that shards depend on, by key, as decoded from JSON; other settings make shards unusable."""
    shaped = ("algorithm.gamma",) if config.env.reward_mode == "potential" else ()
    branched = ("algorithm.branch.",) if config.algorithm.branch.enabled else ()
    return {**settings_read(config, "train", only=(*_EPISODES, *shaped, *branched)), PLAYERS: num_runners}


def join_shards(batches: list[TrajectoryBatch], dropped_env_steps: int, num_groups: int) -> TrajectoryBatch:
    """Concatenate shards into one batch with globally unique group numbers, starting at ``num_groups``."""
    parts: list[TrajectoryBatch] = []
    for batch in batches:
        assert batch.group_id is not None
        part = batch.replace(group_id=batch.group_id - int(batch.group_id.min()) + num_groups)
        part.meta = {name: value for name, value in batch.meta.items() if name == SHARED}
        num_groups = int(part["group_id"].max()) + 1
        parts.append(part)
    whole = TrajectoryBatch.concat(parts)
    whole.meta["env_steps"] = sum(int(batch.meta["env_steps"]) for batch in batches) + dropped_env_steps
    return whole
