"""Learning with data of a fixed age: ``python benchmarks/fixed_staleness.py LAG [OVERRIDES ...]``.

How old the data of an asynchronous run are depends on the machine. Here rollouts and updates take turns, and the policy
that acts has the weights of LAG updates ago (of the start, in the first ones), so that runs can be compared. Such a run
can't be resumed.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable

from torch import Tensor

from embodrl.config import load_config
from embodrl.config.schema import Config
from embodrl.envs.pool.pool import EnvPool
from embodrl.hybrid_engines.copies import frozen_copy
from embodrl.hybrid_engines.rollout.native import NativeRolloutEngine
from embodrl.runs import train as runner
from embodrl.trainer import parts
from embodrl.workers.collector import Collector, SyncCollector
from embodrl.workers.reward import RewardWorker


class LaggedRollout(SyncCollector):
    """Uses weights that are ``lag`` updates old."""

    lag = 0

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """See Collector."""
        if not hasattr(self, "_kept"):
            self._kept: deque[tuple[int, dict[str, Tensor]]] = deque(maxlen=self.lag + 1)
        self._kept.append((version, {name: tensor.detach().clone() for name, tensor in weights}))
        if version >= self.lag:
            known, tensors = self._kept[0]
            super().update_weights(tensors.items(), known)


def make_source(
    config: Config, pool: EnvPool, engine: NativeRolloutEngine, should_stop: Callable[[], bool], rewards: RewardWorker
) -> Collector:
    """As ``workers.rollout_backend.make_collector``."""
    trained = [parameter for group in engine.policy.trainable_groups().values() for parameter in group]
    policy = frozen_copy(engine.policy, trained)
    apart = NativeRolloutEngine(
        policy, config.rollout, config.algorithm.sampling, config.runner.seed, engine.num_threads
    )
    source = LaggedRollout(config, pool, apart, should_stop, rewards.judging)
    source.update_weights(engine.policy.named_parameters(), 0)
    return source


def main(arguments: list[str]) -> int:
    """Train; return the exit code."""
    LaggedRollout.lag = int(arguments[0])
    parts.make_collector = make_source  # type: ignore[assignment]
    return runner.train(load_config(["env=maniskill", "model=openvla", *arguments[1:]])).exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
