"""Statistics of GR00T's robots, and the mapping to and from states and actions.

A checkpoint's metadata.json has statistics of many keys ("left_arm", "gripper", ...). Which keys a model uses, in which
order, and how each is normalised, is defined per robot in its training code (NVIDIA's and RLinf's data configurations).
It is therefore copied here, or given by settings.
Shapes: A dimensions of all keys, W numbers seen by the model (sine and cosine make two of one).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast, get_args

import numpy as np
from numpy.typing import NDArray

from embodrl.errors import CheckpointError
from embodrl.fields import Fields
from embodrl.models.common.config_file import fields_of
from embodrl.models.common.norm_stats import COMPUTE, StatsSets, choose_key, is_constant, read_range, read_values

logger = logging.getLogger(__name__)

Mode = Literal["min_max", "mean_std", "q99", "binary", "sin_cos", "identity", "bounded"]
MODES: tuple[Mode, ...] = get_args(Mode)
NEW_EMBODIMENT = "new_embodiment"
"""Robot name reserved in base models for new robots."""
_STATE_ONLY = "sin_cos"
_POSE = ("x", "y", "z", "roll", "pitch", "yaw", "gripper")
_GENIE = tuple(f"{side}_{part}" for part in ("arm_joint_position", "effector_position") for side in ("left", "right"))
_GENIE_STATE = (*_GENIE, "head_position", "waist_position")


@dataclass(frozen=True)
class Keys:
    """Keys in order, each as ``NAME`` (min_max) or ``NAME:MODE``; None: all of metadata.json, by min_max."""

    state: tuple[str, ...] | None = None
    action: tuple[str, ...] | None = None


KEYS = {
    "libero_franka": Keys(_POSE, _POSE),
    "isaaclab_franka": Keys(_POSE, _POSE),
    "maniskill_widowx": Keys(("left_arm:sin_cos",), ("left_arm",)),
    "agibot_genie1": Keys(_GENIE_STATE, (*_GENIE_STATE, "robot_velocity")),
}
"""By robot: RLinf's data configurations of GR00T N1.5, and NVIDIA's of Genie-1."""
_ARMS = ("left_arm", "right_arm", "left_hand", "right_hand")
_SETTINGS = "model.gr00t.action_keys and model.gr00t.state_keys"
UNDECIDED = {
    "gr1": f"set {_SETTINGS} as in your training; for NVIDIA's gr1_arms_only they are [{','.join(_ARMS)}] and"
    f" [{','.join(f'{name}:sin_cos' for name in _ARMS)}]",
    "oxe_droid": "the model learned its rotations as six numbers, which embodrl does not convert: use a fine-tune for"
    f" your robot, or set {_SETTINGS}",
}
"""Base model robots whose actions depend on more than the metadata -> hint for the user."""


@dataclass(frozen=True)
class KeyStats:
    """Statistics of one key.

    Attributes:
        name: name of the key.
        mode: ``min_max``, ``q99`` (clipped) and ``bounded`` (clipped both ways) map a range to [-1, 1], ``mean_std``
            the mean to 0; a dimension without range gives 0 (min_max, bounded) or stays unchanged; ``binary`` is 1
            above one half; ``sin_cos`` gives sines, then cosines, of a state.
        low, high: ends of the range, or mean minus and plus deviation, ``float64[A]``, or ``float64[H,A]`` for actions
            with a range per chunk step.
    """

    name: str
    mode: Mode
    low: NDArray[np.float64]
    high: NDArray[np.float64]

    @property
    def dims(self) -> int:
        """A."""
        return self.low.shape[-1]

    @property
    def width(self) -> int:
        """W."""
        return self.dims * (2 if self.mode == _STATE_ONLY else 1)

    def normalize(self, values: NDArray[np.floating]) -> NDArray[np.float64]:
        """Map ``[...,A]`` in environment units to ``[...,W]``; ``[...,H,A]`` with ranges per step."""
        scaled = self.scale(values)
        return np.clip(scaled, -1.0, 1.0) if self.mode in ("q99", "bounded") else scaled

    def scale(self, values: NDArray[np.floating]) -> NDArray[np.float64]:
        """Return ``normalize(values)`` without clipping."""
        x = np.asarray(values, dtype=np.float64)
        if self.mode == "binary":
            return (x > 0.5).astype(np.float64)
        if self.mode == "sin_cos":
            return np.concatenate([np.sin(x), np.cos(x)], axis=-1)
        if self.mode == "identity":
            return x
        low, span = self._range(x)
        empty = is_constant(span, low, low + span)
        if self.mode == "bounded":
            empty |= np.isclose(span + low, low)
        scaled = 2.0 * (x - low) / np.where(empty, 1.0, span) - 1.0
        return np.where(empty, x if self.mode in ("mean_std", "q99") else 0.0, scaled)

    def unnormalize(self, actions: NDArray[np.float64]) -> NDArray[np.float64]:
        """Map ``[...,A]`` to environment units, as the inverse where one exists."""
        if self.mode == "binary":
            return (actions > 0.5).astype(np.float64)
        if self.mode == "identity":
            return actions
        low, span = self._range(actions)
        within = np.clip(actions, -1.0, 1.0) if self.mode == "bounded" else actions
        return 0.5 * (within + 1.0) * span + low

    def _range(self, values: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the lower end and the width of the range, for the given number of steps."""
        rows = slice(values.shape[-2]) if self.low.ndim == 2 else slice(None)
        return self.low[rows], self.high[rows] - self.low[rows]


