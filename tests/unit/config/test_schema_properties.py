"""What holds for every field of the schema: wrong values and misspelt names are refused, with the key and its code."""

from __future__ import annotations

import typing
from collections.abc import Iterator, Mapping
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import pytest
from pydantic.fields import FieldInfo

from embodrl.config.check import schema_keys, section_model, shipped_schemas, validate
from embodrl.config.nodes import Origin, from_plain
from embodrl.config.schema.section import NameOf
from embodrl.errors import ConfigProblem
from embodrl.specs import ENVS, MODELS

GIVEN = Origin("argument", "command line")
AT_ONCE = 40
"""Wrong keys of one configuration: a report ends after 50."""
CHOSEN = [
    *({"env": {"env_type": name}} for name in ENVS.builtin),
    *({"model": {"model_type": name}} for name in MODELS.builtin),
]
"""What has each of the shipped schemas."""
ITEMS: dict[str, dict[str, Any]] = {
    "algorithm.by_task": {"task": "reach-red"},
    "cluster.node_groups": {"label": "fast", "node_ranks": "0"},
    "env.cameras": {},
    "env.eval.cameras": {},
    "env.train.task_curriculum.parts": {"kind": "stages"},
}
"""Lists of sections, with what an item has to have."""


def _fields() -> dict[str, tuple[int, FieldInfo]]:
    """Return every key with its field, and the number of the first shipped schema that has it."""
    found: dict[str, tuple[int, FieldInfo]] = {}
    for number, schema in enumerate(shipped_schemas()):
        for key in schema_keys(schema):
            section, _, name = key.rpartition(".")
            model = section_model(section, schema)
            assert model is not None
            found.setdefault(key, (number, model.model_fields[name]))
    return found


FIELDS = _fields()


def kinds_of(annotation: object, metadata: list[Any]) -> Iterator[tuple[object, list[Any]]]:
    """Yield the types of which a value may be, but null, each with its metadata."""
    if get_origin(annotation) is typing.Annotated:
        base, *more = get_args(annotation)
        yield from kinds_of(base, [*more, *metadata])
    elif get_origin(annotation) in (Union, UnionType):
        for one in get_args(annotation):
            yield from kinds_of(one, metadata)
    elif annotation is not type(None):
        yield annotation, [each for one in metadata for each in (*getattr(one, "metadata", ()), one)]


def kinds_of_field(key: str) -> list[tuple[object, list[Any]]]:
    field = FIELDS[key][1]
    return list(kinds_of(field.annotation, list(field.metadata)))


def bound(key: str, exclusive: str, inclusive: str, step: int) -> float | None:
    """Return a number just outside a bound, None for what is no number or has no such bound."""
    [(kind, metadata), *others] = kinds_of_field(key)
    if others or kind not in (int, float):
        return None
    for each in metadata:
        if getattr(each, exclusive, None) is not None:
            return getattr(each, exclusive)
        if getattr(each, inclusive, None) is not None:
            return getattr(each, inclusive) + step
    return None


def is_choice(key: str) -> bool:
    """Tell whether a field is one of a few words."""
    return all(
        get_origin(kind) is Literal or any(isinstance(each, NameOf) for each in metadata)
        for kind, metadata in kinds_of_field(key)
    )


def misspelt(key: str) -> str:
    """Return a key with two letters of its last word in the wrong order, or without that with one twice."""
    section, _, name = key.rpartition(".")
    wrong = name + name[-1]
    for index in range(1, len(name) - 1):
        swapped = name[:index] + name[index + 1] + name[index] + name[index + 2 :]
        if swapped != name and name[index : index + 2].isalpha():
            wrong = swapped
    return f"{section}.{wrong}" if section else wrong


def problems_of(wrong: Mapping[str, tuple[str, object]]) -> dict[str, ConfigProblem]:
    """Return what is wrong with configurations that have these keys, by key, without the numbers of items of lists.

    Args:
        wrong: what is written for each field: key and value.
    """
    found: dict[str, ConfigProblem] = {}
    for number, schema in enumerate(shipped_schemas()):
        written = [pair for key, pair in wrong.items() if FIELDS[key][0] == number]
        for start in range(0, len(written), AT_ONCE):
            tree = with_keys(written[start : start + AT_ONCE], CHOSEN[number])
            problems = validate(from_plain(tree, GIVEN), schema)[2]
            found |= {problem.key.replace(".0.", "."): problem for problem in problems}
    return found


def with_keys(written: list[tuple[str, object]], chosen: dict[str, dict[str, str]]) -> dict[str, Any]:
    """Return a configuration that has these keys and values, and what chooses its schema."""
    tree: dict[str, Any] = {name: dict(section) for name, section in chosen.items()}
    for key, value in written:
        *sections, name = key.split(".")
        place = tree
        for depth, section in enumerate(sections, start=1):
            item = ITEMS.get(".".join(sections[:depth]))
            found = place.setdefault(section, {} if item is None else [dict(item)])
            place = found if item is None else found[0]
        place[name] = value
    return tree


@pytest.mark.parametrize(("exclusive", "inclusive", "step"), [("gt", "ge", -1), ("lt", "le", 1)])
def test_every_number_outside_its_bounds_is_refused(exclusive: str, inclusive: str, step: int) -> None:
    numbers = {key: bound(key, exclusive, inclusive, step) for key in FIELDS}
    wrong = {key: (key, number) for key, number in numbers.items() if number is not None}
    assert len(wrong) > 50
    codes = {key: problem.code for key, problem in problems_of(wrong).items()}
    assert codes == dict.fromkeys(wrong, "config-range")


def test_every_word_that_is_no_choice_is_refused() -> None:
    wrong = {key: (key, "no_such_word") for key in FIELDS if is_choice(key)}
    assert len(wrong) > 50
    problems = problems_of(wrong)
    assert {key: problem.code for key, problem in problems.items()} == dict.fromkeys(wrong, "config-choice")
    assert all(problem.allowed and problem.hint for problem in problems.values())


def test_every_misspelt_key_is_refused_and_the_meant_one_named() -> None:
    wrong = {key: (misspelt(key), None) for key in FIELDS}
    assert len(wrong) > 500
    problems = problems_of(wrong)
    assert {problem.code for problem in problems.values()} == {"config-unknown-key"}
    meant = {key: problem.nearest.replace(".0.", ".") for key, problem in problems.items()}
    assert meant == {misspelt(key): key for key in FIELDS}
