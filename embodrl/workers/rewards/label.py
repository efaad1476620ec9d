"""`embodrl label`: RECAP's value function, advantages and their indicator, as sidecar files of a dataset.

Physical Intelligence 2025, "pi*0.6: a VLA That Learns From Experience", arXiv 2511.14759; file and column names follow
RLinf. Shapes: N frames, E episodes.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from embodrl.algorithms.offline import (
    advantage_indicator,
    n_step_advantages,
    rewards_to_go,
    steps_to_go_rewards,
    two_hot,
)
from embodrl.data.demos import Demos
from embodrl.data.labels import Column, check_labelled_format, frame_numbers, sidecar, write_sidecar
from embodrl.data.load import load_demos
from embodrl.data.replay import POLICY
from embodrl.errors import EmbodrlError, UsageError
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
from embodrl.workers.rewards.reward_model import judged_successes


@dataclass(frozen=True)
class LabelSettings:
    """Settings of the labels.

    Attributes:
        lookahead: number of steps an advantage sums before it bootstraps from the value.
        positive: fraction of frames whose advantage counts as positive.
        failure_penalty: subtracted at the end of a failed episode; None: the length of the longest episode.
        reward_model: model of `embodrl reward train`; a progress model is the value function, a classifier decides
            which episodes succeeded; None trains a value function on the dataset's outcomes.
        fitting: training of the value function; unused with a given progress model.
    """

    tag: str = "recap"
    lookahead: int = 10
    positive: float = 0.3
    failure_penalty: float | None = None
    reward_model: Path | None = None
    fitting: Fitting = field(default_factory=Fitting)


@dataclass(frozen=True)
class LabelResult:
    """Figures of the labels.

    Attributes:
        paths: written files.
        episodes, frames: size of the dataset.
        success_rate: success rate of its episodes.
        thresholds: smallest positive advantage of each task.
        positive_rate: fraction of positive frames.
        positive_in_successes, positive_in_failures: the same within episodes of each outcome; None without such
            episodes.
        spearman: rank correlation of values and returns in held-out episodes; in all episodes with a given model.
    """

    paths: tuple[Path, ...]
    episodes: int
    frames: int
    success_rate: float
    thresholds: dict[str, float]
    positive_rate: float
    positive_in_successes: float | None
    positive_in_failures: float | None
    spearman: float | None


def label(directory: Path, settings: LabelSettings, console: str = "auto") -> LabelResult:
    """Train the value function, and write ``meta/returns_TAG.parquet``, ``meta/advantages_TAG.parquet`` and the model.

    Raises:
        UsageError: fitting settings were given together with a progress model.
        EmbodrlError: the dataset has no outcomes or no inputs, or is not writable.
    """
    check_labelled_format(directory)
    demos = load_demos(directory)
    given = None if settings.reward_model is None else ObservationModel.load(settings.reward_model)
    judges = given is not None and given.kind == "success"
    if given is not None and not judges and settings.fitting != Fitting():
        message = f"{settings.reward_model} is a progress model, which is used unchanged: nothing is trained"
        raise UsageError(message, "remove the options that train a value function", code="label-fitting")
    success = judged_successes(given, demos) if given is not None and judges else successes(demos, directory)
    lengths = np.bincount(demos.episode, minlength=len(success))
    progress_model = None if judges else given
    penalty = float(lengths.max()) if settings.failure_penalty is None else settings.failure_penalty
    scale = None
    if progress_model is not None:  # its values are in these units
        penalty, scale = _units_of(progress_model, settings)
    rewards = [steps_to_go_rewards(int(n), bool(won), penalty) for n, won in zip(lengths, success, strict=True)]
    returns = torch.cat([rewards_to_go(part) for part in rewards])
    scale = scale or float(returns.min().abs().clamp(min=1.0))
    with Progress("label", settings.fitting.steps, "steps", console) as progress:
        if given is None or judges:
            model, values, correlation = _values(demos, success, returns / scale, settings.fitting, progress)
        else:
            model = given
            values = given.judge(frame_inputs(given, demos))
            correlation = spearman(values.numpy(), returns.numpy())
    parts = zip(rewards, values.split(lengths.tolist()), strict=True)
    advantages = torch.cat([n_step_advantages(r / scale, v, settings.lookahead) for r, v in parts])
    positive, thresholds = positive_frames(demos, advantages, settings.positive)
    paths = _write(directory, settings, demos, rewards, returns, scale, values, advantages, positive)
    made = {**asdict(settings), "reward_model": settings.reward_model and str(settings.reward_model)}
    if progress_model is not None:  # the model was trained with its own
        del made["fitting"]
    model.facts = {**model.facts, **made, "failure_penalty": penalty, "scale": scale}
    model.save(directory / "meta" / f"value_{settings.tag}")
    won = torch.from_numpy(success[demos.episode])
    flags = positive.float()
    return LabelResult(
        (*paths, directory / "meta" / f"value_{settings.tag}"),
        len(success),
        len(values),
        float(success.mean()),
        thresholds,
        float(flags.mean()),
        float(flags[won].mean()) if bool(won.any()) else None,
        float(flags[~won].mean()) if bool((~won).any()) else None,
        correlation,
    )


def positive_frames(demos: Demos, advantages: Tensor, fraction: float) -> tuple[Tensor, dict[str, float]]:
    """Return the frames ``bool[N]`` that count as positive, and the smallest positive advantage of each task.

    Positive are the best ``fraction`` of each task by ``advantages float32[N]``, and all frames where an expert or a
    person replaced the policy.

    Raises:
        EmbodrlError: a task's advantages are not finite, so they cannot be ranked.
    """
    positive = torch.zeros(len(advantages), dtype=torch.bool)
    thresholds = {}
    tasks = np.asarray(demos.tasks)[demos.episode]
    for task in sorted(set(demos.tasks)):
        frames = torch.from_numpy(np.flatnonzero(tasks == task))
        if not bool(advantages[frames].isfinite().all()):
            raise EmbodrlError(
                f"the advantages of task {task!r} are not finite",
                "train the value function or reward model again, with a smaller learning rate, and check the dataset",
                code="label-advantages",
            )
        best = frames[advantage_indicator(advantages[frames], fraction)]
        positive[best] = True
        thresholds[task] = float(advantages[best].min())
    if demos.acted_by is not None:
        positive |= torch.from_numpy(demos.acted_by != POLICY)
    return positive, thresholds


def _units_of(model: ObservationModel, settings: LabelSettings) -> tuple[float, float]:
    """Return the failure cost in a progress model's values, in steps, and the number of steps per unit of value."""
    found = [model.facts.get(name) for name in ("failure_penalty", "scale")]
    penalty, scale = ((float(x) if isinstance(x, int | float) else 0.0) for x in found)
    if scale <= 0:
        raise EmbodrlError(
            f"{settings.reward_model} does not record the scale of its values",
            "train it again with this version of `embodrl reward train`",
            code="label-scale",
        )
    if settings.failure_penalty not in (None, penalty):
        raise EmbodrlError(
            f"the values of {settings.reward_model} use a failure penalty of {penalty:g} steps",
            "remove --failure-penalty or --reward-model",
            code="label-scale",
        )
    return penalty, scale


