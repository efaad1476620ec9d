"""`embodrl env`: Python environments of their own for simulators whose packages clash with the rest."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from embodrl.config.isolated import (
    MARKER,
    default_prefix,
    fingerprint,
    installable,
    python_of,
    read_marker,
    requirements,
)
from embodrl.errors import EmbodrlError, UsageError
from embodrl.names import nearest
from embodrl.preflight.findings import MachineFinding
from embodrl.specs import ENVS
from embodrl.storage.atomic import atomic_file

_CLEAN = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
_TAIL_LINES = 15


@dataclass(frozen=True)
class Installed:
    """An environment as `embodrl env list` shows it.

    Attributes:
        name: of the simulator.
        prefix: where it is or would be.
        state: ``ready``, ``outdated`` (other packages are pinned by now), ``incomplete`` or ``absent``.
    """

    name: str
    prefix: Path
    state: str


def check_name(name: str) -> None:
    """Refuse a simulator that has no pinned packages.

    Raises:
        UsageError: names the nearest and the known ones.
    """
    if name not in installable():
        near = nearest(name, installable())
        hint = f"did you mean '{near}'?" if near else "simulators in the main environment are extras of embodrl"
        raise UsageError(f"there is no environment to install for '{name}'; known: {', '.join(installable())}", hint)


def state_of(name: str, prefix: Path) -> str:
    """Return what there is; see ``Installed.state``."""
    marker = read_marker(prefix)
    if marker is None:
        return "incomplete" if prefix.is_dir() and any(prefix.iterdir()) else "absent"
    whole = os.access(python_of(prefix), os.X_OK) and marker.get("name") == name
    return ("ready" if marker.get("requirements") == fingerprint(name) else "outdated") if whole else "incomplete"


def list_environments() -> list[Installed]:
    """Return all that can be installed, and what has been."""
    prefixes = {name: default_prefix(name) for name in installable()}
    return [Installed(name, prefix, state_of(name, prefix)) for name, prefix in prefixes.items()]


def check_pins(name: str) -> MachineFinding | None:
    """Return a warning if the environment that ``env.python: auto`` finds was made from other pins than today's."""
    prefix = default_prefix(name)
    if name not in installable() or state_of(name, prefix) != "outdated":
        return None
    detail = f"{prefix} has other packages than this version of embodrl pins; it may run nevertheless"
    return MachineFinding(f"environment of {name}", "warning", detail, f"embodrl env install {name}")


def check_all_pins() -> list[MachineFinding]:
    """Return a warning for every environment that is outdated."""
    return [found for found in map(check_pins, installable()) if found is not None]


def install(name: str, prefix: Path | None, force: bool, tell: Callable[[str], None]) -> Path:
    """Make a simulator's environment, or find that it is there already; return its interpreter.

    Packages come from where pip is configured to look. A file in it is written last; an environment without that file
    is a half-made one, which nothing uses and the next call rebuilds.

    Args:
        name: of the simulator.
        prefix: directory; None for ``default_prefix``.
        force: rebuild it in any case.
        tell: called with lines of progress.

    Raises:
        UsageError: no such simulator, or the directory holds something else.
        EmbodrlError: pip failed; carries the end of what it said.
    """
    check_name(name)
    prefix = (prefix or default_prefix(name)).expanduser().absolute()
    prefix.parent.mkdir(parents=True, exist_ok=True)
    with _locked(prefix, tell):
        state = state_of(name, prefix)
        if state == "ready" and not force:
            tell(f"{name} is there already: {prefix}")
            return python_of(prefix)
        if state == "incomplete" and not (prefix / "pyvenv.cfg").is_file():
            raise UsageError(f"{prefix} holds something else", "choose another --prefix, or empty the directory")
        if prefix.is_dir():
            (prefix / MARKER).unlink(missing_ok=True)
            shutil.rmtree(prefix)
        start = time.monotonic()
        tell(f"making {prefix} with Python {sys.version_info.major}.{sys.version_info.minor}")
        _run([sys.executable, "-m", "venv", str(prefix)], prefix, tell)
        python = python_of(prefix)
        tell(f"installing {_count(name)} pinned packages, without their dependencies")
        pip = [str(python), "-m", "pip", "install", "--no-input", "--no-deps", "--progress-bar=off"]
        _run([*pip, "-r", str(requirements(name))], prefix, tell)
        tell("importing them")
        _run([str(python), "-c", f"import {', '.join(ENVS.entry(name).imports)}"], prefix, tell)
        _write_marker(name, prefix)
        tell(f"{name} is ready after {time.monotonic() - start:.0f} s")
    return python_of(prefix)


def remove(name: str, prefix: Path | None, tell: Callable[[str], None]) -> None:
    """Remove a simulator's environment.

    Raises:
        UsageError: no such simulator, or the directory was not made by ``install``.
    """
    check_name(name)
    prefix = (prefix or default_prefix(name)).expanduser().absolute()
    state = state_of(name, prefix)
    if state == "absent":
        tell(f"{name} is not installed in {prefix}")
        return
    if not (prefix / "pyvenv.cfg").is_file():
        raise UsageError(f"{prefix} is not an environment that embodrl made", "remove it by hand if you mean it")
    with _locked(prefix, tell):
        (prefix / MARKER).unlink(missing_ok=True)  # first, so that what is left is not taken for whole
        shutil.rmtree(prefix)
    tell(f"removed {prefix}")


def _count(name: str) -> int:
    return sum("==" in line for line in requirements(name).read_text().splitlines())


@contextlib.contextmanager
def _locked(prefix: Path, tell: Callable[[str], None]) -> Iterator[None]:
    """Let one process at a time work on an environment; the lock ends with the process."""
    with prefix.with_name(f".{prefix.name}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            tell("another process is installing it; waiting")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _run(command: list[str], prefix: Path, tell: Callable[[str], None]) -> None:
    environ = {name: value for name, value in os.environ.items() if name not in _CLEAN}
    with subprocess.Popen(
        command,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=prefix.parent,
    ) as process:
        assert process.stdout is not None
        said: list[str] = []
        for line in process.stdout:
            said.append(line.rstrip())
            if line.startswith(("Collecting", "Installing")):
                tell(f"  {line.strip().partition(' (from')[0][:110]}")
    if process.returncode != 0:
        tail = "\n    ".join(said[-_TAIL_LINES:])
        raise EmbodrlError(
            f"'{' '.join(command[:4])} ...' failed with status {process.returncode}:\n    {tail}",
            "fix what it complains of (network, pip's configuration, disk) and run the command again",
            code="env-install-failed",
        )


def _write_marker(name: str, prefix: Path) -> None:
    content = {"name": name, "requirements": fingerprint(name), "made_with": sys.version}
    with atomic_file(prefix / MARKER) as partial:
        partial.write_text(json.dumps(content))
