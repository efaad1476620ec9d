"""The rollout backend that runs in separate processes, on this machine or others."""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor

from embodrl.config.schema import Config
from embodrl.data.shared_inputs import SHARED, numbered
from embodrl.data.trajectory import TrajectoryBatch
from embodrl.deployment import Deployment
from embodrl.envs.pool.offload import SimulatorMemory
from embodrl.errors import CheckpointError, WeightSyncError, WorkerDied, WorkerRaised
from embodrl.hybrid_engines.base import TrainEngine
from embodrl.hybrid_engines.offload import OffloadReport
from embodrl.hybrid_engines.weight_sync.buckets import trained_names
from embodrl.models.base import VLAPolicy
from embodrl.processes.liveness import Limits, stop_requested
from embodrl.processes.traffic import count_shared
from embodrl.scheduler.channel import Channel
from embodrl.scheduler.group import Handle, WorkerGroup, wait_all
from embodrl.scheduler.launchers.base import Launcher
from embodrl.specs import LAUNCHERS
from embodrl.workers.acting_process import Evaluated, SimulatingProcess, channel_names
from embodrl.workers.async_collector import AsyncCollector
from embodrl.workers.collector import Collector, EpisodeSchedule, Metrics, RolloutState, rollout_metrics
from embodrl.workers.evaluator import EpisodeResults, EvalResult, Played, evaluation_result, join_results
from embodrl.workers.lockstep import Shard
from embodrl.workers.reward import RewardWorker
from embodrl.workers.rollout_backend import RolloutBackend
from embodrl.workers.rollout_process import Gathered, RolloutProcess, Streamed, StreamedShard
from embodrl.workers.streaming import ShardSource, ShardStream
from embodrl.workers.supervised import START_TIMEOUT_S, SupervisedProcesses, channels_of
from embodrl.workers.weights import LocalSender, WeightChannel

logger = logging.getLogger(__name__)

# Signals wait until the process polls them, which it does before each chunk.
_STOP_PLACES = 16
# Each slot holds a bucket of weights that may be in flight.
_PIPE_PLACES = 4
_SYNC_ATTEMPTS = 3


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
    acting = (*deployment.of("rollout"), *deployment.simulator_hosts) if acts else ()
    places = [*(deployment.of("actor") if trains else ()), *acting]
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


def launch_rollouts(
    config: Config,
    deployment: Deployment,
    launcher: Launcher,
    channels: Mapping[str, Channel],
    log_dir: Path,
    closing: ExitStack,
    process: type[SimulatingProcess] = RolloutProcess,
) -> WorkerGroup:
    """Start the rollout processes of a deployment, with their simulators; ``closing`` stops them.

    Raises:
        WorkerError: a process could not be started; the others have been stopped.
    """
    variables: Mapping[str, str] = {}
    if deployment.simulator_hosts:
        from embodrl.workers.simulator_host import host_simulators

        config, variables = host_simulators(config, deployment, launcher, log_dir, closing)
    group = WorkerGroup(
        process,
        "rollout",
        # A process that dies must not end the others: each is restarted on its own.
        independent=True,
        config=config,
        deployment=deployment,
        log_dir=str(log_dir.resolve()),
    )
    closing.callback(group.close)
    return group.launch(deployment.of("rollout"), launcher, channels, log_dir, START_TIMEOUT_S, variables)


@dataclass(frozen=True)
class StartedProcesses:
    """The rollout processes of a verb that does not train.

    Attributes:
        channels: those of ``rollout_channels``.
        reports: further channels, one per process, on which it reports to the driver.
    """

    config: Config
    deployment: Deployment
    launcher: Launcher
    group: WorkerGroup
    channels: Mapping[str, Channel]
    reports: Sequence[Channel]

    @classmethod
    def start(
        cls,
        config: Config,
        deployment: Deployment,
        process: type[SimulatingProcess],
        log_dir: Path,
        reports: tuple[str, int],
        closing: ExitStack,
    ) -> StartedProcesses:
        """Start the processes.

        Args:
            config: configuration of the verb.
            deployment: its placement.
            process: class of the processes.
            log_dir: directory for their output.
            reports: name and capacity of the channels ``reports``; that of a process is called NAME_RANK.
            closing: stops what was started.

        Raises:
            EnvError: a simulator could not be started.
            WorkerError: a process could not be started.
            EmbodrlError: the launcher lacks a requirement.
        """
        launcher = make_launcher(config, deployment, trains=False)
        assert launcher is not None
        closing.callback(launcher.close)
        size = len(deployment.of("rollout"))
        channels = rollout_channels(launcher, size)
        kind, capacity = reports
        own = {name: launcher.channel(name, capacity) for name in (f"{kind}_{rank}" for rank in range(size))}
        group = launch_rollouts(config, deployment, launcher, channels | own, log_dir, closing, process)
        return cls(config, deployment, launcher, group, channels, list(own.values()))

    def with_policy(self, policy: VLAPolicy, sync_dir: Path, closing: ExitStack) -> RemoteProcesses:
        """Return the processes, which act with copies of the driver's policy."""
        pipes = list(channels_of(self.channels, "weights").values())
        weights = WeightChannel(
            "collective" if any(place.node for place in self.deployment.of("rollout")) else "memory",
            LocalSender(pipes, trained_names(policy), self.launcher.address),
            list(channels_of(self.channels, "answers").values()),
            sync_dir,
        )
        acting = ActingWeights(policy)
        processes = RemoteProcesses(self.config, self.group, self.channels, weights, acting, lambda: False)
        closing.callback(processes.close)
        return processes

    def without_policy(self) -> SupervisedProcesses:
        """Return the processes, in which no policy acts."""
        return SupervisedProcesses(self.config, self.group, self.channels, lambda: False)


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


