"""LIBERO's scenes: one compiled model per task and process, with any number of environments."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import importlib.util
import math
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from embodrl.envs.axes import generator
from embodrl.envs.libero.assets import PACKAGE, find_assets, package_folder
from embodrl.envs.libero.controller import ArmModel, OscController
from embodrl.envs.libero.experts import PickAndPlace
from embodrl.envs.libero.full_state import DIM as FULL_STATE_DIM
from embodrl.envs.libero.full_state import FullState
from embodrl.envs.libero.init_states import read_init_states
from embodrl.envs.libero.suites import AXES, SUITES, TaskFacts, init_state_of
from embodrl.envs.mujoco.divergence import Divergence
from embodrl.envs.mujoco.scene import SceneRenderer, named_camera
from embodrl.envs.mujoco.types import MjModel
from embodrl.envs.mujoco_gl import choose_gl
from embodrl.envs.simulator import SimStep, Simulator
from embodrl.errors import EnvError, EnvOrderError, MissingDependencyError

if TYPE_CHECKING:
    from typing import NotRequired  # not in Python 3.10, which simulators may use

# Name in the configuration -> name in LIBERO's scenes.
CAMERAS = {
    "agentview": "agentview",
    "wrist": "robot0_eye_in_hand",
    "frontview": "frontview",
    "birdview": "birdview",
    "sideview": "sideview",
}
LOOKS = {
    "light": ("light_diffuse", "light_ambient", "light_specular"),
    "camera": ("cam_pos", "cam_quat"),
    "texture": ("mat_rgba",),
}
"""Arrays of MuJoCo's model that an axis changes."""
CAMERA_M = 0.05
CAMERA_RAD = math.radians(4)
JOINT_STD_RAD = 0.1
COLLISION_GROUP = 0  # invisible geoms
CONTROL_HZ = 20
SAMPLED_JOINT_STD_RAD = 0.02
"""robosuite's noise of the initial posture, also present in the official initial states."""
NOTHING = np.array([0, 0, 0, 0, 0, 0, -1], np.float64)  # holds still with the gripper open


@dataclass(frozen=True)
class SceneOptions:
    """Options shared by all scenes of a process; see ``LiberoConfig`` for most of them.

    Attributes:
        num_tasks: number of tasks of the run, for ``init_state_of``.
        cameras: names, keys of ``CAMERAS``.
        height, width: image size for the policy, in pixels.
        video_size: height and width of videos, in pixels.
        fixture_seed: place fixtures as if LIBERO's environment were seeded with this number once; None: by the reset
            seed.
        fixtures_redrawn: initial state k then has the placement of reset k + 1 after seeding; otherwise of the first.
        full_state: ``proprioception`` includes the task's part.
    """

    suite: str
    num_tasks: int
    assets: str | None
    cameras: tuple[str, ...]
    height: int
    width: int
    video_size: tuple[int, int]
    render_detail: str
    settle_steps: int
    fixture_seed: int | None = None
    fixtures_redrawn: bool = True
    init_states: str = "official"
    full_state: bool = False

    def facts(self, task: str) -> TaskFacts:
        """Facts of a task that need no scene."""
        return SUITES[self.suite].tasks[task]


def import_libero(assets: str | None) -> Path:
    """Import LIBERO without prompts, downloads or files in the home directory; return its folder of task files.

    Raises MissingDependencyError if the package or its assets are missing.
    """
    choose_gl()
    os.environ["HF_HUB_OFFLINE"] = "1"
    # The first import reads a configuration file from here, and prompts if there is none.
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(None):
        os.environ["LIBERO_CONFIG_PATH"] = os.environ["MPLCONFIGDIR"] = folder
        (Path(folder) / "config.yaml").write_text("{}")
        try:
            _silence_robosuite()
            libero = importlib.import_module("libero.libero")
            package = Path(libero.__file__ or "").parent
            vars(libero)["_assets_path_cache"] = str(find_assets(assets, package_folder(PACKAGE)))
            importlib.import_module("libero.libero.envs")
        except ImportError as error:
            raise MissingDependencyError(
                f"LIBERO can't be imported: {error}", "embodrl env install libero, then env.python=auto"
            ) from error
    return package


