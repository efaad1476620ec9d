"""`embodrl eval`: measure the success rate of a policy and write the results."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import cast

from embodrl.config import LoadedConfig
from embodrl.config.schema import Config
from embodrl.envs.pool.pool import EnvPool
from embodrl.errors import EnvTimeout, EnvWorkerDied
from embodrl.models.base import VLAPolicy
from embodrl.reporting.progress import Progress
from embodrl.runs.eval_output import EvalDirectory
from embodrl.runs.eval_result import EvaluationResult, evaluation_of
from embodrl.storage.json_file import check_json_file, write_json_result
from embodrl.trainer.files import removed_if_empty
from embodrl.trainer.provenance import compute_text
from embodrl.types import Decoding
from embodrl.workers.env import check_environments, make_pool, places_here
from embodrl.workers.evaluator import EvalResult, Evaluator
from embodrl.workers.parts import make_acting, prepare_acting
from embodrl.workers.policy import build_policy


def described(pool: EnvPool) -> dict[str, object]:
    """Return the versions and driver that a simulator process reports; empty if it has just died."""
    with suppress(EnvWorkerDied, EnvTimeout):
        answer = pool.call_one(0, "describe")
        if isinstance(answer, dict):
            return cast(dict[str, object], answer)
    return {}


def evaluate(
    loaded: LoadedConfig,
    json_path: Path | None = None,
    output_dir: Path | None = None,
    make_policy: Callable[[Config], VLAPolicy] = build_policy,
    weights: str | None = None,
    harness_path: Path | None = None,
) -> EvaluationResult:
    """Evaluate a policy on fixed seeds.

    Args:
        loaded: configuration of the evaluation.
        json_path: second path of eval.json.
        output_dir: new or empty directory; None creates ``eval-<date and time>`` in ``runner.output_dir``, or in
            outputs/ if that is auto.
        make_policy: returns the policy; by default the one in ``config.model``.
        weights: source of the weights of ``make_policy``, for the report.
        harness_path: file for the result in the format of vla-evaluation-harness.

    Raises:
        OutputError: a result can't be written; raised before anything has started.
        EmbodrlError: the weights exceed the device's memory; raised before anything has started, too.
        MissingDependencyError: the video writer is not installed.
    """
    config = loaded.config.evaluated
    for path in filter(None, (json_path, harness_path)):
        check_json_file(path)
    output = EvalDirectory(config, output_dir, weights)
    with removed_if_empty(output.directory):
        prepare_acting(config, loaded.deployment, config.env.eval.decoding)

        @cache
        def policy() -> VLAPolicy:
            made = make_policy(config)
            output.identify(made)
            return made

        result = _measure(loaded, output, None, policy)
        for axis in config.chosen_axes:
            output.axes[axis] = _measure(loaded, output, axis, policy, result.decoding)
        lines = output.write(result)
    with Progress("eval", 0, "episodes", config.runner.logger.console) as progress:
        for line in lines:
            progress.message(line)
    if json_path is not None:
        write_json_result(json_path, output.content(result))
    if harness_path is not None:
        write_json_result(harness_path, output.harness_content(result))
    return evaluation_of(result, output.directory, output.axes)


def _measure(
    loaded: LoadedConfig,
    output: EvalDirectory,
    axis: str | None,
    policy: Callable[[], VLAPolicy],
    decoding: Decoding | None = None,
) -> EvalResult:
    """Run all episodes, optionally perturbed along an axis, with one decoding or those in ``env.eval.decoding``."""
    config = output.config
    pool = make_pool(config, config.env.eval.total_num_envs, places=places_here(loaded.deployment), axis=axis)
    with pool:
        check_environments(config, pool, training=False)
        only = None if decoding is None else (decoding,)
        evaluator = Evaluator(config, pool, make_acting(config, policy()), decodings=only)
        console = config.runner.logger.console
        with Progress(axis or "eval", evaluator.num_plays, "episodes", console) as progress:
            if axis is None:
                progress.message(compute_text(config))
            result = evaluator.run(output.videos_of(axis), progress.update)
        if axis is None:
            output.simulator = described(pool)
    return result
