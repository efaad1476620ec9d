"""Typed, range-checked reading of a checkpoint's JSON files, before anything is built from them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from embodrl.errors import CheckpointError, PolicyFileError
from embodrl.fields import Fields, read_fields
from embodrl.specs import families_of, is_of_family

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    Spec = TypeVar("Spec", bound=DataclassInstance)

CONFIG_FILE = "config.json"
OWN_SECTION = "embodrl"
MAX_BYTES = 8 * 2**20
MAX_SIZE = 2**17
# Bounds other than 1 to MAX_SIZE. Layer counts and other sizes that allocate memory have tighter ones, since no
# stored weight need exist for them.
_RANGES = {
    **dict.fromkeys(("depth", "num_layers", "num_hidden_layers"), (1, 512)),
    **dict.fromkeys(("action_dim", "max_action_dim", "max_state_dim", "action_horizon"), (1, 4096)),
    "num_images": (1, 64),
    "num_registers": (0, 1024),
    "num_steps": (1, 1000),
    "scale_factor": (1, 64),
    "self_attention_every": (0, 512),
    "relative_dims": (0, 4096),
    "num_timestep_buckets": (1, 2**20),
    "vocab_size": (1, 2**22),
    "max_position_embeddings": (1, 2**24),
}
_HINT = "fetch the checkpoint again, or restore the file from its origin"


def read_file(path: Path) -> Fields:
    """Return the fields of a JSON file of a checkpoint.

    Raises:
        PolicyFileError: the file is missing, unreadable, too large, too deeply nested, or not a JSON object.
    """
    if not path.is_file():  # a pipe would block
        raise PolicyFileError(f"{path} does not exist", "give the directory of a checkpoint in the public layout")
    return read_fields(path, PolicyFileError, _HINT, MAX_BYTES)


def fields_of(content: Mapping[str, object], source: str) -> Fields:
    """Return the fields of a parsed object; errors name ``source``."""
    return Fields(content, source, PolicyFileError, _HINT)


def size(fields: Fields, name: str, default: int | None = None, key: str | None = None) -> int:
    """Return a dimension within the bounds of ``name``; ``key`` is its name in the file if different."""
    low, high = _RANGES.get(name, (1, MAX_SIZE))
    if default is None:
        return fields.integer(key or name, low=low, high=high)
    return fields.integer(key or name, default, low=low, high=high)


def read_sizes(known: Spec, fields: Fields, complete: bool = False) -> Spec:
    """Return dimensions (numbers, flags, nested dataclasses) from a file; ``known`` provides types and defaults.

    With ``complete`` a file that lacks a field without default is refused.
    """
    changes: dict[str, object] = {}
    for field in dataclasses.fields(known):
        name = field.name
        value = getattr(known, field.name)
        required = complete and field.default is dataclasses.MISSING
        if fields.content.get(name) is None and not required:
            continue
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            changes[name] = read_sizes(value, fields.fields(name), complete)
        elif isinstance(value, bool):
            changes[name] = fields.flag(name)
        elif isinstance(value, int):
            changes[name] = size(fields, name)
        elif isinstance(value, float):
            changes[name] = fields.number(name, low=0.0, high=1e9)
    return dataclasses.replace(known, **changes)


def read_vit(known: Spec, fields: Fields) -> Spec:
    """Return the dimensions of a vision transformer; all are required (see ``read_sizes``)."""
    spec = read_sizes(known, fields, complete=True)
    check_multiple(fields, "image_size", "patch_size")
    check_multiple(fields, "width", "num_heads")
    return spec


def check_multiple(fields: Fields, whole: str, part: str) -> None:
    """Refuse dimensions where one must divide the other but does not, e.g. heads and width."""
    larger = size(fields, whole)
    smaller = size(fields, part)
    if larger % smaller:
        fields.refuse(f"'{whole}' is {larger}, not a multiple of '{part}' = {smaller}")


def own_section(raw: Mapping[str, object]) -> dict[str, object]:
    """Return the section of a config.json that embodrl itself wrote."""
    extra = raw.get(OWN_SECTION)
    return extra if isinstance(extra, dict) else {}


UNKNOWN_FAMILY = "use a checkpoint of a family that embodrl reads: `embodrl list models` shows them"


def check_family(fields: Fields, wanted: tuple[str, ...]) -> None:
    """Refuse a config.json of a known family outside ``wanted``; the hint names its family."""
    if any(is_of_family(fields.content, name) for name in wanted):
        return
    if found := families_of(fields.content):
        are, should = (" or ".join(f"'{name}'" for name in names) for names in (found, wanted))
        raise CheckpointError(
            f"{fields.source} is of a {are} model, not {should}",
            f"set model.model_type={' or '.join(found)}",
            code="checkpoint-family",
        )
