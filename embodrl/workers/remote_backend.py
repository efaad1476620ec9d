"""The rollout backend that runs in separate processes, on this machine or others."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, NoReturn, cast

import numpy as np
import torch
from torch import Tensor

from embodrl.config.schema import Config
from embodrl.data.trajectory import TrajectoryBatch
from embodrl.deployment import Deployment
from embodrl.envs.pool.faults import FaultCounts
from embodrl.envs.pool.offload import SimulatorMemory
from embodrl.errors import ChannelTimeout, CheckpointError, WeightSyncError, WorkerDied, WorkerError, WorkerRaised
from embodrl.hybrid_engines.base import TrainEngine
from embodrl.hybrid_engines.offload import OffloadReport
from embodrl.hybrid_engines.weight_sync.buckets import trained_names
from embodrl.models.base import VLAPolicy
from embodrl.processes.liveness import Limits, stop_requested
from embodrl.processes.restarts import RestartBudget
from embodrl.scheduler.channel import Channel
from embodrl.scheduler.group import Handle, WorkerGroup, wait_all
from embodrl.scheduler.launchers.base import Launcher
from embodrl.specs import LAUNCHERS
from embodrl.workers.acting_process import ActingProcess, Answer, Evaluated, channel_names
from embodrl.workers.async_collector import AsyncCollector
from embodrl.workers.collector import LOST, Collector, EpisodeSchedule, Metrics, RolloutState, Snapshot, rollout_metrics
from embodrl.workers.evaluator import EpisodeResults, EvalResult, Played, evaluation_result, join_results
from embodrl.workers.lockstep import Shard
from embodrl.workers.reward import RewardWorker
from embodrl.workers.rollout_backend import RolloutBackend
from embodrl.workers.rollout_process import Gathered, RolloutProcess
from embodrl.workers.weights import WeightChannel

logger = logging.getLogger(__name__)

_POLL_S = 0.1
# Signals wait until the process polls them, which it does before each chunk.
_STOP_PLACES = 16
# Each slot holds a bucket of weights that may be in flight.
_PIPE_PLACES = 4
_START_TIMEOUT_S = 3600.0
_SYNC_ATTEMPTS = 3
_PATIENCE = 0.4
"""Time a process may take to answer after a stop signal, as a fraction of ``runner.stop_timeout_s``."""


def sends_weights(config: Config, deployment: Deployment) -> bool:
    """Return whether the training processes send their weights directly to the rollout processes."""
    # In asynchronous runs a restarted process needs the current version while the next one trains, and only the driver
    # keeps it.
    return deployment.main_component is None and not config.runner.max_staleness


def make_launcher(config: Config, deployment: Deployment, trains: bool) -> Launcher | None:
    """Return the launcher of a run's actor and rollout processes; None if the driver does everything itself.

    ``trains``: there are actor processes.

    Raises:
        MissingDependencyError: Ray is configured but not installed.
        EmbodrlError: Ray lacks the resources.
    """
    acts = deployment.rolls_out_in_processes
    if not (acts or trains):
        return None
    limits = Limits(config.cluster.heartbeat_timeout_s, config.cluster.stall_timeout_s)
    places = [*(deployment.of("actor") if trains else ()), *(deployment.of("rollout") if acts else ())]
    simulators = Counter(place.node for place in deployment.of("env")) if acts else None
    launcher = cast("type[Launcher]", LAUNCHERS.get(config.cluster.launcher))
    return launcher.for_run(places, simulators, config.cluster, limits)


def rollout_channels(launcher: Launcher, size: int) -> dict[str, Channel]:
    """Return the rollout processes' channels by name; see ``channel_names``."""
    return {
        name: launcher.channel(name, _STOP_PLACES if kind == "stop" else _PIPE_PLACES)
        for rank in range(size)
        for kind, name in channel_names(rank).items()
    }


def channels_of(channels: Mapping[str, Channel], kind: str) -> dict[str, Channel]:
    """Return the channels of one kind by name, in rank order."""
    return {name: channel for name, channel in channels.items() if name.startswith(f"{kind}_")}


