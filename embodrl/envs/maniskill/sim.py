"""One ManiSkill scene, reduced to what a VLA policy needs: renders only on request."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embodrl.envs.maniskill.axes import Perturbation
from embodrl.envs.maniskill.controller import EndEffectorController
from embodrl.envs.maniskill.evaluation import evaluate as evaluate_as_one
from embodrl.envs.maniskill.evaluation import observe as observe_as_one
from embodrl.envs.maniskill.grasp import use_numpy_grasp_check
from embodrl.envs.maniskill.rendering import (
    accept_pci_devices,
    decimate_robot,
    omit_reflection_table,
    reduction_of,
    render_device_name,
    simplify_ground,
)
from embodrl.envs.maniskill.tasks import TASKS
from embodrl.envs.maniskill.types import BaseEnv, Tensor
from embodrl.envs.stepping import CameraSettings
from embodrl.errors import EnvError


def to_numpy(tensor: Tensor) -> NDArray[Any]:
    """Convert a torch tensor of any device to numpy."""
    return tensor.detach().cpu().numpy()


class ManiSkillSim:
    """N environments of one task: one on a CPU (PhysX steps one scene), any number on a GPU.

    Args:
        task: key of ``TASKS``.
        num_envs: N.
        cameras: name -> width, height, and optionally fov_rad, eye and target (None: the task's own).
        sim_backend: physx_cpu or physx_cuda.
        render_backend: auto, cpu or gpu.
        render_detail: full (stock meshes and ground), fast (light ones), or auto (fast with CPU rendering).
        mesh_decimation: fraction of the robot's visual triangles to drop, overriding ``render_detail``; auto or None
            does not override.
        human_size: height and width of ``render_human``, in pixels.
        full_state: ``observe`` includes the task's part.
        axis: axis of ``tasks.AXES`` along which episodes are perturbed; None for none.
    """

    def __init__(
        self,
        task: str,
        num_envs: int,
        cameras: Mapping[str, CameraSettings],
        sim_backend: str,
        render_backend: str,
        render_detail: str,
        mesh_decimation: float | str | None,
        human_size: tuple[int, int],
        full_state: bool = False,
        axis: str | None = None,
    ) -> None:
        import gymnasium
        import mani_skill.envs  # noqa: F401  registers the tasks
        from mani_skill.utils.logging_utils import logger

        logger.setLevel("ERROR")  # it warns about its own tasks' initial poses, once per scene
        accept_pci_devices()
        device = render_device_name(render_backend)
        if sim_backend == "physx_cuda" and device != "cuda":
            raise EnvError(
                "physx_cuda renders on the GPU only",
                "set env.render_backend=gpu, or env.sim_backend=physx_cpu",
                code="physx-cuda",
            )
        self.task = TASKS[task]
        self.num_envs = num_envs
        self.camera_names = tuple(cameras)
        self.env: BaseEnv = gymnasium.make(
            task,
            num_envs=num_envs,
            # With images ManiSkill would render at each reset; ``images`` renders on request.
            obs_mode="state" if full_state else "none",
            control_mode="pd_ee_delta_pose",
            reward_mode="none",
            render_mode="rgb_array",
            robot_uids=self.task.robot,
            sim_backend=sim_backend,
            render_backend=device,
            human_render_camera_configs={"height": human_size[0], "width": human_size[1]},
            reconfiguration_freq=0,
        ).unwrapped
        self._place_cameras(cameras)
        if device != "cuda":
            cameras_of_all = (*self.env._sensors.values(), *self.env._human_render_cameras.values())
            for scene in self.env.scene.sub_scenes:
                omit_reflection_table(scene.render_system, cameras_of_all)
        if self.task.show_hidden:
            self.env._hidden_objects.clear()
        reduction = reduction_of(render_detail, mesh_decimation, device)
        if reduction > 0:
            decimate_robot(self.env.agent.robot.links, reduction)
            # PullCubeTool names its table differently.
            table = self.env.scene_builder if hasattr(self.env, "scene_builder") else self.env.table_scene
            simplify_ground(table.ground)
        self.full_state = full_state
        self._controller: EndEffectorController | None = None
        if sim_backend == "physx_cpu":
            self._controller = EndEffectorController(self.env)
            use_numpy_grasp_check(self.env.agent)
        self._seeds = np.zeros(num_envs, np.int64)
        if num_envs > 1:
            self._initialize_row_by_row()
        self._perturbation = None if axis is None else Perturbation(axis, self.env, task)
        space = self.env.single_action_space
        self.action_low = tuple(float(x) for x in space.low)
        self.action_high = tuple(float(x) for x in space.high)
        self.state_dim = observe([self]).shape[1]
        self.control_hz = float(self.env.control_freq)

    def _place_cameras(self, cameras: Mapping[str, CameraSettings]) -> None:
        """Replace the task's cameras by the configured ones; pose and field of view default to the task's."""
        from mani_skill.sensors.camera import Camera, CameraConfig
        from mani_skill.utils.sapien_utils import look_at

        env = self.env
        sensors = {}
        stock = {"hand_camera": hand_camera(env), **env._sensor_configs}
        for name, camera in cameras.items():
            default = stock[name] if name in stock else next(iter(env._sensor_configs.values()))
            has_place = camera.get("eye") is not None
            fov_rad = camera.get("fov_rad")
            config = CameraConfig(
                uid=name,
                pose=look_at(eye=camera["eye"], target=camera["target"]) if has_place else default.pose,
                width=camera["width"],
                height=camera["height"],
                fov=default.fov if fov_rad is None else fov_rad,
                near=default.near,
                far=default.far,
            )
            if not has_place:
                config.mount = default.mount
            sensors[name] = Camera(config, env.scene)
        env._sensors = env.scene.sensors = sensors

    def reset(self, seeds: NDArray[np.int64], rows: NDArray[np.int64]) -> None:
        """Start new episodes in ``rows`` from ``seeds int64[N']``; the other rows continue."""
        if self.num_envs == 1:
            self.env.reset(seed=[int(seeds[0])])
            if self._perturbation is not None:
                self._perturbation.begin(int(seeds[0]))
            return
        # ManiSkill takes the list as the seeds of all N, even when only some rows are reset.
        self._seeds[rows] = seeds
        self.env.reset(seed=[int(seed) for seed in self._seeds], options={"env_idx": self._tensor(rows)})

    def _initialize_row_by_row(self) -> None:
        """Draw each row's initial state from its own seed; ManiSkill draws a whole batch from the first seed.

        Otherwise the same seed would not give the same state, and the environments of a group would not start alike.
        """
        env = self.env
        seeds = self._seeds
        initialize = env._initialize_episode
        torch = import_module("torch")  # ManiSkill's generator; ``env.reset`` restores it afterwards

        def initialize_rows(env_idx: Tensor, options: dict[str, object]) -> None:
            mask = env.scene._reset_mask
            for row in env_idx.tolist():
                mask[:] = False
                mask[row] = True
                torch.manual_seed(int(seeds[row]))
                env._episode_rng = np.random.RandomState(int(seeds[row]) % 2**32)
                initialize(env_idx.new_tensor([row]), options)
            mask[env_idx] = True

        env._initialize_episode = initialize_rows

    def _tensor(self, array: NDArray[np.generic]) -> object:
        from mani_skill.utils import common

        return common.to_tensor(array, device=self.env.device)

    def advance(self, actions: NDArray[np.float32]) -> None:
        """Execute ``actions float32[N,A]`` for one control step (1/20 s)."""
        if self._controller is None:
            self.env._step_action(actions)
        else:
            self._controller.step(actions[0])
        self.env._elapsed_steps += 1
        if self._perturbation is not None:
            self._perturbation.advance()

    def images(self) -> NDArray[np.uint8]:
        """Render the cameras: ``uint8[N,V,H,W,3]``."""
        env = self.env
        for hidden in env._hidden_objects:
            hidden.hide_visual()
        env.scene.update_render(update_sensors=True, update_human_render_cameras=False)
        env.capture_sensor_data()
        views = [
            to_numpy(env._sensors[name].get_obs(depth=False, position=False, segmentation=False)["rgb"])
            for name in self.camera_names
        ]
        return np.stack(views, axis=1).astype(np.uint8, copy=False)

    def render_human(self) -> NDArray[np.uint8]:
        """Render the camera for people: ``uint8[N,H,W,3]``."""
        return to_numpy(self.env.render_rgb_array()).astype(np.uint8, copy=False)

    def get_state(self) -> dict[str, NDArray[np.float32]]:
        """Return the physical state by actor and articulation, as ``kind/name -> float32[N,...]``.

        PhysX keeps more (contact caches, pair order), so that a restored CPU scene continues approximately, not
        bit-exactly; ``fleet.ActionJournal`` restores it bit-exactly.
        """
        flat: dict[str, NDArray[np.float32]] = {}
        for kind, members in self.env.get_state_dict().items():
            for name, value in members.items():
                flat[f"{kind}/{name}"] = to_numpy(value).astype(np.float32)
        return flat

    def set_state(self, state: dict[str, NDArray[np.float32]]) -> None:
        nested: dict[str, dict[str, object]] = {}
        for key, value in state.items():
            kind, _, name = key.partition("/")
            nested.setdefault(kind, {})[name] = self._tensor(value)
        self.env.set_state_dict(nested)

    def close(self) -> None:
        self.env.close()


def hand_camera(env: BaseEnv) -> Any:
    """Return a camera for a Panda without one: next to the wrist, looking along the fingers, which it sees."""
    from mani_skill.sensors.camera import CameraConfig
    from mani_skill.utils.structs import Pose
    from sapien import Pose as ScenePose

    along_fingers = Pose.create(ScenePose([0.06, 0.0, 0.0], [math.sqrt(0.5), 0.0, -math.sqrt(0.5), 0.0]))
    hand = env.agent.robot.links_map["panda_hand"]
    return CameraConfig("hand_camera", along_fingers, 64, 64, fov=math.pi / 2, near=0.01, far=100, mount=hand)


def observe(sims: Sequence[ManiSkillSim]) -> NDArray[np.float32]:
    """Return joint positions (rad, m) and velocities, and with ``full_state`` the task's part: ``float32[N,S]``.

    ``sims`` are scenes of one task, with N environments in total.
    """
    if not sims[0].full_state:
        robots = [sim.env.agent.robot for sim in sims]
        rows = [[to_numpy(robot.get_qpos()), to_numpy(robot.get_qvel())] for robot in robots]
        return np.concatenate([np.concatenate(row, axis=1) for row in rows]).astype(np.float32)
    if sims[0].task.reward_keeps_state and len(sims) > 1:
        return np.concatenate([observe([sim]) for sim in sims])
    return to_numpy(observe_as_one([sim.env for sim in sims])).astype(np.float32)


def evaluate(
    sims: Sequence[ManiSkillSim], actions: NDArray[np.float32] | None = None
) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """Evaluate the current states of scenes of one task, with N environments in total.

    Args:
        sims: scenes.
        actions: last executed actions ``float32[N,A]``; None before the first.

    Returns:
        normalised dense reward ``float32[N]`` (ManiSkill's own, 1 at success) and success ``bool[N]``.
    """
    if sims[0].task.reward_keeps_state and len(sims) > 1:
        alone = [evaluate([sim], None if actions is None else actions[[row]]) for row, sim in enumerate(sims)]
        rewards, successes = zip(*alone, strict=True)
        return np.concatenate(rewards), np.concatenate(successes)
    executed = None if actions is None else sims[0]._tensor(actions)
    reward, success = evaluate_as_one([sim.env for sim in sims], executed)
    return to_numpy(reward).astype(np.float32), to_numpy(success).astype(np.bool_)
