"""Perturbations of ManiSkill's scenes on a CPU along the axes of `embodrl eval axes=...`.

Everything is drawn at the reset of an episode from its seed, so that a scene remains a function of its resets and
actions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from embodrl.envs.axes import colour_shift, generator
from embodrl.envs.maniskill.rendering import render_body
from embodrl.envs.maniskill.tasks import GOALS
from embodrl.envs.maniskill.types import BaseEnv

if TYPE_CHECKING:
    import sapien

CAMERA_M = 0.05
CAMERA_RAD = math.radians(4)
MOVE_MIN_M = 0.04
MOVE_MAX_M = 0.08
JOINT_STD_RAD = 0.1
NUM_ARM_JOINTS = 7
GOAL_M = 0.04
GOAL_STEPS = 80
NUM_DISTRACTORS = 4
DISTRACTOR_FREE_M = 0.12


class Perturbation:
    """Perturbs one scene (ManiSkill environment on a CPU) along one axis of ``tasks.AXES``."""

    def __init__(self, axis: str, env: BaseEnv, task: str) -> None:
        self._env = env
        self._axis = axis
        self._begin = getattr(self, f"_begin_{axis}", None)
        self._scene: sapien.Scene = env.scene.sub_scenes[0]
        self._system: Any = self._scene.render_system
        self._ambient = np.array(self._system.ambient_light)
        self._lights = [(light, np.array(light.color)) for light in self._system.lights]
        self._cameras = [
            (camera, camera.local_pose) for sensor in env._sensors.values() for camera in sensor.camera._render_cameras
        ]
        actors = {name: actor for name, actor in env.scene.actors.items() if name not in ("table-workspace", "ground")}
        self._actors = actors
        bodies = [render_body(entity) for actor in actors.values() for entity in actor._objs]
        self._materials = [(each, np.array(each.base_color)) for each in _materials(bodies)]
        grounds = [render_body(entity) for name in ("table-workspace", "ground") for entity in self._entities(name)]
        self._grounds = list(_materials(grounds))
        self._goal = actors[GOALS[task]] if axis == "goal" else None
        self._goal_place = np.zeros(3)
        self._goal_way = np.zeros(3)
        self._elapsed = 0
        self._distractors = (
            [_thing(self._scene, kind) for kind in range(NUM_DISTRACTORS)] if axis == "distractors" else []
        )

    def begin(self, seed: int) -> None:
        """Perturb an episode that has just begun from ``seed``."""
        self._elapsed = 0
        if self._begin is not None:
            self._begin(generator(self._axis, seed), seed)

    def advance(self) -> None:
        """Advance by one control step."""
        self._elapsed += 1
        if self._goal is not None:
            phase = math.sin(2 * math.pi * self._elapsed / GOAL_STEPS)
            self._place(self._goal, self._goal_place + phase * self._goal_way)

    def _begin_light(self, random: np.random.Generator, seed: int) -> None:
        level = random.uniform(0.4, 0.7) if random.random() < 0.5 else random.uniform(1.4, 1.8)
        factor = level * random.uniform(0.75, 1.25, 3)
        self._system.ambient_light = self._ambient * factor
        for light, colour in self._lights:
            light.color = colour * factor

    def _begin_texture(self, random: np.random.Generator, seed: int) -> None:
        import sapien

        for material in self._grounds:
            pattern = sapien.render.RenderTexture2D(_pattern(random), "R8G8B8A8Unorm", filter_mode="nearest", srgb=True)
            material.set_base_color_texture(pattern)

    def _begin_camera(self, random: np.random.Generator, seed: int) -> None:
        import sapien

        for camera, pose in self._cameras:
            way = random.normal(size=3)
            way *= CAMERA_M * random.uniform() ** (1 / 3) / np.linalg.norm(way)
            turn: Any = sapien.Pose()
            turn.rpy = random.uniform(-CAMERA_RAD, CAMERA_RAD, 3)
            camera.local_pose = sapien.Pose(pose.p + way, pose.q) * turn

    def _begin_colours(self, random: np.random.Generator, seed: int) -> None:
        for material, colour in self._materials:
            material.base_color = [*np.roll(colour[:3], colour_shift(seed)), colour[3]]

    def _begin_distractors(self, random: np.random.Generator, seed: int) -> None:
        import sapien

        taken = [actor.pose.p.numpy()[0, :2] for actor in self._actors.values()]
        for entity in self._distractors:
            place = random.uniform((-0.3, -0.4), (0.25, 0.4))
            while min(np.linalg.norm(place - other) for other in taken) < DISTRACTOR_FREE_M:
                place = random.uniform((-0.3, -0.4), (0.25, 0.4))
            taken.append(place)
            entity.pose = sapien.Pose([*place, 0.02])
            for material in _materials([render_body(entity)]):
                material.base_color = [*random.uniform(0.1, 0.9, 3), 1.0]

    def _begin_objects(self, random: np.random.Generator, seed: int) -> None:
        angle = random.uniform(0, 2 * math.pi)
        far = random.uniform(MOVE_MIN_M, MOVE_MAX_M)
        for actor in self._actors.values():
            self._place(actor, actor.pose.p.numpy()[0] + far * np.array([math.cos(angle), math.sin(angle), 0]))

    def _begin_robot(self, random: np.random.Generator, seed: int) -> None:
        robot = self._env.agent.robot
        joints = robot.get_qpos().clone()
        moved = random.normal(0.0, JOINT_STD_RAD, NUM_ARM_JOINTS).clip(-2 * JOINT_STD_RAD, 2 * JOINT_STD_RAD)
        joints[0, :NUM_ARM_JOINTS] += joints.new_tensor(moved)
        robot.set_qpos(joints)

    def _begin_goal(self, random: np.random.Generator, seed: int) -> None:
        assert self._goal is not None
        self._goal_place = self._goal.pose.p.numpy()[0].copy()
        angle = random.uniform(0, 2 * math.pi)
        self._goal_way = GOAL_M * np.array([math.cos(angle), math.sin(angle), 0])

    def _entities(self, name: str) -> list[sapien.Entity]:
        return [entity for entity in self._scene.entities if entity.name.endswith(name)]

    def _place(self, actor: BaseEnv, place: NDArray[np.float64]) -> None:
        from mani_skill.utils.structs import Pose

        pose = actor.pose
        actor.set_pose(Pose.create_from_pq(pose.p.new_tensor(place)[None], pose.q))


def _materials(bodies: list[sapien.render.RenderBodyComponent | None]) -> Iterator[sapien.render.RenderMaterial]:
    for body in filter(None, bodies):
        for shape in body.render_shapes:
            for part in getattr(shape, "parts", [shape]):
                yield part.material


def _thing(scene: sapien.Scene, kind: int) -> sapien.Entity:
    """Return a new 4 cm object that is rendered but collides with nothing."""
    import sapien

    material = sapien.render.RenderMaterial()
    shapes: list[Callable[[], sapien.render.RenderShape]] = [
        lambda: sapien.render.RenderShapeBox([0.02, 0.02, 0.02], material),
        lambda: sapien.render.RenderShapeSphere(0.02, material),
        lambda: sapien.render.RenderShapeCylinder(0.012, 0.03, material),
        lambda: sapien.render.RenderShapeBox([0.015, 0.03, 0.015], material),
    ]
    entity = sapien.Entity()
    body = sapien.render.RenderBodyComponent()
    body.attach(shapes[kind % len(shapes)]())
    entity.add_component(body)
    entity.name = f"distractor_{kind}"
    scene.add_entity(entity)
    return entity


def _pattern(random: np.random.Generator) -> NDArray[np.uint8]:
    """Return ``uint8[64,64,4]``: checks, stripes or speckles of two colours."""
    rows, columns = np.indices((64, 64)) // 8
    masks = [(rows + columns) % 2, rows % 2, random.integers(0, 2, (8, 8))[rows, columns]]
    colours = random.integers(30, 226, (2, 3))
    picture = colours[masks[random.integers(len(masks))]]
    return np.concatenate([picture, np.full((64, 64, 1), 255)], axis=2).astype(np.uint8)
