"""Result files (JSON or text) that are either complete or absent."""

from __future__ import annotations

import json
import os
from pathlib import Path

from embodrl.errors import OutputError
from embodrl.storage.atomic import atomic_file, output_errors

ELSEWHERE = "choose a file in a writable directory with free space"


def check_json_file(path: Path, make_directory: bool = False) -> None:
    """Check that a result file can be written, before the work starts; OutputError if not.

    A missing directory is created with ``make_directory``, and otherwise rejected as a likely typo.
    """
    if path.is_dir():
        raise OutputError(f"{path} is a directory", f"name a file, such as {path / 'result.json'}")
    if not make_directory and not path.parent.exists():
        hint = f"create it first (mkdir -p {path.parent}), or correct the path"
        raise OutputError(f"{path} can't be written: its directory does not exist", hint, code="output-no-directory")
    with output_errors(f"{path} can't be written", path, ELSEWHERE):
        path.parent.mkdir(parents=True, exist_ok=True)
        if _is_special(path):
            # A probe file may be impossible in this directory; opening the file is check enough.
            os.close(os.open(path, os.O_WRONLY))
            return
        probe = path.with_name(f".{path.name}.probe")
        probe.write_bytes(b"")
        probe.unlink()


def write_json_file(path: Path, content: object) -> None:
    """Write a file atomically, replacing pipes and devices; OutputError, without a partial file, on failure."""
    write_text_file(path, _encoded(content))


def write_text_file(path: Path, text: str, elsewhere: str = ELSEWHERE) -> None:
    """Write text like ``write_json_file``; ``elsewhere`` tells in the error hint how to choose another location."""
    with atomic_file(path, elsewhere) as partial:
        partial.write_text(text, encoding="utf-8")


def write_json_result(path: Path, content: object) -> None:
    """Write results to a user-chosen path, which may be /dev/stdout or a pipe; otherwise like ``write_json_file``."""
    write_text_result(path, _encoded(content))


def write_text_result(path: Path, text: str) -> None:
    """Write text like ``write_json_result``."""
    if not _is_special(path):
        write_text_file(path, text)
        return
    with output_errors(f"{path} can't be written", path, ELSEWHERE):
        path.write_text(text, encoding="utf-8")


def _encoded(content: object) -> str:
    # NaN is not JSON; other programs could not read the file.
    return json.dumps(content, indent=2, allow_nan=False) + "\n"


def _is_special(path: Path) -> bool:
    """Whether the path is a terminal, pipe or device, which a rename would replace with a file."""
    return path.exists() and not path.is_file()
