"""ManiSkill: settings, facts and rules. Imports no simulator."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from embodrl.config.rules.base import Context
from embodrl.config.schema import EnvConfig, Fraction
from embodrl.envs.maniskill.tasks import AXES, INSTRUCTIONS
from embodrl.interface import OPENS_POSITIVE, Interface
from embodrl.rule_set import Finding, RuleSet
from embodrl.specs import EXAMPLE_CAMERA, REWARD_MODES, SimulatorSpec

MIB = 1 << 20


class ManiSkillConfig(EnvConfig):
    """ManiSkill 3 (SAPIEN)."""

    sim_backend: Literal["auto", "physx_cpu", "physx_cuda"] = Field(
        default="auto", description="physics; auto is physx_cpu, which gives bit-reproducible runs"
    )
    render_backend: Literal["auto", "cpu", "gpu"] = Field(
        default="auto", description="Vulkan device; auto uses a GPU if there is one"
    )
    mesh_decimation: Fraction | Literal["auto"] = Field(
        default="auto",
        description="fraction of the robot's visual triangles to drop; 0 also leaves the ground unchanged; auto leaves"
        " both to render_detail",
    )


RULES = RuleSet()


@RULES.rule("env.sim_backend", "env.render_backend", "env.num_processes", "cluster")
def gpu_physics_fits(context: Context) -> Iterator[Finding]:
    """GPU physics needs a GPU, GPU rendering, and one process per GPU."""
    env = context.env(ManiSkillConfig)
    device = context.config.cluster.device
    if env.sim_backend != "physx_cuda":
        return
    if device == "cpu":
        yield Finding(
            "env.sim_backend",
            "physx_cuda simulates on a GPU, but cluster.device is cpu",
            "set env.sim_backend=physx_cpu, or cluster.device=cuda",
            "auto, physx_cpu",
            others=("cluster.device",),
        )
    if env.render_backend == "cpu":
        yield Finding(
            "env.render_backend",
            "physx_cuda keeps its scenes on the GPU, where the CPU renderer can't see them",
            "set env.render_backend=gpu",
            "auto, gpu",
            others=("env.sim_backend",),
        )
    found = context.deployment
    gpus = {(place.node, *place.devices) for place in found.of("env")} if found is not None else set()
    if env.num_processes > max(1, len(gpus)):
        yield Finding(
            "env.num_processes",
            f"physx_cuda batches the environments of a GPU in one process, but {env.num_processes} processes are placed"
            f" on {max(1, len(gpus))} GPU(s)",
            f"set env.num_processes={max(1, len(gpus))}, or place env on as many GPUs",
            f"at most {max(1, len(gpus))}",
            others=("env.sim_backend", "cluster.component_placement"),
        )


@RULES.rule("env.mesh_decimation")
def some_triangles_remain(context: Context) -> Iterator[Finding]:
    """Decimation leaves some triangles."""
    if context.env(ManiSkillConfig).mesh_decimation == 1:
        hint = "set it to 0.95, or auto"
        yield Finding(
            "env.mesh_decimation", "dropping all triangles leaves an invisible robot", hint, "0 to below 1, or auto"
        )


@RULES.rule("model.gripper", "env.env_type")
def gripper_opens_upward(context: Context) -> Iterator[Finding]:
    """ManiSkill opens the gripper at +1; LIBERO's convention closes it there."""
    if context.config.model.gripper == "libero":
        yield Finding(
            "model.gripper",
            "is libero, which closes the gripper at +1; ManiSkill opens it there, so that every grasp is inverted",
            "set it to bridge for a model whose gripper ranges from 0 (closed) to 1 (open), else to as_is",
            "as_is, bridge",
            others=("env.env_type",),
        )


@RULES.note("env.reward_mode", "env.train", "algorithm.loss_type", "model.small_actor.kind", "model.warm_start")
def critics_learned_from_the_dense_reward(context: Context) -> Iterator[Finding]:
    """The reward with which SAC and RLPD learned from random weights."""
    from_scratch = context.loss.off_policy and not context.loss.imitates
    model = context.config.model
    from_scratch = from_scratch and model.small_actor.kind is None and model.warm_start is None
    if from_scratch and context.config.env.reward_mode == "dense_delta":
        yield Finding(
            "env.reward_mode",
            "off-policy, from random weights, PushCube-v1 and PickCube-v1 were learned with ManiSkill's dense reward in"
            " episodes that continue after success, and not with its change",
            "take the settings of experiment=push_cube_sac: env.reward_mode=dense, env.success_bonus=0,"
            " env.train.ignore_terminations=true, algorithm.gamma=0.8",
        )