def _silence_robosuite() -> None:
    """Load robosuite's settings before robosuite, whose import opens a log file and warns on the console."""
    if "robosuite" in sys.modules:
        return
    package = importlib.util.find_spec("robosuite")
    if package is None or not package.submodule_search_locations:
        raise ImportError("No module named 'robosuite'")
    path = Path(package.submodule_search_locations[0]) / "macros.py"
    spec = importlib.util.spec_from_file_location("robosuite.macros", path)
    assert spec is not None and spec.loader is not None
    macros: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(macros)
    macros.CONSOLE_LOGGING_LEVEL = "ERROR"
    macros.FILE_LOGGING_LEVEL = None
    sys.modules["robosuite.macros"] = macros
    sys.modules["robosuite.macros_private"] = ModuleType("robosuite.macros_private")


def perturbed_looks(
    axis: str, random: np.random.Generator, looks: Mapping[str, NDArray[np.float64]]
) -> dict[str, NDArray[np.float64]]:
    """Return the perturbed lights, cameras or materials of a scene: arrays of MuJoCo's model by name.

    ``looks`` are the ``LOOKS`` of the unperturbed scene.
    """
    found = {name: looks[name].copy() for name in LOOKS[axis]}
    if axis == "light":
        level = random.uniform(0.4, 0.7) if random.random() < 0.5 else random.uniform(1.4, 1.8)
        factor = level * random.uniform(0.75, 1.25, 3)
        return {name: values * factor for name, values in found.items()}
    if axis == "texture":
        found["mat_rgba"][:, :3] *= random.uniform(0.4, 1.0, (len(found["mat_rgba"]), 3))
        return found
    for place, turn in zip(found["cam_pos"], found["cam_quat"], strict=True):
        way = random.normal(size=3)
        place += CAMERA_M * random.uniform() ** (1 / 3) * way / np.linalg.norm(way)
        half = random.uniform(-CAMERA_RAD, CAMERA_RAD, 3) / 2
        turn[:] = _quaternion_product(turn, np.array([np.sqrt(1 - half @ half), *half]))
    return found


