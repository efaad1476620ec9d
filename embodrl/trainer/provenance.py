"""Provenance of a run: command, versions, host, and settings changed when it was resumed."""

from __future__ import annotations

import logging
import platform
import shlex
import socket
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from embodrl.config.schema import Config
from embodrl.config.yaml_text import flow
from embodrl.hybrid_engines.training.precision import resolve_precision
from embodrl.processor import processor
from embodrl.reporting.provenance import PROVENANCE_FILE, is_damaged, read_provenance
from embodrl.storage.json_file import write_json_file
from embodrl.trainer.settings import changed_settings
from embodrl.version import __version__
from embodrl.workers.policy import resolve_device

logger = logging.getLogger(__name__)

PACKAGES = (
    *("torch", "numpy", "transformers", "safetensors", "pydantic", "ray", "vllm"),
    *("mani_skill", "sapien", "gymnasium", "mujoco", "metaworld", "robosuite", "libero"),
)
TASK_KEYS = ("env.env_type", "env.tasks", "env.cameras", "env.id", "env.suite")
"""Changing these means that the policy acts in a task it has not seen."""
_GIT_TIMEOUT_S = 5.0


def add_provenance(run_dir: Path, config: Config, config_yaml: str, old_yaml: str | None, iteration: int) -> list[str]:
    """Append a record of this process to ``provenance.json``, and log it; return a line per changed key.

    Environment variables are not recorded: they may contain secrets. ``old_yaml`` is the previous process's
    configuration; None for a new run.

    Raises:
        OutputError: the file is not writable.
    """
    changes = {} if old_yaml is None else changed_settings(old_yaml, config_yaml)
    record = describe_process() | {
        "compute": describe_compute(config),
        "kind": "train" if old_yaml is None else "resume",
        "from_iteration": iteration,
        "changed": {key: list(pair) for key, pair in changes.items()},
    }
    if is_damaged(run_dir):
        aside = run_dir / f"{PROVENANCE_FILE}.damaged"
        (run_dir / PROVENANCE_FILE).replace(aside)
        logger.warning("%s is damaged; it is kept as %s, and a new one begins", PROVENANCE_FILE, aside)
    write_json_file(run_dir / PROVENANCE_FILE, [*read_provenance(run_dir), record])
    logger.info("command: %s", record["command"])
    logger.info("embodrl %s, commit %s, host %s", record["embodrl"], record["commit"] or "unknown", record["host"])
    logger.info("%s", compute_text(config))
    lines = [_change(iteration, key, pair) for key, pair in changes.items()]
    for key in changes:
        if key.startswith(TASK_KEYS):
            logger.warning("%s changed: so far the policy was trained on another task or with other cameras", key)
        elif key == "runner.seed":
            logger.warning("runner.seed changed: this run can no longer be repeated with one seed")
    return lines


def describe_process() -> dict[str, Any]:
    """Return command, start time, host and versions of this process."""
    return {
        "command": shlex.join(["embodrl", *sys.argv[1:]]) if _is_cli() else shlex.join(sys.argv),
        "directory": str(Path.cwd()),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "embodrl": __version__,
        **git_state(Path(__file__).resolve().parents[2]),
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "packages": versions(),
    }


def describe_compute(config: Config) -> dict[str, Any]:
    """Return the processor, the policy's device, and the precision of the actor and of native rollouts there."""
    device = resolve_device(config)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(processor())
    precision = {
        "actor": resolve_precision(config.actor.precision, device),
        "rollout": resolve_precision(config.rollout.precision, device),
    }
    return {"processor": str(processor()), "device": name, "precision": precision}


def compute_text(config: Config) -> str:
    """Return one line on the hardware and precision of a process."""
    found = describe_compute(config)
    settings = (config.actor.precision, config.rollout.precision)
    actor = found["precision"]["actor"]
    rollout = found["precision"]["rollout"]
    parts = actor if actor == rollout else f"{actor} (actor), {rollout} (rollout)"
    forced = "" if settings == ("auto", "auto") else ", as actor.precision and rollout.precision say"
    return f"computing in {parts} on {found['device']}{forced}"


def git_state(directory: Path) -> dict[str, Any]:
    """Return ``commit`` and ``dirty`` of a checkout; both None without a repository or git."""
    if not (directory / ".git").exists():
        return {"commit": None, "dirty": None}
    try:
        commit = _git(directory, "rev-parse", "HEAD").strip()
        dirty = bool(_git(directory, "status", "--porcelain", "--untracked-files=no").strip())
    except (OSError, subprocess.SubprocessError):
        return {"commit": None, "dirty": None}
    return {"commit": commit, "dirty": dirty}


def changes_so_far(run_dir: Path) -> list[str]:
    """Return the changed settings of all processes that resumed a run, one line each."""
    lines: list[str] = []
    for record in read_provenance(run_dir):
        changed = record.get("changed")
        iteration = record.get("from_iteration")
        if isinstance(changed, dict) and isinstance(iteration, int):
            pairs: dict[str, object] = dict(changed)  # pyright: ignore[reportUnknownArgumentType]
            lines += [_change(iteration, key, pair) for key, pair in pairs.items()]
    return lines


def _change(iteration: int, key: str, pair: object) -> str:
    old, new = pair if isinstance(pair, (list, tuple)) and len(pair) == 2 else ("?", "?")
    return f"resumed at iteration {iteration} with {key}: {flow(old)} -> {flow(new)}"


def _is_cli() -> bool:
    return Path(sys.argv[0]).name in ("embodrl", "__main__.py")


def _git(directory: Path, *arguments: str) -> str:
    command = ["git", "-C", str(directory), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=_GIT_TIMEOUT_S).stdout


def versions() -> dict[str, str]:
    """Return the versions of the relevant installed packages."""
    found: dict[str, str] = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
