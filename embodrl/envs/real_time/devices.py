"""Input devices for human corrections. Shapes: A action dimensions."""

from __future__ import annotations

import logging
import threading
from importlib import import_module
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from embodrl.envs.real_time.browser import Browser
from embodrl.envs.real_time.controls import STOP, Controls
from embodrl.envs.real_time.keyboard import Keyboard
from embodrl.errors import MissingDependencyError, UsageError
from embodrl.names import import_function
from embodrl.types import Observation

logger = logging.getLogger(__name__)

_TOUCHED = 0.05
_WATCH_S = 0.02


class Device(Protocol):
    """An input device held by a person."""

    def read(self) -> NDArray[np.float32] | None:
        """Return the person's current action, ``float32[A]``; None if idle."""
        ...

    def close(self) -> None: ...


def wanted_action(device: Device, action_dim: int) -> NDArray[np.float32] | None:
    """Return the person's current action, ``float32[A]``; None if idle.

    Raises UsageError if the device returned something else.
    """
    found = device.read()
    if found is None:
        return None
    action = np.asarray(found)
    if action.shape != (action_dim,) or action.dtype.kind not in "fiu" or not np.isfinite(action).all():
        raise UsageError(
            f"the device {type(device).__name__} returned {action.dtype}{list(action.shape)}, or non-finite values",
            f"return float32[{action_dim}], one number per action dimension, or None",
            code="device-result",
        )
    return action.astype(np.float32)


def show(device: Device, observation: Observation) -> None:
    """Show a person the first camera's picture ``uint8[H,W,3]``, if the device has a method ``show``."""
    if callable(shown := getattr(device, "show", None)):
        shown(observation.images[0, 0])


def open_device(name: str, action_dim: int, control_dir: str | None) -> Device:
    """Return a device, opened: ``keyboard``, ``spacemouse``, ``browser``, or what ``module:function`` returns.

    The function is called with A and ``control_dir``, the directory of signals to the robot
    (``env.real_time.control_dir``). Raises MissingDependencyError if the device's package is not installed, UsageError
    if the device is missing or the function returned none.
    """
    if name == "browser":
        return Browser(action_dim, Controls(control_dir))
    if name in ("keyboard", "spacemouse"):
        make = Keyboard if name == "keyboard" else SpaceMouse
        return make(action_dim, Controls(control_dir))
    device: Any = import_function(name)(action_dim, control_dir)
    if not callable(getattr(device, "read", None)) or not callable(getattr(device, "close", None)):
        raise UsageError(
            f"{name} returned {type(device).__name__} instead of a device",
            "return an object with read(), which gives float32[A] or None, and close()",
            code="device-result",
        )
    return device


class SpaceMouse:
    """A space mouse via pyspacemouse: three directions, three rotations, and the first button for a gripper.

    A thread polls its buttons: the second one must stop the robot while the collector waits for it. The first six of
    ``action_dim`` numbers are moved; with 7 or more, the last one is a gripper. ``device`` None is the first connected
    one. Raises MissingDependencyError without pyspacemouse, UsageError without a space mouse.
    """

    def __init__(self, action_dim: int, controls: Controls, device: Any = None) -> None:
        self._size = action_dim
        self._controls = controls
        self._grip = 1.0
        self._pressed = [False, False]
        self._has_switched = False
        self._lock = threading.Lock()
        self._is_closed = threading.Event()
        self._device = open_space_mouse() if device is None else device
        if device is None:
            threading.Thread(target=self._watch, name="spacemouse", daemon=True).start()

    def _watch(self) -> None:
        while not self._is_closed.wait(_WATCH_S):
            self._look()

    def _look(self) -> Any:
        """Read the device and act on its buttons."""
        with self._lock:
            state = self._device.read()
            buttons = [bool(button) for button in [*list(state.buttons)[:2], 0, 0][:2]]
            first, second = (now and not before for now, before in zip(buttons, self._pressed, strict=True))
            self._pressed = buttons
            if first:
                self._grip = -self._grip
                self._has_switched = True
        if second:
            self._controls.say(STOP)
        return state

    def read(self) -> NDArray[np.float32] | None:
        state = self._look()
        first = self._has_switched
        self._has_switched = False
        axes = np.array([state.x, state.y, state.z, state.roll, state.pitch, state.yaw], np.float32)
        if not first and np.abs(axes).max() < _TOUCHED:
            return None
        action = np.zeros(self._size, np.float32)
        action[:6] = np.clip(axes, -1, 1)[: self._size]
        if self._size >= 7:
            action[-1] = self._grip
        return action

    def close(self) -> None:
        self._is_closed.set()
        with self._lock:
            self._device.close()


def open_space_mouse() -> Any:
    """Return the first connected space mouse.

    Raises MissingDependencyError without pyspacemouse, UsageError if there is none or reading it is not permitted.
    """
    try:
        pyspacemouse = import_module("pyspacemouse")
    except ImportError as error:
        hint = "pip install 'embodrl[spacemouse]'"
        raise MissingDependencyError(f"pyspacemouse can't be imported: {error}", hint) from error
    try:
        device = pyspacemouse.open()
    except Exception as error:  # the package raises plain exceptions of its own and of its drivers
        raise _no_space_mouse(error) from error
    if not device:
        raise _no_space_mouse("none was found")
    return device


def _no_space_mouse(reason: object) -> UsageError:
    hint = "connect it, and allow this user to read /dev/hidraw*"
    return UsageError(f"no space mouse can be read: {reason}", hint, code="spacemouse-missing")
