"""A rollout process: a share of the environments, with its own simulators and weights."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from embodrl.config.schema import Config
from embodrl.data.trajectory import TrajectoryBatch
from embodrl.deployment import Deployment
from embodrl.errors import ChannelClosed, ChannelTimeout
from embodrl.hybrid_engines.weight_sync.buckets import layout_of
from embodrl.scheduler.worker import Worker, dispatch
from embodrl.types import Decoding
from embodrl.workers.async_collector import EpisodeRunner, make_runners
from embodrl.workers.collector import RolloutState, Share, Snapshot, SyncCollector, share_config
from embodrl.workers.env import held_out_pool
from embodrl.workers.evaluator import Evaluator, run_decodings
from embodrl.workers.lockstep import Shard, ShardMeta
from embodrl.workers.parts import make_share
from embodrl.workers.recorders import Judging
from embodrl.workers.reward import DetachedRewards, RewardWorker
from embodrl.workers.rollout_backend import make_sync_collector
from embodrl.workers.weights import ReceiverThread, Route, make_receiver


def channel_names(rank: int) -> dict[str, str]:
    """Return the names of a process's channels: signals, weights, answers."""
    return {name: f"{name}_{rank}" for name in ("stop", "weights", "answers")}


class Answer(TypedDict):
    """Answer of a rollout process to a long request; see RolloutProcess."""

    faults: dict[str, int]
    carried: NotRequired[Snapshot]


class Gathered(Answer):
    """Answer to a request for a batch."""

    batch: TrajectoryBatch
    rewards: DetachedRewards | None
    metas: list[ShardMeta]


class Evaluated(Answer):
    """Answer to a request for an evaluation: the fields of ``EpisodeResults``, by decoding."""

    played: dict[Decoding, dict[str, Any]]


