"""Sidecar files of GR00T N1.7 weights: per-robot preparation of images, states and actions.

Unlike N1.5's files they are complete: processor_config.json has, per robot, the state and action keys in order, how
each is normalised, and whether actions are relative to the state; statistics.json has the numbers, and
embodiment_id.json the robots' encoder indices. Unsupported features are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from embodrl.errors import CheckpointError, EmbodrlError
from embodrl.fields import Fields
from embodrl.models.common.config_file import fields_of, read_file
from embodrl.models.common.images import center_crop, pad_to_square, resize_area, resize_bilinear
from embodrl.models.common.norm_stats import COMPUTE, StatsSets, choose_key, read_range, read_values, stats_sets
from embodrl.models.gr00t.robots import NEW_EMBODIMENT, JoinedStats, KeyStats, RobotStats

PROCESSOR_FILE = "processor_config.json"
STATISTICS_FILE = "statistics.json"
EMBODIMENTS_FILE = "embodiment_id.json"
EMBODIMENT_IDS = {
    **{"simpler_env_google": 0, "simpler_env_widowx": 1, "libero_sim": 2, NEW_EMBODIMENT: 10},
    **{"robocasa_panda_omron": 10, "robocasa_gr1_tabletop": 10, "unitree_g1_sonic": 11},
    **{"oxe_droid_relative_eef_relative_joint": 24, "real_g1_relative_eef_relative_joints": 25},
    **{"unitree_g1_full_body_with_waist_height_nav_cmd": 25, "real_r1_pro_sharpa_relative_eef": 26},
    **{"xdof_relative_eef_relative_joint": 27, "xdof_relative_eef_relative_joint_subtask": 27},
}
"""NVIDIA's N1.7 robot ids, for robots that embodiment_id.json omits."""
MAX_STEPS = 4096
UNSUPPORTED = {"use_tactile": False, "exclude_state": False, "use_mean_std": False, "clip_outliers": True}
_HINT = "use a checkpoint without it, or NVIDIA's own code"


@dataclass(frozen=True)
class ImageTransform:
    """Image preparation: resize, crop the centre, resize again.

    Attributes:
        side: side of the result in pixels.
        crop: side of the crop in pixels.
        area: use OpenCV's INTER_AREA, as NVIDIA's albumentations; else antialiased bilinear, as its torchvision.
        keeps_shape: only the shortest side is resized to ``side`` in some or all versions of NVIDIA's code, so only
            square images are supported.
        letter_box: pad images to squares with black bars first.
    """

    side: int
    crop: int
    area: bool
    keeps_shape: bool
    letter_box: bool

    def __call__(self, images: Tensor) -> Tensor:
        """Return ``uint8[B,side,side,3]`` of ``uint8[B,H,W,3]``; raise ``EmbodrlError`` if squares are needed."""
        if self.letter_box:
            images = pad_to_square(images)
        height, width = images.shape[1:3]
        if self.keeps_shape and height != width:
            raise EmbodrlError(
                f"images have {height} x {width} pixels; this GR00T keeps their shape, so they must be square",
                "give all of env.cameras the same height and width",
                code="gr00t-picture-shape",
            )
        resize = resize_area if self.area else resize_bilinear
        middle = center_crop(resize(images, self.side, self.side), self.crop, rounds_down=self.area)
        return resize(middle, self.side, self.side)