@dataclass(frozen=True)
class JoinedStats:
    """Concatenated statistics of several keys."""

    keys: tuple[KeyStats, ...]

    @property
    def dims(self) -> int:
        """A."""
        return sum(key.dims for key in self.keys)

    @property
    def width(self) -> int:
        """W."""
        return sum(key.width for key in self.keys)

    def normalize(self, values: NDArray[np.floating]) -> NDArray[np.float64]:
        """Map ``[...,A]`` in environment units to ``[...,W]``."""
        return self._each(values, lambda key, part: key.normalize(part))

    def scale(self, values: NDArray[np.floating]) -> NDArray[np.float64]:
        """Return ``normalize(values)`` without clipping."""
        return self._each(values, lambda key, part: key.scale(part))

    def unnormalize(self, actions: NDArray[np.float64]) -> NDArray[np.float64]:
        """Map ``[...,A]`` to environment units."""
        return self._each(actions, lambda key, part: key.unnormalize(part))

    def _each(
        self,
        values: NDArray[np.floating],
        convert: Callable[[KeyStats, NDArray[np.float64]], NDArray[np.float64]],
    ) -> NDArray[np.float64]:
        ends = np.cumsum([key.dims for key in self.keys])[:-1]
        parts = np.split(np.asarray(values, dtype=np.float64), ends, axis=-1)
        return np.concatenate([convert(key, part) for key, part in zip(self.keys, parts, strict=True)], axis=-1)


@dataclass(frozen=True)
class RobotStats:
    """Statistics of a robot.

    Attributes:
        name: name of the robot.
        action: statistics of the predicted actions.
        state: statistics of the state; None if the state is used unchanged.
        horizon: number of predicted actions trained for the robot; None for all.
        relative: (action slice, state slice) pairs; these actions are relative to the state.
    """

    name: str
    action: JoinedStats
    state: JoinedStats | None
    horizon: int | None = None
    relative: tuple[tuple[slice, slice], ...] = ()


def identity_metadata(name: str, action_dim: int) -> dict[str, object]:
    """Return metadata.json for one robot with actions in [-1, 1] and an unchanged state."""
    action = {"action": {"min": [-1.0] * action_dim, "max": [1.0] * action_dim}}
    entry = {"embodiment_tag": name, "modalities": {}, "statistics": {"action": action, "state": {}}}
    return {name: entry}


