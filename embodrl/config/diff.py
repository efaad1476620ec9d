"""What differs between two configurations."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any, cast

from embodrl.config.load import leaf_keys, load_config, load_run
from embodrl.config.show import flow
from embodrl.errors import UsageError

MISSING = "-"


def side(text: str) -> dict[str, Any]:
    """Return the values of a run, of a YAML file, or of settings separated by blanks ("" is the defaults).

    Raises:
        ConfigError: the configuration is invalid.
        UsageError: there is no such run or file.
    """
    path = Path(text).expanduser()
    if text and "=" not in text and not path.exists():
        raise UsageError(
            f"{text} is neither a run, nor a YAML file, nor settings",
            'settings are written key=value, several of them in quotes: "env=toy runner.seed=3"',
            code="config-diff-side",
        )
    if text and "=" not in text and (path / "config.yaml").is_file():
        return load_run(path / "config.yaml", resuming=True).config.model_dump(mode="json")
    if text and "=" not in text:
        return load_config([], path).config.model_dump(mode="json")
    return load_config(shlex.split(text)).config.model_dump(mode="json")


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return ``(key, value of one, value of other)`` of every setting that differs; "-" where one has no such key."""
    keys = dict.fromkeys([*leaf_keys(one), *leaf_keys(other)])
    rows = [(key, _value(one, key), _value(other, key)) for key in keys]
    return [row for row in rows if row[1] != row[2]]


def _value(values: Any, key: str) -> str:
    found: Any = values
    for part in key.split("."):
        if isinstance(found, list):
            items = cast(list[Any], found)
            found = items[int(part)] if part.isdigit() and int(part) < len(items) else MISSING
        elif isinstance(found, dict):
            found = cast(dict[str, Any], found).get(part, MISSING)
        else:
            return MISSING
    return MISSING if found is MISSING else flow(found)
