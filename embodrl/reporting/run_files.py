"""Reads files of a possibly foreign run: regular files of limited size, never links or pipes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from embodrl.config.nodes import MAX_FILE_BYTES, parse_yaml
from embodrl.fields import read_regular_file

CONFIG_FILE = "config.yaml"


def read_run_config(run_dir: Path) -> tuple[dict[str, Any], str, str]:
    """Read the config.yaml of a run with the limits of ``--config``.

    Returns:
        Settings, text of the file, and the reason if it can't be read; empty if there is none.
    """
    try:
        text = read_regular_file(run_dir / CONFIG_FILE, MAX_FILE_BYTES).decode()
    except FileNotFoundError:
        return {}, "", ""
    except UnicodeDecodeError:
        return {}, "", "it is not UTF-8 text"
    except OSError as error:
        return {}, "", error.strerror or type(error).__name__
    tree, problems = parse_yaml(text, CONFIG_FILE, "run")
    if problems:
        return {}, text, f"{problems[0].key}: {problems[0].message}"
    return cast(dict[str, Any], tree.plain()), text, ""


def own_files(run_dir: Path, *patterns: str) -> tuple[list[Path], list[Path]]:
    """Return the matching regular files of a run, sorted; and the other matches, such as links and pipes.

    Files behind a link to a directory do not belong to the run either.
    """
    root = run_dir.resolve()
    found = sorted({path for pattern in patterns for path in run_dir.glob(pattern)})
    own = [path for path in found if not path.is_symlink() and path.is_file() and _is_below(path, root)]
    return own, sorted({*found} - {*own})


def _is_below(path: Path, root: Path) -> bool:
    return path.resolve().is_relative_to(root)
