"""Rollouts in processes of their own, on this machine or on others.

Each process has a share of the environments. One that dies is brought up anew, gets the weights, and plays again what
it had been asked for; the others go on.

Legend: R rollout processes.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodrl.config.schema import Config
from embodrl.deployment import Deployment
from embodrl.envs.pool.faults import FaultCounts
from embodrl.envs.pool.offload import SimulatorMemory
from embodrl.errors import ChannelTimeout, WeightSyncError, WorkerDied, WorkerError, WorkerRaised
from embodrl.hybrid_engines.offload import OffloadReport
from embodrl.hybrid_engines.weight_sync.buckets import trained_names
from embodrl.hybrid_engines.weight_sync.choice import choose_weight_sync, uses_nccl
from embodrl.models.base import VLAPolicy
from embodrl.scheduler.channel import Channel
from embodrl.scheduler.group import Handle, WorkerGroup, wait_all
from embodrl.scheduler.launchers.base import Launcher
from embodrl.workers.async_collector import AsyncCollector
from embodrl.workers.evaluator import EvalResult, Played, evaluation_result
from embodrl.workers.group_source import RemoteCollector, RemoteRunner
from embodrl.workers.policy import resolve_device
from embodrl.workers.rollout_process import RolloutProcess, channel_names
from embodrl.workers.rollouts import Rollouts
from embodrl.workers.weights import LocalSender, RemoteSender, WeightChannel

logger = logging.getLogger(__name__)

_POLL_S = 0.1
_STOP_PLACES = 16
_PIPE_PLACES = 4
_START_TIMEOUT_S = 3600.0
_SYNC_ATTEMPTS = 3


def sends_weights(config: Config, deployment: Deployment) -> bool:
    """Return whether the training processes send their weights to the rollout processes themselves."""
    return deployment.main_component is None and not config.runner.max_staleness


class RolloutGroup(Rollouts):
    """The rollout processes of a deployment.

    Args:
        config: the run.
        deployment: with a place for each process.
        launcher: brings them up; closed by its owner.
        run_dir: of the run; weights may go through it.
    """

    def __init__(self, config: Config, deployment: Deployment, launcher: Launcher, run_dir: Path) -> None:
        self.config, self.deployment, self.launcher, self.run_dir = config, deployment, launcher, run_dir
        self.places = deployment.of("rollout")
        self.size = len(self.places)
        self.log_dir = run_dir / "logs"
        self.group = WorkerGroup(
            RolloutProcess,
            "rollout",
            independent=True,
            config=config,
            deployment=deployment,
            log_dir=str(self.log_dir.resolve()),
        )
        self._faults = FaultCounts()
        self._known_faults: list[dict[str, int]] = [{} for _ in self.places]
        self._carried: list[dict[str, Any] | None] = [None for _ in self.places]
        self._new: set[int] = set()  # brought up anew, and without what their predecessors knew
        self._calls = itertools.count()
        self._incarnations = [0 for _ in self.places]
        self._pings: dict[int, Handle] = {}
        self._revival = threading.Lock()
        self._restarts = 0
        self._tasks: list[str] = []
        self._weights: Callable[[], Iterable[tuple[str, Tensor]]] = lambda: ()
        self._version = 0
        self._pipes: dict[str, Channel] = {}
        self._closing = ExitStack()
        self._closing.callback(self.group.close)

    # -- life ---------------------------------------------------------------------------------------------------------

    def weight_pipes(self) -> dict[str, Channel] | None:
        if not self._pipes:
            names = [channel_names(rank)["weights"] for rank in range(self.size)]
            self._pipes = {name: self.launcher.channel(name, _PIPE_PLACES) for name in names}
        return self._pipes if sends_weights(self.config, self.deployment) else None

    def wait_started(self) -> None:
        self.weight_pipes()
        channels = self._pipes | {
            name: self.launcher.channel(name, _STOP_PLACES if name.startswith("stop") else _PIPE_PLACES)
            for rank in range(self.size)
            for name in channel_names(rank).values()
            if name not in self._pipes
        }
        self.group.launch(self.places, self.launcher, channels, self.log_dir, _START_TIMEOUT_S)
        about = self.group.call_on(0, "about").result()
        self._tasks, self._num_envs = about["tasks"], about["num_envs"] * self.size
        self._stop = [channels[channel_names(rank)["stop"]] for rank in range(self.size)]
        self._answers = [channels[channel_names(rank)["answers"]] for rank in range(self.size)]

    @property
    def tasks(self) -> Sequence[str]:
        return self._tasks

    @property
    def faults(self) -> FaultCounts:
        return self._faults

    def prepare(self, policy: VLAPolicy, should_stop: Callable[[], bool], keep_frames: bool) -> None:
        self.policy, self.should_stop, self.keep_frames = policy, should_stop, keep_frames
        self.trained = trained_names(policy)
        kind = choose_weight_sync(self.deployment, self.config.rollout.weight_sync)
        pipes = list(self._pipes.values())
        if self.sending is None:
            sender, where, device = LocalSender(pipes, self.trained, self.launcher.address), "driver", policy.device
        else:
            sender, where = RemoteSender(self.sending, self._pipes, self.trained), "training process of rank 0"
            device = resolve_device(self.config)
        self.link = WeightChannel(
            kind,
            sender,
            pipes,
            self._answers,
            self.run_dir.resolve() / "weight_sync",
            "cuda" if uses_nccl(self.deployment) and device.type == "cuda" else "cpu",
        )
        self._closing.callback(self.link.close)
        logger.info("%d rollout process(es), weights by %s from the %s", self.size, kind, where)
        for handle in [self.group.call_on(rank, "prepare", keep_frames) for rank in range(self.size)]:
            handle.result()
        self._keep(policy.state_dict().items())
        with self._revival:
            self._join_all()
        if self.config.runner.max_staleness:
            players = [RemoteRunner(self, rank) for rank in range(self.size)]
            self.source = AsyncCollector(self.config, self._num_envs, len(self._tasks), players, self, should_stop)
        else:
            self.source = RemoteCollector(self)
        self._closing.callback(self.source.close)

    def close(self) -> None:
        self._closing.close()

    # -- weights ------------------------------------------------------------------------------------------------------

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Let all processes act with these weights, and wait until they do.

        Raises:
            WeightSyncError: they did not get there, in several attempts.
            WorkerDied: ``rollout.max_restarts`` are used up.
        """
        with self._revival:
            self._keep(weights)
            again, self._version = version <= self._version, version
            if not self.config.runner.max_staleness:  # ahead of training nothing is carried but random numbers
                self._carried = [None if known is None else _no_update(known["random"]) for known in self._carried]
            if again:  # the run went back to a checkpoint, and a link only goes forward
                self._join_all()
                return
            try:
                self.link.send(self._weights(), version, self._check)
            except (WeightSyncError, WorkerDied) as error:
                logger.warning("weights of version %d: %s; they are sent again, whole", version, error)
                self._join_all()

    def _keep(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Keep hold of what all processes act with, for those that are brought up anew."""
        if not self.config.runner.max_staleness:
            self._weights = self._state_dict
            return
        # Beside rollouts the policy trains on: what is in it is the weights of no version.
        copies = {name: tensor.detach().cpu().clone() for name, tensor in weights if name in self.trained}
        self._weights = lambda: ((name, copies.get(name, tensor)) for name, tensor in self._state_dict())

    def _state_dict(self) -> Iterable[tuple[str, Tensor]]:
        with nullcontext() if self.trainer is None else self.trainer.memory.present():
            yield from self.policy.state_dict().items()

    def _join_all(self) -> None:
        """Connect all processes anew, bringing up those that have gone, and send all weights."""
        for attempt in itertools.count(1):
            try:
                options = self.link.options()
                handles = [self.group.call_on(rank, "join", options) for rank in range(self.size)]
                self.link.open(options, lambda handles=handles: _raise_known(handles))
                wait_all(handles)
                self.link.send(self._weights(), self._version, self._check)
                self._carry_on()
                return
            except WorkerDied as error:
                self._revive(error)
            except (WeightSyncError, WorkerRaised) as error:
                if attempt >= _SYNC_ATTEMPTS:
                    raise
                logger.warning("%s", error)
                for rank in range(self.size):
                    try:
                        self.group.call_on(rank, "about").result()
                    except WorkerDied as died:
                        self._revive(died)

    def _carry_on(self) -> None:
        """Let new processes go on where their predecessors were; weights would end the update that they are in."""
        for rank in sorted(self._new):
            if (carried := self._carried[rank]) is not None:
                self.group.call_on(rank, "carry_on", carried).result()
            self._new.remove(rank)

    def _check(self) -> None:
        """Raise if a process has gone, as far as is known."""
        for rank in range(self.size):
            ping = self._pings.pop(rank, None) or self.group.call_on(rank, "about")
            if not ping.done:
                self._pings[rank] = ping
            elif ping.error is not None:
                raise ping.error

    def revive(self, error: WorkerDied, incarnation: int) -> None:
        """Bring up a process anew, with the weights that all act with.

        Args:
            error: of the one that has gone.
            incarnation: which one that was; nothing happens if there is a later one.

        Raises:
            WorkerDied: ``rollout.max_restarts`` are used up.
        """
        with self._revival:
            if self._incarnations[error.rank] == incarnation:
                self._revive(error)
                self._join_all()

    def _revive(self, error: WorkerError) -> None:
        rank = error.rank
        while True:
            self._count_restart(error)
            try:
                self.group.restart(rank, _START_TIMEOUT_S)
                self.group.call_on(rank, "prepare", self.keep_frames).result()
                self._new.add(rank)
                return
            except WorkerError as again:
                error = again

    def _count_restart(self, error: WorkerError) -> None:
        rank, limit = error.rank, self.config.rollout.max_restarts
        if self._restarts >= limit:
            raise WorkerDied(
                f"given up after {limit} restarts of rollout processes: {error.message}",
                error.hint,
                rank,
                log_tail=error.log_tail,
            ) from error
        self._restarts += 1
        self._incarnations[rank] += 1
        self._pings.pop(rank, None)
        self._known_faults[rank] = {}
        self._faults.count("rollout_restarts")
        logger.warning("restart %d of %d of a rollout process: %s", self._restarts, limit, error.message)

    # -- requests -----------------------------------------------------------------------------------------------------

    def ask(
        self,
        method: str,
        arguments: Sequence[tuple[Any, ...]],
        ranks: Sequence[int] | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> list[dict[str, Any]]:
        """Return what the processes answer to a request that can be interrupted; who dies is asked again.

        Args:
            method: of RolloutProcess.
            arguments: after the number of the call, by process.
            ranks: the processes; None for all.
            should_stop: asked now and then; None takes that of the run.

        Raises:
            InterruptedError: ``should_stop`` answered True.
            WorkerError: a method raised, or processes die again and again.
        """
        ranks = range(self.size) if ranks is None else ranks
        should_stop = should_stop or self.should_stop
        call, incarnations = next(self._calls), list(self._incarnations)
        given = dict(zip(ranks, arguments, strict=True))
        handles = {rank: self.group.call_on(rank, method, call, *own) for rank, own in given.items()}
        answers: dict[int, dict[str, Any] | None] = {}
        stopped = False
        try:
            while pending := [rank for rank in handles if rank not in answers]:
                if not stopped and should_stop():
                    stopped = True
                    self._signal(call, pending)
                futures = [future for rank in pending for future in handles[rank].futures.values() if not future.done()]
                wait(futures, _POLL_S, FIRST_COMPLETED)
                gone = {rank: isinstance(handles[rank].error, WorkerDied) for rank in pending}
                for rank, dead in sorted(gone.items(), key=lambda item: item[1]):
                    # Who takes the place of another gets its weights when all are free to meet.
                    if not handles[rank].done or (dead and not all(handles[other].done for other in pending)):
                        continue
                    try:
                        answers[rank] = answer = handles[rank].result()
                        if answer is not None:  # at once: it may die before the others have answered
                            self._learn(rank, answer)
                    except WorkerDied as error:
                        self.revive(error, incarnations[rank])
                        incarnations[rank] = self._incarnations[rank]
                        if stopped:
                            answers[rank] = None
                        else:
                            handles[rank] = self.group.call_on(rank, method, call, *given[rank])
        except BaseException:
            self._give_up(call, {rank: handles[rank] for rank in handles if rank not in answers})
            raise
        found = [answer for answer in answers.values() if answer is not None]
        if len(found) < len(answers):
            raise InterruptedError
        return [answers[rank] or {} for rank in ranks]

    def remember(self, random: Sequence[list[str]]) -> None:
        """Keep where the random numbers of each process are, for one that takes its place."""
        self._carried = [_no_update(numbers) for numbers in random]

    def _signal(self, call: int, ranks: Iterable[int]) -> None:
        for rank in ranks:
            try:
                self._stop[rank].put(call, 0.0)
            except ChannelTimeout:
                logger.warning("rollout process %d has not looked for signals", rank)

    def _give_up(self, call: int, handles: dict[int, Handle]) -> None:
        """Let the others come to an end, too, so that the next request finds them free."""
        self._signal(call, handles)
        wait([future for handle in handles.values() for future in handle.futures.values()], _START_TIMEOUT_S)

    def _learn(self, rank: int, answer: dict[str, Any]) -> None:
        """Take note of faults, and of where the random numbers are."""
        known = self._known_faults[rank]
        for name, number in answer["faults"].items():
            self._faults.count(name, number - known.get(name, 0))
        self._known_faults[rank] = answer["faults"]
        self._carried[rank] = answer.get("carried", self._carried[rank])

    def ask_one(self, rank: int, method: str) -> Any:
        """Return the answer of one process; as ``all``."""
        return self.all(method, ranks=[rank])[0]

    def all(self, method: str, *arguments: Sequence[Any], ranks: Sequence[int] | None = None) -> list[Any]:
        """Return what all processes answer to a request that takes no time; ``arguments`` are by process.

        A process that has died is brought up anew and asked again.
        """
        ranks = range(self.size) if ranks is None else ranks
        given = list(zip(*arguments, strict=True)) if arguments else [()] * len(ranks)
        incarnations = list(self._incarnations)
        handles = [self.group.call_on(rank, method, *own) for rank, own in zip(ranks, given, strict=True)]
        answers: list[Any] = []
        for rank, handle, own in zip(ranks, handles, given, strict=True):
            while True:
                try:
                    answers.append(handle.result())
                    break
                except WorkerDied as error:
                    self.revive(error, incarnations[rank])
                    incarnations[rank] = self._incarnations[rank]
                    handle = self.group.call_on(rank, method, *own)
        return answers

    # -- memory -------------------------------------------------------------------------------------------------------

    def offload_policies(self) -> OffloadReport | None:
        found = [answer for answer in self.all("offload_policy") if answer is not None]
        return OffloadReport.total([OffloadReport(torch.device(name), *num_bytes) for name, *num_bytes in found])

    def offload_simulators(self, end_processes: bool) -> SimulatorMemory | None:
        found = [answer for answer in self.all("offload_simulators", [end_processes] * self.size) if answer is not None]
        return SimulatorMemory(sum(b for b, _ in found), sum(a for _, a in found)) if found else None

    def onload(self) -> None:
        self.all("onload")

    def onload_policy(self) -> None:
        if self.trainer is not None:
            self.trainer.onload()

    def evaluate(self, video_dir: Path | None) -> EvalResult:
        episodes = np.array_split(np.arange(self.config.env.eval.num_episodes), self.size)
        where = None if video_dir is None else str(video_dir.resolve())
        with self.source.quiet():
            parts = self.ask("evaluate", [(part, where) for part in episodes])
        played = Played(
            np.concatenate([part["outcome"] for part in parts]),
            [text for part in parts for text in part["instructions"]],
            max(part["env_s"] for part in parts),
            max(part["policy_s"] for part in parts),
        )
        return evaluation_result(self.config, self._tasks, played)


def _no_update(random: list[str]) -> dict[str, Any]:
    """Return what a process carries that has these random numbers and is in no update."""
    return {"metas": [], "random": random, "before": None}


def _raise_known(handles: Sequence[Handle]) -> None:
    """Raise the first error that is known, without waiting."""
    for handle in handles:
        if handle.error is not None:
            raise handle.error
