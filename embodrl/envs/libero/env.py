"""LIBERO as a VectorEnv: its tasks, initial states and cameras under the stepping shared by all simulators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from embodrl.envs.libero.sim import LiberoScene, LiberoSim, SceneOptions
from embodrl.envs.simulator import Simulator, SimulatorVectorEnv
from embodrl.envs.stepping import CameraSettings, EpisodeRules, RuleOptions

if TYPE_CHECKING:
    from typing import Unpack  # not in Python 3.10, which simulators may use


class LiberoVectorEnv(SimulatorVectorEnv):
    """B environments of a suite in this process; environments of one task share a compiled scene.

    The arguments are the settings of ``LiberoConfig`` with the fields of ``EpisodeRules``; placement of fixtures and
    initial states as in ``sim.SceneOptions``. Cameras ``[{name, height, width}]`` are names of ``sim.CAMERAS``, all of
    one size. ``include_state`` adds end effector position (m), rotation vector (rad) and both finger positions (m),
    ``full_state`` the poses of the task's object and goal (``full_state.FullState``). LIBERO has no dense reward, so
    every reward mode but ``sparse`` adds nothing.
    """

    def __init__(
        self,
        num_envs: int,
        suite: str,
        tasks: list[str],
        cameras: Sequence[CameraSettings],
        include_state: bool = False,
        max_chunk: int = 8,
        libero_assets: str | None = None,
        settle_steps: int = 10,
        fixture_seed: int | None = None,
        fixtures_redrawn: bool = True,
        init_states: str = "official",
        full_state: bool = False,
        include_images: bool = True,
        render_detail: str = "auto",
        video_size: tuple[int, int] = (256, 256),
        video_fps: float | None = None,
        **rules: Unpack[RuleOptions],
    ) -> None:
        self._options = SceneOptions(
            suite=suite,
            num_tasks=len(tasks),
            assets=libero_assets,
            cameras=tuple(camera["name"] for camera in cameras),
            height=cameras[0]["height"],
            width=cameras[0]["width"],
            video_size=(int(video_size[0]), int(video_size[1])),
            render_detail=render_detail,
            settle_steps=settle_steps,
            fixture_seed=fixture_seed,
            fixtures_redrawn=fixtures_redrawn,
            init_states=init_states,
            full_state=full_state,
        )
        self._scenes: dict[str, LiberoScene] = {}
        episodes = EpisodeRules(**rules)
        super().__init__(num_envs, tasks, cameras, episodes, include_state, max_chunk, video_fps, include_images)

    def make_simulator(self, task: str) -> Simulator:
        if task not in self._scenes:
            self._scenes[task] = LiberoScene(task, self._options)
        return LiberoSim(self._scenes[task])

    def close(self) -> None:
        super().close()
        for scene in self._scenes.values():
            scene.close()
        self._scenes = {}
