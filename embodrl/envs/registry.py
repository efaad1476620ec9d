"""Environments by name. Importing this module imports no simulator; making an environment does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from embodrl.specs import ENVS, RegisteredName, SimulatorSpec

SIMULATORS = {
    name: f"embodrl.envs.{name}.spec:SPEC"
    for name in ("maniskill", "toy", "dataset", "gymnasium", "libero", "metaworld", "robot")
}
"""Built-in environments: name -> module of the spec."""
SERVERS = {"tcp": "embodrl.envs.env_server.spec:TCP"}
"""Built-in kinds of servers for simulators on other machines."""
EVAL_PROTOCOLS = {
    name: f"embodrl.envs.libero.protocols:{name.upper()}"
    for name in ("openpi", "openvla", "openvla_oft", "rlinf", "simplevla")
}
"""Built-in settings of published evaluations."""


class SupportedEnv(RegisteredName):
    """Name of a registered environment: ``SupportedEnv("libero")``, ``SupportedEnv.LIBERO``, ``members()``.

    Raises UnknownNameError for other names, listing the known names and the nearest.
    """

    __slots__ = ()
    registry = ENVS

    TOY: ClassVar[SupportedEnv]
    MANISKILL: ClassVar[SupportedEnv]
    METAWORLD: ClassVar[SupportedEnv]
    GYMNASIUM: ClassVar[SupportedEnv]
    LIBERO: ClassVar[SupportedEnv]
    DATASET: ClassVar[SupportedEnv]
    ROBOT: ClassVar[SupportedEnv]

    @classmethod
    def register(
        cls,
        name: str,
        vector_env: object,
        description: str = "",
        *,
        tasks: Sequence[str] | Mapping[str, str] | str = (),
        action_dim: int | None = None,
        settings: object = None,
        **facts: object,
    ) -> SupportedEnv:
        """Register an environment, from a module named by ``extensions`` or an entry point.

        Args:
            name: value for ``env.env_type``.
            vector_env: ``VectorEnv`` class, or ``module:Class``, imported on first use in the simulator processes.
            description: one line for ``embodrl list envs``.
            tasks: names for ``env.tasks``, or name -> instruction.
            action_dim: numbers per action.
            settings: class of the section ``env``, derived from ``embodrl.config.schema.EnvConfig``, whose extra fields
                become arguments of the VectorEnv; or ``module:Class``. A list of names is short for ``reads``.
            facts: further attributes of ``SimulatorSpec``, for validation and ``embodrl list envs``.

        Raises:
            EmbodrlError: the name is taken, or a fact is unknown or invalid.
        """
        if isinstance(settings, (list, tuple)):
            facts = {"reads": settings, **facts}
            settings = None
        return cls.of(
            SimulatorSpec.make(
                name, vector_env, description, {"tasks": tasks, "action_dim": action_dim, "settings": settings, **facts}
            )
        )


for _name in SupportedEnv.registry.builtin:
    setattr(SupportedEnv, _name.upper(), SupportedEnv(_name))
