"""A robot with lerobot's interface as an environment: connect, get_observation, send_action, disconnect.

Source: github.com/huggingface/lerobot 0.6.1, src/lerobot/robots/robot.py. Nothing else of lerobot is used: any object
with these methods will do.

Shapes: A action dimensions, V cameras, H x W image, S state dimensions.
"""

from __future__ import annotations

import contextlib
import logging
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from embodrl.envs.images import resized
from embodrl.envs.real_time.safety import Command
from embodrl.envs.simulator import SimStep, Simulator, SimulatorVectorEnv
from embodrl.envs.stepping import CameraSettings, EpisodeRules
from embodrl.errors import EnvError, MissingDependencyError
from embodrl.names import import_object

if TYPE_CHECKING:
    from embodrl.envs.real_time.real_time import RealTime

logger = logging.getLogger(__name__)
RobotObservation = Mapping[str, Any]


class Robot(Protocol):
    """The part of lerobot's ``Robot`` used here."""

    @property
    def observation_features(self) -> Mapping[str, Any]: ...
    @property
    def action_features(self) -> Mapping[str, Any]: ...
    @property
    def is_calibrated(self) -> bool: ...
    def connect(self, calibrate: bool) -> None: ...
    def get_observation(self) -> RobotObservation: ...
    def send_action(self, action: dict[str, float], /) -> object: ...
    def disconnect(self) -> None: ...


