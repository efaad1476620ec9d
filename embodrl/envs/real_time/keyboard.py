"""Keys as a device for human corrections, from the terminal or elsewhere. Shapes: A action dimensions."""

from __future__ import annotations

import logging
import os
import select
import sys
import termios
import threading
import time
import tty
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from embodrl.envs.real_time.controls import FAILURE, PAUSE, READY, STOP, SUCCESS, Controls
from embodrl.errors import UsageError

logger = logging.getLogger(__name__)

HOLD_S = 0.3
"""A terminal reports a held key as repeated presses, the first after a delay."""
AXES = ("da", "ws", "rf", "lj", "ik", "ou")
"""Keys that move the first dimensions up and down."""
GRIPPER = "g"
HOLD = "h"
CONTINUE = "c"
"""Releases the emergency stop: never the key that set it, which a hurried person presses twice."""
SIGNALS = {"p": PAUSE, " ": STOP, "\n": READY, "\r": READY, "y": SUCCESS, "n": FAILURE}
HELP = (
    "keys: d a  w s  r f  l j  i k  o u move, g gripper, h hold, p pause, space stop, c continue after a stop,"
    " Enter ready, y solved, n failed"
)
_LISTEN_S = 0.2


class Keyboard:
    """Non-blocking keyboard input of the terminal.

    Read by a thread, since keys must reach the robot while the collector waits for it.

    Args:
        action_dim: A. With 7 or more, the last one is a gripper, which a key opens (1) and closes (-1).
        controls: receives pause, stop, ready, success and failure.
        keys: returns the keys pressed since the last call; None for the terminal's.

    Raises:
        UsageError: there is no terminal.
    """

    def __init__(
        self,
        action_dim: int,
        controls: Controls,
        keys: Callable[[], str] | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._size = action_dim
        self._controls = controls
        self._now = now
        self._keys = keys
        self._grip = 1.0
        self._held: dict[str, float] = {}
        self._last_s = -HOLD_S
        self._terminal = None if keys is not None else Terminal()
        if self._terminal is not None:
            threading.Thread(target=self._listen, args=(self._terminal,), name="keyboard", daemon=True).start()

    def read(self) -> NDArray[np.float32] | None:
        if self._keys is not None:
            self.press(self._keys())
        now = self._now()
        if now - self._last_s >= HOLD_S:
            return None
        action = np.zeros(self._size, np.float32)
        for dimension, (up, down) in enumerate(AXES[: self._size]):
            pressed = [now - self._held.get(key, -HOLD_S) < HOLD_S for key in (up, down)]
            action[dimension] = float(pressed[0]) - float(pressed[1])
        if self._size >= 7:
            action[-1] = self._grip
        return action

    def _listen(self, terminal: Terminal) -> None:
        while (keys := terminal.pressed(_LISTEN_S)) is not None:
            self.press(keys)

    def press(self, keys: str) -> None:
        """Note keys that are pressed now."""
        now = self._now()
        for key in keys:
            if key == CONTINUE:
                self._controls.take(STOP)
            elif key in SIGNALS:
                signal = SIGNALS[key]
                (self._controls.switch if signal == PAUSE else self._controls.say)(signal)
            else:
                self._grip = -self._grip if key == GRIPPER else self._grip
                if key in (GRIPPER, HOLD) or any(key in pair for pair in AXES):
                    self._held[key] = self._last_s = now

    def close(self) -> None:
        if self._terminal is not None:
            self._terminal.close()


class Terminal:
    """The terminal of this process, without line buffering and echo."""

    def __init__(self) -> None:
        if not sys.stdin.isatty():
            raise UsageError(
                "interventions by keyboard need a terminal, but the input of this process is not one",
                "start the command in a terminal, or choose another device",
                code="keyboard-no-terminal",
            )
        self._file = sys.stdin.fileno()
        self._is_closed = False
        self._before = termios.tcgetattr(self._file)
        tty.setcbreak(self._file)
        logger.warning(HELP)

    def pressed(self, wait_s: float) -> str | None:
        """Return the keys pressed, waiting up to ``wait_s``; None if the terminal is closed."""
        if self._is_closed:
            return None
        ready, _, _ = select.select([self._file], [], [], wait_s)
        found = os.read(self._file, 1024) if ready and not self._is_closed else None
        return None if found == b"" else (found or b"").decode(errors="ignore")

    def close(self) -> None:
        """Restore the terminal settings."""
        self._is_closed = True
        termios.tcsetattr(self._file, termios.TCSADRAIN, self._before)