class RemoteProcesses(SupervisedProcesses):
    """Processes that act for the driver with copies of its policy; see SupervisedProcesses.

    A restarted process receives the weights before it repeats its request.

    Args:
        group: processes of a class derived from ``ActingProcess``.
        acting: the weights to act with.
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
        super().__init__(config, group, channels, should_stop)
        self.link = weights
        self._acting = acting
        self._pings: dict[int, Handle] = {}
        # The policy acts only in the processes.
        acting.policy.seen_state_dim = int(self.about["state_dim"])
        self._acting.keep(acting.policy.state_dict().items())
        # A process may die while it joins; the restart needs the lock.
        with self._restarts.lock:
            self._rejoin()

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
                self._rejoin()
                return
            if stop_requested.is_set():  # the run is stopping: no rollout will use them
                return
            try:
                self.link.send(self._acting.tensors(), version, self._check)
            except (WeightSyncError, WorkerDied) as error:
                if stop_requested.is_set():
                    return
                logger.warning("weights of version %d: %s; all weights are sent again", version, error)
                self._rejoin()

    def _rejoin(self) -> None:
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

    def _note_restart(self, rank: int) -> None:
        self._pings.pop(rank, None)
        super()._note_restart(rank)

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
        self._files = itertools.count()
        self.collector: Collector
        if config.runner.max_staleness:
            kind = RemoteStream if config.rollout.streaming else RemoteRunner
            runners = [kind(self, rank) for rank in range(self.size)]
            schedule = EpisodeSchedule(config, self.about["num_envs"] * self.size, len(self.tasks))
            self.collector = AsyncCollector(config, schedule, runners, self, should_stop, self.rewards)
        else:
            self.collector = RemoteCollector(self)

    def close(self) -> None:
        """Stop asynchronous rollouts and close the weight channel."""
        self.collector.close()
        super().close()

    def accept_batch(self, answer: Gathered | StreamedShard) -> TrajectoryBatch:
        """Return the batch of an answer, and register its rewards with the reward worker."""
        batch = answer["batch"]
        if SHARED in batch.meta:
            count_shared(batch.meta[SHARED].num_bytes)
            batch = numbered(batch, next(self._files))
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

    def sync_metrics(self) -> dict[str, float]:
        return self.link.metrics()

    def evaluate(self, video_dir: Path | None, every_decoding: bool) -> EvalResult:
        with self.collector.paused():
            played = self.play_shares("evaluate", video_dir, every_decoding)
        return evaluation_result(self.config.evaluated, played)


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

    def gather_more(self, iteration: int, epoch: int, groups: int) -> tuple[TrajectoryBatch, Metrics]:
        return self._join(self.rollouts.call("gather_more", [(iteration, epoch, groups)] * self.rollouts.size), 1)

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


class RemoteStream(ShardStream):
    """A rollout process as a stream of AsyncCollector.

    A request names all shards that run in the process, so that a replacement begins those of its predecessor.
    """

    def __init__(self, rollouts: RemoteBackend, rank: int) -> None:
        self.rollouts = rollouts
        self.rank = rank
        self.num_shards = rollouts.about["num_envs"] // rollouts.config.algorithm.group_size

    def run(self, source: ShardSource, shards_a_journal: int) -> None:
        running: dict[int, Shard] = {}
        while not source.is_over():
            while len(running) < self.num_shards and (given := source.begin_now()) is not None:
                number, shard = given
                running[number] = shard
            if not running:
                source.wait()
                continue
            shards = [(number, dict(vars(shard))) for number, shard in running.items()]
            try:
                answer: Streamed = self.rollouts.call(
                    "stream", [(shards, shards_a_journal)], [self.rank], source.is_over
                )[0]
            except InterruptedError:
                break
            for ended in answer["ended"]:
                batch = self.rollouts.accept_batch(ended)
                del running[ended["number"]]
                source.finished(ended["number"], batch)
        source.interrupted(list(running))
