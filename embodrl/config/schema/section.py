"""Building blocks of the schema. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from embodrl.errors import EmbodrlError
from embodrl.registry import Registry

PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
"""Decay of a moving average: 1 would keep its initial value forever."""
Seed = Annotated[int, Field(ge=0, le=2**31 - 1)]


def _rank_text(value: object) -> object:
    """Return a placement as text: YAML reads ``0`` as an integer, but ``0-3`` as text."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


Ranks = Annotated[str, BeforeValidator(_rank_text)]


def _group_text(value: object) -> object:
    """Return the mapping ``{node_group: LABEL, placement: RANKS}`` as the text ``LABEL/RANKS``."""
    if isinstance(value, dict):
        mapping = cast(dict[str, object], value)
        if "node_group" in mapping and set(mapping) <= {"node_group", "placement"}:
            return f"{mapping['node_group']}/{mapping.get('placement', 'all')}"
    return _rank_text(cast(object, value))


GroupRanks = Annotated[str, BeforeValidator(_group_text)]


def _expanded(text: str) -> str:
    """Return a path with a leading ``~`` expanded, which no shell does after ``key=``."""
    return str(Path(text).expanduser()) if text.startswith("~") else text


PathText = Annotated[str, AfterValidator(_expanded)]
"""A path on this machine, or an alternative to one, such as a hub name."""


@dataclass(frozen=True)
class NameOf:
    """Metadata of a text field: the value is a name in a registry, optionally with a property of its spec.

    Attributes:
        registry: registry of the names.
        fact: spec attribute that must be neither None nor empty; "" allows all names.
    """

    registry: Registry[Any]
    fact: str = ""

    def names(self) -> list[str]:
        return [spec.name for spec in self.registry.all() if not self.fact or getattr(spec, self.fact)]

    def check(self, value: str) -> str:
        """Return the value if it is allowed; pydantic reports the error otherwise."""
        try:
            if value in self.registry and (not self.fact or getattr(self.registry.entry(value), self.fact)):
                return value
        except EmbodrlError as error:  # an entry point that can't be imported
            raise PydanticCustomError("entry_point", "{text}", {"text": str(error)}) from None
        raise PydanticCustomError("literal_error", "not one of the allowed values")

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self.check, handler(source))


@dataclass(frozen=True)
class AppliesIf:
    """Metadata of a field: it has an effect only if another setting, or a fact about the chosen parts, has certain
    values.

    On a section it applies to all settings in it, except the one that it names. Several conditions must hold together.

    Attributes:
        key: dotted name of the other setting, or of a fact in the rules' ``Context``, such as ``loss.needs_values``.
        values: values for which the field has an effect; empty: all but null, false, 0 and empty values.
        reason: text of the note in place of the key and its value.
    """

    key: str
    values: tuple[object, ...] = ()
    reason: str = ""

    def holds(self, value: object) -> bool:
        """Return whether the field has an effect with this value of ``key``."""
        return value in self.values if self.values else bool(value)


@dataclass(frozen=True)
class ArgumentOf:
    """Metadata of an ``algorithm`` setting: it is passed to losses or estimators as the parameter of its name.

    Attributes:
        kind: ``loss`` or ``estimator``.
        alone: nothing else reads the setting, so it has no effect with a function that lacks the parameter.
    """

    kind: Literal["loss", "estimator"]
    alone: bool = True


class ReadBy:
    """Metadata of a field: only these verbs read it. On a section it applies to all fields without their own.

    Args:
        verbs: names of verbs; ``record`` is `embodrl collect` with a policy in place of the experts.
    """

    def __init__(self, *verbs: str) -> None:
        self.verbs = frozenset(verbs)


RL = ReadBy("train")
"""Rollouts and training on them; `embodrl plan` reads like `embodrl train`."""
TRAINING = ReadBy("train", "sft", "store")
"""Optimizer steps on any data."""
WORKERS = ReadBy("train", "sft")
"""Separate training processes."""
PROCESSES = ReadBy("train", "eval", "sft")
"""Separate processes that train or act."""
ROLLOUTS = ReadBy("train", "eval")
"""How the episodes of rollouts and evaluations are played."""
PLACED = ReadBy("train", "eval", "collect", "record")
"""Where episodes are played."""
EPISODES = ReadBy("train", "eval", "sft", "collect", "record", "store")
"""Running simulators."""
POLICY = ReadBy("train", "eval", "sft", "record", "store", "serve")
"""A policy that acts or trains, unlike experts."""
EVALUATION = ReadBy("train", "eval", "sft", "store")
"""Success rates on fixed seeds."""
DEMONSTRATIONS = ReadBy("collect", "record", "store")
"""Recorded episodes."""


class Section(BaseModel):
    """A mapping in the YAML: frozen, strict types, no unknown keys, no infinities."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
