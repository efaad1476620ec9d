"""`embodrl eval`: the success rate of a policy, with what it writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import cast

from embodrl.config import LoadedConfig
from embodrl.config.schema import Config
from embodrl.envs.pool.pool import EnvPool
from embodrl.errors import EnvTimeout, EnvWorkerDied
from embodrl.hybrid_engines.rollout.native import make_rollout_engine
from embodrl.models.base import VLAPolicy
from embodrl.reporting.intervals import wilson_interval
from embodrl.reporting.progress import Progress
from embodrl.runs.eval_output import HTML_FILE, EvalDirectory
from embodrl.storage.json_file import check_json_file, write_json_file
from embodrl.trainer.files import removed_if_empty
from embodrl.trainer.provenance import compute_text
from embodrl.types import Decoding
from embodrl.workers.env import check_environments, check_simulator, make_pool, places_here
from embodrl.workers.evaluator import EpisodeRecord, EvalResult, Evaluator
from embodrl.workers.policy import build_policy, check_memory, configure_torch, num_threads


@dataclass(frozen=True, repr=False)
class EvaluationResult:
    """What an evaluation measured.

    Attributes:
        success_rate: fraction of the episodes in which the task was solved; NaN without an episode.
        success_at_end: fraction that ended solved; NaN without an episode, or where the environment does not tell.
        interval: 95 % Wilson score interval of it.
        per_task: success rate by task.
        episodes: one record per episode that was completed, ordered by seed.
        lost_episodes: number of episodes that simulator faults ended in every attempt; not counted above.
        output_dir: directory with eval.json, eval.html and videos; None if nothing was written.
        axes: what was measured on the same episodes perturbed, by axis.
        decodings: what was measured on the same episodes by other choices of the actions: ``sampled``, ``mean``.
    """

    success_rate: float
    interval: tuple[float, float]
    per_task: dict[str, float]
    episodes: list[EpisodeRecord]
    lost_episodes: int
    output_dir: Path | None = None
    success_at_end: float = float("nan")
    axes: Mapping[str, EvaluationResult] = field(default_factory=dict[str, "EvaluationResult"])
    decodings: Mapping[Decoding, EvaluationResult] = field(default_factory=dict["Decoding", "EvaluationResult"])

    def __repr__(self) -> str:
        """Return one line; the records of the episodes would be hundreds."""
        low, high = self.interval
        lost = f", {self.lost_episodes} lost" if self.lost_episodes else ""
        return (
            f"EvaluationResult(success_rate={self.success_rate:.3f}, interval=({low:.3f}, {high:.3f}),"
            f" {len(self.episodes)} episodes{lost}, output_dir={str(self.output_dir)!r})"
        )

    @property
    def exit_code(self) -> int:
        """0, or 1 if episodes were lost: the rate is not that of all of them then."""
        others = (*self.axes.values(), *self.decodings.values())
        return 1 if self.lost_episodes or any(result.lost_episodes for result in others) else 0

    @property
    def report(self) -> Path | None:
        """eval.html; None if nothing was written."""
        return self.output_dir / HTML_FILE if self.output_dir is not None else None

    @property
    def videos(self) -> list[Path]:
        """Videos of the first episodes."""
        return sorted(self.output_dir.glob("videos/[!.]*.mp4")) if self.output_dir is not None else []


def evaluation_of(
    result: EvalResult, output_dir: Path | None = None, axes: Mapping[str, EvalResult] | None = None
) -> EvaluationResult:
    """Return the public form of what an ``Evaluator`` measured."""
    return EvaluationResult(
        result.success_rate,
        wilson_interval(sum(result.successes), result.episodes),
        result.per_task,
        result.records,
        result.lost_episodes,
        output_dir,
        result.success_at_end,
        {name: evaluation_of(perturbed) for name, perturbed in (axes or {}).items()},
        {name: evaluation_of(other) for name, other in result.decodings.items()},
    )


def described(pool: EnvPool) -> dict[str, object]:
    """Return what a simulator process tells of itself: versions and driver; nothing if it has just died."""
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
    """`embodrl eval`: measure a policy on fixed seeds.

    Args:
        loaded: the run.
        json_path: a second place for eval.json.
        output_dir: new or empty; None is a new directory ``eval-<date and time>`` in ``runner.output_dir``, or in
            outputs/ where that is auto.
        make_policy: returns the policy; by default the one that ``config.model`` names.
        weights: where those of ``make_policy`` come from, for the report.
        harness_path: a file for the same as vla-evaluation-harness writes it.

    Raises:
        OutputError: a result can't be written; raised before anything has started.
        EmbodrlError: the device has less memory than the weights take; raised before anything has started, too.
        MissingDependencyError: videos are to be written, and what writes them is not installed.
    """
    config = loaded.config.evaluated
    for path in filter(None, (json_path, harness_path)):
        check_json_file(path)
    output = EvalDirectory(config, output_dir, weights)
    with removed_if_empty(output.directory):
        device = configure_torch(config, loaded.deployment.of("rollout")[0])
        check_memory(config, loaded.deployment, training=False, device=device, decoding=config.env.eval.decoding)
        check_simulator(config)

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
        write_json_file(json_path, output.content(result))
    if harness_path is not None:
        write_json_file(harness_path, output.harness_content(result))
    return evaluation_of(result, output.directory, output.axes)


def _measure(
    loaded: LoadedConfig,
    output: EvalDirectory,
    axis: str | None,
    policy: Callable[[], VLAPolicy],
    decoding: Decoding | None = None,
) -> EvalResult:
    """Run all episodes, perturbed along an axis or not; by one decoding, or those of ``env.eval.decoding``."""
    config = output.config
    pool = make_pool(config, config.env.eval.total_num_envs, places=places_here(loaded.deployment), axis=axis)
    with pool:
        check_environments(config, pool, training=False)
        evaluator = Evaluator(config, pool, make_rollout_engine(config, policy(), num_threads(config)))
        if decoding is not None:
            evaluator.decodings = (decoding,)
        console = config.runner.logger.console
        with Progress(axis or "eval", evaluator.num_plays, "episodes", console) as progress:
            if axis is None:
                progress.message(compute_text(config))
            evaluator.progress = progress.update
            result = evaluator.run(output.videos_of(axis))
        if axis is None:
            output.simulator = described(pool)
    return result
