"""Evaluation results of the Python API."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from embodrl.reporting.intervals import wilson_interval
from embodrl.runs.eval_output import HTML_FILE
from embodrl.types import Decoding
from embodrl.workers.evaluator import EpisodeRecord, EvalResult


@dataclass(frozen=True, repr=False)
class EvaluationResult:
    """Result of an evaluation.

    Attributes:
        success_rate: fraction of the episodes in which the task was solved; NaN without an episode.
        success_at_end: fraction of the episodes that ended solved; NaN without an episode, or if the environment does
            not report it.
        interval: 95 % Wilson score interval of ``success_rate``.
        per_task: success rate by task.
        episodes: one record per completed episode, ordered by seed.
        lost_episodes: episodes that came to no result in any attempt, through simulator faults or their workflow; not
            counted above.
        output_dir: directory with eval.json, eval.html and videos; None if nothing was written.
        axes: results of the same episodes with perturbations, by axis.
        decodings: results of the same episodes with other decodings: ``sampled``, ``mean``.
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
        """Return one line; the episode records would take hundreds."""
        low, high = self.interval
        lost = f", {self.lost_episodes} lost" if self.lost_episodes else ""
        return (
            f"EvaluationResult(success_rate={self.success_rate:.3f}, interval=({low:.3f}, {high:.3f}),"
            f" {len(self.episodes)} episodes{lost}, output_dir={str(self.output_dir)!r})"
        )

    @property
    def exit_code(self) -> int:
        """0, or 1 if episodes were lost, so that the success rate does not cover all of them."""
        others = (*self.axes.values(), *self.decodings.values())
        return 1 if self.lost_episodes or any(result.lost_episodes for result in others) else 0

    @property
    def report(self) -> Path | None:
        """Path of eval.html; None if nothing was written."""
        return self.output_dir / HTML_FILE if self.output_dir is not None else None

    @property
    def videos(self) -> list[Path]:
        """Videos of the first episodes."""
        return sorted(self.output_dir.glob("videos/[!.]*.mp4")) if self.output_dir is not None else []


def evaluation_of(
    result: EvalResult, output_dir: Path | None = None, axes: Mapping[str, EvalResult] | None = None
) -> EvaluationResult:
    """Return the public form of an ``Evaluator``'s result."""
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
