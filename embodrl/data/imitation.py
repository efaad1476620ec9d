"""Demonstrations for imitation: selection by the configuration, compatibility checks, and the shuffled stream."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embodrl.config.schema import Config, SftConfig
from embodrl.data.demos import Demos
from embodrl.data.facts import data_directory, missing, read_facts
from embodrl.data.lerobot import IMAGES, camera_key
from embodrl.data.load import camera_names, load_demos
from embodrl.data.pictures import Place, in_memory
from embodrl.data.replay import POLICY
from embodrl.data.store_shards import is_store, shards_of
from embodrl.errors import CheckpointError, EmbodrlError
from embodrl.hub import DATASET_FILES, fetch, parse_dataset
from embodrl.specs import ENVS
from embodrl.types import Observation

logger = logging.getLogger(__name__)


def shift_images(images: NDArray[np.uint8], largest: int, rng: np.random.Generator) -> NDArray[np.uint8]:
    """Shift ``uint8[N,V,H,W,3]`` by up to ``largest`` pixels, repeating edges (Kostrikov et al., 2020)."""
    if largest == 0:
        return images
    height, width = images.shape[2:4]
    padded = np.pad(images, ((0, 0), (0, 0), (largest, largest), (largest, largest), (0, 0)), mode="edge")
    shifts = rng.integers(0, 2 * largest + 1, size=(len(images), 2))
    return np.stack([padded[i, :, y : y + height, x : x + width] for i, (y, x) in enumerate(shifts)])


def not_lerobot(directory: Path, without: str) -> EmbodrlError:
    """Return the error for a setting (undone by ``sft.{without}``) that needs a format with feature names."""
    return EmbodrlError(
        f"{directory} is not a LeRobot dataset; names of cameras and features are unavailable",
        f"set sft.{without}",
        code="sft-cameras-without-names",
    )


def load_configured_demos(config: Config, place: Place = in_memory) -> Demos:
    """Load the demonstrations of ``config.sft``, downloading if needed; of LeRobot's, the cameras in ``env.cameras``.

    ``place`` makes the array of their images. Raises EmbodrlError if they are missing or damaged, or the cameras
    ambiguous.
    """
    settings = config.sft
    cameras = config.env.cameras
    on_hub = parse_dataset(settings.data_dir)
    directory = Path(settings.data_dir).expanduser() if on_hub is None else fetch(on_hub, DATASET_FILES)
    present = camera_names(directory, settings.keys)
    if present is None:
        if settings.cameras is not None:
            raise not_lerobot(directory, "cameras=null")
        if settings.keys:
            raise not_lerobot(directory, "keys={}")
        return load_demos(directory, settings.max_episodes, place=place)
    chosen = settings.cameras
    if chosen is None:
        chosen = tuple(camera.name for camera in cameras)
        missing = [name for name in chosen if not {name, camera_key(name)} & set(present)]
        if missing and len(cameras) == len(present) == 1:
            chosen = (present[0],)
        elif missing:
            names = ", ".join(key.removeprefix(IMAGES) for key in present) or "no cameras"
            raise EmbodrlError(
                f"{directory} has the cameras {names}, but not {', '.join(missing)} of env.cameras",
                "list the dataset's cameras to use in sft.cameras, in the order of env.cameras",
                code="sft-camera-missing",
            )
    size = (cameras[0].height, cameras[0].width)
    return load_demos(directory, settings.max_episodes, chosen, size, settings.keys, place)


def check_robot(config: Config) -> None:
    """Raise EmbodrlError if demonstrations state another robot or frame rate and ``sft.check_robot`` is true."""
    env = config.env
    spec = ENVS.entry(config.env.env_type)
    if not config.sft.check_robot or spec.robots is None:
        return
    facts = read_facts(data_directory(config.sft.data_dir), config.sft.keys)
    ours = (env.env_type, *spec.robots)
    problems: list[str] = []
    if facts.robot_type is not None and facts.robot_type not in ours:
        problems.append(f"the robot {facts.robot_type}, not {' or '.join(ours)}")
    rate = spec.control_hz
    if facts.fps is not None and rate is not None and abs(facts.fps - rate) > 0.01 * rate:
        problems.append(f"{facts.fps:g} frames per second, not {rate:g}")
    if problems:
        raise EmbodrlError(
            f"{config.sft.data_dir} does not match env.env_type={env.env_type}: it states {' and '.join(problems)}",
            "choose the environment it was recorded in, or env=dataset, which needs no simulator; if the statement is"
            " wrong (LIBERO's data of openpi state 10 frames per second), set sft.check_robot=false",
            code="sft-other-robot",
        )


def load_checked_demos(config: Config, place: Place = in_memory) -> Demos:
    """Load the demonstrations of ``sft.data_dir`` and check that the configured policy can imitate them.

    A store counts as one dataset. Raises EmbodrlError if they are damaged, or robot or cameras differ from the
    environment's.
    """
    directory = data_directory(config.sft.data_dir)
    if is_store(directory):
        return _load_store(directory, config, place)
    check_robot(config)
    demos = load_configured_demos(config, place)
    check_demos(demos, config)
    return demos


def data_configs(config: Config) -> list[Config]:
    """Return the configuration with ``sft.data_dir`` set to each dataset that ``sft.further_data`` mixes, in order."""
    further = [config.sft.model_copy(update={"data_dir": directory}) for directory in config.sft.further_data]
    return [config, *(config.model_copy(update={"sft": settings}) for settings in further)]


def check_mixed_facts(config: Config) -> None:
    """Check that the datasets of ``sft.data_dir`` and ``sft.further_data`` exist and can be mixed, without frames.

    Raises EmbodrlError if one is missing or damaged, or differs from the first in actions, state or, where the cameras
    are not chosen by name, their number.
    """
    every = [read_facts(data_directory(one.sft.data_dir), one.sft.keys) for one in data_configs(config)]
    for facts, directory in zip(every[1:], config.sft.further_data, strict=True):
        pairs = {"action dimensions": (facts.action_dim, every[0].action_dim)}
        if config.env.include_state:
            pairs["state dimensions"] = (facts.state_dim, every[0].state_dim)
        if camera_names(data_directory(directory), config.sft.keys) is None:
            pairs["cameras"] = (len(facts.cameras), len(config.env.cameras))
        _refuse_differences(pairs, directory, config)


def _refuse_differences(pairs: Mapping[str, tuple[object, object]], directory: str, config: Config) -> None:
    wrong = [f"{name}: {found}, not {first}" for name, (found, first) in pairs.items() if found != first]
    if wrong:
        raise EmbodrlError(
            f"{directory} of sft.further_data can't be mixed with {config.sft.data_dir}: {'; '.join(wrong)}",
            "mix datasets with the same actions, state and cameras",
            code="sft-data-differ",
        )


def load_further_demos(config: Config, first: Demos, place: Place = in_memory) -> list[Demos]:
    """Load the demonstrations of ``sft.further_data`` and check them like those of ``sft.data_dir``, which are given.

    Raises EmbodrlError as ``load_checked_demos``, or if they can't be mixed with the first.
    """
    found: list[Demos] = []
    for one in data_configs(config)[1:]:
        demos = load_checked_demos(one, place)
        pairs: dict[str, tuple[object, object]] = {"images": (demos.images.shape[1:], first.images.shape[1:])}
        if config.env.include_state:
            pairs["state dimensions"] = (demos.state.shape[1], first.state.shape[1])
        _refuse_differences(pairs, one.sft.data_dir, config)
        found.append(demos)
    return found


def hold_out(demos: Demos, settings: SftConfig) -> tuple[Demos, Demos | None]:
    """Return the training episodes and the last ``sft.val_episodes``, which are held out; None if that is 0.

    Raises EmbodrlError if no episode would be left to train on.
    """
    if not settings.val_episodes:
        return demos, None
    kept = demos.num_episodes - settings.val_episodes
    if kept < 1:
        raise EmbodrlError(
            f"sft.val_episodes={settings.val_episodes} holds out all {demos.num_episodes} episodes of"
            f" {settings.data_dir}",
            f"set it to at most {demos.num_episodes - 1}; 10 % of the episodes is common",
            code="sft-val-episodes",
        )
    return demos.split(kept)


def load_untrained_demos(config: Config) -> tuple[Demos, Demos]:
    """Return the episodes a fine-tune of this configuration trains on, and the held-out ones.

    Held out are the last ``sft.val_episodes`` of the loaded episodes; without that setting, the episodes after the
    first ``sft.max_episodes``. Raises EmbodrlError if there are none, or like ``load_configured_demos``.
    """
    settings = config.sft
    if settings.val_episodes:
        trained, apart = hold_out(load_configured_demos(config), settings)
        assert apart is not None
        return trained, apart
    without_limit = settings.model_copy(update={"max_episodes": None})
    every = load_configured_demos(config.model_copy(update={"sft": without_limit}))
    if settings.max_episodes is None or settings.max_episodes >= every.num_episodes:
        stated = "null" if settings.max_episodes is None else settings.max_episodes
        raise EmbodrlError(
            f"all {every.num_episodes} episodes of {settings.data_dir} are trained on: sft.val_episodes is 0, and"
            f" sft.max_episodes {stated}",
            "train with sft.val_episodes=N, which holds out the last N episodes, or name a dataset with more episodes",
            code="no-held-out-episodes",
        )
    return every.split(settings.max_episodes)


def _load_store(directory: Path, config: Config, place: Place) -> Demos:
    parts: list[Demos] = []
    for shard in shards_of(directory):
        settings = config.sft.model_copy(update={"data_dir": str(shard), "max_episodes": None})
        parts.append(load_checked_demos(config.model_copy(update={"sft": settings}), place))
    if not parts:
        raise missing(directory)
    whole = Demos.concat(parts, place=lambda shape: place(str(directory), shape), with_outcomes=True)
    most = config.sft.max_episodes
    if most is None or most >= whole.num_episodes:
        return whole
    return whole.select(range(most), with_outcomes=True)


def check_demos(demos: Demos, config: Config) -> None:
    """Raise EmbodrlError if action dimensions or cameras differ, or the required robot state was not recorded."""
    source = config.sft.data_dir
    action_dim = demos.actions.shape[1]
    cameras = demos.images.shape[1]
    if action_dim != config.model.action_dim:
        raise EmbodrlError(
            f"actions in {source} have {action_dim} dimensions, model.action_dim is {config.model.action_dim}",
            f"set model.action_dim={action_dim}, or use demonstrations of the policy's robot",
            code="sft-action-dim",
        )
    if cameras != len(config.env.cameras):
        raise EmbodrlError(
            f"{source} has {cameras} cameras, env.cameras has {len(config.env.cameras)}",
            "configure the cameras that the demonstrations were collected with, or re-collect them",
            code="sft-num-cameras",
        )
    if config.env.include_state and demos.state.shape[1] == 0:
        raise EmbodrlError(
            f"env.include_state is true, and {source} holds no robot states",
            "re-collect the demonstrations with env.include_state=true, or set env.include_state=false",
            code="sft-no-state",
        )


def corrected_frames(demos: Demos, horizon: int) -> NDArray[np.int64]:
    """Return the frames from which on another actor than the policy acted, for ``horizon`` steps or to the end."""
    if demos.acted_by is None:
        return np.zeros(0, np.int64)
    frames = np.arange(len(demos.actions))
    ahead = np.minimum(frames[:, None] + np.arange(horizon), demos.last[:, None])
    return frames[(demos.acted_by[ahead] != POLICY).all(axis=1)]


def observed(demos: Demos, config: Config) -> Demos:
    """Return the demonstrations as the environment would show them: without states if ``env.include_state`` is off."""
    return demos if config.env.include_state else replace(demos, state=demos.state[:, :0])


def observation_of(demos: Demos, frames: NDArray[np.int64], images: NDArray[np.uint8]) -> Observation:
    """Return the observation of frames with these images ``uint8[n,V,H,W,3]``."""
    return Observation(images, demos.state[frames], demos.said(frames), np.zeros(len(frames), np.int32))


class FrameBatches:
    """Endless batches of frames, shuffled once per epoch; the order continues across epochs.

    Args:
        settings: section ``sft``.
        horizon: H, actions that the policy learns per frame.
        seed: seed of the order and of the random shifts.
        include_state: yield the robot's state; otherwise ``float32[N,0]``.
        corrections_only: only frames from which on an expert or a person acted for the whole horizon, or to the end.
    """

    def __init__(
        self,
        demos: Demos,
        settings: SftConfig,
        horizon: int,
        seed: int,
        include_state: bool = False,
        corrections_only: bool = False,
    ) -> None:
        self.demos = demos
        self.settings = settings
        self.horizon = horizon
        self._state = demos.state if include_state else demos.state[:, :0]
        self._rng = np.random.default_rng(seed)
        self._order = np.zeros(0, np.int64)
        self.frames = corrected_frames(demos, horizon) if corrections_only else np.arange(len(demos.actions))

    def next(self) -> tuple[Observation, Tensor, Tensor]:
        """Return observations, actions ``float32[N,H,A]`` and the mask ``bool[N,H]`` of actions within the episode."""
        demos = self.demos
        frames = self._draw(self.settings.batch_size)
        actions, inside = demos.action_chunks(frames, self.horizon)
        images = shift_images(demos.images[frames], self.settings.random_shift_px, self._rng)
        observation = replace(observation_of(demos, frames, images), state=self._state[frames])
        return observation, torch.from_numpy(actions), torch.from_numpy(inside)

    def _draw(self, size: int) -> NDArray[np.int64]:
        """Return the next frames."""
        frames, self._order = self._drawn(size, self._order, self.frames)
        return frames

    def _drawn(
        self, size: int, order: NDArray[np.int64], every: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the next frames in an order, and the rest of it; ``every`` is shuffled where it ends."""
        while len(order) < size:
            order = np.concatenate([order, every[self._rng.permutation(len(every))]])
        return order[:size], order[size:]

    def state(self) -> tuple[dict[str, Any], Tensor]:
        """Return the random state as JSON, and ``int64[...]``, the remaining frames of the epoch."""
        return dict(self._rng.bit_generator.state), torch.from_numpy(self._order.copy())

    def load_state(self, rng: dict[str, Any], order: Tensor) -> None:
        """Continue from ``state``; CheckpointError if it was taken with other demonstrations."""
        if order.numel() and int(order.max()) >= len(self.demos.actions):
            raise CheckpointError(
                f"the checkpoint was made with more than {int(order.max())} frames of demonstrations,"
                f" {self.settings.data_dir} has {len(self.demos.actions)}",
                "resume with the demonstrations the run started with",
                code="sft-other-demonstrations",
            )
        self._rng.bit_generator.state = rng
        self._order = order.numpy().copy()


