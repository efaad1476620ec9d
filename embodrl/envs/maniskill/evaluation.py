"""Batched reward and success of several scenes of one task, computed by ManiSkill's own code.

On a CPU every scene is a ManiSkill environment of one row, and its reward takes some fifty torch operations on single
rows. The task code is written for batches: here it runs on a view whose attributes join those of all scenes. Its
operations do not mix rows, so that each row is bit-identical to evaluating its scene alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from types import FunctionType
from typing import Any

from embodrl.envs.maniskill.types import BaseEnv, Tensor


def evaluate(envs: Sequence[BaseEnv], actions: object) -> tuple[Tensor, Tensor]:
    """Return the normalised dense reward ``float32[N]`` and success ``bool[N]`` of the current states.

    Args:
        envs: ManiSkill environments of one task with N rows in total.
        actions: executed actions ``float32[N,A]``, or None.
    """
    env = envs[0] if len(envs) == 1 else SceneView(envs, joins_code=True)
    info = env.get_info()
    return env.compute_normalized_dense_reward(obs={}, action=actions, info=info), info["success"]


def observe(envs: Sequence[BaseEnv]) -> Tensor:
    """Return ManiSkill's own state observation ``float32[N,S]`` of environments of one task with N rows in total."""
    env = envs[0] if len(envs) == 1 else SceneView(envs, joins_code=True)
    return env.get_obs(env.get_info())


class SceneView:
    """The same object of several scenes, read as if it belonged to one scene with all their rows.

    Attributes are read once and cached: a view serves one evaluation. Assigning attributes raises, so that code which
    stores something in its scene fails instead of losing it.

    Args:
        members: the object in each scene.
        joins_code: run methods and properties once on the view, not on each member: for environments and agents, which
            ManiSkill has written for batches; on a CPU its wrappers of SAPIEN's objects only look at the first one.
    """

    def __init__(self, members: Sequence[Any], joins_code: bool) -> None:
        vars(self).update(_members=members, _joins_code=joins_code)

    def __getattr__(self, name: str) -> Any:
        first = self._members[0]
        code = getattr(type(first), name, None)
        value: object
        if isinstance(code, property) and (self._joins_code or name == "pose") and code.fget is not None:
            value = code.fget(self)
        elif isinstance(code, FunctionType) and self._joins_code and name not in vars(first):
            value = code.__get__(self)
        else:
            values = [getattr(member, name) for member in self._members]
            value = [one for each in values for one in each] if name == "_objs" else join(values)
        vars(self)[name] = value
        return value

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a view of scenes can't keep {name}: evaluate the scenes one by one")


def join(values: Sequence[Any]) -> Any:
    """Join the values of all scenes: rows are stacked; constants, which are equal, appear once."""
    from mani_skill.agents.base_agent import BaseAgent
    from mani_skill.utils.structs import BaseStruct, Pose

    torch = import_module("torch")
    first = values[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(values) if first.ndim and len(first) == 1 else first
    if isinstance(first, Pose):
        return Pose(torch.cat([pose.raw_pose for pose in values]))
    if isinstance(first, BaseAgent):
        return SceneView(values, joins_code=True)
    if isinstance(first, BaseStruct):
        return SceneView(values, joins_code=False)
    if isinstance(first, list):
        return [join(each) for each in zip(*values, strict=True)]
    return _call_each(values) if callable(first) else first


def _call_each(functions: Sequence[Callable[..., Any]]) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        return join(
            [
                function(*(_of(argument, index) for argument in arguments), **options)
                for index, function in enumerate(functions)
            ]
        )

    return call


def _of(argument: Any, index: int) -> Any:
    return argument._members[index] if isinstance(argument, SceneView) else argument
