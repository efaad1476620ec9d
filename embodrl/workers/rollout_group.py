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
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodrl.config.schema import Config
from embodrl.envs.faults import FaultCounts
from embodrl.envs.offload import SimulatorMemory
from embodrl.errors import ChannelTimeout, WeightSyncError, WorkerDied, WorkerRaised
from embodrl.hybrid_engines.offload import OffloadReport
from embodrl.hybrid_engines.weight_sync.buckets import trained_names
from embodrl.hybrid_engines.weight_sync.choice import choose_weight_sync, uses_nccl
from embodrl.models.base import VLAPolicy
from embodrl.scheduler.group import Handle, WorkerGroup
from embodrl.scheduler.launchers.base import Launcher
from embodrl.scheduler.placement import Placement
from embodrl.workers.async_rollout import AsyncRolloutWorker
from embodrl.workers.evaluate import EvalResult, Played, evaluation_result
from embodrl.workers.group_source import GroupSource, RemotePlayer
from embodrl.workers.rollout_process import RolloutProcess, channel_names
from embodrl.workers.rollouts import Rollouts
from embodrl.workers.weight_link import WeightLink

logger = logging.getLogger(__name__)

_POLL_S = 0.1
_STOP_PLACES = 16
_START_TIMEOUT_S = 3600.0
_SYNC_ATTEMPTS = 3


class RolloutGroup(Rollouts):
    """The rollout processes of a placement.

    Args:
        config: the run.
        placement: with a place for each process.
        launcher: brings them up; closed by its owner.
        run_dir: of the run; weights may go through it.
    """

    def __init__(self, config: Config, placement: Placement, launcher: Launcher, run_dir: Path) -> None:
        self.config, self.placement, self.launcher, self.run_dir = config, placement, launcher, run_dir
        self.places = placement.of("rollout")
        self.size = len(self.places)
        self.log_dir = run_dir / "logs"
        self.group = WorkerGroup(
            RolloutProcess, "rollout", independent=True, config=config, log_dir=str(self.log_dir.resolve())
        )
        self._faults = FaultCounts()
        self._known_faults: list[dict[str, int]] = [{} for _ in self.places]
        self._random: list[list[str] | None] = [None for _ in self.places]
        self._calls = itertools.count()
        self._incarnations = [0 for _ in self.places]
        self._pings: dict[int, Handle] = {}
        self._revival = threading.Lock()
        self._restarts = 0
        self._tasks: list[str] = []
        self._weights: Callable[[], Iterable[tuple[str, Tensor]]] = lambda: ()
        self._version = 0

    # -- life ---------------------------------------------------------------------------------------------------------

    def wait_started(self) -> None:
        channels = {
            name: self.launcher.channel(name, _STOP_PLACES if name.startswith("stop") else 4)
            for rank in range(self.size)
            for name in channel_names(rank).values()
        }
        self.group.launch(self.places, self.launcher, channels, self.log_dir, _START_TIMEOUT_S)
        about = self.group.call_on(0, "about").result()
        self._tasks, self._num_envs = about["tasks"], about["num_envs"] * self.size
        self._stop = [channels[channel_names(rank)["stop"]] for rank in range(self.size)]
        self._link_channels = (
            [channels[channel_names(rank)["weights"]] for rank in range(self.size)],
            [channels[channel_names(rank)["answers"]] for rank in range(self.size)],
        )

    @property
    def tasks(self) -> Sequence[str]:
        return self._tasks

    @property
    def faults(self) -> FaultCounts:
        return self._faults

    def prepare(self, policy: VLAPolicy, should_stop: Callable[[], bool], keep_frames: bool) -> None:
        self.policy, self.should_stop, self.keep_frames = policy, should_stop, keep_frames
        self.trained = trained_names(policy)
        kind = choose_weight_sync(self.placement, False, self.config.rollout.weight_sync)
        assert kind != "shared"
        pipes, answers = self._link_channels
        self.link = WeightLink(
            kind,
            pipes,
            answers,
            self.trained,
            self.run_dir.resolve() / "weight_sync",
            self.launcher.address,
            "cuda" if uses_nccl(self.placement) else "cpu",
        )
        logger.info("%d rollout process(es), weights by %s", self.size, kind)
        for handle in [self.group.call_on(rank, "prepare", keep_frames) for rank in range(self.size)]:
            handle.result()
        self._keep(policy.state_dict().items())
        with self._revival:
            self._join_all()
        if self.config.runner.max_staleness:
            players = [RemotePlayer(self, rank) for rank in range(self.size)]
            self.source = AsyncRolloutWorker(self.config, self._num_envs, len(self._tasks), players, self, should_stop)
        else:
            self.source = GroupSource(self)

    def close(self) -> None:
        if hasattr(self, "source"):
            self.source.close()
            self.link.close()
        self.group.close()

    # -- weights ------------------------------------------------------------------------------------------------------

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Let all processes act with these weights, and wait until they do.

        Raises:
            WeightSyncError: they did not get there, in several attempts.
            WorkerDied: ``rollout.max_restarts`` are used up.
        """
        with self._revival:
            self._keep(weights)
            self._version = version
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
        return self.policy.state_dict().items()

    def _join_all(self) -> None:
        """Connect all processes anew, bringing up those that have gone, and send all weights."""
        for attempt in itertools.count(1):
            try:
                options = self.link.options()
                handles = [self.group.call_on(rank, "join", options) for rank in range(self.size)]
                for handle in handles:  # one that has gone would be waited for
                    if handle.error is not None:
                        raise handle.error
                self.link.open(options)
                for handle in handles:
                    handle.result()
                self.link.send(self._weights(), self._version, self._check)
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

    def _revive(self, error: WorkerDied) -> None:
        rank, limit = error.rank, self.config.rollout.max_restarts
        if self._restarts >= limit:
            raise WorkerDied(
                f"given up after {limit} restarts of rollout processes: {error.message}",
                error.remedy,
                rank,
                log_tail=error.log_tail,
            ) from error
        self._restarts += 1
        self._incarnations[rank] += 1
        self._pings.pop(rank, None)
        self._faults.count("rollout_restarts")
        logger.warning("restart %d of %d of a rollout process: %s", self._restarts, limit, error.message)
        self._known_faults[rank] = {}
        self.group.restart(rank, _START_TIMEOUT_S)
        self.group.call_on(rank, "prepare", self.keep_frames).result()
        if (random := self._random[rank]) is not None:
            self.group.call_on(rank, "draw_from", random).result()

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
                for rank in pending:
                    # Who takes the place of another gets its weights when all are free to meet.
                    dead = isinstance(handles[rank].error, WorkerDied)
                    if not handles[rank].done or (dead and not all(handles[other].done for other in pending)):
                        continue
                    try:
                        answers[rank] = handles[rank].result()
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
        for rank, answer in answers.items():
            assert answer is not None
            self._learn(rank, answer)
        return [answers[rank] or {} for rank in ranks]

    def remember(self, random: Sequence[list[str]]) -> None:
        """Keep where the random numbers of each process are, for one that takes its place."""
        self._random = list(random)

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
        self._random[rank] = answer.get("random", self._random[rank])

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
        """The policy of this process does not act, and stays."""

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