def refuse_others(saved: Mapping[str, object], demos: Demos, data_dir: str) -> None:
    """Raise CheckpointError unless ``demos`` are those a ``DatasetBatches`` state was taken with.

    States of earlier versions do not identify their demonstrations and are accepted.
    """
    if "demonstrations" in saved and saved["demonstrations"] != demos.checksum:
        raise CheckpointError(
            f"the demonstrations in {data_dir} are not the ones the run started with",
            "resume with the same sft.data_dir, episodes and cameras, and unchanged files; to train on others,"
            " start a new run with model.warm_start=RUN/policy",
            code="sft-other-demonstrations",
        )


class DatasetBatches(FrameBatches):
    """Frames of a fixed dataset; its order can't be continued with other demonstrations."""

    def state(self) -> tuple[dict[str, Any], Tensor]:
        rng, order = super().state()
        return {"rng": rng, "demonstrations": self.demos.checksum}, order

    def load_state(self, rng: dict[str, Any], order: Tensor) -> None:
        if "demonstrations" not in rng:
            logger.warning(
                "the checkpoint is from an earlier version and does not identify its demonstrations: not compared"
            )
            super().load_state(rng, order)
            return
        refuse_others(rng, self.demos, self.settings.data_dir)
        super().load_state(rng["rng"], order)


