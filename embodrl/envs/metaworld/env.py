"""Meta-World (Sawyer arm, MuJoCo) with images: MT1, MT10 and MT50, with scripted policies as experts.

Meta-World: Yu et al. 2019, arXiv 1910.10897; version 3 of its tasks (the package ``metaworld``).

Shapes: A action dimensions, V cameras, H x W image, S state dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from embodrl.envs.metaworld.tasks import INSTRUCTIONS
from embodrl.envs.mujoco.divergence import Divergence
from embodrl.envs.mujoco.scene import SceneRenderer, make_camera
from embodrl.envs.mujoco_gl import choose_gl
from embodrl.envs.simulator import Replayed, SimStep, Simulator, SimulatorVectorEnv
from embodrl.envs.stepping import CameraSettings, EpisodeRules, RuleOptions
from embodrl.errors import EnvOrderError, MissingDependencyError

if TYPE_CHECKING:
    from typing import Unpack  # not in Python 3.10, which simulators may use

MAX_REWARD = 10.0
"""Meta-World's dense rewards lie between 0 and this value, which they reach at success."""
STATE_DIM = 4
FULL_STATE_DIM = 39
UPSIDE_DOWN = ("corner", "corner2", "corner3", "corner4")
"""Cameras mounted upside down in Meta-World's scenes; their images are rotated."""
UNLIMITED = 10**9
HINT = "pip install 'embodrl[metaworld]', or set env.python to an interpreter with metaworld installed"


class _Expert(Protocol):
    def get_action(self, obs: NDArray[np.float64], /) -> NDArray[np.float64]: ...


class MetaWorldSimulator(Simulator):
    """One task of Meta-World. Actions are the change of the gripper's position (x, y, z; 1 is 1 cm) and its closing.

    The initial state depends on the seed alone, even where Meta-World would take one of 50 from a list.

    Args:
        task: task name such as ``push-v3``.
        cameras: ``[{name, height, width, fov_rad, eye, target}]``.
        film_size: height and width of ``film``, in pixels.
        renderers: task -> renderer, shared by the simulators of a process.
        render_detail: see ``SceneRenderer``.
        full_state: ``proprioception`` is Meta-World's whole observation: objects now and a step before, and the goal.
    """

    action_low = (-1.0,) * 4
    action_high = (1.0,) * 4
    is_seeded = True

    def __init__(
        self,
        task: str,
        cameras: Sequence[CameraSettings],
        film_size: tuple[int, int],
        renderers: dict[str, SceneRenderer],
        render_detail: str,
        full_state: bool = False,
    ) -> None:
        try:
            environments = import_module("metaworld.env_dict").ALL_V3_ENVIRONMENTS
            self._policies = import_module("metaworld.policies").ENV_POLICY_MAP
        except ImportError as error:
            raise MissingDependencyError(f"Meta-World can't be imported: {error}", HINT) from error
        self.instruction = INSTRUCTIONS[task]
        self._mujoco = import_module("mujoco")
        self._task = task
        env = environments[task]()
        env._set_task_called = True
        env._freeze_rand_vec = False
        env.seeded_rand_vec = True
        # The experts need the goal, which the policy never observes.
        env._partially_observable = False
        env.__dict__.pop("sawyer_observation_space", None)  # a cached observation space would cut off the goal
        env.max_path_length = UNLIMITED
        self._env = env
        self.state_dim = FULL_STATE_DIM if full_state else STATE_DIM
        self.control_hz = 1 / env.dt
        self._divergence = Divergence()
        self._obs: NDArray[np.float64] = np.zeros(0)
        self._expert: _Expert | None = None
        self._size = (cameras[0]["height"], cameras[0]["width"])
        self._film_size = film_size
        self._cameras = [(make_camera(env.model, each), _is_upside_down(each)) for each in cameras]
        if task not in renderers:
            height, width = (max(pair) for pair in zip(self._size, film_size, strict=True))
            renderers[task] = SceneRenderer(env.model, height, width, render_detail)
        self._renderer = renderers[task]

    def reset(self, seed: int) -> None:
        self._env.seed(seed)
        self._obs, _ = self._env.reset()
        self._expert = None
        # Meta-World moves the goal markers last; without this, the previous episode's position would be rendered.
        self._mujoco.mj_kinematics(self._env.model, self._env.data)

    def step(self, action: NDArray[np.float32]) -> SimStep:
        self._obs, reward, _, _, info = self._env.step(np.clip(action, -1, 1))
        diverged = self._divergence.struck(self._env.data)
        return SimStep(float(reward) / MAX_REWARD, bool(info["success"]), diverged=diverged)

    def first_reward(self) -> float:
        reward, _ = self._env.evaluate_state(self._obs, np.zeros(len(self.action_low), np.float32))
        return float(reward) / MAX_REWARD

    def images(self) -> NDArray[np.uint8]:
        return np.stack([self._draw(index, *self._size) for index in range(len(self._cameras))])

    def film(self) -> NDArray[np.uint8]:
        return self._draw(0, *self._film_size)

    def _draw(self, index: int, height: int, width: int) -> NDArray[np.uint8]:
        camera, turned = self._cameras[index]
        picture = self._renderer.draw(self._env.model, self._env.data, camera, height, width)
        return picture[::-1, ::-1] if turned else picture

    def proprioception(self) -> NDArray[np.float32]:
        """Return gripper position (m) and opening (0 to 1), and what ``full_state`` adds: ``float32[S]``."""
        return self._obs[: self.state_dim].astype(np.float32)

    def signature(self) -> bytes:
        return self._obs.tobytes() + self._env.data.qvel.tobytes()

    def expert_reset(self) -> None:
        self._expert = self._policies[self._task]()

    def expert_action(self) -> NDArray[np.float32]:
        """Meta-World's own scripted policy, which sees the state."""
        if self._expert is None:
            raise EnvOrderError("the expert has not started", "call expert_reset first")
        return np.clip(self._expert.get_action(self._obs), -1, 1).astype(np.float32)

    def close(self) -> None:
        """The renderer is shared and stays."""


