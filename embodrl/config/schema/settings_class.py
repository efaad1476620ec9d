"""The class of a section that a simulator or a model family extends."""

from __future__ import annotations

from functools import cache
from typing import Any, cast

from pydantic import BaseModel, ValidationError

from embodrl.errors import EmbodrlError
from embodrl.names import import_object


@cache
def settings_class(name: str, settings: type[Any] | str | None, base: type[Any]) -> type[Any]:
    """Return the class that ``settings`` of the spec ``name`` is or names, ``base`` for None.

    Raises:
        EmbodrlError: it is not derived from ``base``, or can't be constructed without arguments.
    """
    if settings is None:
        return base
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