class MixedBatches(DatasetBatches):
    """Batches whose frames are drawn from several datasets by weight, each of which is shuffled once per own epoch.

    Args:
        demos: demonstrations of all datasets, one after another.
        sizes: numbers of frames of the datasets.
        settings: section ``sft``.
        horizon: H, actions that the policy learns per frame.
        seed: seed of the datasets drawn, their orders and the random shifts.
        include_state: as for ``FrameBatches``.
    """

    def __init__(
        self,
        demos: Demos,
        sizes: Sequence[int],
        settings: SftConfig,
        horizon: int,
        seed: int,
        include_state: bool = False,
    ) -> None:
        super().__init__(demos, settings, horizon, seed, include_state)
        self._borders = np.cumsum(sizes)
        weights = np.array(sizes if settings.data_weights is None else settings.data_weights, np.float64)
        self._shares = weights / weights.sum()

    def _draw(self, size: int) -> NDArray[np.int64]:
        chosen = self._rng.choice(len(self._shares), size, p=self._shares)
        frames = np.zeros(size, np.int64)
        owner = np.searchsorted(self._borders, self._order, side="right")
        rest: list[NDArray[np.int64]] = []
        for number, border in enumerate(self._borders.tolist()):
            mine = chosen == number
            every = np.arange(self._borders[number - 1] if number else 0, border)
            frames[mine], left = self._drawn(int(mine.sum()), self._order[owner == number], every)
            rest.append(left)
        self._order = np.concatenate(rest)
        return frames


