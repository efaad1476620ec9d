"""Robot time around one environment: clock, command limits, human signals, and simulated delay, loss and noise.

Shapes: A action dimensions, V cameras, H x W image, S state dimensions.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from embodrl.envs.real_time.clock import Clock, Pacer
from embodrl.envs.real_time.controls import FAILURE, PAUSE, READY, STOP, SUCCESS, Controls
from embodrl.envs.real_time.safety import Command, CommandLimits
from embodrl.fields import Fields

logger = logging.getLogger(__name__)

_LOOK_S = 0.05
Seen = tuple[NDArray[np.uint8], NDArray[np.float32]]


@runtime_checkable
class Units(Protocol):
    """An environment whose commands differ from its actions."""

    def to_command(self, action: NDArray[np.float32]) -> Command:
        """Convert an action ``float32[A]`` to a command in the robot's units."""
        ...

    def to_action(self, command: Command) -> NDArray[np.float32]:
        """Convert a command to an action."""
        ...

    def present(self) -> Command | None:
        """Return the command that would keep the robot in place, as measured; None if not measured."""
        ...

    def forget(self) -> None:
        """Measure the robot's position before the next command: a person may have moved it."""
        ...


class RealTime:
    """Mediates between the single environment of a process and the acting policy or person, by ``env.real_time``.

    An ``env`` without commands of its own uses its actions as commands, beginning at 0. ``clock`` None is the wall
    clock.
    """

    def __init__(self, settings: Fields, env: object, clock: Clock | None = None) -> None:
        hz = settings.number("control_hz")
        safety = settings.fields("safety")
        self.control_hz = hz
        self.pacer = Pacer(clock or Clock(settings.number("speed")), hz)
        self.controls = Controls(settings.text("control_dir", None))
        self.limits = CommandLimits(
            *(_numbers(safety, name) for name in ("low", "high", "max_step", "max_velocity")),
            period_s=1 / hz,
            stops=safety.text("on_violation") == "stop",
        )
        self._units = env if isinstance(env, Units) else None
        self._lag = settings.number("latency_s") * hz
        self._drop_rate = settings.number("dropped_frames")
        self._state_noise = settings.number("state_noise")
        self._action_noise = settings.number("action_noise")
        self.max_dropped = settings.integer("max_dropped_frames")
        self._seed = settings.integer("seed")
        self._waits = settings.flag("wait_for_person")
        self._rng = np.random.default_rng(0)
        self._previous: Command | None = None
        self._steps = 0
        self._seen: deque[tuple[int, Seen]] = deque()
        self._counts = dict.fromkeys(("stops", "pauses", "dropped_frames"), 0)

    # -- episodes -----------------------------------------------------------------------------------------------------

    def begin(self, seed: int) -> None:
        """Prepare an episode after the scene has been reset: wait for whoever must be ready."""
        if self._waits:
            logger.warning("waiting for a person to reset the scene and make %s/%s", self.controls.directory, READY)
            self._wait_while(lambda: not self.controls.take(READY))
        self.hold()
        for name in (SUCCESS, FAILURE):  # from the previous episode
            self.controls.take(name)
        self._rng = np.random.default_rng([self._seed, max(seed, 0)])
        self._steps = 0
        self._previous = None
        self._seen.clear()
        self.pacer.begin()

    def hold(self) -> None:
        """Wait while an emergency stop holds; also before a scene reset, which may move a robot."""
        if self.controls.holds(STOP):
            logger.warning("stopped until %s/%s is removed", self.controls.directory, STOP)
            self._wait_while(lambda: self.controls.holds(STOP))

    def _wait_while(self, holds: Callable[[], bool]) -> None:
        while holds():
            self.pacer.clock.sleep(_LOOK_S * self.pacer.clock.speed)

    def admit(self, action: NDArray[np.float32]) -> NDArray[np.float32] | None:
        """Return the action to execute now for ``action float32[A]``; None if the robot must stop."""
        if self.controls.holds(PAUSE):
            self._counts["pauses"] += 1
            self._wait_while(lambda: self.controls.holds(PAUSE) and not self.controls.holds(STOP))
            self._previous = None
            if self._units is not None:
                self._units.forget()
            self.pacer.begin()
        allowed = None if self.controls.holds(STOP) else self._limited(action)
        if allowed is None:
            self._counts["stops"] += 1
            logger.warning("emergency stop: no command is sent, and the episode ends")
            return None
        if self._action_noise:
            noise = self._rng.standard_normal(allowed.shape).astype(np.float32) * np.float32(self._action_noise)
            allowed = np.clip(allowed + noise, -1, 1, dtype=np.float32)
        self.pacer.command()
        self._steps += 1
        return allowed

    def _limited(self, action: NDArray[np.float32]) -> NDArray[np.float32] | None:
        units = self._units
        command = action.astype(np.float64) if units is None else units.to_command(action)
        if self._previous is None:
            self._previous = np.zeros_like(command) if units is None else units.present()
        allowed = self.limits.apply(command, self._previous)
        if allowed is None:
            return None
        self._previous = allowed
        if allowed is command or (allowed == command).all():
            return action
        return allowed.astype(np.float32) if units is None else units.to_action(allowed)

    def judged(self) -> tuple[bool, bool]:
        """Return whether a person has marked the episode as a success or a failure."""
        return self.controls.take(SUCCESS), self.controls.take(FAILURE)

    # -- observations -------------------------------------------------------------------------------------------------

    @property
    def sees_every_step(self) -> bool:
        """Observations lag behind the last action, so that every step must be observed."""
        return self._lag > 0

    def observe(self, images: NDArray[np.uint8], state: NDArray[np.float32]) -> None:
        """Replace the current ``uint8[V,H,W,3]`` and ``float32[S]`` in place by the observation delivered now.

        The delivered observation was taken ``latency_s`` ago or, at the beginning, is the first one.
        """
        if not self._seen or self._seen[-1][0] != self._steps:
            self._seen.append((self._steps, self._taken(images, state)))
        while len(self._seen) > 1 and self._seen[1][0] <= self._steps - self._lag:
            self._seen.popleft()
        images[:], state[:] = self._seen[0][1]

    def _taken(self, images: NDArray[np.uint8], state: NDArray[np.float32]) -> Seen:
        pictures = images.copy()
        if self._drop_rate and self._rng.random() < self._drop_rate and self._seen:
            self._counts["dropped_frames"] += 1
            pictures = self._seen[-1][1][0]
        noise = self._rng.standard_normal(state.shape).astype(np.float32) * np.float32(self._state_noise)
        return pictures, (state + noise).astype(np.float32)

    def dropped(self) -> None:
        """Count a missing observation, in whose place the last one is delivered again."""
        self._counts["dropped_frames"] += 1

    def status(self) -> dict[str, float]:
        """Return statistics since the last call: the times of ``Pacer.status``, and counts."""
        found = self.pacer.status() | self._counts | {f"limited_{name}": n for name, n in self.limits.counts.items()}
        for name in self._counts:
            self._counts[name] = 0
        for name in self.limits.counts:
            self.limits.counts[name] = 0
        return found


def _numbers(fields: Fields, name: str) -> list[float] | None:
    return None if fields.content.get(name) is None else [float(number) for number in fields.numbers(name)]