@dataclass(frozen=True)
class Sidecars:
    """Contents of the three files; ``embodiment_ids`` maps robot names to encoder indices."""

    processor: Fields
    statistics: StatsSets
    embodiment_ids: Mapping[str, int]

    @staticmethod
    def read(directory: Path) -> Sidecars:
        """Read a checkpoint's files; embodiment_id.json may be missing.

        Raises:
            CheckpointError: a file is missing or invalid, or needs an unsupported feature.
        """
        processor = read_file(directory / PROCESSOR_FILE)
        path = directory / EMBODIMENTS_FILE
        ids = read_file(path) if path.is_file() else fields_of({}, str(path))
        found = Sidecars(
            processor,
            stats_sets(read_file(directory / STATISTICS_FILE)),
            {**EMBODIMENT_IDS, **{name: ids.integer(name, high=MAX_STEPS) for name in ids}},
        )
        for name, wanted in UNSUPPORTED.items():
            if found.settings.flag(name, wanted) != wanted:
                _refuse(processor, f"{name} {str(not wanted).lower()} is not supported")
        return found

    @property
    def settings(self) -> Fields:
        """``processor_kwargs``."""
        return self.processor.fields("processor_kwargs")

    def images(self) -> ImageTransform:
        """Return the image preparation; raise ``CheckpointError`` if sizes are missing or not square."""
        kwargs = self.settings
        area = kwargs.flag("use_albumentations", False)
        edge = kwargs.integer("shortest_image_edge", None, low=1, high=MAX_STEPS) if area else None
        fraction = kwargs.number("crop_fraction", None, low=1e-3, high=1.0) if area else None
        side = edge if edge is not None else _square(kwargs, "image_target_size")
        crop = _square(kwargs, "image_crop_size") if fraction is None else max(1, int(side * fraction))
        if area and fraction is None:  # the reference uses the ratio of the two sizes
            crop = max(1, int(side * (crop / _square(kwargs, "image_target_size"))))
        if crop > side:
            kwargs.refuse(f"the crop of {crop} pixels is larger than the image of {side}")
        return ImageTransform(side, crop, area, area, kwargs.flag("letter_box_transform", False))

    def robot(self, key: str | None, action_dim: int, source: str) -> RobotStats:
        """Return the statistics of robot ``key`` (None takes the only one) with ``action_dim`` dimensions.

        Raises:
            CheckpointError: no such robot, several and none chosen, invalid statistics, other dimensions, or
                unsupported actions.
        """
        configs = self.settings.fields("modality_configs")
        known = [name for name in self.statistics if name in configs]
        name = choose_key(known, key, source, "statistics of the robot")
        config = configs.fields(name)
        statistics = self.statistics[name]
        for part in ("video", "state", "language"):
            indices = config.fields(part, {})
            if "delta_indices" in indices and len(indices.items("delta_indices")) != 1:
                _refuse(config, f"'{part}' has a history, which is not supported")
        state = self._state(config.fields("state"), statistics.fields("state", {}))
        action, references = self._action(config.fields("action"), statistics)
        if action.dims != action_dim:
            raise CheckpointError(
                f"{source}: action statistics of '{name}' have {action.dims} dimensions, not {action_dim}",
                f"set model.action_dim={action.dims}, choose another robot with model.unnorm_key, or {COMPUTE}",
                code="statistics-size",
            )
        horizon = len(config.fields("action").items("delta_indices"))
        for part in action.keys:
            if part.low.ndim == 2 and len(part.low) < horizon:
                config.refuse(f"'action' has {horizon} steps, the statistics of '{part.name}' have {len(part.low)}")
        return RobotStats(name, action, state, horizon, _slices(action, state, references, config))

    def _state(self, config: Fields, statistics: Fields) -> JoinedStats | None:
        names = config.texts("modality_keys")
        sines = (
            _listed(config, "sin_cos_embedding_keys")
            if self.settings.flag("apply_sincos_state_encoding", False)
            else ()
        )
        deviations = _listed(config, "mean_std_embedding_keys")
        keys: list[KeyStats] = []
        for name in names:
            part = _numbers(statistics.fields(name))
            if name in deviations and name not in sines:
                mean = read_values(part, "mean")
                std = read_values(part, "std", low=0.0)
                keys.append(KeyStats(name, "mean_std", mean - std, mean + std))
            else:
                keys.append(KeyStats(name, "sin_cos" if name in sines else "bounded", *self._ends(part)))
        return JoinedStats(tuple(keys)) if keys else None

    def _action(self, config: Fields, statistics: Fields) -> tuple[JoinedStats, dict[str, str]]:
        """Return the statistics, and for each relative action key the state key that it is relative to."""
        names = config.texts("modality_keys")
        if deviations := _listed(config, "mean_std_embedding_keys"):
            _refuse(config, f"actions {', '.join(deviations)} by mean and deviation are not supported")
        given = config.objects("action_configs") if config.content.get("action_configs") else []
        if given and len(given) != len(names):
            config.refuse(f"'action_configs' has {len(given)} entries, 'modality_keys' {len(names)}")
        converts = self.settings.flag("use_relative_action", False)
        keys: list[KeyStats] = []
        references: dict[str, str] = {}
        for index, name in enumerate(names):
            how = given[index] if given else fields_of({}, config.source)
            if not converts or how.text("rep", "absolute").lower() != "relative":
                keys.append(KeyStats(name, "bounded", *self._ends(_numbers(statistics.fields("action").fields(name)))))
                continue
            if how.text("type").lower() != "non_eef":
                _refuse(how, f"'{name}' is a pose relative to the gripper's, which is not supported")
            references[name] = how.text("state_key", None) or name
            keys.append(KeyStats(name, "bounded", *_by_step(statistics.fields("relative_action").fields(name))))
        return JoinedStats(tuple(keys)), references

    def _ends(self, part: Fields) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        return read_range(part, *(("q01", "q99") if self.settings.flag("use_percentiles", False) else ("min", "max")))

    def files(self) -> dict[str, Mapping[str, object]]:
        """Return the contents of the files by name."""
        statistics = {name: stats.content for name, stats in self.statistics.items()}
        return {
            PROCESSOR_FILE: self.processor.content,
            STATISTICS_FILE: statistics,
            EMBODIMENTS_FILE: dict(self.embodiment_ids),
        }


