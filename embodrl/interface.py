"""Meaning of actions and observations, for environments and policies. Imports nothing heavy.

Either side may leave conventions unstated, which are then not compared. An environment states its conventions in its
spec, a family in its spec for checkpoints of known datasets, and a policy written by embodrl in ``embodrl.json``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import cast

ZERO_CLOSES = "0 closes, 1 opens"
CLOSES_POSITIVE = "-1 opens, 1 closes"
OPENS_POSITIVE = "-1 closes, 1 opens"
CONVERTED = {
    ("libero", ZERO_CLOSES): CLOSES_POSITIVE,
    ("libero", CLOSES_POSITIVE): OPENS_POSITIVE,
    ("libero", OPENS_POSITIVE): CLOSES_POSITIVE,
    ("bridge", ZERO_CLOSES): OPENS_POSITIVE,
}
"""``model.gripper`` and the policy's own convention -> convention that reaches the environment; unchanged for all
others.
"""


@dataclass(frozen=True, kw_only=True)
class Interface:
    """Conventions of actions and observations; None is not stated.

    Attributes:
        action: ``delta_pose`` (change of the end effector's pose), ``delta_position``, or another word.
        rotation: rotation of an action: ``axis_angle``, ``euler_xyz``, ``rotation_6d``, ``quaternion_xyzw`` or
            ``none``.
        frame: frame of an action's pose: ``base`` (the robot's) or ``end_effector``.
        gripper: last number of an action, e.g. ``CLOSES_POSITIVE``.
        state: parts of the state in order.
        cameras: cameras in order.
        pictures: ``upright``, or ``rotated_180``.
        control_hz: actions per second.
    """

    action: str | None = None
    rotation: str | None = None
    frame: str | None = None
    gripper: str | None = None
    state: tuple[str, ...] | None = None
    cameras: tuple[str, ...] | None = None
    pictures: str | None = None
    control_hz: float | None = None

    @staticmethod
    def of(content: Mapping[str, object]) -> Interface:
        """Return the conventions in a JSON file; values of a wrong type count as not stated."""
        found: dict[str, object] = {}
        for name in (field.name for field in fields(Interface)):
            value = content.get(name)
            if name in ("state", "cameras"):
                items = cast(list[object], value) if isinstance(value, list) else [None]
                found[name] = tuple(items) if all(isinstance(item, str) for item in items) else None
            else:
                wanted = (int, float) if name == "control_hz" else str
                found[name] = value if isinstance(value, wanted) else None
        return Interface(**found)  # pyright: ignore[reportArgumentType]

    def differences(self, other: Interface) -> list[tuple[str, object, object]]:
        """Return (name, own value, other value) of all conventions that both state and that differ."""
        pairs = [(field.name, getattr(self, field.name), getattr(other, field.name)) for field in fields(self)]
        return [(name, mine, theirs) for name, mine, theirs in pairs if None not in (mine, theirs) and mine != theirs]


LIBERO_STATE = ("end effector position", "rotation vector", "two fingers")
LIBERO = Interface(
    action="delta_pose",
    rotation="axis_angle",
    frame="base",
    gripper=CLOSES_POSITIVE,
    state=LIBERO_STATE,
    cameras=("agentview", "wrist"),
    pictures="rotated_180",
    control_hz=20.0,
)
"""LIBERO as openpi, lerobot and RLinf feed it: github.com/Physical-Intelligence/openpi, examples/libero/main.py."""
