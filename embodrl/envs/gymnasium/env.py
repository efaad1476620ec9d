"""Any single environment registered with Gymnasium; its rendering serves as the camera.

Shapes: A action dimensions, V cameras, H x W image, S state dimensions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol, TypedDict, cast

import numpy as np
from numpy.typing import NDArray

from embodrl.envs.images import resized
from embodrl.envs.mujoco.divergence import Divergence
from embodrl.envs.mujoco.scene import is_fast, simplify
from embodrl.envs.mujoco_gl import choose_gl
from embodrl.envs.simulator import Replayed, SimStep, Simulator, SimulatorVectorEnv
from embodrl.envs.stepping import CameraSettings, EpisodeRules, RewardOptions
from embodrl.errors import EnvError, MissingDependencyError

if TYPE_CHECKING:
    from typing import Unpack  # not in Python 3.10, which simulators may use


class _Viewer(Protocol):
    def make_context_current(self) -> None: ...


class _Renderer(Protocol):
    """Gymnasium's ``MujocoRenderer``."""

    viewer: _Viewer | None

    def render(self, mode: str, /) -> NDArray[np.uint8]: ...


class _Env(Protocol):
    """The part of ``gymnasium.Env`` used here; observations may be anything."""

    unwrapped: Any
    action_space: Any
    observation_space: object
    metadata: Mapping[str, float]

    def reset(self, *, seed: int) -> tuple[object, object]: ...
    def step(
        self, action: NDArray[np.generic] | np.integer, /
    ) -> tuple[object, float, bool, bool, dict[str, float]]: ...
    def render(self) -> object: ...
    def close(self) -> None: ...


class _Options(TypedDict):
    env_id: str
    size: tuple[int, int] | None
    film_size: tuple[int, int]
    instruction: str
    success_key: str | None
    success_threshold: float
    max_episode_steps: int
    render_detail: str


class _Rules(RewardOptions, total=False):
    include_images: bool


SUCCESS_KEYS = ("success", "is_success")
RETURN = "return"
"""Value of ``success_key`` that stands for the sum of the rewards so far."""
HINT = "pip install 'embodrl[gymnasium]', or set env.python to an interpreter with gymnasium installed"