def _quaternion_product(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the Hamilton product of two quaternions (w, x, y, z)."""
    vector = a[0] * b[1:] + b[0] * a[1:] + np.cross(a[1:], b[1:])
    return np.array([a[0] * b[0] - a[1:] @ b[1:], *vector])


class LiberoScene:
    """Compiled model of a task, with LIBERO's own object placement and success test.

    Environments take turns; ``activate`` installs the data and fixtures of one of them.
    """

    def __init__(self, task: str, options: SceneOptions) -> None:
        package = import_libero(options.assets)
        self.mujoco = importlib.import_module("mujoco")
        self._binding = importlib.import_module("robosuite.utils.binding_utils")
        self._randomization_error = importlib.import_module("robosuite.utils.errors").RandomizationError
        robosuite = importlib.import_module("robosuite")
        problems = importlib.import_module("libero.libero.envs")
        self.task = task
        self.options = options
        bddl = package / "bddl_files" / options.suite / f"{task}.bddl"
        with contextlib.redirect_stdout(None):
            problem = problems.bddl_utils.get_problem_info(str(bddl))["problem_name"]
            np.random.seed(0)
            self.env: Any = problems.TASK_MAPPING[problem](
                str(bddl),
                robots=["Panda"],
                controller_configs=robosuite.load_controller_config(default_controller="OSC_POSE"),
                initialization_noise=None,
                use_camera_obs=False,
                has_offscreen_renderer=False,
                control_freq=CONTROL_HZ,
                ignore_done=True,
                hard_reset=False,
            )
        self.model: MjModel = self.env.sim.model._model
        names = [name for group in LOOKS.values() for name in group]
        self.looks = {name: np.array(getattr(self.model, name), np.float64) for name in names}
        self.init_states = read_init_states(
            package / "init_files" / options.suite / f"{task}.pruned_init", options.facts(task).sha256
        )
        if self.init_states.shape[1] != 1 + self.model.nq + self.model.nv:
            raise EnvError(
                f"the initial states of {task} do not fit its scene",
                "use the pinned versions of LIBERO",
                code="libero-init-states",
            )
        self.substeps = round(1 / (CONTROL_HZ * self.model.opt.timestep))
        self.place(0)
        self.arm = ArmModel(self.env)
        self.rest = self.arm.measure(self.env.sim.data._data)
        self.full_state = FullState(self)
        self.cameras = [named_camera(self.model, CAMERAS[name]) for name in options.cameras]
        self.film_camera = named_camera(self.model, CAMERAS["agentview"])
        self._active: LiberoSim | None = None
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # the compiler leaves much memory behind

    @cached_property
    def renderer(self) -> SceneRenderer:
        """Created for the first image, so that runs without images do without."""
        options = self.options
        height = max(options.height, options.video_size[0])
        width = max(options.width, options.video_size[1])
        return SceneRenderer(self.model, height, width, options.render_detail, (COLLISION_GROUP,))

    def new_data(self) -> Any:
        """Return robosuite's wrapper of a new ``MjData``."""
        return self._binding.MjData(self.env.sim.model)

    def place(self, seed: int, resets: int = 1) -> None:
        """Reset as LIBERO does; each of ``resets`` places the fixtures at random, by the seed."""
        np.random.seed(seed % 2**32)
        while resets:
            with contextlib.redirect_stdout(None), contextlib.suppress(self._randomization_error):
                self.env.reset()
                resets -= 1  # like LIBERO, retry until every object has a place

    def place_for(self, seed: int, init_state: int) -> None:
        """Place the fixtures of an episode; see ``SceneOptions.fixture_seed``."""
        fixed = self.options.fixture_seed
        if fixed is None:
            self.place(seed)
        else:
            self.place(fixed, init_state + 1 if self.options.fixtures_redrawn else 1)

    def activate(self, sim: LiberoSim, again: bool = False) -> None:
        """Make data, fixtures and looks of one environment current; ``again`` after they changed."""
        if self._active is sim and not again:
            return
        self._active = sim
        self.env.sim.data = sim.data
        if sim.fixtures is not None:
            self.model.body_pos[:], self.model.body_quat[:] = sim.fixtures
        for name, values in sim.looks.items():
            getattr(self.model, name)[:] = values

    def close(self) -> None:
        if "renderer" in self.__dict__:
            self.renderer.close()


class _State(TypedDict):
    """MuJoCo's integration state, poses of the fixtures, and the controller's goals."""

    physics: NDArray[np.float64]
    fixtures: list[NDArray[np.float64]] | None
    looks: NotRequired[dict[str, NDArray[np.float64]]]
    controller: dict[str, object]


class LiberoSim(Simulator):
    """One environment of a scene: its physics, controller and fixtures.

    Actions are changes of the end effector's position (1 is 5 cm) and rotation (1 is 0.5 rad), and the gripper, of
    which only the sign counts: -1 opens, +1 closes.
    """

    action_low = (-1.0,) * 7
    action_high = (1.0,) * 7
    state_dim = 8
    control_hz = float(CONTROL_HZ)
    is_seeded = True

    def __init__(self, scene: LiberoScene) -> None:
        self.scene = scene
        self.instruction = scene.options.facts(scene.task).instruction
        self.state_dim = type(self).state_dim + FULL_STATE_DIM * scene.options.full_state
        self.data = scene.new_data()
        self.fixtures: tuple[NDArray[np.float64], NDArray[np.float64]] | None = None
        self.looks: dict[str, NDArray[np.float64]] = {}
        self._axis: str | None = None
        self._controller = OscController(scene.arm, scene.rest)
        self._divergence = Divergence()
        self._expert: PickAndPlace | None = None

    def perturb(self, axis: str) -> None:
        if axis not in AXES:
            super().perturb(axis)
        self._axis = axis

    def reset(self, seed: int) -> None:
        """Place fixtures by the seed, and objects and robot as in the initial state it stands for."""
        scene = self.scene
        model = self.scene.model
        sampled = scene.options.init_states == "sampled"
        init_state = init_state_of(seed, scene.options.num_tasks)
        scene.activate(self)
        if sampled:
            scene.place(seed)
            joints = scene.arm.qpos
            self.data._data.qpos[joints] += np.random.default_rng(seed).normal(0, SAMPLED_JOINT_STD_RAD, len(joints))
        else:
            scene.place_for(seed, init_state)
            scene.env.sim.set_state_from_flattened(scene.init_states[init_state])
        self.fixtures = model.body_pos.copy(), model.body_quat.copy()
        if self._axis is not None:
            self._perturb_episode(self._axis, seed)
        self._propagate()
        self._controller.reset()
        for _ in range(scene.options.settle_steps):
            self._execute(NOTHING)
        if self._divergence.struck(self.data._data):
            raise EnvError(
                f"{scene.task}: the simulation diverges while settling in"
                f" {'a sampled initial state' if sampled else f'initial state {init_state}'}, seed {seed}",
                "use the pinned versions of LIBERO, or lower env.settle_steps",
                code="libero-unstable",
            )

    def _perturb_episode(self, axis: str, seed: int) -> None:
        random = generator(axis, seed)
        scene = self.scene
        if axis == "robot":
            joints = scene.arm.qpos
            moved = random.normal(0.0, JOINT_STD_RAD, len(joints)).clip(-2 * JOINT_STD_RAD, 2 * JOINT_STD_RAD)
            self.data._data.qpos[joints] += moved
            return
        self.looks = perturbed_looks(axis, random, scene.looks)
        scene.activate(self, again=True)

    def step(self, action: NDArray[np.float32]) -> SimStep:
        """A control step is 1/20 s."""
        self._execute(action.astype(np.float64))
        diverged = self._divergence.struck(self.data._data)
        return SimStep(0.0, bool(self.scene.env._check_success()), diverged=diverged)

    def _execute(self, action: NDArray[np.float64]) -> None:
        scene = self.scene
        data = self.data._data
        controller = self._controller
        scene.activate(self)
        now = controller.set_goal(action, data)
        for substep in range(scene.substeps):
            if substep:
                now = scene.arm.measure(data)
            controller.apply(now, action[6], data)
            scene.mujoco.mj_step2(scene.model, data)
            scene.mujoco.mj_step1(scene.model, data)
        scene.env._post_process()

    def _propagate(self) -> None:
        """Update everything that depends on positions and velocities, including visuals (the stove's burner)."""
        self.scene.mujoco.mj_step1(self.scene.model, self.data._data)
        self.scene.env._post_process()

    def images(self) -> NDArray[np.uint8]:
        """Mirrored left to right, as published policies expect (OpenGL images rotated by 180 degrees)."""
        scene = self.scene
        options = self.scene.options
        self._show()
        views = [
            scene.renderer.draw(scene.model, self.data._data, camera, options.height, options.width)[:, ::-1]
            for camera in scene.cameras
        ]
        return np.stack(views)

    def film(self) -> NDArray[np.uint8]:
        """Agentview, upright."""
        self._show()
        scene = self.scene
        size = self.scene.options.video_size
        return scene.renderer.draw(scene.model, self.data._data, scene.film_camera, *size)

    def _show(self) -> None:
        self.scene.activate(self)
        self.scene.env._post_process()

    def proprioception(self) -> NDArray[np.float32]:
        """Return end effector position (m), rotation vector (rad) and both finger positions (m): ``float32[8]``.

        With ``full_state``, followed by ``FullState.read``.
        """
        arm = self.scene.arm
        data = self.data._data
        quaternion = data.xquat[arm.hand][[1, 2, 3, 0]]
        rotation = arm.transform.quat2axisangle(quaternion.copy())
        own = np.concatenate([data.site_xpos[arm.site], rotation, data.qpos[arm.gripper_qpos]]).astype(np.float32)
        if not self.scene.options.full_state:
            return own
        self.scene.activate(self)
        return np.concatenate([own, self.scene.full_state.read(data)])

    def expert_reset(self) -> None:
        self.scene.activate(self)
        (_, target, place), *_ = self.scene.env.parsed_problem["goal_state"]
        self._expert = PickAndPlace(self, target, place)

    def expert_action(self) -> NDArray[np.float32]:
        if self._expert is None:
            raise EnvOrderError("the expert has not started", "call expert_reset first")
        self.scene.activate(self)
        return self._expert.act(self.data._data)

    def get_state(self) -> _State:
        mujoco = self.scene.mujoco
        model = self.scene.model
        physics = np.zeros(mujoco.mj_stateSize(model, mujoco.mjtState.mjSTATE_INTEGRATION))
        mujoco.mj_getState(model, self.data._data, physics, mujoco.mjtState.mjSTATE_INTEGRATION)
        fixtures = None if self.fixtures is None else list(self.fixtures)
        return {
            "physics": physics,
            "fixtures": fixtures,
            "looks": self.looks,
            "controller": self._controller.get_state(),
        }

    def set_state(self, state: _State) -> None:
        """For any environment of the same task."""
        mujoco = self.scene.mujoco
        model = self.scene.model
        self.fixtures = None if state["fixtures"] is None else (state["fixtures"][0], state["fixtures"][1])
        self.looks = state.get("looks", {})
        self.scene.activate(self, again=True)
        mujoco.mj_setState(model, self.data._data, state["physics"], mujoco.mjtState.mjSTATE_INTEGRATION)
        self._controller.set_state(state["controller"])
        self._propagate()
