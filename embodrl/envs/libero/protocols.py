"""Settings of published LIBERO evaluations. Imports no simulator.

All five iterate over the 50 official initial states of each task, with images of 256 x 256 pixels rotated by 180
degrees and a state of position, rotation vector (robosuite's ``quat2axisangle``, whose angle may exceed pi: the
quaternion's sign is kept) and both fingers, as LIBERO is configured here. They differ in the settings below.
"""

from __future__ import annotations

from embodrl.envs.libero.suites import NUM_INIT_STATES, SUITES
from embodrl.specs import ProtocolSpec

CAMERA_PX = 256
PUBLISHED = {
    "env.eval.seed": 0,  # the first episodes start from the first initial states
    "env.init_states": "official",
    "env.settle_steps": 10,
    "env.render_detail": "full",
    "env.eval.to_step_limit": False,
}
LIMITS = {"": {name: suite.max_episode_steps for name, suite in SUITES.items()}}
RLDS: dict[str, object] = {"model.center_crop": True, "model.gripper": "libero"}
OPENVLA_PICTURES = RLDS | {"model.resize_filter": "lanczos_jpeg"}

OPENVLA = ProtocolSpec(
    name="openvla",
    description="OpenVLA: an observation for each action",
    env_type="libero",
    source="github.com/openvla/openvla, experiments/robot/libero/run_libero_eval.py, libero_utils.py",
    settings=PUBLISHED | {"env.fixture_seed": 0},
    models={"openvla": OPENVLA_PICTURES | {"model.num_action_chunks": 1}},
    step_limits=LIMITS,
    episodes_per_task=NUM_INIT_STATES,
    camera_px=CAMERA_PX,
)
OPENVLA_OFT = ProtocolSpec(
    name="openvla_oft",
    description="OpenVLA-OFT: chunks of 8 actions",
    env_type="libero",
    source="github.com/moojink/openvla-oft, experiments/robot/libero/run_libero_eval.py, libero_utils.py",
    settings=PUBLISHED | {"env.fixture_seed": 0},
    models={"openvla_oft": OPENVLA_PICTURES | {"model.num_action_chunks": 8}},
    step_limits=LIMITS,
    episodes_per_task=NUM_INIT_STATES,
    camera_px=CAMERA_PX,
)
OPENPI = ProtocolSpec(
    name="openpi",
    description="openpi: the first 5 actions of each chunk of pi0 or pi0.5",
    env_type="libero",
    source="github.com/Physical-Intelligence/openpi, examples/libero/main.py",
    settings=PUBLISHED | {"env.fixture_seed": 7},
    models={name: {"model.num_action_chunks": 5, "model.flow.num_steps": 10} for name in ("pi0", "pi05")},
    step_limits=LIMITS,
    episodes_per_task=NUM_INIT_STATES,
    camera_px=CAMERA_PX,
)
SIMPLEVLA = ProtocolSpec(
    name="simplevla",
    description="SimpleVLA-RL: chunks of 8 actions, 512 steps in every suite",
    env_type="libero",
    source="github.com/PRIME-RL/SimpleVLA-RL, verl/workers/rollout/rob_rollout.py, examples/*_rl_libero.sh",
    settings=PUBLISHED | {"env.fixture_seed": 0, "env.fixtures_redrawn": False},  # a new environment for each episode
    models={"openvla_oft": OPENVLA_PICTURES | {"model.num_action_chunks": 8}},
    step_limits={"": dict.fromkeys(SUITES, 512)},
    episodes_per_task=NUM_INIT_STATES,
    camera_px=CAMERA_PX,
)
RLINF = ProtocolSpec(
    name="rlinf",
    description="RLinf: 15 steps of settling, episodes continue after a success",
    env_type="libero",
    source="github.com/RLinf/RLinf, rlinf/envs/libero/libero_env.py, evaluations/libero, examples/embodiment/config",
    settings=PUBLISHED | {"env.settle_steps": 15, "env.eval.to_step_limit": True},
    models={
        "openvla_oft": RLDS | {"model.num_action_chunks": 8},
        "pi0": {"model.num_action_chunks": 5},
        "pi05": {"model.num_action_chunks": 5},
        "gr00t": {"model.gripper": "libero"},
    },
    step_limits={
        "": {"libero_spatial": 240, "libero_object": 280, "libero_goal": 320, "libero_10": 520},
        "openvla_oft": {"libero_spatial": 512, "libero_object": 512, "libero_goal": 512, "libero_10": 520},
        "gr00t": {"libero_spatial": 240, "libero_object": 240, "libero_goal": 320, "libero_10": 480},
    },
    episodes_per_task=NUM_INIT_STATES,
    camera_px=CAMERA_PX,
    differs="OpenVLA-OFT draws its actions at temperature 1.6, here they are the most probable ones",
)
