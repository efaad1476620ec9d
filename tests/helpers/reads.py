"""Which settings a verb reads while it works, and which it would say that it ignores."""

from __future__ import annotations

import sys
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from pydantic.fields import FieldInfo

import embodrl
from embodrl import api
from embodrl.config.schema import Config
from embodrl.config.schema.readers import Verb
from embodrl.config.schema.section import Section
from embodrl.errors import ConfigError

ROOT = str(Path(embodrl.__file__).parent)
SCHEMA = f"{ROOT}/config/schema/"
CHECKING = f"{ROOT}/config/"
"""What only looks at settings, to check them, is not what a verb does with them."""


def _reader(frame: FrameType | None) -> str:
    """Return the file that reads a setting; properties of the schema read on behalf of their callers."""
    while frame is not None and frame.f_code.co_filename.startswith(SCHEMA):
        frame = frame.f_back
    return "" if frame is None else frame.f_code.co_filename


@contextmanager
def recorded() -> Iterator[set[tuple[type, str]]]:
    """Yield the settings that embodrl's own code reads in the block, as class of the section and name."""
    original, seen = Section.__getattribute__, set[tuple[type, str]]()

    def read(self: Section, name: str) -> Any:
        if name[0] != "_" and name in type(self).model_fields:
            file = _reader(sys._getframe(1))
            if file.startswith(ROOT) and not file.startswith(CHECKING):
                seen.add((type(self), name))
        return original(self, name)

    Section.__getattribute__ = read  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield seen
    finally:
        Section.__getattribute__ = original


def leaves(section: Section, prefix: str = "") -> Iterator[tuple[str, type, FieldInfo, object]]:
    """Yield dotted key, class of the section, field and value of every setting; of lists of sections none."""
    for name, info in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, Section):
            yield from leaves(value, f"{prefix}{name}.")
        elif not (isinstance(value, tuple) and value and isinstance(value[0], Section)):
            yield f"{prefix}{name}", type(section), info, value


def _choices(annotation: Any) -> list[object]:
    if typing.get_origin(annotation) is typing.Literal:
        return list(typing.get_args(annotation))
    return [choice for part in typing.get_args(annotation) for choice in _choices(part)]


def other_values(info: FieldInfo, value: object) -> list[str]:
    """Return texts of the command line of which one is likely to be valid, and another value than this one."""
    if isinstance(value, bool):
        return [str(not value).lower()]
    chosen = [str(choice) for choice in _choices(info.annotation) if choice != value]
    chosen += [f"[{choice}]" for choice in _choices(info.annotation) if isinstance(value, tuple)]
    if isinstance(value, int):
        chosen += [str(value + 1), str(2 * value), str(value - 1)]
    elif isinstance(value, float):
        chosen += [str(value * 0.5 or 0.5), str(value * 1.5 + 0.1)]
    elif isinstance(value, tuple) and value and isinstance(value[0], int | float):
        numbers = [number * 0.5 if isinstance(number, float) else number + 1 for number in value]
        chosen.append(str(numbers).replace(" ", ""))
    return [
        *chosen,
        "true",
        "3",
        "0.5",
        "other",
        "0.0.0.0",
        "[other]",
        "[0.5]",
        "[openpi]",
        "[{label: a, node_ranks: 0}]",
        "{a: 1}",
        "{a: true}",
    ]


def is_answered(verb: Verb, base: list[str], key: str, info: FieldInfo, value: object) -> bool:
    """Tell whether another value of a setting on the command line is refused, or noted to have no effect."""
    for text in other_values(info, value):
        try:
            loaded = api._load([*base, f"{key}={text}"], (), verb)
        except ConfigError as error:
            if all(problem.code.startswith("config-") for problem in error.problems):
                continue  # not a valid value
            return True
        return any(f"{note.key}.".startswith(f"{key}.") or key.startswith(f"{note.key}.") for note in loaded.notes)
    raise AssertionError(f"no valid value of {key} found")


def silent(verb: Verb, base: list[str], config: Config, seen: set[tuple[type, str]]) -> list[str]:
    """Return the settings that a verb neither reads nor refuses nor notes."""
    return [
        key
        for key, section, info, value in leaves(config)
        if (section, key.rpartition(".")[2]) not in seen and not is_answered(verb, base, key, info, value)
    ]
