"""`embodrl reward train` and `check`: success classifiers and progress models from recorded episodes.

Shapes: E episodes, N frames.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from embodrl.algorithms.offline import rewards_to_go, steps_to_go_rewards, two_hot
from embodrl.config.rules.reward import REWARD_MODEL
from embodrl.data.demos import Demos
from embodrl.data.load import load_demos
from embodrl.errors import EmbodrlError, UsageError
from embodrl.models.common.config_file import CONFIG_FILE, read_file
from embodrl.models.common.observation_model import ObservationModel
from embodrl.reporting.progress import Progress
from embodrl.workers.rewards.observe import (
    Fitting,
    fit,
    frame_inputs,
    held_out_episodes,
    make_model,
    spearman,
    successes,
)

Kind = Literal["success", "progress"]
BINS = 10
"""Number of equal-width bins of the calibration error."""
Flags = NDArray[np.bool_]
Scores = NDArray[np.floating]


@dataclass(frozen=True)
class RewardTraining:
    """Training settings of a reward model.

    Attributes:
        kind: success: a classifier of last observations; progress: a value function of the remaining steps.
        window: number of final frames of a success labelled as success (classifier only); None: 1.
        fitting: training of the network.
    """

    kind: Kind = "success"
    window: int | None = None
    fitting: Fitting = field(default_factory=lambda: Fitting(held_out=0.3))


@dataclass(frozen=True)
class Judged:
    """Quality of a model, on last observations of episodes unless noted otherwise; None where undefined.

    Attributes:
        episodes, successes: numbers of judged episodes and of successes among them.
        auc: probability that a success scores above a failure.
        accuracy: fraction of correct answers at the threshold (classifier).
        false_positives, false_negatives: fraction of failures classified as success, and the reverse (classifier).
        frame_false_positives: fraction of all frames of failures classified as success (classifier).
        brier: mean squared error of the probability (classifier).
        calibration_error: expected calibration error over ten bins (classifier).
        spearman: rank correlation of values and returns over all frames (progress model).
    """

    episodes: int
    successes: int
    auc: float | None
    accuracy: float | None = None
    false_positives: float | None = None
    false_negatives: float | None = None
    frame_false_positives: float | None = None
    brier: float | None = None
    calibration_error: float | None = None
    spearman: float | None = None


@dataclass(frozen=True)
class RewardResult:
    """Result of training; ``threshold`` is the smallest probability classified as success, None for progress.

    ``trained_on`` and ``calibrated_on`` are numbers of episodes.
    """

    path: Path
    kind: Kind
    threshold: float | None
    trained_on: int
    calibrated_on: int
    judged: Judged


def train_reward(directory: Path, output: Path, settings: RewardTraining, console: str = "auto") -> RewardResult:
    """Train a model on a dataset of successes and failures, and write it to ``output``.

    Raises:
        UsageError: ``output`` holds something else, or a progress model was given a window.
        EmbodrlError: the dataset has no outcomes, too few of one kind, or no observations.
        OutputError: the model cannot be written.
    """
    if settings.kind != "success" and settings.window is not None:
        raise UsageError("a progress model values every frame: no window applies", "leave it out", code="reward-window")
    _check_output(output)
    demos = load_demos(directory)
    won = successes(demos, directory)
    calibrating, judging = split(won, settings.fitting, settings.kind, directory)
    model = make_model("success" if settings.kind == "success" else "value", demos, settings.fitting)
    inputs = frame_inputs(model, demos)
    of_frames = torch.from_numpy(~(calibrating | judging)[demos.episode])
    rows = of_frames.nonzero()[:, 0]
    model.standardize(inputs["state"][rows])
    steps_left, penalty, scale = returns_to_go(demos, won)
    returns = steps_left / scale
    with Progress("reward", settings.fitting.steps, "steps", console) as progress:
        if settings.kind == "success":
            targets = ending(demos, won, settings.window or 1)
            _fit_classifier(model, inputs, rows, torch.from_numpy(targets), settings.fitting, progress)
        else:
            centers = model.centers
            fit(
                model,
                inputs,
                rows,
                lambda logits, drawn: F.cross_entropy(logits, two_hot(returns[drawn], centers)),
                settings.fitting,
                progress,
            )
    scores = model.judge(inputs).numpy()
    last = last_frames(demos)
    threshold = None
    if settings.kind == "success":
        threshold = best_threshold(scores[last][calibrating], won[calibrating])
    found = _judged(model.kind, scores, demos, won, judging, threshold, returns.numpy())
    model.facts = {
        **asdict(settings),
        "threshold": threshold,
        "tasks": sorted(set(demos.tasks)),
        "data": str(directory),
        "judged": asdict(found),
        "failure_penalty": penalty,
        "scale": scale,
    }
    model.save(output)
    counts = (int((~calibrating & ~judging).sum()), int(calibrating.sum()))
    return RewardResult(output, settings.kind, threshold, *counts, found)


def check_reward(model_dir: Path, directory: Path) -> Judged:
    """Judge a saved model on all episodes of a dataset.

    Raises:
        CheckpointError: the model is missing or damaged.
        EmbodrlError: the dataset comes from another environment, or has no outcomes.
    """
    model = ObservationModel.load(model_dir)
    demos = load_demos(directory)
    won = successes(demos, directory)
    scores = model.judge(frame_inputs(model, demos)).numpy()
    threshold = model.threshold if model.kind == "success" else None
    every = np.ones(len(won), np.bool_)
    return _judged(model.kind, scores, demos, won, every, threshold, scaled_returns(demos, won).numpy())


def split(won: Flags, fitting: Fitting, kind: Kind, source: object) -> tuple[Flags, Flags]:
    """Return the held-out episodes ``bool[E]`` that calibrate the threshold, and the ones that judge the model.

    Raises:
        EmbodrlError: one outcome has too few episodes.
    """
    held_out = held_out_episodes(won.tolist(), fitting)
    calibrating = np.zeros_like(held_out)
    judging = np.zeros_like(held_out)
    for outcome in (False, True):
        episodes = np.flatnonzero(held_out & (won == outcome))
        half = len(episodes) // 2 if kind == "success" else 0
        calibrating[episodes[:half]] = True
        judging[episodes[half:]] = True
    parts = (calibrating, judging, ~(calibrating | judging))
    enough = all((part & (won == outcome)).any() for part in parts for outcome in (False, True))
    if not (judging.any() and parts[-1].any() if kind == "progress" else enough):
        raise EmbodrlError(
            f"{source} has {int(won.sum())} successes and {int((~won).sum())} failures, too few to hold some out",
            "collect more of both (collect.keep_failures=true), or change --held-out: a classifier needs two held-out"
            " episodes of each and one of each to learn from, a progress model one of either kind",
            code="reward-few-episodes",
        )
    return calibrating, judging


def last_frames(demos: Demos) -> NDArray[np.int64]:
    """Return the last frame of each episode, ``int64[E]``."""
    return np.flatnonzero(demos.last == np.arange(len(demos.last)))


def ending(demos: Demos, won: Flags, window: int) -> Flags:
    """Return which frames ``bool[N]`` are among the last ``window`` frames of a success."""
    return won[demos.episode] & (demos.last - np.arange(len(demos.last)) < window)


def scaled_returns(demos: Demos, won: Flags) -> Tensor:
    """Return ``float32[N]`` from -1 to 0: minus the remaining steps; failures lose the longest length in addition.

    As in RECAP (arXiv 2511.14759, eq. 5), divided by the largest magnitude.
    """
    returns, _, scale = returns_to_go(demos, won)
    return returns / scale


def returns_to_go(demos: Demos, won: Flags) -> tuple[Tensor, float, float]:
    """Return ``scaled_returns`` in steps, the failure cost in steps, and the scale (the largest magnitude)."""
    lengths = np.bincount(demos.episode, minlength=len(won))
    penalty = float(lengths.max())
    parts = [rewards_to_go(steps_to_go_rewards(int(n), bool(w), penalty)) for n, w in zip(lengths, won, strict=True)]
    returns = torch.cat(parts)
    return returns, penalty, float(returns.min().abs().clamp(min=1.0))


def _fit_classifier(
    model: ObservationModel,
    inputs: dict[str, Tensor],
    rows: Tensor,
    targets: Tensor,
    fitting: Fitting,
    progress: Progress,
) -> None:
    """Train by cross-entropy with equal total weights for success frames and all others."""
    share = targets[rows].float().mean()
    weight = ((1 - share) / share).clamp(max=1000.0)

    def loss_of(logits: Tensor, drawn: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(logits[:, 0], targets[drawn].float(), pos_weight=weight)

    fit(model, inputs, rows, loss_of, fitting, progress)


def best_threshold(scores: Scores, labels: Flags) -> float:
    """Return the threshold with maximum sensitivity + specificity, midway between scores; of ties, the middle one."""
    levels = np.unique(scores)
    candidates = np.concatenate([levels[:1], (levels[1:] + levels[:-1]) / 2])
    said = scores[None] >= candidates[:, None]
    youden = said[:, labels].mean(1) - said[:, ~labels].mean(1)
    best = candidates[youden >= youden.max() - 1e-9]
    return float(best[len(best) // 2])


def auc(scores: Scores, labels: Flags) -> float | None:
    """Return the probability that a positive scores above a negative; ties count half."""
    if labels.all() or not labels.any():
        return None
    above = scores[labels][:, None] - scores[~labels][None]
    return float(((above > 0) + 0.5 * (above == 0)).mean())


def calibration_error(probabilities: Scores, labels: Flags) -> float:
    """Return the expected calibration error (Guo et al. 2017, eq. 3) over bins of equal width."""
    bins = np.minimum((probabilities * BINS).astype(int), BINS - 1)
    gaps = [abs(probabilities[bins == b].mean() - labels[bins == b].mean()) * (bins == b).mean() for b in set(bins)]
    return float(sum(gaps))


def _judged(
    kind: str, scores: Scores, demos: Demos, won: Flags, episodes: Flags, threshold: float | None, returns: Scores
) -> Judged:
    last = last_frames(demos)[episodes]
    frames = episodes[demos.episode]
    labels = won[episodes]
    ends = scores[last]
    counts = (int(episodes.sum()), int(labels.sum()), auc(ends, labels))
    if kind == "value":
        return Judged(*counts, spearman=spearman(scores[frames], returns[frames]))
    assert threshold is not None
    said = ends >= threshold
    of_failures = scores[frames & ~won[demos.episode]]
    return Judged(
        *counts,
        accuracy=float((said == labels).mean()),
        false_positives=_share(said[~labels]),
        false_negatives=_share(~said[labels]),
        frame_false_positives=_share(of_failures >= threshold),
        brier=float(((ends - labels) ** 2).mean()),
        calibration_error=calibration_error(ends, labels),
    )


def _share(flags: Flags) -> float | None:
    return float(flags.mean()) if len(flags) else None


def _check_output(output: Path) -> None:
    """Refuse to overwrite anything but a reward model."""
    config = output / CONFIG_FILE
    replaced = config.is_file() and read_file(config).text("model_type", "") == REWARD_MODEL
    if output.exists() and not replaced and (not output.is_dir() or any(output.iterdir())):
        raise UsageError(f"{output} exists and is not a reward model", "choose another directory", code="reward-output")


def judged_successes(model: ObservationModel, demos: Demos) -> Flags:
    """Return which episodes ``bool[E]`` a classifier considers successes."""
    last = last_frames(demos)
    seen = model.inputs(demos.images[last], demos.state[last], demos.said(last))
    return (model.judge(seen) >= model.threshold).numpy()
