"""Environments by name. Importing this module imports no simulator; making an environment does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from embodrl.registry import ENVS, RegisteredName


class SupportedEnv(RegisteredName):
    """The name of a registered environment: ``SupportedEnv("libero")``, ``SupportedEnv.LIBERO``, ``members()``.

    Raises:
        UnknownNameError: the name is not registered; lists the known ones and the nearest.
    """

    __slots__ = ()
    registry = ENVS

    TOY: ClassVar[SupportedEnv]
    MANISKILL: ClassVar[SupportedEnv]
    METAWORLD: ClassVar[SupportedEnv]
    GYMNASIUM: ClassVar[SupportedEnv]
    LIBERO: ClassVar[SupportedEnv]

    @classmethod
    def register(
        cls,
        name: str,
        vector_env: Any,
        description: str = "",
        *,
        tasks: Sequence[str] | Mapping[str, str] | str = (),
        action_dim: int | None = None,
        settings: Sequence[str] = (),
        **facts: Any,
    ) -> SupportedEnv:
        """Add an environment, from a module that ``extensions`` names.

        Args:
            name: for ``env.env_type``.
            vector_env: a ``VectorEnv`` class, or ``module:Class``, imported on first use in the simulator processes.
            description: one line for ``embodrl list envs``.
            tasks: names for ``env.tasks``.
            action_dim: numbers of an action.
            settings: keys of the section ``env`` that the class takes as arguments beside those that all do.
            facts: what else validation and ``embodrl list envs`` should know, as in ``embodrl/registry.py``.

        Raises:
            EmbodrlError: the name is taken.
        """
        known = {"tasks": tasks, "action_dim": action_dim, "settings": settings}
        given = {key: value for key, value in known.items() if value not in ((), None)}
        return cls.add(name, vector_env, description, **given, **facts)


for _member in SupportedEnv.members():
    setattr(SupportedEnv, _member.upper(), _member)
