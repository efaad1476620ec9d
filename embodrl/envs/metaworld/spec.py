"""Meta-World: facts. Imports no simulator."""

from __future__ import annotations

from embodrl.envs.axes import COMMON
from embodrl.envs.metaworld.tasks import INSTRUCTIONS
from embodrl.interface import CLOSES_POSITIVE, Interface
from embodrl.specs import EXAMPLE_CAMERA, REWARD_MODES, SimulatorSpec

INTERFACE = Interface(action="delta_position", rotation="none", frame="base", gripper=CLOSES_POSITIVE, control_hz=80.0)

SPEC = SimulatorSpec(
    name="metaworld",
    robots=("sawyer",),
    control_hz=80.0,
    target="embodrl.envs.metaworld.env:MetaWorldVectorEnv",
    description="Meta-World 3 (MuJoCo): a Sawyer arm; MT1, MT10 and MT50",
    reads=("cameras", "include_images", "state", "reward_mode", "success_bonus", "render_detail", "video"),
    reward_modes=REWARD_MODES,
    tasks=INSTRUCTIONS,
    action_dim=4,
    cameras=("topview", "corner", "corner2", "corner3", "corner4", "behindGripper", "gripperPOV"),
    needs=("metaworld", "mujoco", "fast_simplification"),
    extra="metaworld",
    draws_with="mujoco",
    example={"tasks": ["reach-v3"], "cameras": [{**EXAMPLE_CAMERA, "name": "corner2"}]},
    axes=COMMON,
    actions="change of the gripper's position (x, y, z) and gripper closing, -1 to 1",
    camera_list="topview, corner, corner2 to 4, behindGripper, gripperPOV, or any name with eye and target",
    experts="all tasks",
    interface=lambda env: INTERFACE,
    verified="all tasks on a CPU (MUJOCO_GL=egl); not yet on a GPU",
)
