"""Classes of the sections ``env`` and ``model``, which depend on the simulator and the model family."""

from __future__ import annotations

from embodrl.config.schema.env import EnvConfig
from embodrl.config.schema.model import ModelConfig
from embodrl.config.schema.settings_class import settings_class
from embodrl.specs import ENVS, MODELS


def env_settings(name: object) -> type[EnvConfig]:
    """Return the class of section ``env`` for a simulator; the common one if the simulator adds no settings.

    Raises:
        EmbodrlError: the spec names no class derived from EnvConfig, or one that can't be constructed without
            arguments.
    """
    spec = ENVS.entry(name) if isinstance(name, str) and name in ENVS else None
    return EnvConfig if spec is None else settings_class(spec.name, spec.settings, EnvConfig)


def model_settings(name: object) -> type[ModelConfig]:
    """Return the class of section ``model`` for a family, as ``env_settings`` does."""
    spec = MODELS.entry(name) if isinstance(name, str) and name in MODELS else None
    return ModelConfig if spec is None else settings_class(spec.name, spec.settings, ModelConfig)
