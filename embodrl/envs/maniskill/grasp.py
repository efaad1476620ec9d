"""ManiSkill's test whether a Panda holds an object, for one scene on a CPU, without torch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from embodrl.envs.maniskill.types import Agent, Batched, Body

if TYPE_CHECKING:
    import sapien


def angle_between(a: NDArray[np.float32], b: NDArray[np.float32]) -> float:
    """Return the angle in degrees between ``a[3]`` and ``b[3]``."""
    cosine = float(a @ b) / (float(np.linalg.norm(a)) * float(np.linalg.norm(b)))
    return math.degrees(math.acos(min(max(cosine, -1.0), 1.0)))


def use_numpy_grasp_check(agent: Agent) -> None:
    """Replace ``agent.is_grasping``, which success and the rewards of several tasks evaluate, by a cheaper equivalent.

    The result is ManiSkill's: both fingers press with at least ``min_force`` newtons, each within ``max_angle`` degrees
    of its opening direction.
    """
    from mani_skill.utils import common
    from mani_skill.utils.sapien_utils import get_pairwise_contact_impulse

    system = agent.scene.px
    fingers = [(agent.finger1_link._objs[0], 1.0), (agent.finger2_link._objs[0], -1.0)]

    def presses(
        finger: Body,
        sign: float,
        contacts: list[sapien.physx.PhysxContact],
        entity: sapien.Entity,
        min_force: float,
        max_angle: float,
    ) -> bool:
        force_n = get_pairwise_contact_impulse(contacts, finger.entity, entity) / system.timestep
        if np.linalg.norm(force_n) < min_force:
            return False
        opening = sign * finger.entity_pose.to_transformation_matrix()[:3, 1]
        return angle_between(opening, force_n) <= max_angle

    def is_grasping(object: Batched, min_force: float = 0.5, max_angle: float = 85) -> object:
        contacts = system.get_contacts()
        entity = object._bodies[0].entity
        held = all(presses(finger, sign, contacts, entity, min_force, max_angle) for finger, sign in fingers)
        return common.to_tensor(np.array([held]))

    agent.is_grasping = is_grasping
