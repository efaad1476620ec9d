"""Classes of the sections ``env`` and ``model``, which depend on the simulator and the model family."""

from __future__ import annotations

from functools import cache
from typing import Any, cast

from pydantic import BaseModel, ValidationError

from embodrl.config.schema.env import EnvConfig
from embodrl.config.schema.model import ModelConfig
from embodrl.errors import EmbodrlError
from embodrl.names import import_object
from embodrl.specs import ENVS, MODELS


def env_settings(name: object) -> type[EnvConfig]:
    """Return the class of section ``env`` for a simulator; the common one if the simulator adds no settings.

    Raises:
        EmbodrlError: the spec names no class derived from EnvConfig, or one that can't be constructed without
            arguments.
    """
    spec = ENVS.entry(name) if isinstance(name, str) and name in ENVS else None
    return EnvConfig if spec is None or spec.settings is None else _settings(spec.name, spec.settings, EnvConfig)


def model_settings(name: object) -> type[ModelConfig]:
    """Return the class of section ``model`` for a family, as ``env_settings`` does."""
    spec = MODELS.entry(name) if isinstance(name, str) and name in MODELS else None
    return ModelConfig if spec is None or spec.settings is None else _settings(spec.name, spec.settings, ModelConfig)


@cache
def _settings(name: str, settings: type[Any] | str, base: type[Any]) -> type[Any]:
    found: Any = import_object(settings) if isinstance(settings, str) else settings
    if not isinstance(found, type) or not issubclass(found, base):
        raise EmbodrlError(
            f"the settings of '{name}' are {found!r}, which is not derived from  {base.__name__}",
            f"write class MySettings({base.__name__}) with a default for every field",
            code="settings-class-invalid",
        )
    section = cast(type[BaseModel], found)
    required = [field for field, info in section.model_fields.items() if info.is_required()]
    if required:
        raise EmbodrlError(
            f"the setting '{required[0]}' of '{name}' has no default",
            f"write {required[0]}: ... = Field(default=..., description=...)",
            code="settings-class-invalid",
        )
    added = {field: info for field, info in section.model_fields.items() if field not in base.model_fields}
    try:  # pydantic does not validate defaults by itself
        section.model_validate({field: info.get_default(call_default_factory=True) for field, info in added.items()})
    except ValidationError as error:
        first = error.errors()[0]
        raise EmbodrlError(
            f"the default of the setting '{'.'.join(map(str, first['loc']))}' of '{name}' is invalid: {first['msg']}",
            "give a default within the setting's type and bounds",
            code="settings-class-invalid",
        ) from None
    return found
