"""Quick check for LIBERO's packages and assets, without importing them."""

from __future__ import annotations

import re
import subprocess
from importlib import metadata
from pathlib import Path

from embodrl.config.isolated import ask
from embodrl.config.schema import EnvConfig
from embodrl.envs.libero.assets import PACKAGE, find_assets, package_folder
from embodrl.envs.libero.spec import LiberoConfig
from embodrl.errors import MissingDependencyError

NEWEST_MUJOCO = (3, 3, 2)
"""3.3.3 draws the floor of libero_object darker (github.com/Lifelong-Robot-Learning/LIBERO, issue 88); since 3.4 a bowl
of libero_spatial's sixth task settles differently (github.com/RLinf/RLinf, issue 1460)."""
_MUJOCO = "from importlib.metadata import version; print(version('mujoco'))"
_FIND = (
    "import importlib.util, sys; found = importlib.util.find_spec(sys.argv[1]); "
    "print(next(iter(found.submodule_search_locations)) if found else '')"
)


def find_package(python: str | None, name: str) -> Path | None:
    """Return the location of a package installed for an interpreter (None: this one), or None."""
    if python is None:
        return package_folder(name)
    try:
        done = ask(python, _FIND, name)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return Path(done.stdout.strip()) if done.returncode == 0 and done.stdout.strip() else None


def find_problems(settings: EnvConfig | None, python: str | None) -> list[tuple[str, str]]:
    """Return what is missing, each with a hint: the probe of the spec."""
    found: list[tuple[str, str]] = []
    if find_package(python, "libero") is None:
        where = f"for {python}" if python else "in its own environment or alongside embodrl"
        found.append((f"LIBERO is not installed {where}", "embodrl env install libero; then leave env.python=auto"))
    assets = settings.libero_assets if isinstance(settings, LiberoConfig) else None
    try:
        find_assets(assets, find_package(python, PACKAGE))
    except MissingDependencyError as missing:
        found.append((missing.message, missing.hint))
    return found


def find_warnings(python: str | None) -> list[tuple[str, str, str]]:
    """Return a warning if an interpreter's MuJoCo renders or settles LIBERO's scenes differently (None: this one).

    No warning if the version can't be queried; ``find_problems`` reports a missing LIBERO.
    """
    try:
        found = metadata.version("mujoco") if python is None else ask(python, _MUJOCO).stdout.strip()
    except (OSError, subprocess.TimeoutExpired, metadata.PackageNotFoundError):
        return []
    numbers = tuple(int(part) for part in re.findall(r"\d+", found)[:3])
    if numbers <= NEWEST_MUJOCO:
        return []
    newest = ".".join(map(str, NEWEST_MUJOCO))
    detail = (
        f"MuJoCo {found} renders libero_object darker and settles some objects differently from {newest} and before,"
    )
    detail += " the versions used for published results"
    return [("mujoco-version", detail, f"embodrl env install libero --force, or pip install mujoco=={newest}")]
