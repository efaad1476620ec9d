"""Argument files: settings that one command writes for another, with the trust level of their origin.

On the command line such settings would count as the user's own and could be options. A verb takes such a file as
``@FILE``. Each line is ``- "key=value"``, a JSON string; the last line may approve the settings that run code.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from embodrl.config.trust import approval
from embodrl.errors import ConfigError, ConfigProblem
from embodrl.fields import read_regular_file

PREFIX = "@"
MAX_BYTES = 2**20
_ITEM = "- "


def text_of_arguments(texts: Sequence[str], approved: Mapping[str, object]) -> str:
    """Return the content of an argument file; ``approved`` are the arguments' settings that may run code."""
    return "".join(f"{_ITEM}{json.dumps(text)}\n" for text in texts) + approval(approved)


def read_arguments(path: Path) -> tuple[list[str], str]:
    """Return the arguments of a file, and its whole text.

    Raises:
        ConfigError: the file can't be read, or is not an argument file.
    """
    try:
        content = read_regular_file(path, MAX_BYTES).decode()
        lines = [line for line in content.splitlines() if not line.startswith("#")]
        return [_text(line) for line in lines], content
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        message = f"{path} is not an argument file: {reason}"
        hint = (
            f'give arguments directly; each line of an argument file is - "key=value"; pass YAML with --config {path}'
        )
        problem = ConfigProblem(f"{PREFIX}{path}", message, str(path), hint=hint, code="argument-file")
        raise ConfigError([problem]) from None


def _text(line: str) -> str:
    value: object = json.loads(line.removeprefix(_ITEM)) if line.startswith(_ITEM) else None
    if not isinstance(value, str):
        raise ValueError(f"{line[:80]!r} is not - and a JSON string")
    return value