class GymnasiumSimulator(Simulator):
    """One environment of Gymnasium.

    Actions in [-1, 1] are mapped to the bounds of the environment's Box, if it has any. For a Discrete space of n
    choices an action has n numbers, of which the largest is chosen.

    Args:
        env_id: id for ``gymnasium.make``, including ``module:Name-v0``, which imports the module first.
        size: height and width of images, in pixels; None: only ``film`` renders.
        film_size: height and width of ``film``, in pixels.
        instruction: language instruction for the policy.
        success_key: key of ``info``, or ``return``; None: ``success`` or ``is_success`` if present.
        success_threshold: success is a value at or above the threshold.
        max_episode_steps: replaces the environment's own limit.
        render_detail: auto, full or fast; for MuJoCo environments.
    """

    def __init__(
        self,
        env_id: str,
        size: tuple[int, int] | None,
        film_size: tuple[int, int],
        instruction: str,
        success_key: str | None,
        success_threshold: float,
        max_episode_steps: int,
        render_detail: str,
    ) -> None:
        self._id = env_id
        self._size = size
        self._film_size = film_size
        has_gl = choose_gl(required=False)
        self.env = _make(env_id, max_episode_steps)
        if hasattr(self.env.unwrapped, "mujoco_renderer"):
            choose_gl(required=not has_gl)
            self._prepare_mujoco(size or film_size, render_detail)
        self.instruction = instruction
        self.control_hz = float(self.env.metadata.get("render_fps") or self.control_hz)
        self._success_key = success_key
        self._threshold = success_threshold
        self._to_env = _from_one_hot(self.env.action_space) or _from_unit_box(self.env.action_space)
        dims = _action_dim(self.env.action_space)
        self.action_low = (-1.0,) * dims
        self.action_high = (1.0,) * dims
        self._obs: object = None
        self._return = 0.0
        self._divergence = Divergence()
        self._film_renderer: _Renderer | None = None
        self.state_dim = _vector_size(self.env.observation_space)
        # The first image is slow, and a free MuJoCo camera stays where the first image puts it.
        self.reset(0)
        if size is not None:
            self._frame()

    def _prepare_mujoco(self, size: tuple[int, int], detail: str) -> None:
        """Render directly at the camera's size, without features that are slow on a CPU."""
        base = self.env.unwrapped
        base.mujoco_renderer.height, base.mujoco_renderer.width = size
        glob = base.model.vis.global_
        glob.offheight = max(glob.offheight, size[0], self._film_size[0])
        glob.offwidth = max(glob.offwidth, size[1], self._film_size[1])
        if is_fast(detail):
            simplify(base.model)

    def reset(self, seed: int) -> None:
        self._obs, _ = self.env.reset(seed=seed)
        self._return = 0.0

    def step(self, action: NDArray[np.float32]) -> SimStep:
        self._obs, reward, terminated, truncated, info = self.env.step(self._to_env(action))
        self._return += float(reward)
        diverged = self._divergence.struck(getattr(self.env.unwrapped, "data", None))
        return SimStep(float(reward), self._is_success(info), bool(terminated), bool(truncated), diverged)

    def _is_success(self, info: dict[str, float]) -> bool:
        if self._success_key == RETURN:
            return self._return >= self._threshold
        if self._success_key is None:
            return any(bool(np.all(info[key])) for key in SUCCESS_KEYS if key in info)
        if self._success_key not in info:
            raise EnvError(
                f"the info of {self._id} has no '{self._success_key}' (env.success_key)",
                f"name one of {', '.join([*map(str, info), RETURN])}",
                code="gymnasium-success-key",
            )
        return float(info[self._success_key]) >= self._threshold

    def images(self) -> NDArray[np.uint8]:
        assert self._size is not None, "images are wanted"
        return resized(self._frame(), *self._size)[None]

    def film(self) -> NDArray[np.uint8]:
        base = self.env.unwrapped
        if not hasattr(base, "mujoco_renderer"):
            return resized(self._frame(), *self._film_size)
        renderer = self._film_renderer
        if renderer is None:
            ours = base.mujoco_renderer
            height, width = self._film_size
            renderer = self._film_renderer = type(ours)(
                base.model,
                base.data,
                ours.default_cam_config,
                width,
                height,
                ours.max_geom,
                ours.camera_id,
            )
        _make_current(renderer)
        return renderer.render("rgb_array")

    def _frame(self) -> NDArray[np.uint8]:
        _make_current(getattr(self.env.unwrapped, "mujoco_renderer", None))
        frame = self._render()
        if not isinstance(frame, np.ndarray) or frame.ndim != 3 or frame.dtype != np.uint8:
            found = f"{frame.dtype}{list(frame.shape)}" if isinstance(frame, np.ndarray) else type(frame).__name__
            raise EnvError(
                f"{self._id} draws {found}, not uint8[H,W,3]",
                "wrap it so that render() returns RGB images",
                code="gymnasium-pictures",
            )
        return frame[..., :3]

    def _render(self) -> object:
        """Render an image; the first call imports the environment's rendering package, such as pygame."""
        try:
            return self.env.render()
        except ImportError as error:
            raise self._cannot_draw(error) from error
        except import_module("gymnasium").error.DependencyNotInstalled as error:
            raise self._cannot_draw(error) from error

    def _cannot_draw(self, error: Exception) -> MissingDependencyError:
        text = f"{self._id} renders with a package that is not installed: {error}"
        hint = "pip install pygame, or the package named in the message"
        return MissingDependencyError(text, hint, code="gymnasium-drawing")

    def proprioception(self) -> NDArray[np.float32]:
        """Return the environment's observation if it is a vector: ``float32[S]``."""
        return np.asarray(self._obs, np.float32).reshape(-1) if self.state_dim else np.zeros(0, np.float32)

    def signature(self) -> bytes:
        if isinstance(self._obs, np.ndarray):
            return self._obs.tobytes()
        return hashlib.sha256(repr(self._obs).encode()).digest()

    def close(self) -> None:
        self.env.close()


ToEnv = Callable[[NDArray[np.float32]], "NDArray[np.generic] | np.integer"]
"""Maps ``float32[A]`` to the environment's own action."""


def _from_unit_box(box: Any) -> ToEnv:
    low, high = (bound.reshape(-1).astype(np.float64) for bound in (box.low, box.high))
    bounded = np.isfinite(low) & np.isfinite(high)
    middle = np.where(bounded, (low + high) / 2, 0).astype(np.float32)
    half = np.where(bounded, (high - low) / 2, 1).astype(np.float32)

    def scale(action: NDArray[np.float32]) -> NDArray[np.generic]:
        return (middle + half * np.clip(action, -1, 1)).reshape(box.shape).astype(box.dtype)

    return scale


def _from_one_hot(space: Any) -> ToEnv | None:
    """Return the choice of a Discrete space, of any other None."""
    if not hasattr(space, "n"):
        return None
    return lambda action: space.dtype.type(space.start + int(np.argmax(action)))


def _action_dim(space: Any) -> int:
    return int(space.n) if hasattr(space, "n") else int(np.prod(space.shape))


