"""What every part of the schema is made of. Imports no torch."""

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
"""Of a moving average: 1 would keep its starting value forever."""
Seed = Annotated[int, Field(ge=0, le=2**31 - 1)]


def _rank_text(value: object) -> object:
    """YAML reads the placement ``0`` as an integer; it is text like ``0-3``."""
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
    """Return a path with the home directory in place of a leading ``~``, which no shell expands after ``key=``."""
    return str(Path(text).expanduser()) if text.startswith("~") else text


PathText = Annotated[str, AfterValidator(_expanded)]
"""A path on this machine, or what stands in place of one, such as a name of the hub."""


@dataclass(frozen=True)
class NameOf:
    """Metadata of a text: it is a name of a registry, whose spec has a fact.

    Attributes:
        registry: with the names.
        fact: attribute of the spec that is neither None nor empty; "" for all names.
    """

    registry: Registry[Any]
    fact: str = ""

    def names(self) -> list[str]:
        """Return the allowed names."""
        return [spec.name for spec in self.registry.all() if not self.fact or getattr(spec, self.fact)]

    def check(self, value: str) -> str:
        """Return the value if it is allowed; pydantic reports the error."""
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
    """Metadata of a field: it has an effect only where another setting, or a fact of what is chosen, has a value.

    On a section it counts for all settings in it, except the one that it names. Several have to hold together.

    Attributes:
        key: dotted name of the other setting, or of a fact of the rules' ``Context``, such as ``loss.needs_values``.
        values: values with which the field has an effect; none for all but null, false, 0 and empty ones.
        reason: what the note says instead of the key and its value.
    """

    key: str
    values: tuple[object, ...] = ()
    reason: str = ""

    def holds(self, value: object) -> bool:
        """Tell whether the field has an effect with this value of ``key``."""
        return value in self.values if self.values else bool(value)


@dataclass(frozen=True)
class ArgumentOf:
    """Metadata of a setting of ``algorithm``: functions of a kind get it, as the parameter of its name.

    Attributes:
        kind: ``loss`` or ``estimator``.
        alone: nothing else reads it, so that it has no effect beside a function without that parameter.
    """

    kind: Literal["loss", "estimator"]
    alone: bool = True


class ReadBy:
    """Metadata of a field: only these verbs read it. On a section it counts for all of it, but for what says otherwise.

    Args:
        verbs: names of verbs; ``record`` is `embodrl collect` with a policy in place of the experts.
    """

    def __init__(self, *verbs: str) -> None:
        self.verbs = frozenset(verbs)


RL = ReadBy("train")
"""Rollouts and what is learned from them; `embodrl plan` reads as `embodrl train` does."""
TRAINING = ReadBy("train", "sft", "store")
"""Optimizer steps, whatever they learn from."""
WORKERS = ReadBy("train", "sft")
"""Training processes, of which the others have none."""
EPISODES = ReadBy("train", "eval", "sft", "collect", "record", "store")
"""Simulators that are started."""
POLICY = ReadBy("train", "eval", "sft", "record", "store", "serve")
"""A policy that acts or is trained, which experts are not."""
EVALUATION = ReadBy("train", "eval", "sft", "store")
"""Success rates on fixed seeds."""
DEMONSTRATIONS = ReadBy("collect", "record", "store")
"""Episodes that are kept."""


class Section(BaseModel):
    """A mapping in the YAML: frozen, strict types, no unknown keys, no infinities."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
