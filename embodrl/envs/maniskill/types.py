"""Protocols for the parts of ManiSkill's untyped objects that embodrl uses; SAPIEN's objects are typed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypedDict

from numpy.typing import NDArray

from embodrl.envs.stepping import CameraSettings

if TYPE_CHECKING:
    import sapien

BaseEnv: TypeAlias = Any
"""ManiSkill's ``BaseEnv`` of version 3.0.1, including attributes of the tasks."""


class Tensor(Protocol):
    """A torch tensor; embodrl's simulators do not import torch themselves."""

    def detach(self) -> Tensor: ...
    def cpu(self) -> Tensor: ...
    def numpy(self) -> NDArray[Any]: ...
    def tolist(self) -> list[int]: ...
    def new_tensor(self, values: list[int], /) -> Tensor: ...


class Body(Protocol):
    """A SAPIEN physics body, such as a link."""

    entity: sapien.Entity
    entity_pose: Any


class Batched(Protocol):
    """ManiSkill's view of one body in each scene."""

    _objs: Sequence[Body]
    _bodies: Sequence[Body]


class BatchedEntity(Protocol):
    """ManiSkill's view of one entity in each scene."""

    _objs: Sequence[sapien.Entity]


class BatchedCamera(Protocol):
    """ManiSkill's view of one camera in each scene."""

    _render_cameras: Sequence[sapien.render.RenderCameraComponent]


class BatchedSensor(Protocol):
    """A ManiSkill camera sensor."""

    camera: BatchedCamera


class Agent(Protocol):
    """A ManiSkill agent with a gripper."""

    scene: Any
    finger1_link: Batched
    finger2_link: Batched
    is_grasping: object


class Controller(Protocol):
    """A ManiSkill controller."""

    config: Any
    action_space_low: Sequence[float]
    action_space_high: Sequence[float]


class GripperController(Controller, Protocol):
    """ManiSkill's controller of mimicked joints."""

    control_joint_indices: Sequence[int]
    _multiplier: Any
    _offset: Any


class SimOptions(TypedDict):
    """Arguments of ``ManiSkillSim`` without task and number of environments."""

    cameras: dict[str, CameraSettings]
    sim_backend: str
    render_backend: str
    render_detail: str
    mesh_decimation: float | str | None
    human_size: tuple[int, int]
    full_state: bool
    axis: str | None
