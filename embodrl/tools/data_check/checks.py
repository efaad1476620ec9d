"""Checks of demonstrations for common causes of failed fine-tunes: units, grippers, lag, cameras, copies, frames.

Shapes: N frames, V cameras, H x W image, A action dimensions, S state dimensions, E episodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from embodrl.data.demos import Demos
from embodrl.data.facts import DatasetFacts
from embodrl.models.common.norm_stats import is_constant

NORMALIZE = "sft.stats=data normalises by statistics of the data"
LARGE = 1.5
SMALL = 0.02
DEGREES = 2 * np.pi
TICKS = 400.0
OUTLIER = 20.0
"""In multiples of the range from q01 to q99."""
LAGS = range(-5, 11)
LEAST_CORRELATION = 0.7
LAG_MARGIN = 0.02
LAG_FRAMES = 20_000
Level = Literal["error", "warning"]
WRIST = ("wrist", "hand", "gripper", "eef")


@dataclass(frozen=True)
class DataFinding:
    """A finding to check before training.

    Attributes:
        level: an ``error`` almost certainly spoils training; a ``warning`` may.
        message: observation, with dimensions and episodes numbered from 0.
    """

    level: Level
    code: str
    message: str
    hint: str


@dataclass
class Checked:
    """Demonstrations and values shared by the checks.

    Attributes:
        demos: demonstrations with frames of any size, or none.
        binary: action dimensions that nearly always take two values (grippers) -> these values.
    """

    demos: Demos
    facts: DatasetFacts
    binary: dict[int, tuple[float, float]] = field(default_factory=dict[int, tuple[float, float]])

    def __post_init__(self) -> None:
        for index, column in enumerate(self.demos.actions.T):
            span = float(np.ptp(column)) or 1.0
            values, counts = np.unique(((column - column.min()) / span).round(2), return_counts=True)
            values = (values * span + column.min()).round(6)
            most = np.sort(values[np.argsort(counts)[-2:]])
            if len(most) == 2 and np.sort(counts)[-2:].sum() >= 0.9 * len(column):
                self.binary[index] = (float(most[0]), float(most[1]))
            elif index == self.demos.actions.shape[1] - 1 and set(values) == {-1.0, 0.0, 1.0}:  # two conventions
                self.binary[index] = (-1.0, 1.0)

    @property
    def episodes(self) -> list[slice]:
        starts = np.flatnonzero(np.diff(self.demos.episode, prepend=-1))
        return [slice(a, b) for a, b in zip(starts, [*starts[1:], len(self.demos.episode)], strict=True)]

    @property
    def moving(self) -> list[int]:
        """Action dimensions that are neither constant nor binary."""
        return [
            i for i, still in enumerate(_constant_dimensions(self.demos.actions)) if not still and i not in self.binary
        ]


def inspect(demos: Demos, facts: DatasetFacts) -> list[DataFinding]:
    """Return the findings, errors first; empty for sound data."""
    checked = Checked(demos, facts)
    found = [finding for check in CHECKS for finding in check(checked)]
    return sorted(found, key=lambda finding: finding.level != "error")


def shown(numbers: Sequence[int] | NDArray[np.int64], limit: int = 8) -> str:
    """Return a list of numbers, truncated if long."""
    more = f" and {len(numbers) - limit} more" if len(numbers) > limit else ""
    return ", ".join(str(int(number)) for number in numbers[:limit]) + more


def _scale(data: Checked) -> Iterator[DataFinding]:
    low, high = np.quantile(data.demos.actions, [0.01, 0.99], axis=0)
    reach = np.maximum(np.abs(low), np.abs(high))
    if large := [i for i in data.moving if reach[i] > LARGE]:
        most = reach[large].max()
        unit = "encoder ticks?" if most > TICKS else "degrees?" if most > DEGREES else "radians or metres?"
        message = f"actions reach {most:.4g} in dimensions {shown(large)}: {unit}"
        yield DataFinding("warning", "action-scale-large", message, NORMALIZE)
    if small := [i for i in data.moving if high[i] - low[i] < SMALL]:
        span = (high - low)[small].max()
        message = f"98 % of the actions in dimensions {shown(small)} lie within {span:.2g}: metres per step?"
        yield DataFinding("warning", "action-scale-small", message, f"{NORMALIZE}; 256 bins would not resolve them")


def _constant_dimensions(values: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Return the constant dimensions of ``[N,D]``, ``bool[D]``, as defined by the normalisation."""
    low, high = values.min(0).astype(np.float64), values.max(0).astype(np.float64)
    return is_constant(high - low, low, high)


def _constant(data: Checked) -> Iterator[DataFinding]:
    for name, values in (("action", data.demos.actions), ("state", data.demos.state)):
        if len(still := np.flatnonzero(_constant_dimensions(values))):
            message = f"{name} dimensions {shown(still)} never change"
            yield DataFinding("warning", f"{name}-constant", message, "check the recording, or drop them")