class RobotSimulator(Simulator):
    """One robot. Actions in -1 to 1 are mapped to the robot's units.

    Args:
        robot: robot, not yet connected.
        action_low, action_high: values of -1 and 1 for each of ``action_features``, in the robot's units.
        relative: an action changes the last command by up to half of that range times ``max_change``.
        max_change: see ``relative``.
        cameras: cameras, named as in ``observation_features``.
        state_keys: numbers of an observation that form the state; empty: all.
        instruction: language instruction for the policy.
        reset: called with the robot and the seed before an episode; None for no action.
        success: maps an observation to success; None if only a person decides.

    Raises:
        EnvError: the robot has other actions, cameras or numbers, or is not calibrated.
    """

    is_seeded = True  # no seed can position a robot, and comparing two resets would move it

    def __init__(
        self,
        robot: Robot,
        action_low: Sequence[float],
        action_high: Sequence[float],
        relative: bool,
        max_change: float,
        cameras: Sequence[CameraSettings],
        state_keys: Sequence[str],
        instruction: str,
        reset: Callable[[Robot, int], object] | None,
        success: Callable[[RobotObservation], bool] | None,
    ) -> None:
        self.robot = robot
        self.instruction = instruction
        self._keys = list(robot.action_features)
        _check_lengths(self._keys, action_low, action_high)
        self._middle = (np.asarray(action_high) + np.asarray(action_low)) / 2
        self._half = (np.asarray(action_high) - np.asarray(action_low)) / 2
        self._relative = relative
        self._change = self._half * max_change
        features = robot.observation_features
        numbers = [name for name, kind in features.items() if not isinstance(kind, tuple)]
        self._state_keys = list(state_keys) or numbers
        pictures = [name for name, kind in features.items() if isinstance(kind, tuple)]
        _check_names("env.cameras", [camera["name"] for camera in cameras], pictures)
        _check_names("env.state_keys", self._state_keys, numbers)
        if relative:
            _check_names("env.relative_actions", self._keys, numbers)
        self._cameras = [(camera["name"], camera["height"], camera["width"]) for camera in cameras]
        self.state_dim = len(self._state_keys)
        self.action_low = (-1.0,) * len(self._keys)
        self.action_high = (1.0,) * len(self._keys)
        self._reset = reset
        self._success = success
        self._seen: RobotObservation | None = None
        self._dropped = 0
        self._command: Command | None = None
        self.real_time: RealTime | None = None
        robot.connect(calibrate=False)
        if not robot.is_calibrated:
            raise EnvError(
                f"{type(robot).__name__} is not calibrated",
                "calibrate it first (lerobot-calibrate)",
                code="robot-settings",
            )
        logger.info("connected to %s", type(robot).__name__)

    def reset(self, seed: int) -> None:
        if self._reset is not None:
            self._reset(self.robot, seed)
        self._seen = self._command = None

    def present(self) -> Command | None:
        """Return the measured positions in the order of the command, ``float64[A]``; None if not all are measured."""
        self.observe()  # a person may have moved the robot since
        seen = self._observation
        if any(key not in seen for key in self._keys):
            return None
        return np.array([float(seen[key]) for key in self._keys])

    def forget(self) -> None:
        """See ``real_time.Units``."""
        self._command = None

    def _from(self) -> Command:
        """Return the base of a relative action: the last command, or the robot's position."""
        if self._command is None:
            present = self.present()
            assert present is not None, "checked at the start: relative actions need measured positions"
            self._command = present
        return self._command

    def to_command(self, action: NDArray[np.float32]) -> Command:
        """Return ``float64[A]`` in the robot's units."""
        if not self._relative:
            return self._middle + self._half * np.clip(action, -1, 1)
        wanted = self._from() + self._change * action
        return np.clip(wanted, self._middle - self._half, self._middle + self._half)

    def to_action(self, command: Command) -> NDArray[np.float32]:
        """Return the action ``float32[A]`` for a command."""
        base, scale = (self._from(), self._change) if self._relative else (self._middle, self._half)
        return ((command - base) / scale).astype(np.float32)

    def step(self, action: NDArray[np.float32]) -> SimStep:
        command = self.to_command(action)
        self.robot.send_action(dict(zip(self._keys, command.tolist(), strict=True)))
        self._command = command
        if self.real_time is not None:
            self.real_time.pacer.wait()  # the observation already shows the effect of the command
        self.observe()
        return SimStep(0.0, self._success is not None and bool(self._success(self._observation)))

    def observe(self) -> None:
        """Query the robot's observation; if it does not answer in time, return its last one.

        Raises EnvError if it failed to answer several times in a row, or has never answered.
        """
        try:
            self._seen = self.robot.get_observation()
            self._dropped = 0
        except TimeoutError as error:
            self._dropped += 1
            borne = 0 if self.real_time is None else self.real_time.max_dropped
            if self._seen is None or self._dropped > borne:
                raise EnvError(
                    f"{type(self.robot).__name__} gave no observation {self._dropped} times in a row: {error}",
                    "check its cables and cameras; env.real_time.max_dropped_frames sets how many are tolerated",
                    code="robot-no-observation",
                ) from error
            if self.real_time is not None:
                self.real_time.dropped()

    @property
    def _observation(self) -> RobotObservation:
        if self._seen is None:
            self.observe()
        assert self._seen is not None
        return self._seen

    def images(self) -> NDArray[np.uint8]:
        seen = self._observation
        pictures = [resized(np.asarray(seen[name], np.uint8), height, width) for name, height, width in self._cameras]
        return np.stack(pictures)

    def proprioception(self) -> NDArray[np.float32]:
        return np.array([float(self._observation[key]) for key in self._state_keys], np.float32)

    def close(self) -> None:
        self.robot.disconnect()


