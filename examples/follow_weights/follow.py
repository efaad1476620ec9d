"""Evaluate a run while it trains, from outside: python follow.py outputs/RUN [VERSIONS]

Start the run with ``rollout.publish_weights=true``. This process may be on another machine that shares the directory.
It takes the newest weights over, plays the evaluation episodes, and looks for newer ones.
"""

import sys
from pathlib import Path

from embodrl.config import load_run
from embodrl.hybrid_engines.rollout.native import NativeRolloutEngine
from embodrl.hybrid_engines.weight_sync.buckets import layout_of
from embodrl.hybrid_engines.weight_sync.disk import DiskReceiver
from embodrl.workers.env import make_pool
from embodrl.workers.evaluator import Evaluator
from embodrl.workers.policy import build_policy, configure_torch, num_threads

WAIT_S = 600.0


def follow(run_dir: Path, versions: int) -> None:
    """Evaluate so many versions, or until none has come for ten minutes."""
    config = load_run(run_dir / "config.yaml", []).config
    configure_torch(config)
    policy = build_policy(config)
    engine = NativeRolloutEngine(policy, config.rollout, config.algorithm.sampling, 0, num_threads(config))
    receiver = DiskReceiver(engine, run_dir / "weights", layout_of(policy))
    pool = make_pool(config, config.env.eval.total_num_envs, run_dir / "follow_logs")
    with pool:
        evaluator = Evaluator(config, pool, engine)
        for _ in range(versions):
            report = receiver.receive(timeout_s=WAIT_S)
            if report is None:
                break
            result = evaluator.run()
            print(f"version {report.version}: success {result.success_rate:.1%} of {result.episodes}", flush=True)  # noqa: T201
    receiver.close()


if __name__ == "__main__":
    follow(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 10**9)