def _values(
    demos: Demos, success: np.ndarray, targets: Tensor, fitting: Fitting, progress: Progress
) -> tuple[ObservationModel, Tensor, float | None]:
    """Train the value function; return it, values ``float32[N]`` of all frames, and the held-out correlation."""
    model = make_model("value", demos, fitting)
    inputs = frame_inputs(model, demos)
    centers = model.centers
    held_out = torch.from_numpy(held_out_episodes(success.tolist(), fitting)[demos.episode])

    def loss_of(logits: Tensor, rows: Tensor) -> Tensor:
        return F.cross_entropy(logits, two_hot(targets[rows], centers))

    fit(model, inputs, (~held_out).nonzero()[:, 0], loss_of, fitting, progress)
    values = model.judge(inputs)
    correlation = spearman(values[held_out].numpy(), targets[held_out].numpy()) if bool(held_out.any()) else None
    return model, values, correlation


def _write(
    directory: Path,
    settings: LabelSettings,
    demos: Demos,
    rewards: list[Tensor],
    returns: Tensor,
    scale: float,
    values: Tensor,
    advantages: Tensor,
    positive: Tensor,
) -> tuple[Path, Path]:
    """Write both sidecars; values and advantages are scaled to -1..0, returns and rewards are in steps."""
    numbers = frame_numbers(demos)
    n = settings.lookahead
    episodes = values.split([len(part) for part in rewards])
    after = torch.cat([torch.cat([part, part.new_zeros(n)])[n:] for part in episodes])
    left = torch.from_numpy(demos.last - np.arange(len(demos.last)) + 1).clamp(max=n)
    done = np.arange(len(demos.last)) == demos.last
    words = demos.said(slice(None))
    of_returns: dict[str, Column] = {
        **numbers,
        "return": returns.numpy(),
        "reward": torch.cat(rewards).numpy(),
        "done": done,
        "prompt": words,
    }
    of_advantages: dict[str, Column] = {
        **numbers,
        "advantage": positive.numpy(),
        "advantage_continuous": advantages.numpy(),
        "value_current": values.numpy(),
        "value_next": after.numpy(),
        "reward_sum": (advantages + values - after).numpy(),
        "reward_sum_raw": ((advantages + values - after) * scale).numpy(),
        "num_valid_rewards": left.numpy(),
    }
    paths = sidecar(directory, "returns", settings.tag), sidecar(directory, "advantages", settings.tag)
    write_sidecar(paths[0], of_returns)
    write_sidecar(paths[1], of_advantages)
    return paths