def launch_rollouts(
    config: Config,
    deployment: Deployment,
    launcher: Launcher,
    channels: Mapping[str, Channel],
    log_dir: Path,
    process: type[ActingProcess] = RolloutProcess,
) -> WorkerGroup:
    """Start the rollout processes of a deployment, with their simulators.

    Raises:
        WorkerError: a process could not be started; the others have been stopped.
    """
    group = WorkerGroup(
        process,
        "rollout",
        # A process that dies must not end the others: each is restarted on its own.
        independent=True,
        config=config,
        deployment=deployment,
        log_dir=str(log_dir.resolve()),
    )
    return group.launch(deployment.of("rollout"), launcher, channels, log_dir, _START_TIMEOUT_S)


class KnownStates:
    """What is known of the rollout processes, for replacements and checkpoints.

    Attributes:
        snapshots: where each process was; None until it has answered.
        faults: faults of all processes since the start of the run.
    """

    def __init__(self, size: int) -> None:
        self.snapshots: list[Snapshot | None] = [None for _ in range(size)]
        self.faults = FaultCounts()
        self._reported: list[dict[str, int]] = [{} for _ in range(size)]

    def note(self, rank: int, answer: Answer) -> None:
        """Record the faults and the snapshot in an answer."""
        known = self._reported[rank]
        # Processes report totals; only the increase is added.
        for name, number in answer["faults"].items():
            self.faults.count(name, number - known.get(name, 0))
        self._reported[rank] = answer["faults"]
        self.snapshots[rank] = answer.get("carried", self.snapshots[rank])

    def note_restart(self, rank: int) -> None:
        """Count a restart; the replacement counts its faults from 0."""
        self._reported[rank] = {}
        self.faults.count("rollout_restarts")

    def remember(self, random: Sequence[list[str] | None]) -> None:
        """Store random states for replacements; None keeps a lost process where its update began."""
        for rank, (numbers, known) in enumerate(zip(random, self.snapshots, strict=True)):
            where = known["before"] if numbers is None and known is not None else numbers
            if where is not None:
                self.snapshots[rank] = _no_update(where)

    def end_update(self) -> None:
        """Forget the updates in progress: with new weights, a replacement could not repeat them."""
        self.snapshots = [None if known is None else _no_update(known["random"]) for known in self.snapshots]

    def state_of_lost(self, rank: int) -> RolloutState:
        """Return the known state of a process that died while the run was stopping: random numbers, no simulators."""
        known = self.snapshots[rank]
        return RolloutState({LOST: True} | ({} if known is None else {"random": known["random"]}))