def choose_keys(robot: str, settings: Keys, saved: Mapping[str, Keys], public: bool, source: str) -> tuple[Keys, str]:
    """Return a robot's keys with their modes, and the source that defines them.

    Args:
        robot: name of the robot.
        settings: keys from settings, which take precedence.
        saved: keys that embodrl wrote, by robot.
        public: whether the checkpoint was not written by embodrl.
        source: file to name in errors.

    Raises:
        CheckpointError: neither settings nor files define the meaning of the robot's actions.
    """
    known = saved.get(robot, KEYS.get(robot, Keys()))
    if settings.action is not None:
        state = settings.state if settings.state is not None else known.state
        return Keys(state, settings.action), "settings model.gr00t.action_keys and state_keys"
    if robot in saved:
        origin = "config.json"
    elif public and robot in UNDECIDED:
        raise CheckpointError(
            f"{source}: the meaning of the actions of '{robot}' depends on more than the metadata",
            UNDECIDED[robot],
            code="gr00t-keys",
        )
    else:
        origin = f"data configuration of {robot}" if robot in KEYS else "all of metadata.json, by min_max: assumed"
    if public and robot not in KEYS and robot not in saved:
        logger.warning(
            "%s: all keys of '%s' are normalised by min_max in the order of metadata.json, which does not say how the"
            " model was trained; if its data configuration differs, set model.gr00t.action_keys and state_keys",
            source,
            robot,
        )
    return Keys(settings.state if settings.state is not None else known.state, known.action), origin


def choose_robot(
    metadata: StatsSets, key: str | None, action_dim: int, source: str, keys_of: Callable[[str], Keys] | None = None
) -> RobotStats:
    """Return the statistics of a robot.

    Args:
        metadata: statistics by robot, as in metadata.json.
        key: name of the robot; None takes the only one.
        action_dim: expected A.
        source: file to name in errors.
        keys_of: function from robot name to keys; None takes all by min_max in file order.

    Raises:
        CheckpointError: no such robot, several and none chosen, invalid statistics, or other dimensions.
    """
    key = choose_key(metadata, key, source, "statistics of the robot")
    statistics = metadata[key].fields("statistics", {})
    keys = Keys() if keys_of is None else keys_of(key)
    action = _joined(statistics.fields("action", {}), keys.action, "action")
    if action is None or action.dims != action_dim:
        found = 0 if action is None else action.dims
        raise CheckpointError(
            f"{source}: action statistics of '{key}' have {found} dimensions, not {action_dim}",
            f"set model.action_dim={found}, choose another robot with model.unnorm_key or parts of it with"
            f" model.gr00t.action_keys, or {COMPUTE}",
            code="statistics-size",
        )
    return RobotStats(key, action, _joined(statistics.fields("state", {}), keys.state, "state"))


def _joined(parts: Fields, chosen: Sequence[str] | None, kind: Literal["state", "action"]) -> JoinedStats | None:
    if not parts.content:
        return None
    return JoinedStats(tuple(_key_stats(parts, entry, kind) for entry in (chosen if chosen is not None else parts)))


def _key_stats(parts: Fields, entry: str, kind: Literal["state", "action"]) -> KeyStats:
    name, _, text = entry.partition(":")
    mode = cast(Mode, text or "min_max")
    if mode not in MODES or (mode == _STATE_ONLY and kind == "action"):
        raise CheckpointError(
            f"model.gr00t.{kind}_keys: '{entry}' has no known mode",
            f"write NAME:MODE with one of {', '.join(m for m in MODES if kind == 'state' or m != _STATE_ONLY)}",
            code="gr00t-keys",
        )
    if name not in parts:
        raise CheckpointError(
            f"{parts.source} has no '{name}'; it has {', '.join(parts)}",
            f"set model.gr00t.{kind}_keys to the keys that the model was trained with, in their order",
            code="gr00t-keys",
        )
    part = parts.fields(name)
    # A one-dimensional part may give a bare number.
    wanted = ("min", "max", "mean", "std", "q01", "q99")
    listed = fields_of(
        {n: v if isinstance(v, list) else [v] for n, v in part.content.items() if n in wanted}, part.source
    )
    if mode == "mean_std":
        mean = read_values(listed, "mean")
        std = read_values(listed, "std", low=0.0)
        return KeyStats(name, mode, mean - std, mean + std)
    return KeyStats(
        name, mode, *(read_range(listed, "q01", "q99") if mode == "q99" else read_range(listed, "min", "max"))
    )
