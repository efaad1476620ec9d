"""Results as one file, JSON or other text, that is whole or not there."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from embodrl.errors import OutputError

HINT = "name a file in a directory of yours that has room"


def check_json_file(path: Path) -> None:
    """Find out before the work whether its results can be written; the directory is made if missing.

    Raises:
        OutputError: they can't be.
    """
    if path.is_dir():
        raise OutputError(f"{path} is a directory", f"name a file, such as {path / 'result.json'}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if _is_special(path):
            os.close(os.open(path, os.O_WRONLY))
            return
        partial = _partial(path)
        partial.write_bytes(b"")
        partial.unlink()
    except OSError as error:
        raise OutputError(f"{path} can't be written: {error.strerror or error}", HINT) from error


def write_json_file(path: Path, content: Any) -> None:
    """Write results; a file that was there before stays until the new one is whole.

    Raises:
        OutputError: it can't be written; nothing half-written is left.
    """
    write_text_file(path, json.dumps(content, indent=2, allow_nan=False) + "\n")


def write_text_file(path: Path, text: str) -> None:
    """Write text; as ``write_json_file``."""
    partial = _partial(path)
    try:
        if _is_special(path):
            path.write_text(text, encoding="utf-8")
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            partial.write_text(text, encoding="utf-8")
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise OutputError(f"{path} can't be written: {error.strerror or error}", HINT) from error


def _is_special(path: Path) -> bool:
    """A terminal, a pipe or /dev/null, which a rename would replace with a file."""
    return path.exists() and not path.is_file()


def _partial(path: Path) -> Path:
    return path.with_name(f".{path.name}.partial")