IMITATED = "imitated"
"""Checkpoint key: the sampling state of demonstrations, and their checksum."""


class DemoDraws:
    """Frames of demonstrations, sampled uniformly with replacement, that a policy imitates alongside another loss.

    A draw has ``size`` frames with H = ``horizon`` actions each.
    """

    def __init__(self, demos: Demos, size: int, horizon: int, seed: int) -> None:
        self.demos = demos
        self.size = size
        self.horizon = horizon
        self._generator = torch.Generator().manual_seed(seed)

    def next(self) -> tuple[Observation, Tensor, Tensor]:
        """Return observations, actions ``float32[N,H,A]`` and the mask ``bool[N,H]`` of actions within the episode."""
        demos = self.demos
        frames = torch.randint(len(demos.actions), (self.size,), generator=self._generator).numpy()
        actions, inside = demos.action_chunks(frames, self.horizon)
        observation = observation_of(demos, frames, demos.images[frames])
        return observation, torch.from_numpy(actions), torch.from_numpy(inside)

    def state(self) -> dict[str, Tensor]:
        """Return the state for a checkpoint."""
        return {IMITATED: self._generator.get_state(), f"{IMITATED}.checksum": torch.tensor(self.demos.checksum)}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Continue from ``state``; CheckpointError if it is missing or of other demonstrations."""
        if IMITATED not in state or int(state[f"{IMITATED}.checksum"]) != self.demos.checksum:
            raise CheckpointError(
                "the demonstrations are not the ones the run started with",
                "resume with the same algorithm.off_policy.demos and unchanged files",
                code="imitation-other-data",
            )
        self._generator.set_state(state[IMITATED])
