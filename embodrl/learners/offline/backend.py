"""Rollout backend of offline runs: gathers nothing, and starts simulators with the first evaluation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from embodrl.config.schema import Config
from embodrl.deployment import ProcessPlace
from embodrl.envs.pool.faults import FaultCounts
from embodrl.envs.pool.offload import SimulatorMemory
from embodrl.envs.pool.pool import EnvPool
from embodrl.hybrid_engines.offload import OffloadReport
from embodrl.hybrid_engines.rollout.base import RolloutEngine
from embodrl.workers.collector import Collector, NoCollector
from embodrl.workers.env import check_environments, make_pool
from embodrl.workers.evaluator import EvalResult, run_decodings
from embodrl.workers.rollout_backend import RolloutBackend, evaluator_class


class OfflineBackend(RolloutBackend):
    """The driver acts, in evaluations only; ``should_stop`` interrupts them. ``collector`` gives batches, if any."""

    def __init__(
        self,
        config: Config,
        engine: RolloutEngine,
        places: tuple[ProcessPlace, ...],
        log_dir: Path,
        should_stop: Callable[[], bool],
        collector: Callable[[Config, RolloutEngine], NoCollector] | None = None,
    ) -> None:
        self.config = config
        self.engine = engine
        self.should_stop = should_stop
        self.collector: Collector = (collector or NoCollector)(config, engine)
        self.tasks = config.env.tasks
        self.faults = FaultCounts()
        self._places = places
        self._log_dir = log_dir
        self._pool: EnvPool | None = None

    def num_decodings(self, every_decoding: bool) -> int:
        return len(run_decodings(self.config, self.engine, every_decoding))

    def evaluate(self, video_dir: Path | None, every_decoding: bool) -> EvalResult:
        pool = self._pool or self._start()
        decodings = run_decodings(self.config, self.engine, every_decoding)
        evaluator = evaluator_class(self.config)
        return evaluator(self.config, pool, self.engine, self.should_stop, decodings=decodings).run(video_dir)

    def _start(self) -> EnvPool:
        config = self.config.evaluated
        pool = make_pool(config, config.env.train.total_num_envs, self._log_dir, places=self._places)
        self._pool = pool
        pool.start()
        check_environments(config, pool, training=False)
        vars(pool.faults).update(vars(self.faults))
        self.faults = pool.faults
        return pool

    def offload_policies(self) -> OffloadReport | None:
        self.engine.offload()
        return self.engine.offload_report

    def offload_simulators(self, end_processes: bool) -> SimulatorMemory | None:
        return None if self._pool is None else self._pool.offload(end_processes)

    def onload(self) -> None:
        self.engine.onload()
        if self._pool is not None:
            self._pool.onload()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