@RULES.rule("rollout.workflow", "env.sim_backend")
def workflows_need_single_environments(context: Context) -> Iterator[Finding]:
    """A workflow steps each of its environments individually."""
    if context.config.rollout.workflow is not None and context.env(ManiSkillConfig).sim_backend == "physx_cuda":
        message = "physx_cuda steps all its environments at once, but a workflow steps its episodes individually"
        hint = "set env.sim_backend=physx_cpu"
        yield Finding("env.sim_backend", message, hint, "auto, physx_cpu", others=("rollout.workflow",))


@RULES.rule("env.enable_offload", "env.sim_backend")
def simulators_come_back_bit_exactly(context: Context) -> Iterator[Finding]:
    """States of GPU physics are restored approximately, not bit-exactly."""
    env = context.env(ManiSkillConfig)
    if env.enable_offload and env.sim_backend == "physx_cuda":
        message = "is true, but physx_cuda restores a saved state only approximately, not bit-exactly"
        hint = "set it to false, or env.sim_backend=physx_cpu"
        yield Finding("env.enable_offload", message, hint, "false", others=("env.sim_backend",))


@RULES.rule("axes", "env.sim_backend")
def axes_are_of_single_scenes(context: Context) -> Iterator[Finding]:
    """Perturbations need scenes on a CPU."""
    if context.config.axes is not None and context.env(ManiSkillConfig).sim_backend == "physx_cuda":
        message = "physx_cuda does not support perturbed scenes"
        hint = "set env.sim_backend=physx_cpu, or omit axes"
        yield Finding("axes", message, hint, others=("env.sim_backend",))


@RULES.note("env.render_detail", "env.mesh_decimation")
def decimation_decides(context: Context) -> Iterator[Finding]:
    """env.mesh_decimation overrides env.render_detail."""
    decimation = context.env(ManiSkillConfig).mesh_decimation
    if decimation != "auto" and context.by_user("env.render_detail"):
        message = f"has no effect: env.mesh_decimation is {decimation:g}, which overrides it"
        yield Finding("env.render_detail", message, "omit it, or set env.mesh_decimation=auto")


def interface(env: EnvConfig) -> Interface:
    """Return the conventions of ``pd_ee_delta_pose`` (mani_skill/agents/controllers/pd_ee_pose.py)."""
    return Interface(
        action="delta_pose",
        rotation="euler_xyz",
        frame="base",
        gripper=OPENS_POSITIVE,
        state=("joint positions", "joint velocities", *(("task",) if env.state == "full" else ()))
        if env.include_state
        else None,
        pictures="upright",
        control_hz=20.0,
    )


SPEC = SimulatorSpec(
    name="maniskill",
    robots=("panda", "panda_wristcam"),
    control_hz=20.0,
    target="embodrl.envs.maniskill.env:ManiSkillVectorEnv",
    description="ManiSkill 3 (SAPIEN) table-top manipulation",
    settings=ManiSkillConfig,
    rules=(RULES,),
    reads=("cameras", "include_images", "state", "reward_mode", "success_bonus", "render_detail", "video"),
    reward_modes=REWARD_MODES,
    tasks=INSTRUCTIONS,
    action_dim=7,
    batched_by=("sim_backend", "physx_cuda"),
    gpu_settings={"sim_backend": "physx_cuda", "render_backend": "gpu"},
    cameras=("base_camera", "hand_camera"),
    needs=("mani_skill", "sapien", "fast_simplification"),
    extra="maniskill",
    draws_with="vulkan",
    example={"tasks": ["PushCube-v1"], "cameras": [{**EXAMPLE_CAMERA, "name": "base_camera"}]},
    process_bytes=600 * MIB,
    env_bytes=5 * MIB,
    actions="change of the gripper's pose (x, y, z, three angles) and gripper opening, -1 to 1",
    camera_list="base_camera, hand_camera (on the wrist), or any name with eye and target",
    experts="all tasks",
    interface=interface,
    axes=AXES,
    verified="all tasks on a CPU; not yet on a GPU",
)
