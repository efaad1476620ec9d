"""Who plays: the main process itself, or processes of their own. The training loop sees no difference."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path

from embodrl.config.schema import Config
from embodrl.deployment import Deployment
from embodrl.envs.pool.faults import FaultCounts
from embodrl.envs.pool.offload import SimulatorMemory
from embodrl.hybrid_engines.offload import OffloadReport
from embodrl.hybrid_engines.rollout.native import make_rollout_engine
from embodrl.hybrid_engines.training.policy_engine import PolicyTrainEngine
from embodrl.models.base import VLAPolicy
from embodrl.scheduler.channel import Channel
from embodrl.scheduler.group import WorkerGroup
from embodrl.workers.collector import Collector
from embodrl.workers.env import make_pool
from embodrl.workers.evaluator import EvalResult, Evaluator
from embodrl.workers.rollout_source import make_collector


class Rollouts(ABC):
    """Simulators, and the policy that acts in them.

    ``start_async``, ``wait_started``, ``prepare``; then ``source`` and ``evaluate`` can be used.

    Attributes:
        source: where batches come from.
        trainer: trains in this process with weights that only it uses, so that they may be away; None if none does.
        sending: the processes that train, where they send their weights to those that act; None if this one does.
    """

    source: Collector
    trainer: PolicyTrainEngine | None = None
    sending: WorkerGroup | None = None

    def start_async(self) -> None:  # noqa: B027 - not all can
        """Begin to start what takes time."""

    def weight_pipes(self) -> dict[str, Channel] | None:
        """Return the channels that processes that train send weights through by themselves; None if they do not."""
        return None

    @abstractmethod
    def wait_started(self) -> None:
        """Wait until all is there.

        Raises:
            EnvError: a simulator could not be brought up.
            WorkerError: a process could not be brought up.
        """

    @property
    @abstractmethod
    def tasks(self) -> Sequence[str]:
        """Names of the tasks, which take turns."""

    @property
    @abstractmethod
    def faults(self) -> FaultCounts:
        """What went wrong in the run so far."""

    @abstractmethod
    def prepare(self, policy: VLAPolicy, should_stop: Callable[[], bool], keep_frames: bool) -> None:
        """Get ready to play.

        Args:
            policy: that trains, or has the weights of what trains.
            should_stop: asked now and then; True interrupts what is under way.
            keep_frames: keep what the first camera sees, for those who judge episodes by it.
        """

    @abstractmethod
    def evaluate(self, video_dir: Path | None) -> EvalResult:
        """Play the episodes of ``env.eval`` with the newest weights.

        Raises:
            InterruptedError: ``should_stop`` answered True.
        """

    @abstractmethod
    def offload_policies(self) -> OffloadReport | None:
        """Take the weights that only act off their device, with what else acting needs; return what that freed."""

    @abstractmethod
    def offload_simulators(self, end_processes: bool) -> SimulatorMemory | None:
        """Take the simulators out of memory; return what that freed. See ``EnvPool.offload``."""

    @abstractmethod
    def onload(self) -> None:
        """Bring back policies and simulators."""

    @abstractmethod
    def onload_policy(self) -> None:
        """Bring back the policy of this process."""

    @abstractmethod
    def close(self) -> None:
        """End all processes."""


class LocalRollouts(Rollouts):
    """The main process acts, with the weights that train or a copy of them.

    Args:
        config: the run.
        deployment: where everything is.
        log_dir: where the output of the simulators goes.
    """

    def __init__(self, config: Config, deployment: Deployment, log_dir: Path | None = None) -> None:
        self.config, self.deployment = config, deployment
        self.pool = make_pool(config, config.env.train.total_num_envs, log_dir, places=deployment.of("env"))
        self._prepared = False

    def start_async(self) -> None:
        self.pool.start_async()

    def wait_started(self) -> None:
        self.pool.wait_started()
        self.pool.call("check_state")

    @property
    def tasks(self) -> Sequence[str]:
        return self.pool.spec.tasks

    @property
    def faults(self) -> FaultCounts:
        return self.pool.faults

    def prepare(self, policy: VLAPolicy, should_stop: Callable[[], bool], keep_frames: bool) -> None:
        self.acting = acting = make_rollout_engine(
            self.config, policy, self.deployment.threads_of(self.deployment.of("rollout")[0])
        )
        acting.may_offload = self.config.rollout.enable_offload and self.deployment.trains_in_processes
        self.source = make_collector(self.config, self.pool, acting, should_stop, keep_frames)
        self.evaluator = Evaluator(self.config, self.pool, acting, should_stop=should_stop)
        self._prepared = True

    def evaluate(self, video_dir: Path | None) -> EvalResult:
        with self.source.quiet():
            return self.evaluator.run(video_dir)

    def offload_policies(self) -> OffloadReport | None:
        self.acting.offload()
        return self.acting.offload_report

    def offload_simulators(self, end_processes: bool) -> SimulatorMemory | None:
        return self.pool.offload(end_processes)

    def onload(self) -> None:
        self.acting.onload()
        self.pool.onload()

    def onload_policy(self) -> None:
        self.acting.onload()

    def close(self) -> None:
        if self._prepared:
            self.source.close()
        self.pool.close()
