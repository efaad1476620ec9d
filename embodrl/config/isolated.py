"""Locations of the simulators' own Python environments, made by `embodrl env install`."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, cast

from embodrl.fields import MAX_JSON_BYTES, read_regular_file

if TYPE_CHECKING:
    from embodrl.config.schema import Config

AUTO = "auto"
MARKER = "embodrl-environment.json"
"""Marker written first, to recognise environments made here; ``requirements`` is added at the end."""
REQUIREMENTS = Path(__file__).resolve().parents[1] / "envs" / "requirements"


def installable() -> list[str]:
    """Return the simulators with pinned requirements."""
    return sorted(path.stem for path in REQUIREMENTS.glob("*.txt"))


def requirements(name: str) -> Path:
    """Return the file of pinned packages of a simulator."""
    return REQUIREMENTS / f"{name}.txt"


def default_prefix(name: str) -> Path:
    """Return the path of a simulator's environment: ``$EMBODRL_<NAME>_ENV``, or a path below the user's cache
    directory.
    """
    chosen = os.environ.get(f"EMBODRL_{name.upper()}_ENV")
    if chosen:
        return Path(chosen).expanduser().absolute()
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "embodrl" / "envs" / name


def python_of(prefix: Path) -> Path:
    """Return the interpreter of an environment."""
    return prefix / "bin" / "python"


def fingerprint(name: str) -> str:
    """Return a fingerprint of a simulator's pinned packages."""
    return hashlib.sha256(requirements(name).read_bytes()).hexdigest()


def read_marker(prefix: Path) -> dict[str, object] | None:
    """Return the marker that `embodrl env install` left in an environment; None if there is none."""
    try:
        content: object = json.loads(read_regular_file(prefix / MARKER, MAX_JSON_BYTES))
    except (OSError, ValueError):
        return None
    return cast(dict[str, object], content) if isinstance(content, dict) else None


def installed_python(name: str) -> Path | None:
    """Return the interpreter of a simulator's environment, or None if the environment is missing or incomplete."""
    prefix = default_prefix(name)
    python = python_of(prefix)
    return python if is_whole(name, prefix) else None


def is_whole(name: str, prefix: Path) -> bool:
    """Return whether `embodrl env install` has made a simulator's environment completely."""
    marker = read_marker(prefix) or {}
    return marker.get("name") == name and "requirements" in marker and os.access(python_of(prefix), os.X_OK)


def ask(python: str, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run code in an interpreter with the module search path of a simulator process.

    Raises:
        OSError: the interpreter can't be started.
        subprocess.TimeoutExpired: the interpreter hangs.
    """
    environ = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    # Drop the current directory, which may be another user's run; -P needs Python 3.11.
    command = [python, "-c", f"import sys; sys.path.pop(0)\n{code}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environ)


def interpreter_of(config: Config) -> str | None:
    """Return the interpreter of the simulator processes; None is the current one."""
    if config.env.python != AUTO:
        return config.env.python
    found = installed_python(config.env.env_type)
    return None if found is None else str(found)