class RobotVectorEnv(SimulatorVectorEnv):
    """One robot as a batch of one.

    The arguments are the settings of ``RobotConfig`` with the fields of ``EpisodeRules``; see also ``RobotSimulator``.
    There is one task name, under which results are reported. ``include_images`` False: no camera is needed, and images
    are black. An empty ``state_keys`` is all numbers.
    """

    def __init__(
        self,
        num_envs: int,
        tasks: list[str],
        robot: str,
        cameras: Sequence[CameraSettings],
        action_low: Sequence[float],
        action_high: Sequence[float],
        instruction: str,
        robot_settings: Mapping[str, object] | None = None,
        robot_module: str | None = None,
        relative_actions: bool = False,
        max_change: float = 0.1,
        state_keys: Sequence[str] = (),
        reset_fn: str | None = None,
        success_fn: str | None = None,
        include_images: bool = True,
        max_episode_steps: int = 200,
        include_state: bool = True,
        max_chunk: int = 8,
        success_bonus: float = 1.0,
        auto_reset: bool = True,
        ignore_terminations: bool = False,
    ) -> None:
        if num_envs != 1:
            raise EnvError("a process has one robot", "set env.train.total_num_envs=1", code="one-robot-per-process")
        if robot_module is not None:
            import_module(robot_module)
        reset, success = (None if name is None else import_object(name) for name in (reset_fn, success_fn))
        seen = cameras if include_images else ()
        self._arguments = (
            *(action_low, action_high, relative_actions, max_change, seen, state_keys, instruction, reset, success),
        )
        self._robot = make_robot(robot, robot_settings or {})
        rules = EpisodeRules(max_episode_steps, "sparse", success_bonus, auto_reset, ignore_terminations)
        super().__init__(1, tasks, cameras, rules, include_state, max_chunk, include_images=include_images)

    def make_simulator(self, task: str) -> Simulator:
        return RobotSimulator(self._robot, *self._arguments)

    @property
    def _simulator(self) -> RobotSimulator:
        found = self._sim(0)
        assert isinstance(found, RobotSimulator)
        return found

    def set_real_time(self, settings: Mapping[str, object]) -> None:
        super().set_real_time(settings)
        self._simulator.real_time = self.real_time

    def to_command(self, action: NDArray[np.float32]) -> Command:
        """See ``real_time.Units``."""
        return self._simulator.to_command(action)

    def to_action(self, command: Command) -> NDArray[np.float32]:
        """See ``real_time.Units``."""
        return self._simulator.to_action(command)

    def present(self) -> Command | None:
        """See ``real_time.Units``."""
        return self._simulator.present()

    def forget(self) -> None:
        """See ``real_time.Units``."""
        self._simulator.forget()


def make_robot(name: str, settings: Mapping[str, object]) -> Robot:
    """Return a robot that is not yet connected, by lerobot name or ``module:function`` that returns one.

    ``settings`` are of its lerobot configuration, or arguments of that function. Raises MissingDependencyError without
    lerobot, EnvError if there is no such robot, or for invalid settings.
    """
    if ":" in name:
        return import_object(name)(**settings)
    try:
        robots, utils, draccus = map(import_module, ("lerobot.robots", "lerobot.robots.utils", "draccus"))
    except ImportError as error:
        raise MissingDependencyError(
            f"lerobot can't be imported: {error}",
            "set env.python to an interpreter with lerobot installed (pip install lerobot)",
        ) from error
    for package in (robots, import_module("lerobot.cameras")):
        _import_parts(package)
    try:
        config = draccus.decode(robots.RobotConfig, {"type": name, **settings})
    except (draccus.utils.DraccusException, TypeError, ValueError) as error:
        known = ", ".join(sorted(robots.RobotConfig.get_known_choices()))
        raise EnvError(
            f"lerobot makes no robot '{name}' of {dict(settings)}: {error}",
            f"known here: {known or 'none'}; set env.robot_module to the module that registers it",
            code="robot-settings",
        ) from error
    return utils.make_robot_from_config(config)


def _import_parts(package: ModuleType) -> None:
    """Import the modules of a package: lerobot knows a robot or camera only once its module is imported."""
    for part in pkgutil.iter_modules(package.__path__):
        with contextlib.suppress(ImportError):  # another robot's module, whose driver is not installed
            import_module(f"{package.__name__}.{part.name}")


def _check_lengths(keys: Sequence[str], low: Sequence[float], high: Sequence[float]) -> None:
    if not len(keys) == len(low) == len(high):
        raise EnvError(
            f"the robot takes {len(keys)} numbers per action ({', '.join(keys)}), env.action_low and env.action_high"
            f" have {len(low)} and {len(high)}",
            "set one number for each, in this order, and set model.action_dim",
            code="robot-actions",
        )


def _check_names(setting: str, wanted: Sequence[str], offered: Sequence[str]) -> None:
    if missing := [name for name in wanted if name not in offered]:
        raise EnvError(
            f"{setting} needs {', '.join(missing)}, which the robot does not observe",
            f"it observes {', '.join(offered) or 'none of that kind'}",
            code="robot-observation",
        )