class ActingWeights:
    """The weights that the processes act with, which replacements receive.

    Args:
        policy: the driver's policy.
        present: returns a context in which the driver's policy is on its device; a train engine may offload it.
        may_be_stale: during rollouts the policy trains on, so its weights belong to no version.

    Attributes:
        version: completed updates of these weights.
    """

    def __init__(
        self,
        policy: VLAPolicy,
        present: Callable[[], AbstractContextManager[None]] = nullcontext,
        may_be_stale: bool = False,
    ) -> None:
        self.version = 0
        self.policy = policy
        self._present = present
        self._trained = trained_names(policy)
        self._may_be_stale = may_be_stale
        self._copies: dict[str, Tensor] = {}

    def keep(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy the trainable weights if the policy trains on; frozen ones are read from the policy."""
        # Otherwise they are not read: gathering them from training processes is expensive.
        if self._may_be_stale:
            self._copies = {name: tensor.detach().cpu().clone() for name, tensor in weights if name in self._trained}

    def tensors(self) -> Iterable[tuple[str, Tensor]]:
        """Yield names and tensors."""
        with self._present():
            yield from (dict(self.policy.state_dict()) | self._copies).items()


class ProcessRestarts:
    """Restarts of rollout processes within a budget.

    Attributes:
        lock: held during a restart. Several threads of an asynchronous run may see the same death; the first restarts
            the process, the others wait.
        incarnations: restarts of each process.
        new: ranks restarted, and without their predecessors' state.
    """

    def __init__(self, group: WorkerGroup, budget: RestartBudget) -> None:
        self.lock = threading.Lock()
        self.incarnations = [0 for _ in range(group.world_size)]
        self.new: set[int] = set()
        self._group = group
        self._budget = budget
        self._lost: set[int] = set()  # died while the run was stopping

    def restart(self, error: WorkerError, on_restart: Callable[[int], None]) -> None:
        """Restart a process; ``on_restart`` is called with its rank before each attempt.

        Raises:
            WorkerDied: the budget is exhausted.
            InterruptedError: the run is about to end.
        """
        rank = error.rank
        while True:
            if stop_requested.is_set():
                self._leave_lost(error)
            self._count(error)
            on_restart(rank)
            try:
                self._group.restart(rank, _START_TIMEOUT_S, stop_requested.is_set)
                self.new.add(rank)
                return
            except WorkerError as again:
                error = again
            except InterruptedError:
                # A stop was requested meanwhile, so the next turn does not restart the process.
                continue

    def _leave_lost(self, error: WorkerError) -> NoReturn:
        if error.rank not in self._lost:
            self._lost.add(error.rank)
            logger.warning("not restarted, as the run is about to end: %s", error.message)
        raise InterruptedError from error

    def _count(self, error: WorkerError) -> None:
        if not self._budget.take():
            raise WorkerDied(
                f"stopped after {self._budget.limit} restarts of rollout processes: {error.message}",
                error.hint,
                error.rank,
                log_tail=error.log_tail,
            ) from error
        self.incarnations[error.rank] += 1
        logger.warning("restart %s of a rollout process: %s", self._budget.used, error.message)
        error.__traceback__ = None  # its call refers to it: a cycle, with all that the frames of this iteration hold


class _Patience:
    """Kills processes that have not answered long after a stop request."""

    def __init__(self, group: WorkerGroup, timeout_s: float) -> None:
        self._group = group
        self._timeout_s = timeout_s
        self._stop_requested_at: float | None = None

    def end_late(self, handles: Mapping[int, Handle]) -> None:
        if not stop_requested.is_set():
            return
        self._stop_requested_at = self._stop_requested_at or time.monotonic()
        if time.monotonic() - self._stop_requested_at < self._timeout_s:
            return
        for rank in [rank for rank, handle in handles.items() if not handle.done]:
            self._group.give_up(rank, f"has not answered for {self._timeout_s:g} s after a signal")


class RemoteProcesses:
    """Processes that act for the driver, on this machine or others, each with a share of the environments.

    A process that dies is restarted, receives the weights, and repeats its last request; the others continue. If the
    run is about to end (``stop_requested``), it stays dead.

    Args:
        group: processes of a class derived from ``ActingProcess``.
        channels: channels that the processes were started with.
        acting: the weights to act with.
        should_stop: polled regularly; True interrupts the current request.
    """

    def __init__(
        self,
        config: Config,
        group: WorkerGroup,
        channels: Mapping[str, Channel],
        weights: WeightChannel,
        acting: ActingWeights,
        should_stop: Callable[[], bool],
    ) -> None:
        self.config = config
        self.group = group
        self.link = weights
        self.should_stop = should_stop
        self.known = KnownStates(group.world_size)
        self.faults = self.known.faults
        self._acting = acting
        budget = RestartBudget(config.rollout.max_restarts, config.cluster.restart_window_s)
        self._restarts = ProcessRestarts(group, budget)
        self._patience = _Patience(group, _PATIENCE * config.runner.stop_timeout_s)
        self._stop = list(channels_of(channels, "stop").values())
        self._calls = itertools.count()
        self._pings: dict[int, Handle] = {}
        self.about: dict[str, Any] = self.group.call_on(0, "about").result()
        self.tasks = list(self.about["tasks"])
        # The policy acts only in the processes.
        acting.policy.seen_state_dim = int(self.about["state_dim"])
        self._acting.keep(acting.policy.state_dict().items())
        # A process may die while it joins; the restart needs the lock.
        with self._restarts.lock:
            self._join_all()

    @property
    def size(self) -> int:
        """Number of rollout processes."""
        return self.group.world_size

    def close(self) -> None:
        """Close the weight channel. The owner closes the processes."""
        self.link.close()

    # -- weights -------------------------------------------------------------------------------------------------------

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Send these weights to all processes, and wait until they use them, unless the run is about to end.

        Raises:
            WeightSyncError: several attempts failed.
            WorkerDied: ``rollout.max_restarts`` is exhausted.
        """
        # InterruptedError: a process died while the run is stopping, so no rollout will need these weights.
        with self._restarts.lock, suppress(InterruptedError):
            self._acting.keep(weights)
            went_back = version <= self._acting.version
            self._acting.version = version
            if not self.config.runner.max_staleness:  # asynchronous rollouts restore only random numbers
                self.known.end_update()
            if went_back:  # back to a checkpoint, while a weight channel accepts only increasing versions
                self._join_all()
                return
            if stop_requested.is_set():  # the run is stopping: no rollout will use them
                return
            try:
                self.link.send(self._acting.tensors(), version, self._check)
            except (WeightSyncError, WorkerDied) as error:
                if stop_requested.is_set():
                    return
                logger.warning("weights of version %d: %s; all weights are sent again", version, error)
                self._join_all()

    def _join_all(self) -> None:
        """Reconnect all processes, restart dead ones, and send all weights."""
        for attempt in itertools.count(1):
            try:
                options = self.link.options()
                # The receivers start connecting before the sender opens: the rendezvous of a collective sync needs both
                # at once.
                handles = [self.group.call_on(rank, "join", options) for rank in range(self.size)]
                self.link.open(options, lambda handles=handles: _raise_known(handles))
                wait_all(handles)
                self.link.send(self._acting.tensors(), self._acting.version, self._check)
                self._restore_new()
                return
            except WorkerDied as error:
                self._revive(error)
            except (WeightSyncError, WorkerRaised) as error:
                if attempt >= _SYNC_ATTEMPTS:
                    raise
                logger.warning("%s", error)
                # A failed sync names no process, so each one is queried to find the dead ones.
                for rank in range(self.size):
                    try:
                        self.group.call_on(rank, "about").result()
                    except WorkerDied as died:
                        self._revive(died)

    def _restore_new(self) -> None:
        """Give restarted processes their predecessors' state; further weights would end their update."""
        for rank in sorted(self._restarts.new):
            if (carried := self.known.snapshots[rank]) is not None:
                self.group.call_on(rank, "restore", carried).result()
            self._restarts.new.remove(rank)

    def _check(self) -> None:
        for rank in range(self.size):
            # A process in a rollout answers late: reuse its pending ping, so that pings do not pile up.
            ping = self._pings.pop(rank, None) or self.group.call_on(rank, "about")
            self._patience.end_late({rank: ping})
            if not ping.done:
                self._pings[rank] = ping
            elif ping.error is not None:
                raise ping.error

    def revive(self, error: WorkerDied, incarnation: int) -> None:
        """Restart a process with the current weights, unless ``incarnation`` has been restarted already.

        Raises:
            WorkerDied: ``rollout.max_restarts`` is exhausted.
            InterruptedError: the run is about to end.
        """
        with self._restarts.lock:
            if self._restarts.incarnations[error.rank] == incarnation:
                self._revive(error)
                self._join_all()

    def _revive(self, error: WorkerError) -> None:
        self._restarts.restart(error, self._note_restart)

    def _note_restart(self, rank: int) -> None:
        self._pings.pop(rank, None)
        self.known.note_restart(rank)

    # -- requests ------------------------------------------------------------------------------------------------------

    def call(
        self,
        method: str,
        arguments: Sequence[tuple[object, ...]],
        ranks: Sequence[int] | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> list[Any]:
        """Return the processes' answers to an interruptible request; a process that dies is restarted and asked again.

        Args:
            method: method of RolloutProcess.
            arguments: arguments after the call number, by process.
            ranks: the processes; None for all.
            should_stop: polled now and then; None uses the run's.

        Raises:
            InterruptedError: ``should_stop`` returned True, or a process died while the run is stopping.
            WorkerError: a method raised, or processes keep dying.
        """
        ranks = range(self.size) if ranks is None else ranks
        should_stop = should_stop or self.should_stop
        # Signals carry the call number, so that a late one does not stop the next request.
        call = next(self._calls)
        # Noted before the calls begin, so that a process restarted by another thread is not restarted twice.
        incarnations = list(self._restarts.incarnations)
        given = dict(zip(ranks, arguments, strict=True))
        handles = {rank: self.group.call_on(rank, method, call, *own) for rank, own in given.items()}
        answers: dict[int, Answer | None] = {}
        stopped = False
        try:
            while pending := [rank for rank in handles if rank not in answers]:
                if not stopped and should_stop():
                    stopped = True
                    self._signal(call, pending)
                self._patience.end_late(handles)
                futures = [future for rank in pending for future in handles[rank].futures.values() if not future.done()]
                wait(futures, _POLL_S, FIRST_COMPLETED)
                # Answers of living processes first: they must be recorded before a restart, which synchronises all
                # processes.
                gone = {rank: isinstance(handles[rank].error, WorkerDied) for rank in pending}
                for rank, dead in sorted(gone.items(), key=lambda item: item[1]):
                    # A replacement receives its weights once all processes are free to synchronise.
                    if not handles[rank].done or (dead and not all(handles[other].done for other in pending)):
                        continue
                    try:
                        answers[rank] = answer = handles[rank].result()
                        if answer is not None:  # immediately: it may die before the others have answered
                            self.known.note(rank, answer)
                    except WorkerDied as error:
                        self.revive(error, incarnations[rank])
                        incarnations[rank] = self._restarts.incarnations[rank]
                        # The request ends with InterruptedError anyway, so the replacement has nothing to repeat.
                        if stopped:
                            answers[rank] = None
                        else:
                            handles[rank] = self.group.call_on(rank, method, call, *given[rank])
        except BaseException:  # also after a signal, which is re-raised: no call may stay pending
            self._give_up(call, {rank: handles[rank] for rank in handles if rank not in answers})
            raise
        found = [answer for answer in answers.values() if answer is not None]
        if len(found) < len(answers):
            raise InterruptedError
        return [answers[rank] or {} for rank in ranks]

    def _signal(self, call: int, ranks: Iterable[int]) -> None:
        for rank in ranks:
            try:
                self._stop[rank].put(call, 0.0)
            except ChannelTimeout:
                logger.warning("rollout process %d has not polled its signals", rank)

    def _give_up(self, call: int, handles: dict[int, Handle]) -> None:
        """Let the other processes finish, too, so that they are free for the next request."""
        self._signal(call, handles)
        deadline = time.monotonic() + _START_TIMEOUT_S
        futures = [future for handle in handles.values() for future in handle.futures.values()]
        while wait(futures, _POLL_S).not_done and time.monotonic() < deadline:
            self._patience.end_late(handles)

    def play_shares(
        self,
        method: str,
        video_dir: Path | None,
        *arguments: object,
        should_stop: Callable[[], bool] | None = None,
    ) -> Played:
        """Return the episodes of an evaluation, of which each process plays consecutive ones; see ``call``."""
        episodes = np.array_split(np.arange(self.config.env.eval.num_episodes), self.size)
        where = None if video_dir is None else str(video_dir.resolve())
        given = [(part, where, *arguments) for part in episodes]
        parts: list[Evaluated] = self.call(method, given, should_stop=should_stop)
        found: list[Played] = [{name: EpisodeResults(**one) for name, one in part["played"].items()} for part in parts]
        return join_results(found, max)

    def call_all(self, method: str, *arguments: Sequence[object], ranks: Sequence[int] | None = None) -> list[Any]:
        """Return all processes' answers to a short request; ``arguments`` are by process.

        A process that has died is restarted and asked again; if the run is about to end, its answer is None.
        """
        ranks = range(self.size) if ranks is None else ranks
        given = list(zip(*arguments, strict=True)) if arguments else [()] * len(ranks)
        # As in ``call``: noted before the calls begin.
        incarnations = list(self._restarts.incarnations)
        handles = [self.group.call_on(rank, method, *own) for rank, own in zip(ranks, given, strict=True)]
        answers: list[Any] = []
        for rank, handle, own in zip(ranks, handles, given, strict=True):
            while True:
                try:
                    answers.append(handle.result())
                    break
                except WorkerDied as error:
                    try:
                        self.revive(error, incarnations[rank])
                    except InterruptedError:
                        answers.append(None)
                        break
                    incarnations[rank] = self._restarts.incarnations[rank]
                    handle = self.group.call_on(rank, method, *own)
        return answers


class RemoteBackend(RemoteProcesses, RolloutBackend):
    """Rollouts in separate processes; see RemoteProcesses.

    If the run is about to end, a checkpoint stores the last known random state of a dead process.

    Args:
        policy: the driver's policy, whose weights the processes start with.
        trainer: train engine; if it is in this process, the driver's policy may be offloaded.

    Attributes:
        rewards: replaces the rewards of batches; adopts the rewards that the processes have requested.
    """

    def __init__(
        self,
        config: Config,
        group: WorkerGroup,
        channels: Mapping[str, Channel],
        weights: WeightChannel,
        policy: VLAPolicy,
        trainer: TrainEngine,
        should_stop: Callable[[], bool],
    ) -> None:
        acting = ActingWeights(policy, trainer.present, may_be_stale=config.runner.max_staleness > 0)
        super().__init__(config, group, channels, weights, acting, should_stop)
        self.rewards = RewardWorker(config, tuple(self.tasks))
        self.collector: Collector
        if config.runner.max_staleness:
            runners = [RemoteRunner(self, rank) for rank in range(self.size)]
            schedule = EpisodeSchedule(config, self.about["num_envs"] * self.size, len(self.tasks))
            self.collector = AsyncCollector(config, schedule, runners, self, should_stop, self.rewards)
        else:
            self.collector = RemoteCollector(self)

    def close(self) -> None:
        """Stop asynchronous rollouts and close the weight channel."""
        self.collector.close()
        super().close()

    def accept_batch(self, answer: Gathered) -> TrajectoryBatch:
        """Return the batch of an answer, and register its rewards with the reward worker."""
        batch = answer["batch"]
        if answer["rewards"] is not None:
            self.rewards.adopt(batch, answer["rewards"])
        return batch

    def offload_policies(self) -> OffloadReport | None:
        found = [answer for answer in self.call_all("offload_policy") if answer is not None]
        return OffloadReport.total([OffloadReport(torch.device(name), *num_bytes) for name, *num_bytes in found])

    def offload_simulators(self, end_processes: bool) -> SimulatorMemory | None:
        found = [
            answer for answer in self.call_all("offload_simulators", [end_processes] * self.size) if answer is not None
        ]
        return SimulatorMemory(sum(b for b, _ in found), sum(a for _, a in found)) if found else None

    def onload(self) -> None:
        self.call_all("onload")

    def evaluate(self, video_dir: Path | None, every_decoding: bool) -> EvalResult:
        with self.collector.paused():
            played = self.play_shares("evaluate", video_dir, every_decoding)
        return evaluation_result(self.config.evaluated, played)


def _no_update(random: list[str]) -> Snapshot:
    """Return the snapshot of a process with these random numbers and no update in progress."""
    return {"metas": [], "random": random, "before": None}


def _raise_known(handles: Sequence[Handle]) -> None:
    """Raise the first known error, without waiting."""
    for handle in handles:
        if handle.error is not None:
            raise handle.error


class RemoteCollector:
    """Collects from all rollout processes in parallel and joins their batches, in a synchronous run. See Collector."""

    def __init__(self, rollouts: RemoteBackend) -> None:
        self.rollouts = rollouts
        self.config = rollouts.config

    def gather(self, iteration: int) -> tuple[TrajectoryBatch, Metrics]:
        parts = self.rollouts.call("gather", [(iteration,)] * self.rollouts.size)
        return self._join(parts, self.config.algorithm.rollout_epoch)

    def gather_more(self, iteration: int, epoch: int) -> tuple[TrajectoryBatch, Metrics]:
        return self._join(self.rollouts.call("gather_more", [(iteration, epoch)] * self.rollouts.size), 1)

    def _join(self, parts: list[Gathered], num_epochs: int) -> tuple[TrajectoryBatch, Metrics]:
        """Return one batch, rollout by rollout, as if one process had stepped all environments."""
        batches: list[TrajectoryBatch] = [self.rollouts.accept_batch(part) for part in parts]
        env_steps = sum(int(batch.meta.pop("env_steps")) for batch in batches)
        size = len(batches[0]) // num_epochs
        rows = [slice(epoch * size, (epoch + 1) * size) for epoch in range(num_epochs)]
        whole = TrajectoryBatch.concat([batch[mine] for mine in rows for batch in batches])
        whole.meta["env_steps"] = env_steps
        metrics = rollout_metrics([meta for part in parts for meta in part["metas"]])
        each = [rollout_metrics(part["metas"]) for part in parts]
        # The processes ran at the same time.
        metrics |= {name: max(one[name] or 0.0 for one in each) for name in ("time/env_s", "time/policy_s")}
        return whole, metrics

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        self.rollouts.update_weights(weights, version)

    def drain(self) -> None:
        """Do nothing: the processes serve one call after another."""

    def undo(self) -> None:
        self.rollouts.known.remember(self.rollouts.call_all("undo"))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do nothing: no rollout is in progress."""
        yield

    def reset_history(self) -> None:
        self.rollouts.call_all("reset_history")

    def state(self) -> RolloutState:
        """Return the state; with one process, in the format of a driver that acts."""
        found = self.rollouts.call_all("state")
        states = [
            self.rollouts.known.state_of_lost(rank) if state is None else RolloutState(**state)
            for rank, state in enumerate(found)
        ]
        if len(states) == 1:
            return states[0]
        return RolloutState(
            {"processes": [state.state for state in states]},
            {f"{rank}_{name}": group for rank, state in enumerate(states) for name, group in state.tensors.items()},
            {f"rollout_{rank}_{name}": blob for rank, state in enumerate(states) for name, blob in state.blobs.items()},
        )

    def load_state(self, saved: RolloutState, version: int) -> None:
        size = self.rollouts.size
        count = len(saved.state.get("processes", [None]))
        if count != size:
            raise CheckpointError(
                f"the checkpoint was made with {count} rollout process(es), not {size}",
                f"resume with {count} of them in cluster.component_placement",
                code="checkpoint-other-settings",
            )
        states = [saved] if size == 1 else [self._part(saved, rank) for rank in range(size)]
        found = self.rollouts.call_all(
            "load_state", *zip(*((s.state, s.tensors, s.blobs) for s in states), strict=True)
        )
        self.rollouts.known.remember(found)

    def _part(self, saved: RolloutState, rank: int) -> RolloutState:
        mine = f"rollout_{rank}_"
        return RolloutState(
            saved.state["processes"][rank],
            {},
            {name.removeprefix(mine): blob for name, blob in saved.blobs.items() if name.startswith(mine)},
        )

    def close(self) -> None:
        """Do nothing: no rollout is in progress."""


class RemoteRunner:
    """A rollout process as a runner of AsyncCollector. See EpisodeRunner."""

    def __init__(self, rollouts: RemoteBackend, rank: int) -> None:
        self.rollouts = rollouts
        self.rank = rank

    def roll_out(self, shard: Shard, should_stop: Callable[[], bool]) -> TrajectoryBatch:
        return self.rollouts.accept_batch(
            self.rollouts.call("roll_out", [(dict(vars(shard)),)], [self.rank], should_stop)[0]
        )

    def rebuild(self) -> None:
        self.rollouts.call_all("rebuild", ranks=[self.rank])