def _outliers(data: Checked) -> Iterator[DataFinding]:
    actions = data.demos.actions
    low, middle, high = np.quantile(actions, [0.01, 0.5, 0.99], axis=0)
    for i in data.moving:
        distance = np.abs(actions[:, i] - middle[i])
        worst = int(distance.argmax())
        if high[i] > low[i] and distance[worst] > OUTLIER * (high[i] - low[i]):
            episode = data.demos.episode[worst]
            message = f"action dimension {i} is {actions[worst, i]:.4g} in episode {episode}; 98 % are within"
            message += f" {low[i]:.4g} to {high[i]:.4g}"
            yield DataFinding(
                "warning", "action-outlier", message, "remove the episode: min-max statistics are spoiled"
            )


def _gripper(data: Checked) -> Iterator[DataFinding]:
    for i, (closed, opened) in data.binary.items():
        column = data.demos.actions[:, i].round(6)
        least = np.array([column[episode].min() for episode in data.episodes])
        kinds = [int((least < -0.5).sum()), int((np.abs(least) < 0.5).sum())]
        if min(kinds) and np.isin(column, [-1, 0, 1]).mean() > 0.9 and len(np.unique(column)) > 2:
            message = f"action dimension {i} is -1 or 1 in {kinds[0]} episodes, and 0 or 1 in {kinds[1]}"
            yield DataFinding("error", "gripper-mixed", message, "bring all episodes to one convention")
        elif (closed, opened) == (0.0, 1.0):
            message = f"action dimension {i} is 0 or 1: embodrl's simulators take -1 to 1"
            hint = "scale it to -1 to 1; model.gripper=libero or bridge is for policies that output 0 to 1"
            yield DataFinding("warning", "gripper-zero-one", message, hint)
        first = column[[episode.start for episode in data.episodes]]
        share = float((first == closed).mean())
        if 0.1 < share < 0.9 and len(data.episodes) >= 4:
            message = f"action dimension {i} begins at {closed:g} in {share:.0%} of the episodes, else at {opened:g}"
            yield DataFinding("warning", "gripper-starts-differ", message, "is the sign inverted in some episodes?")


def _lag(data: Checked) -> Iterator[DataFinding]:
    """Compare actions, or their changes if they are positions, with shifted changes of the state."""
    actions = data.demos.actions.astype(np.float64)
    state = data.demos.state.astype(np.float64)
    if not state.shape[1] or not data.moving:
        return
    size = min(actions.shape[1], state.shape[1])
    if np.ptp(actions, axis=0)[:size].any() and np.abs(actions[:, :size] - state[:, :size]).max() < 1e-6:
        message = "actions are the state of the same frame: a policy would learn not to move"
        yield DataFinding("error", "action-is-state", message, "record the commanded position, or the next state")
        return
    change = [_changes(values, data.episodes) for values in (actions, state)]
    late: dict[int, int] = {}
    for i in data.moving:
        kinds = [_best_lag(column, change[1], data.episodes) for column in (actions[:, i], change[0][:, i])]
        (correlation, lag, expected), is_position = max((kind, bool(n)) for n, kind in enumerate(kinds))
        largest = max(2.0, (data.facts.fps or 20) / 2) if is_position else 1.0
        if correlation > LEAST_CORRELATION and correlation - expected > LAG_MARGIN and not 0 <= lag <= largest:
            late[i] = lag
    kinds_of_lag: tuple[tuple[int, Level, str], ...] = (
        (-1, "error", "action-after-state"),
        (1, "warning", "action-lag"),
    )
    for sign, level, code in kinds_of_lag:
        frames, votes = Counter([*(lag for lag in late.values() if lag * sign > 0), 0]).most_common(1)[0]
        # A single dimension may correlate with a state dimension by chance.
        if frames * sign > 0 and 2 * votes > len(data.moving):
            where = shown([i for i, lag in late.items() if lag == frames])
            message = f"the state changes {abs(frames)} frames {'before' if sign < 0 else 'after'} the action"
            hint = "shift actions and observations so that each action follows its observation"
            yield DataFinding(level, code, f"{message} that says so (dimensions {where})", hint)


def _changes(values: NDArray[np.float64], episodes: list[slice]) -> NDArray[np.float64]:
    """Return ``[N,D]``: the next value minus this one; NaN at the end of an episode."""
    change = np.full_like(values, np.nan)
    for episode in episodes:
        change[episode.start : episode.stop - 1] = np.diff(values[episode], axis=0)
    return change


def _best_lag(
    column: NDArray[np.float64], change: NDArray[np.float64], episodes: list[slice]
) -> tuple[float, int, float]:
    """Return the largest correlation of ``[N]`` with a column of ``[N,S]``, its lag, and the largest at lag 0 or 1."""
    best = 0.0
    at_rest = 0.0
    lag = 0
    for k in LAGS:
        pairs: list[NDArray[np.float64]] = []
        for episode in episodes:
            if (length := episode.stop - episode.start - abs(k)) > 2:
                first = episode.start + max(-k, 0)
                second = episode.start + max(k, 0)
                both = (column[first : first + length, None], change[second : second + length])
                pairs.append(np.concatenate(both, axis=1))
        table = np.concatenate(pairs)[:LAG_FRAMES] if pairs else np.zeros((0, 1))
        table = table[np.isfinite(table).all(axis=1)]
        if len(table) < 10 or not table[:, 0].std():
            continue
        table -= table.mean(axis=0)
        norms = np.linalg.norm(table, axis=0)
        found = float((np.abs(table[:, 0] @ table[:, 1:]) / np.maximum(norms[0] * norms[1:], 1e-300)).max())
        if k in (0, 1):
            at_rest = max(at_rest, found)
        if found > best:
            best = found
            lag = k
    return best, lag, at_rest


