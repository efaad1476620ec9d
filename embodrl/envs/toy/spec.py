"""The toy environment: facts. Needs no simulator."""

from __future__ import annotations

from embodrl.envs.toy.tasks import AXES, INSTRUCTIONS
from embodrl.specs import SimulatorSpec

SPEC = SimulatorSpec(
    name="toy",
    robots=(),
    control_hz=20.0,
    target="embodrl.envs.toy.env:ToyVectorEnv",
    description="a dot to be moved to a coloured goal; needs no simulator",
    reads=("image_size", "state"),
    tasks=INSTRUCTIONS,
    action_dim=7,
    axes=AXES,
    actions="the first two numbers move the dot, -1 to 1",
    camera_list="one, from above",
    experts="all tasks",
    verified="everywhere",
)
