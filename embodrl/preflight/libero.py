"""Can LIBERO run here: its packages, its assets, and something to draw with."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
from importlib import metadata
from pathlib import Path

from embodrl.config.isolated import installed_python
from embodrl.envs.mujoco.scene import GL_HINT
from embodrl.errors import MissingDependencyError
from embodrl.preflight.findings import Finding
from embodrl.preflight.simulators import ask, draw_frame, missing_gl, optional
from embodrl.specs import ENVS

INSTALL = "embodrl env install libero"
ASSETS = "set env.libero_assets or EMBODRL_LIBERO_ASSETS to the folder with LIBERO's scenes/ and textures/"
NEWEST_MUJOCO = (3, 3, 2)
"""3.3.3 draws the floor of libero_object darker (github.com/Lifelong-Robot-Learning/LIBERO, issue 88); since 3.4 a bowl
of libero_spatial's sixth task does not settle as before (github.com/RLinf/RLinf, issue 1460)."""
_MUJOCO = "from importlib.metadata import version; print(version('mujoco'))"
_PROBE = (
    "import importlib.util as u, pathlib; s = u.find_spec('libero'); "
    "print(pathlib.Path(s.submodule_search_locations[0]) / 'libero' if s else '')"
)


def find_package(python: str | None) -> Path | None:
    """Return where LIBERO is installed for an interpreter (None: this one), or None; imports nothing of it."""
    if python is None:
        spec = importlib.util.find_spec("libero")
        found = spec.submodule_search_locations if spec is not None else None
        return Path(found[0]) / "libero" if found else None
    try:
        done = ask(python, _PROBE)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return Path(done.stdout.strip()) if done.returncode == 0 and done.stdout.strip() else None


def problems(python: str | None, assets: str | None) -> list[tuple[str, str]]:
    """Return what is missing, with the hint of each; quick, nothing of the simulator is started."""
    found: list[tuple[str, str]] = []
    package = find_package(python)
    if package is None:
        where = f"for {python}" if python else "in an environment of its own, nor beside embodrl"
        found.append((f"LIBERO is not installed {where}", f"{INSTALL}; then leave env.python=auto"))
    named = assets or os.environ.get("EMBODRL_LIBERO_ASSETS")
    folder = Path(named).expanduser() if named else package / "assets" if package else None
    if folder is None:
        found.append(("no folder of LIBERO's assets is named", ASSETS))
    elif not (folder / "scenes").is_dir():
        found.append((f"LIBERO's assets are not in {folder}", ASSETS))
    if missing_gl():
        found.append((missing_gl(), GL_HINT))
    return found


def preflight_libero(python: str | None, assets: str | None) -> None:
    """Refuse before anything is started where LIBERO can't run.

    Args:
        python: interpreter of the simulator processes; None for this one.
        assets: as ``env.libero_assets``.

    Raises:
        MissingDependencyError: with all that is missing.
    """
    found = problems(python, assets)
    if found:
        raise MissingDependencyError("; ".join(message for message, _ in found), "; ".join(hint for _, hint in found))


def check_mujoco(python: str | None) -> Finding | None:
    """Return a warning if an interpreter (None: this one) has a MuJoCo that draws or settles LIBERO's scenes otherwise.

    One that can't be asked is none; that LIBERO is missing there is reported by ``problems``.
    """
    try:
        found = metadata.version("mujoco") if python is None else ask(python, _MUJOCO).stdout.strip()
    except (OSError, subprocess.TimeoutExpired, metadata.PackageNotFoundError):
        return None
    numbers = tuple(int(part) for part in re.findall(r"\d+", found)[:3])
    if numbers <= NEWEST_MUJOCO:
        return None
    newest = ".".join(map(str, NEWEST_MUJOCO))
    detail = f"MuJoCo {found} draws libero_object darker and settles some objects otherwise than {newest} and before,"
    detail += " with which published figures were made"
    return Finding("mujoco-version", "warning", detail, f"{INSTALL} --force, or pip install mujoco=={newest}")


def wanted() -> bool:
    """Tell whether this machine is meant to run LIBERO: it has been installed in one way or the other."""
    return installed_python("libero") is not None or find_package(None) is not None


def check_libero() -> Finding:
    """Make one environment in the interpreter that ``env.python: auto`` finds, reset it and draw one frame."""
    python = installed_python("libero")
    found = problems(None if python is None else str(python), None)
    if found:
        message, hint = ("; ".join(part) for part in zip(*found, strict=True))
        return Finding("LIBERO", "warning", message, hint)
    name, suite = next(iter(ENVS.entry("libero").suites.items()))
    kwargs = {
        "suite": name,
        "tasks": [next(iter(suite.tasks))],
        "cameras": [{"name": "agentview", "height": 64, "width": 64}],
        "settle_steps": 0,
        "max_episode_steps": 1,
    }
    interpreter = None if python is None else str(python)
    return optional(draw_frame("LIBERO", "libero", kwargs, interpreter, hint=f"{INSTALL} --force"))