def _is_upside_down(camera: CameraSettings) -> bool:
    return camera["name"] in UPSIDE_DOWN and camera.get("eye") is None


class MetaWorldVectorEnv(SimulatorVectorEnv):
    """B environments of Meta-World.

    The arguments are the settings of the section ``env`` with the fields of ``EpisodeRules``; the dense reward is
    Meta-World's, divided by 10. Tasks are names of ``INSTRUCTIONS``. Meta-World's own cameras are topview, corner,
    corner2, corner3, corner4, behindGripper and gripperPOV. ``include_state`` adds the gripper's position and opening
    to the observation, ``full_state`` the rest of Meta-World's own observation: positions of objects and of the goal.
    """

    def __init__(
        self,
        num_envs: int,
        tasks: list[str],
        cameras: Sequence[CameraSettings],
        include_state: bool = False,
        full_state: bool = False,
        include_images: bool = True,
        max_chunk: int = 8,
        render_detail: str = "auto",
        video_size: tuple[int, int] = (256, 256),
        video_fps: float | None = None,
        **rules: Unpack[RuleOptions],
    ) -> None:
        choose_gl()
        self._cameras = cameras
        self._detail = render_detail
        self._full_state = full_state
        self._film_size = (video_size[0], video_size[1])
        self._renderers: dict[str, SceneRenderer] = {}
        own = EpisodeRules(**rules)
        super().__init__(num_envs, tasks, cameras, own, include_state, max_chunk, video_fps, include_images)

    def make_simulator(self, task: str) -> Simulator:
        shared = (self._cameras, self._film_size, self._renderers, self._detail, self._full_state)
        return Replayed(MetaWorldSimulator(task, *shared))

    def close(self) -> None:
        super().close()
        for renderer in self._renderers.values():
            renderer.close()
