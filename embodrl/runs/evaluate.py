"""`embodrl eval`: measure the success rate of a policy and write the results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from pathlib import Path

from embodrl.config import LoadedConfig
from embodrl.config.schema import Config
from embodrl.models.base import VLAPolicy
from embodrl.reporting.progress import Progress
from embodrl.runs.eval_output import EvalDirectory
from embodrl.runs.eval_result import EvaluationResult, evaluation_of
from embodrl.storage.json_file import check_json_file, write_json_result
from embodrl.trainer.files import drop_missing_warm_start, removed_if_empty
from embodrl.trainer.provenance import compute_text
from embodrl.types import Decoding
from embodrl.workers.env import check_environments, make_pool, places_here
from embodrl.workers.evaluating import RemoteEvaluator, described
from embodrl.workers.evaluator import EvalResult
from embodrl.workers.parts import make_acting, prepare_acting
from embodrl.workers.policy import build_policy, in_memory
from embodrl.workers.rollout_backend import evaluator_class


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

        apart = loaded.deployment.rolls_out_in_processes

        @cache
        def policy() -> VLAPolicy:
            made = make_policy(in_memory(config) if apart else config)
            output.identify(made)
            return made

        with ExitStack() as closing:
            measure: _Measure = partial(_measured_here, loaded, output, policy)
            if apart:
                built = drop_missing_warm_start(config)
                processes = RemoteEvaluator(built, loaded.deployment, policy(), output.directory, closing)
                measure = partial(_measured_by, processes, output)
            result = measure(None, None)
            for axis in config.chosen_axes:
                output.axes[axis] = measure(axis, (result.decoding,))
        lines = output.write(result)
    with Progress("eval", 0, "episodes", config.runner.logger.console) as progress:
        for line in lines:
            progress.message(line)
    if json_path is not None:
        write_json_result(json_path, output.content(result))
    if harness_path is not None:
        write_json_result(harness_path, output.harness_content(result))
    return evaluation_of(result, output.directory, output.axes)


_Measure = Callable[["str | None", "tuple[Decoding, ...] | None"], EvalResult]
"""Runs all episodes, optionally perturbed along an axis, with some decodings or those in ``env.eval.decoding``."""


def _measured_here(
    loaded: LoadedConfig,
    output: EvalDirectory,
    policy: Callable[[], VLAPolicy],
    axis: str | None,
    decodings: tuple[Decoding, ...] | None,
) -> EvalResult:
    """Run all episodes in this process; see ``_Measure``."""
    config = output.config
    pool = make_pool(config, config.env.eval.total_num_envs, places=places_here(loaded.deployment), axis=axis)
    with pool:
        check_environments(config, pool, training=False)
        evaluator = evaluator_class(config)(config, pool, make_acting(config, policy()), decodings=decodings)
        with _progress(config, axis, evaluator.num_plays) as progress:
            result = evaluator.run(output.videos_of(axis), progress.update)
        if axis is None:
            output.simulator = described(pool)
    return result


def _measured_by(
    processes: RemoteEvaluator, output: EvalDirectory, axis: str | None, decodings: tuple[Decoding, ...] | None
) -> EvalResult:
    """Run all episodes in the rollout processes; see ``_Measure``."""
    with _progress(output.config, axis, processes.num_plays(decodings)) as progress:
        result = processes.run(output.videos_of(axis), progress.update, axis, decodings)
    if axis is None:
        output.simulator = processes.describe()
    return result


@contextmanager
def _progress(config: Config, axis: str | None, num_plays: int) -> Iterator[Progress]:
    with Progress(axis or "eval", num_plays, "episodes", config.runner.logger.console) as progress:
        if axis is None:
            progress.message(compute_text(config))
        yield progress