class RolloutProcess(Worker):
    """Collects and evaluates for the driver, which calls the methods; ``call`` numbers its requests."""

    def __init__(self, config: Config, deployment: Deployment, log_dir: str | None = None) -> None:
        share = Share(self.rank, self.world_size)
        logs = None if log_dir is None else Path(log_dir) / f"rollout_{self.rank}"
        places = deployment.of("env")[share.rows(config.env.num_processes)]
        self.pool, self.engine = make_share(config, deployment, share, logs, places)
        self.config = mine = share_config(config, share)
        self.share = share
        self.channels = {name: self.channel(full) for name, full in channel_names(self.rank).items()}
        make_own = partial(held_out_pool, log_dir=logs, places=places)
        self.evaluator = Evaluator(mine, self.pool, self.engine, self._should_stop, make_own)
        self.rewards = RewardWorker(config, tuple(self.pool.spec.tasks)) if config.reward.judged else None
        # SRPO judges in the driver, from the frames.
        judging = Judging(keep_frames=config.algorithm.srpo.enabled)
        if self.rewards is not None:
            self.rewards.check(self.pool.spec)
            judging = self.rewards.judging
        self._collector: SyncCollector | None = None
        self._runner: EpisodeRunner | None = None
        if config.runner.max_staleness:
            # Requests are served one after another: several pipeline stages would only make batches smaller.
            rollout = mine.rollout.model_copy(update={"pipeline_stages": 1})
            alone = mine.model_copy(update={"rollout": rollout})
            (self._runner,) = make_runners(alone, self.pool, self.engine, judging)
        else:
            self._collector = make_sync_collector(mine, self.pool, self.engine, self._should_stop, judging, share)
        self._receiver: ReceiverThread | None = None
        self._call = -1
        self._stopped = False

    # -- lifecycle -----------------------------------------------------------------------------------------------------

    @dispatch()
    def about(self) -> dict[str, object]:
        """Return the process id, the task names, and the numbers of environments and state dimensions."""
        spec = self.pool.spec
        sizes = {"num_envs": spec.num_envs, "state_dim": spec.state_dim}
        return {"pid": os.getpid(), "tasks": list(spec.tasks), **sizes}

    @dispatch()
    def join(self, options: Route) -> None:
        """Receive weights from a new generation of the channel (``WeightChannel.options``)."""
        if self._receiver is not None:
            # Two receivers would read from the same channel.
            self._receiver.close()
        receiver = make_receiver(self, options, self.channels["weights"], self.rank, layout_of(self.engine.policy))
        self._receiver = ReceiverThread(receiver, self.channels["answers"], options["generation"])

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Accept weights (a ``WeightTarget``); called by the receiver's thread."""
        # The current version arrives again after another process was restarted: the update in progress continues.
        again = self.engine.version == version
        target = self.engine if again or self.is_asynchronous else self.collector
        target.update_weights(weights, version)

    def close(self) -> None:
        """Stop the simulators."""
        if self._receiver is not None:
            self._receiver.close()
        if self.rewards is not None:
            self.rewards.close()
        self.pool.close()

    # -- requests ------------------------------------------------------------------------------------------------------

    @property
    def is_asynchronous(self) -> bool:
        """Whether the driver chooses the next shards."""
        return self._collector is None

    @property
    def collector(self) -> SyncCollector:
        """Collector of a synchronous run."""
        assert self._collector is not None
        return self._collector

    @property
    def runner(self) -> EpisodeRunner:
        """Runner of an asynchronous run."""
        assert self._runner is not None
        return self._runner

    @dispatch()
    def gather(self, call: int, iteration: int) -> dict[str, object] | None:
        """Return a batch and its metadata; None if interrupted. See Collector."""
        return self._rolled_out(call, lambda: self.collector.gather(iteration)[0])

    @dispatch()
    def gather_more(self, call: int, iteration: int, epoch: int) -> dict[str, object] | None:
        """Like ``gather``, for another rollout of the update."""
        return self._rolled_out(call, lambda: self.collector.gather_more(iteration, epoch)[0])

    @dispatch()
    def roll_out(self, call: int, shard: dict[str, Any]) -> dict[str, object] | None:
        """Like ``gather``, for a shard of an asynchronous run."""
        return self._rolled_out(call, lambda: self.runner.roll_out(Shard(**shard), self._should_stop))

    def _rolled_out(self, call: int, roll_out: Callable[[], TrajectoryBatch]) -> dict[str, object] | None:
        self._call = call
        self._stopped = False
        try:
            batch = roll_out()
            rewards = None if self.rewards is None else self.rewards.detach(batch, self._should_stop)
        except InterruptedError:
            return None
        carried: Snapshot
        if self.is_asynchronous:
            carried = {"metas": [], "random": self.engine.random_state(), "before": None}
        else:
            carried = self.collector.snapshot()
        return {
            "batch": batch,
            "rewards": rewards,
            "metas": carried["metas"],
            "carried": carried,
            **self._faults(),
        }

    @dispatch()
    def evaluate(
        self, call: int, episodes: NDArray[np.int64], video_dir: str | None, every_decoding: bool
    ) -> dict[str, object] | None:
        """Return the results of episodes ``int64[n]``; None if interrupted. See Evaluator."""
        self._call = call
        self._stopped = False
        where = None if video_dir is None else Path(video_dir)
        decodings = run_decodings(self.evaluator.config, self.engine, every_decoding)
        try:
            played = self.evaluator.run_episodes(episodes, where, decodings=decodings)
        except InterruptedError:
            return None
        return {"played": {decoding: vars(results) for decoding, results in played.items()}, **self._faults()}

    def _faults(self) -> dict[str, object]:
        return {"faults": dict(vars(self.pool.faults))}

    def _should_stop(self) -> bool:
        try:
            # Signals for earlier requests may still be in the channel; they are discarded.
            while not self._stopped:
                self._stopped = self.channels["stop"].get(0.0) == self._call
        except ChannelTimeout:
            pass
        except ChannelClosed:
            self._stopped = True
        return self._stopped

    @dispatch()
    def rebuild(self) -> None:
        self.runner.rebuild()

    @dispatch()
    def offload_policy(self) -> tuple[str, int, int] | None:
        """Offload the weights; return the device and the bytes allocated there before and after."""
        self.engine.offload()
        report = self.engine.offload_report
        return None if report is None else (str(report.device), report.before, report.after)

    @dispatch()
    def offload_simulators(self, end_processes: bool) -> tuple[int, int] | None:
        """Move the simulators out of memory; return the bytes before and after."""
        memory = self.pool.offload(end_processes)
        return None if memory is None else (memory.before, memory.after)

    @dispatch()
    def onload(self) -> None:
        """Bring back weights and simulators."""
        self.engine.onload()
        self.pool.onload()

    @dispatch()
    def undo(self) -> list[str]:
        """Undo the current update; return the random state."""
        self.collector.undo()
        return self.engine.random_state()

    @dispatch()
    def reset_history(self) -> None:
        self.collector.reset_history()

    @dispatch()
    def restore(self, carried: Snapshot) -> None:
        """Continue from the predecessor's snapshot; see ``SyncCollector.restore``."""
        if self.is_asynchronous:
            self.engine.set_random_state(carried["random"])
        else:
            self.collector.restore(carried)

    @dispatch()
    def state(self) -> dict[str, object]:
        return dict(vars(self.collector.state()))

    @dispatch()
    def load_state(
        self, state: dict[str, object], tensors: dict[str, dict[str, Tensor]], blobs: dict[str, bytes]
    ) -> list[str]:
        """Load a state with the version of the last weights; return the random state."""
        self.collector.load_state(RolloutState(state, tensors, blobs), self.engine.version)
        return self.engine.random_state()