def _duplicates(data: Checked) -> Iterator[DataFinding]:
    seen: dict[bytes, int] = {}
    copies: list[int] = []
    for number, episode in enumerate(data.episodes):
        content = data.demos.actions[episode].tobytes() + data.demos.state[episode].tobytes()
        if seen.setdefault(content, number) != number:
            copies.append(number)
    if copies:
        message = f"{len(copies)} episodes repeat the actions and states of earlier ones: {shown(copies)}"
        yield DataFinding(
            "warning", "episode-duplicate", message, "remove them, unless they are meant to have more weight"
        )


def _frames(data: Checked) -> Iterator[DataFinding]:
    images = data.demos.images
    names = [*data.facts.cameras, *(f"camera{v}" for v in range(images.shape[1]))][: images.shape[1]]
    for view, name in enumerate(names):
        pictures = images[:, view].reshape(len(images), -1)
        if (dark := (pictures.max(axis=1) < 8)).any():
            level: Level = "error" if dark.mean() > 0.01 else "warning"
            where = shown(np.unique(data.demos.episode[dark]))
            message = f"{dark.mean():.1%} of the frames of {name} are black (episodes {where})"
            yield DataFinding(level, "frames-black", message, "remove these episodes, or the camera (sft.cameras)")
        stuck = [
            number
            for number, episode in enumerate(data.episodes)
            if episode.stop - episode.start > 2
            and not dark[episode].all()
            and not np.any(np.diff(pictures[episode].astype(np.int16), axis=0))
        ]
        if stuck:
            message = f"{name} shows the same image throughout {len(stuck)} episodes: {shown(stuck)}"
            yield DataFinding("error", "frames-frozen", message, "remove these episodes, or the camera (sft.cameras)")
        for other in range(view):
            if np.array_equal(images[:, view], images[:, other]) and not dark.all():
                message = f"{names[other]} and {name} show the same images"
                yield DataFinding("error", "camera-duplicate", message, "check how the cameras were recorded")


def _cameras(data: Checked) -> Iterator[DataFinding]:
    names = list(data.facts.cameras)
    on_wrist = [any(word in name.lower() for word in WRIST) for name in names]
    if len(names) > 1 and on_wrist[0] and not all(on_wrist):
        order = [name for _, name in sorted(zip(on_wrist, names, strict=True), key=lambda pair: pair[0])]
        message = f"the first camera is {names[0]}: policies are trained with the scene first and the wrist second"
        yield DataFinding("warning", "camera-order", message, f"sft.cameras=[{','.join(order)}]")


def _episodes(data: Checked) -> Iterator[DataFinding]:
    lengths = np.array([episode.stop - episode.start for episode in data.episodes])
    median = float(np.median(lengths))
    fps = data.facts.fps
    if len(short := np.flatnonzero((lengths < 3) & (lengths < median / 3))):
        message = f"episodes {shown(short)} have fewer than 3 frames; the median is {median:g}"
        yield DataFinding("warning", "episode-short", message, "remove them")
    if len(long := np.flatnonzero(lengths > 5 * median)):
        message = f"episodes {shown(long)} are more than 5 times as long as the median, {median:g} frames"
        yield DataFinding("warning", "episode-long", message, "was the recording left running?")
    if fps is not None and not 2 <= fps <= 200:
        yield DataFinding("warning", "frame-rate", f"{fps:g} frames per second", "check the rate of the recording")
    blank = [place for place, words in enumerate(data.demos.instruction_table) if not words.strip()]
    if len(empty := np.unique(data.demos.episode[np.isin(data.demos.instruction, blank)])):
        message = f"episodes {shown(empty)} have no instruction"
        yield DataFinding("warning", "instruction-empty", message, "add the instructions to meta/tasks")


def _idle(data: Checked) -> Iterator[DataFinding]:
    moves = data.demos.actions[:, data.moving]
    span = np.ptp(moves, axis=0)
    change = np.abs(_changes(data.demos.actions.astype(np.float64), data.episodes)[:, list(data.binary)])
    idle = (np.abs(moves) < 1e-3 * span).all(axis=1) & ~(change > 0).any(axis=1)
    if moves.shape[1] and idle.mean() > 0.25:
        message = f"in {idle.mean():.0%} of the frames nothing moves: a policy learns to wait"
        yield DataFinding("warning", "frames-idle", message, "leave such frames out, as LIBERO's *_no_noops sets do")


CHECKS = (
    *(_scale, _constant, _outliers, _gripper, _lag, _duplicates),
    *(_frames, _cameras, _episodes, _idle),
)