def _make_current(renderer: _Renderer | None) -> None:
    """Make a renderer's OpenGL context current; with several contexts, Gymnasium does not do so reliably."""
    if renderer is not None and renderer.viewer is not None:
        renderer.viewer.make_context_current()


def _make(env_id: str, max_episode_steps: int) -> _Env:
    """Return the environment.

    Raises:
        MissingDependencyError: gymnasium, or a dependency of the environment, is not installed.
        EnvError: the environment does not exist, renders no images, or has actions of another kind.
    """
    try:
        gymnasium = import_module("gymnasium")
    except ImportError as error:
        raise MissingDependencyError(f"gymnasium can't be imported: {error}", HINT) from error
    try:
        env = gymnasium.make(env_id, max_episode_steps=max_episode_steps, render_mode="rgb_array")
    except (ImportError, gymnasium.error.DependencyNotInstalled) as error:
        missing = env_id.partition(":")[0].partition(".")[0] if ":" in env_id else ""
        if missing and find_spec(missing) is None:
            raise MissingDependencyError(
                f"env.id {env_id}: no module named '{missing}'",
                "correct the name, or put the directory of the module on PYTHONPATH",
                code="gymnasium-module-missing",
            ) from error
        raise MissingDependencyError(f"{env_id} needs a package that is not installed: {error}", HINT) from error
    except gymnasium.error.UnregisteredEnv as error:
        hint = "`python -c 'import gymnasium; gymnasium.pprint_registry()'` lists them; another package's are"
        raise EnvError(str(error), f"{hint} written module:Name-v0", code="gymnasium-id") from error
    if env.render_mode != "rgb_array":
        raise EnvError(
            f"{env_id} can't render RGB images",
            "choose an environment with render_mode rgb_array",
            code="gymnasium-pictures",
        )
    spaces = gymnasium.spaces
    is_box = isinstance(env.action_space, spaces.Box) and env.action_space.dtype.kind == "f"
    if not (is_box or type(env.action_space) is spaces.Discrete):
        raise EnvError(
            f"{env_id} takes actions in {env.action_space}, neither in a Box of real numbers nor Discrete",
            "choose a variant with such actions, or register one with a wrapper that makes them continuous",
            code="gymnasium-actions",
        )
    return env


def _vector_size(space: object) -> int:
    """Return the length of a space's observation vectors; 0 if its observations are not numeric vectors."""
    shape = getattr(space, "shape", None)
    dtype = getattr(space, "dtype", None)
    return shape[0] if shape is not None and dtype is not None and len(shape) == 1 and dtype.kind in "fiu" else 0


class GymnasiumVectorEnv(SimulatorVectorEnv):
    """B environments of Gymnasium.

    The arguments are the settings of ``GymnasiumConfig`` with the fields of ``EpisodeRules``. There is one task name,
    under which results are reported, and one camera, whose size images are resized to. ``action_dim`` is checked
    against the environment. Raises EnvError if the environment has other actions, no vector observation for
    ``include_state``, or lacks a key.
    """

    def __init__(
        self,
        num_envs: int,
        tasks: list[str],
        id: str,
        cameras: Sequence[CameraSettings],
        instruction: str,
        action_dim: int | None = None,
        success_key: str | None = None,
        success_threshold: float = 0.5,
        max_episode_steps: int = 100,
        include_state: bool = False,
        max_chunk: int = 8,
        render_detail: str = "auto",
        video_size: tuple[int, int] = (256, 256),
        video_fps: float | None = None,
        **rules: Unpack[_Rules],
    ) -> None:
        draws = rules.pop("include_images", True)
        self._options: _Options = {
            "env_id": id,
            "size": (cameras[0]["height"], cameras[0]["width"]) if draws else None,
            "film_size": (video_size[0], video_size[1]),
            "instruction": instruction,
            "success_key": success_key,
            "success_threshold": success_threshold,
            "max_episode_steps": max_episode_steps,
            "render_detail": render_detail,
        }
        rules.setdefault("reward_mode", "dense")
        episode_rules = EpisodeRules(max_episode_steps, **cast(RewardOptions, rules))
        super().__init__(num_envs, tasks, cameras, episode_rules, include_state, max_chunk, video_fps, draws)
        if action_dim is not None and action_dim != self.spec.action_dim:
            raise EnvError(
                f"{id} takes {self.spec.action_dim} numbers per action, the policy outputs {action_dim}",
                f"set model.action_dim={self.spec.action_dim}",
                code="gymnasium-actions",
            )
        if include_state and not self.spec.state_dim:
            raise EnvError(
                f"the observation of {id} is not a vector and can't serve as state",
                "set env.include_state=false",
                code="gymnasium-state",
            )

    def make_simulator(self, task: str) -> Simulator:
        return Replayed(GymnasiumSimulator(**self._options))
