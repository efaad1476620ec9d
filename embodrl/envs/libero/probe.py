"""Can LIBERO run here: its packages and its assets. Quick; imports nothing of it."""

from __future__ import annotations

import importlib.util
import os
import subprocess
from pathlib import Path

from embodrl.config.isolated import ask
from embodrl.config.schema import EnvConfig
from embodrl.envs.libero.spec import LiberoConfig

ASSETS = "set env.libero_assets or EMBODRL_LIBERO_ASSETS to the folder with LIBERO's scenes/ and textures/"
_FIND = (
    "import importlib.util as u, pathlib; s = u.find_spec('libero'); "
    "print(pathlib.Path(s.submodule_search_locations[0]) / 'libero' if s else '')"
)


def find_package(python: str | None) -> Path | None:
    """Return where LIBERO is installed for an interpreter (None: this one), or None."""
    if python is None:
        spec = importlib.util.find_spec("libero")
        found = spec.submodule_search_locations if spec is not None else None
        return Path(found[0]) / "libero" if found else None
    try:
        done = ask(python, _FIND)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return Path(done.stdout.strip()) if done.returncode == 0 and done.stdout.strip() else None


def find_problems(settings: EnvConfig | None, python: str | None) -> list[tuple[str, str]]:
    """Return what is missing, each with a hint: the probe of the spec."""
    found: list[tuple[str, str]] = []
    package = find_package(python)
    if package is None:
        where = f"for {python}" if python else "in an environment of its own, nor beside embodrl"
        found.append((f"LIBERO is not installed {where}", "embodrl env install libero; then leave env.python=auto"))
    assets = settings.libero_assets if isinstance(settings, LiberoConfig) else None
    named = assets or os.environ.get("EMBODRL_LIBERO_ASSETS")
    folder = Path(named).expanduser() if named else package / "assets" if package else None
    if folder is None:
        found.append(("no folder of LIBERO's assets is named", ASSETS))
    elif not (folder / "scenes").is_dir():
        found.append((f"LIBERO's assets are not in {folder}", ASSETS))
    return found
