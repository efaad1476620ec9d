"""Settings as a file has them: one that verbs share holds those of other verbs, which a command line can't."""

from __future__ import annotations

from typing import Any

from embodrl.config.compose import is_choice, parse_arguments


def as_file(overrides: list[str]) -> dict[str, Any]:
    """Return arguments of the command line as the mapping that a YAML file with them holds."""
    values: dict[str, Any] = {"presets": {}}
    arguments, problems = parse_arguments(overrides)
    assert not problems
    for argument in arguments:
        if is_choice(argument):
            values["presets"][argument.key] = argument.value
            continue
        *sections, name = argument.key.split(".")
        section = values
        for each in sections:
            section = section.setdefault(each, {})
        section[name] = argument.value
    return values