def identity_sidecars(
    processor_class: str, side: int, crop_fraction: float, action_dim: int, horizon: int, embodiment: int
) -> Sidecars:
    """Return the files of a model without a checkpoint: actions in [-1, 1], unchanged state.

    ``crop_fraction`` is the visible fraction of each image ``side`` (pixels); ``embodiment`` is the encoder index.
    """
    values = dict.fromkeys(("min", "q01"), [-1.0] * action_dim) | dict.fromkeys(("max", "q99"), [1.0] * action_dim)
    values |= {"mean": [0.0] * action_dim, "std": [1.0] * action_dim}
    processor = {
        "processor_class": processor_class,
        "processor_kwargs": {
            "modality_configs": {NEW_EMBODIMENT: modality_config(("action",), (), horizon)},
            "shortest_image_edge": side,
            "crop_fraction": crop_fraction,
            "use_albumentations": True,
            "use_percentiles": True,
            "formalize_language": True,
        },
    }
    built_in = "built-in statistics"
    return Sidecars(
        fields_of(processor, built_in),
        stats_sets(fields_of({NEW_EMBODIMENT: {"action": {"action": values}, "state": {}}}, built_in)),
        {NEW_EMBODIMENT: embodiment},
    )


def with_statistics(sidecars: Sidecars, given: StatsSets, horizon: int) -> Sidecars:
    """Return the files with the statistics of ``model.stats_path``: one robot's whole state and action."""
    (name, entry), *_ = given.items()
    statistics = entry.fields("statistics")
    config = modality_config(tuple(statistics.fields("action")), tuple(statistics.fields("state")), horizon)
    old = sidecars.settings
    configs = {**old.fields("modality_configs", {}).content, name: config}
    processor = {
        **sidecars.processor.content,
        "processor_kwargs": {**old.content, "modality_configs": configs, "use_percentiles": True},
    }
    return Sidecars(fields_of(processor, sidecars.processor.source), {name: statistics}, sidecars.embodiment_ids)


def modality_config(action: tuple[str, ...], state: tuple[str, ...], horizon: int) -> dict[str, object]:
    """Return a robot's entry of processor_config.json, with absolute actions."""
    parts: dict[str, object] = {"video": {"delta_indices": [0], "modality_keys": []}}
    parts["state"] = {"delta_indices": [0], "modality_keys": list(state)}
    parts["action"] = {"delta_indices": list(range(horizon)), "modality_keys": list(action)}
    parts["language"] = {"delta_indices": [0], "modality_keys": ["annotation.human.task_description"]}
    return parts


def _refuse(fields: Fields, problem: str) -> NoReturn:
    raise CheckpointError(f"{fields.source}: {problem}", _HINT, code="checkpoint-unsupported")


def _square(fields: Fields, name: str) -> int:
    height, width = (int(side) for side in fields.numbers(name, 2, low=1, high=MAX_STEPS))
    if height != width:
        _refuse(fields, f"{name} is {height} x {width}; only squares are supported")
    return height


def _listed(fields: Fields, name: str) -> tuple[str, ...]:
    return tuple(fields.texts(name)) if fields.content.get(name) is not None else ()


def _numbers(part: Fields) -> Fields:
    """Allow a bare number for a one-dimensional part."""
    return fields_of({n: v if isinstance(v, list) else [v] for n, v in part.content.items()}, part.source)


def _by_step(part: Fields) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the ends of the range, ``float64[A]``, or ``float64[H,A]`` with a range per step."""
    low = part.items("min")
    high = part.items("max")
    if not low or not isinstance(low[0], list):
        return read_range(_numbers(part), "min", "max")
    if len(low) != len(high):
        part.refuse(f"'min' has {len(low)} steps, 'max' {len(high)}")
    rows = [
        read_range(fields_of({"min": lower, "max": upper}, f"{part.source}[{step}]"), "min", "max")
        for step, (lower, upper) in enumerate(zip(low, high, strict=True))
    ]
    if any(len(row) != len(after) for (row, _), (after, _) in pairwise(rows)):
        part.refuse("'min' has steps of different dimensions")
    return np.stack([row[0] for row in rows]), np.stack([row[1] for row in rows])


def _slices(
    action: JoinedStats, state: JoinedStats | None, references: Mapping[str, str], config: Fields
) -> tuple[tuple[slice, slice], ...]:
    """Return the slices of relative actions and of the states they are relative to."""
    of_action, of_state = (_places(stats) for stats in (action, state))
    found: list[tuple[slice, slice]] = []
    for name, reference in references.items():
        if reference not in of_state:
            config.refuse(f"the action '{name}' is relative to '{reference}', which is not a state key")
        part = of_action[name]
        origin = of_state[reference]
        if part.stop - part.start != origin.stop - origin.start:
            config.refuse(f"the action '{name}' is relative to '{reference}', which has other dimensions")
        found.append((part, origin))
    return tuple(found)


def _places(stats: JoinedStats | None) -> dict[str, slice]:
    keys = () if stats is None else stats.keys
    ends = np.cumsum([key.dims for key in keys]).tolist()
    return {key.name: slice(end - key.dims, end) for key, end in zip(keys, ends, strict=True)}
