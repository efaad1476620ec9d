"""`embodrl eval`: the success rate of a policy, with what it writes."""

from __future__ import annotations

from pathlib import Path

from embodrl.config import LoadedConfig
from embodrl.hybrid_engines.rollout.native import make_rollout_engine
from embodrl.reporting.progress import Progress
from embodrl.runs.eval_output import EvalOutput
from embodrl.storage.json_file import check_json_file, write_json_file
from embodrl.workers.env import check_simulator, make_pool
from embodrl.workers.evaluator import Evaluator
from embodrl.workers.policy import build_policy, configure_torch, num_threads


def evaluate(loaded: LoadedConfig, json_path: Path | None = None, output_dir: Path | None = None) -> int:
    """`embodrl eval`: measure the policy that the configuration names.

    Returns the exit code: 1 if an episode could not be played to its end, as the rate is not that of all then.

    Args:
        loaded: the run.
        json_path: a second place for eval.json.
        output_dir: new or empty; None is a new directory ``eval-<date and time>`` in ``runner.output_dir``, or in
            outputs/ where that is auto.

    Raises:
        OutputError: a result can't be written; told before anything has started.
        MissingDependencyError: videos are to be written, and what writes them is not installed.
    """
    config = loaded.config
    if json_path is not None:
        check_json_file(json_path)
    output = EvalOutput(config, output_dir)
    device = configure_torch(config, loaded.deployment.of("rollout")[0])
    check_simulator(config)
    pool = make_pool(config, config.env.eval.total_num_envs)
    with pool, Progress("eval", config.env.eval.num_episodes, "episodes", config.runner.logger.console) as progress:
        policy = build_policy(config, device)
        engine = make_rollout_engine(config, policy, num_threads(config))
        result = Evaluator(config, pool, engine, progress.update).run(output.video_dir)
        for line in output.write(result):
            progress.message(line)
    if json_path is not None:
        write_json_file(json_path, output.content(result))
    return 1 if result.lost_episodes else 0
