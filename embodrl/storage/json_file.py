"""Results as one file, JSON or other text, that is complete or absent."""

from __future__ import annotations

import json
import os
from pathlib import Path

from embodrl.errors import OutputError
from embodrl.storage.atomic import atomic_file, output_errors

ELSEWHERE = "choose a file in a writable directory with free space"


def check_json_file(path: Path, make_directory: bool = False) -> None:
    """Check before the work that its results can be written.

    Args:
        path: path of the file.
        make_directory: create its directory if missing; else a missing one is refused as a likely typing error.

    Raises:
        OutputError: they can't be.
    """
    if path.is_dir():
        raise OutputError(f"{path} is a directory", f"name a file, such as {path / 'result.json'}")
    if not make_directory and not path.parent.exists():
        hint = f"create it first (mkdir -p {path.parent}), or correct the path"
        raise OutputError(f"{path} can't be written: its directory does not exist", hint, code="output-no-directory")
    with output_errors(f"{path} can't be written", path, ELSEWHERE):
        path.parent.mkdir(parents=True, exist_ok=True)
        if _is_special(path):
            # It may be in a directory where no probe can be made; opening it shows enough.
            os.close(os.open(path, os.O_WRONLY))
            return
        probe = path.with_name(f".{path.name}.probe")
        probe.write_bytes(b"")
        probe.unlink()


def write_json_file(path: Path, content: object) -> None:
    """Write a file atomically; an earlier one stays until the new one is complete. A pipe or device is replaced.

    Raises:
        OutputError: it can't be written; nothing half-written is left.
    """
    write_text_file(path, _encoded(content))


def write_text_file(path: Path, text: str, elsewhere: str = ELSEWHERE) -> None:
    """Write text; as ``write_json_file``.

    Args:
        path: path of the file.
        text: its content.
        elsewhere: how to choose another place, for the hint of the error.
    """
    with atomic_file(path, elsewhere) as partial:
        partial.write_text(text, encoding="utf-8")


def write_json_result(path: Path, content: object) -> None:
    """Write results where the user has asked for them, which may be /dev/stdout or a pipe; see ``write_json_file``."""
    write_text_result(path, _encoded(content))


def write_text_result(path: Path, text: str) -> None:
    """Write text; as ``write_json_result``."""
    if not _is_special(path):
        write_text_file(path, text)
        return
    with output_errors(f"{path} can't be written", path, ELSEWHERE):
        path.write_text(text, encoding="utf-8")


def _encoded(content: object) -> str:
    # NaN is not JSON, and other programs could not read the file.
    return json.dumps(content, indent=2, allow_nan=False) + "\n"


def _is_special(path: Path) -> bool:
    """A terminal, a pipe or /dev/null, which a rename would replace with a file."""
    return path.exists() and not path.is_file()
