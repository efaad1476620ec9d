"""`embodrl env`: separate Python environments for simulators whose packages conflict with the rest."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from embodrl.config.isolated import (
    MARKER,
    default_prefix,
    fingerprint,
    installable,
    is_whole,
    python_of,
    read_marker,
    requirements,
)
from embodrl.errors import EmbodrlError, UsageError
from embodrl.fields import open_descriptor
from embodrl.names import meant
from embodrl.preflight.findings import MachineFinding
from embodrl.specs import ENVS
from embodrl.storage.atomic import atomic_file

_CLEAN = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
_TAIL_LINES = 15


@dataclass(frozen=True)
class Installed:
    """An environment as shown by `embodrl env list`.

    Attributes:
        prefix: directory, existing or planned.
        state: ``ready``, ``outdated`` (the pins have changed), ``incomplete``, ``absent``, or ``foreign`` (not made by
            ``install``).
    """

    name: str
    prefix: Path
    state: str


def check_name(name: str) -> None:
    """Refuse a simulator without pinned packages; the UsageError lists the known ones."""
    if name not in installable():
        near = meant(name, installable())
        hint = f"did you mean '{near}'?" if near else "simulators in the main environment are extras of embodrl"
        raise UsageError(f"there is no environment to install for '{name}'; known: {', '.join(installable())}", hint)


def state_of(name: str, prefix: Path) -> str:
    """Return the state of a directory; see ``Installed.state``."""
    marker = read_marker(prefix)
    if marker is None and (not prefix.exists() or (prefix.is_dir() and not any(prefix.iterdir()))):
        return "absent"
    if marker is None or marker.get("name") != name or not _is_of(marker, name, prefix):
        return "foreign"
    if not is_whole(name, prefix):
        return "incomplete"
    return "ready" if marker["requirements"] == fingerprint(name) else "outdated"


def _is_of(marker: Mapping[str, object], name: str, prefix: Path) -> bool:
    """Whether a marker was written for this directory, rather than copied or unpacked into it."""
    stated = marker.get("prefix", str(default_prefix(name)))
    return isinstance(stated, str) and os.path.realpath(stated) == os.path.realpath(prefix)


def list_environments() -> list[Installed]:
    """Return all installable environments with their state."""
    prefixes = {name: default_prefix(name) for name in installable()}
    return [Installed(name, prefix, state_of(name, prefix)) for name, prefix in prefixes.items()]


def check_pins(name: str) -> MachineFinding | None:
    """Return a warning if the environment found by ``env.python: auto`` was made from older pins."""
    prefix = default_prefix(name)
    if name not in installable() or state_of(name, prefix) != "outdated":
        return None
    detail = f"{prefix} has packages other than the ones this version of embodrl pins; it may still run"
    return MachineFinding(f"environment of {name}", "warning", detail, f"embodrl env install {name}")


def check_all_pins() -> list[MachineFinding]:
    """Return a warning for every outdated environment."""
    return [found for found in map(check_pins, installable()) if found is not None]


def install(name: str, prefix: Path | None, force: bool, tell: Callable[[str], None]) -> Path:
    """Install a simulator's environment, unless it is ready; return its interpreter.

    Packages come from pip's configured index. A marker file is written first and completed last: a directory with an
    incomplete marker is a half-made environment, which nothing uses and the next call rebuilds. A directory without the
    file was not made here and is left untouched.

    Args:
        name: simulator.
        prefix: directory; None for ``default_prefix``.
        force: rebuild even if ready.
        tell: called with lines of progress.

    Raises:
        UsageError: unknown simulator, or the directory was not made by ``install``.
        EmbodrlError: pip failed; carries the end of its output.
    """
    check_name(name)
    prefix = (prefix or default_prefix(name)).expanduser().absolute()
    prefix.parent.mkdir(parents=True, exist_ok=True)
    with _locked(prefix, tell):
        state = state_of(name, prefix)
        if state == "ready" and not force:
            tell(f"{name} is already installed: {prefix}")
            return python_of(prefix)
        if state == "foreign":
            raise _foreign(name, prefix)
        prefix.mkdir(exist_ok=True)
        _write_marker(name, prefix)
        _empty(prefix)
        start = time.monotonic()
        tell(f"making {prefix} with Python {sys.version_info.major}.{sys.version_info.minor}")
        _run([sys.executable, "-I", "-m", "venv", str(prefix)], prefix, tell)
        python = python_of(prefix)
        tell(f"installing {_count(name)} pinned packages, without their dependencies")
        pip = [str(python), "-I", "-m", "pip", "install", "--no-input", "--no-deps", "--progress-bar=off"]
        _run([*pip, "-r", str(requirements(name))], prefix, tell)
        tell("importing them")
        _run([str(python), "-I", "-c", f"import {', '.join(ENVS.entry(name).imports)}"], prefix, tell)
        _write_marker(name, prefix, requirements=fingerprint(name), made_with=sys.version)
        tell(f"{name} is ready after {time.monotonic() - start:.0f} s")
    return python_of(prefix)


def remove(name: str, prefix: Path | None, tell: Callable[[str], None]) -> None:
    """Remove a simulator's environment.

    Raises:
        UsageError: unknown simulator, or the directory was not made by ``install``.
    """
    check_name(name)
    prefix = (prefix or default_prefix(name)).expanduser().absolute()
    if state_of(name, prefix) == "absent":
        tell(f"{name} is not installed in {prefix}")
        return
    with _locked(prefix, tell):
        if state_of(name, prefix) == "foreign":
            raise _foreign(name, prefix)
        _write_marker(name, prefix)  # first, so that a partial removal does not look complete
        _empty(prefix)
        (prefix / MARKER).unlink()
        prefix.resolve().rmdir()
    tell(f"removed {prefix}")


def _foreign(name: str, prefix: Path) -> UsageError:
    message = f"{prefix} was not made by `embodrl env install {name}`: it has no {MARKER} of {name}"
    hint = "choose another --prefix (or $EMBODRL_{}_ENV), or remove it by hand if you mean it"
    return UsageError(message, hint.format(name.upper()), code="env-directory-foreign")


def _empty(prefix: Path) -> None:
    """Remove all but the marker, which identifies the directory until the end."""
    for path in prefix.iterdir():
        if path.name == MARKER:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _count(name: str) -> int:
    return sum("==" in line for line in requirements(name).read_text().splitlines())


@contextlib.contextmanager
def _locked(prefix: Path, tell: Callable[[str], None]) -> Iterator[None]:
    """Let one process at a time work on an environment; the lock ends with the process."""
    with open(prefix.with_name(f".{prefix.name}.lock"), "w", opener=open_descriptor) as file:
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
            "fix the reported problem (network, pip's configuration, disk) and run the command again",
            code="env-install-failed",
        )


def _write_marker(name: str, prefix: Path, **facts: str) -> None:
    content = {"name": name, "prefix": str(prefix), **facts}
    with atomic_file(prefix / MARKER) as partial:
        partial.write_text(json.dumps(content))
