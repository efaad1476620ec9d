"""Settings that run code, and the trust in their origin.

The command line, shipped presets and the user's own YAML files may name modules, functions and programs to run. The
configuration of a run may come from somebody else: run directories are shared, copied and unpacked from archives. So a
run's ``config.yaml`` carries an approval of its settings that run code, keyed with a secret of the user who started the
run; without a valid approval they are refused before anything is imported, unless the user trusts the file.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import logging
import os
import re
import secrets
import stat
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import cast

from embodrl.config.nodes import MAX_FILE_BYTES, Node, lookup
from embodrl.errors import ConfigProblem
from embodrl.fields import open_regular_file, read_regular_file

logger = logging.getLogger(__name__)

CODE_SETTINGS = {
    "actor.optim.fn": "a function",
    "algorithm.adv_type": "a function, if it is module:function",
    "algorithm.by_task": "a function, if an adv_type is module:function",
    "algorithm.loss_type": "a function, if it is module:function",
    "algorithm.off_policy.intervention_device": "a function, if it is module:function",
    "algorithm.srpo.encoder": "a function, if it is module:function",
    "cluster.ray_address": "the Ray cluster to join, whose head node controls what its nodes run",
    "env.id": "a module to import, if it is module:Name",
    "env.reset_fn": "a function",
    "env.robot": "a function, if it is module:function",
    "env.robot_module": "a module to import",
    "env.success_fn": "a function",
    "env.python": "the program that runs the simulators, unless it is auto",
    "extensions": "modules to import",
    "model.python": "the program that runs the policy",
    "pipeline.fn": "a function",
    "recipe.collect": "settings of a stage, including any of these",
    "recipe.rl": "settings of a stage, including any of these",
    "recipe.sft": "settings of a stage, including any of these",
    "recipe.teacher": "settings of a stage, including any of these",
    "reward.fn": "a function",
    "rollout.agent": "a function",
    "rollout.workflow": "a class",
}
"""Dotted key of each setting that runs code -> what it names."""
_ALWAYS = (
    *("cluster.ray_address", "env.python", "env.robot_module", "extensions", "model.python"),
    *("recipe.collect", "recipe.rl", "recipe.sft", "recipe.teacher"),
)
_EVALUATED = "env.eval.settings."
"""Section with settings of evaluations' environments, under the names that they have in ``env``."""
TRUST_VARIABLE = "EMBODRL_TRUST"
SEAL = "# SHA-256 of all above: "
_APPROVAL = re.compile(r"^# approval of the settings that run code: ([0-9a-f]{64})$", re.MULTILINE)
RUN_FILES = ("metrics.jsonl", "sft_metrics.jsonl", "provenance.json", "checkpoints", "policy", "policy_best", ".lock")
"""Files that mark a config.yaml next to them as a run's."""


def code_settings(tree: Node) -> dict[str, object]:
    """Return the settings of a tree that would run code, by dotted key."""
    keys = [*CODE_SETTINGS, *(key.replace("env.", _EVALUATED, 1) for key in CODE_SETTINGS if key.startswith("env."))]
    found = {key: node.plain() for key in keys if (node := lookup(tree, key)) is not None}
    return {key: value for key, value in found.items() if _runs_code(_of_training(key), value)}


def _of_training(key: str) -> str:
    """Return the key of training's environments for one of evaluations."""
    return key.replace(_EVALUATED, "env.", 1)


def _runs_code(key: str, value: object) -> bool:
    if value in (None, "auto", "", []):
        return False
    if key == "algorithm.by_task" and isinstance(value, list):
        names = (_name_in(entry) for entry in cast("list[object]", value))
        return any(_runs_code("algorithm.adv_type", name) for name in names)
    # A reference (${section.key}) may resolve to anything.
    return key in _ALWAYS or not isinstance(value, str) or ":" in value or "${" in value


def _name_in(entry: object) -> object:
    return cast("dict[str, object]", entry).get("adv_type") if isinstance(entry, dict) else entry


def untrusted_code(tree: Node, origins: Collection[str]) -> list[ConfigProblem]:
    """Return a problem for each code-running setting whose origin is one of the untrusted files."""
    problems: list[ConfigProblem] = []
    for key, value in code_settings(tree).items():
        node = lookup(tree, key)
        assert node is not None
        foreign = next(
            (n for n in (*node.items, node) if n.origin.source in origins and n.origin.kind != "preset"), None
        )
        if foreign is not None:
            problems.append(
                ConfigProblem(
                    key,
                    f"names code to run, {json.dumps(value)}: {CODE_SETTINGS[_of_training(key)]}; the file is of a"
                    " run that this user did not start, belongs to another user, or is world-writable",
                    str(foreign.origin),
                    hint=f"review the file and the code that it names; then repeat the command with --trust (or"
                    f" {TRUST_VARIABLE}=1), or set it on the command line",
                    code="settings-run-code",
                )
            )
    return problems


def is_trusted(path: Path, tree: Node, text: str | None = None, of_run: bool = False) -> bool:
    """Return whether settings of a file may run code.

    True for a user's own file outside of runs, and for the file of a run that this user started. A file is the user's
    own if it belongs to the user or root and is not world-writable; its true source is unknown.

    Args:
        path: configuration file.
        tree: values of the file.
        text: content used in place of the file's.
        of_run: treat the file as a run's even without run files next to it, since copies may be incomplete.
    """
    settings = code_settings(tree)
    if not settings or os.environ.get(TRUST_VARIABLE) == "1":
        return True
    try:
        text = read_regular_file(path, MAX_FILE_BYTES, follow_links=True).decode() if text is None else text
        found = path.stat()
        own = found.st_uid in (os.getuid(), 0) and not found.st_mode & stat.S_IWOTH
    except (OSError, UnicodeDecodeError):
        own = False
    if not (of_run or _APPROVAL.search(text or "") or SEAL in (text or "") or is_of_run(path)):
        return own
    return has_approval(settings, text or "")


def has_approval(settings: Mapping[str, object], text: str) -> bool:
    """Return whether a text has this user's ``approval`` of its settings that run code, or has no such settings."""
    line = _APPROVAL.search(text)
    return not settings or is_approved(settings, "" if line is None else line[1])


def is_of_run(path: Path) -> bool:
    """Return whether a configuration file lies in a run directory."""
    return any((path.parent / name).exists() for name in RUN_FILES)


def approval(settings: Mapping[str, object]) -> str:
    """Return the line of a run's configuration that records this user's approval of its settings that run code.

    Empty if there are none, or if the user's secret can't be stored, which is logged.
    """
    digest = approve(settings) if settings else ""
    return f"# approval of the settings that run code: {digest}\n" if digest else ""


def approve(content: Mapping[str, object]) -> str:
    """Return a digest that proves that this user wrote a JSON-able content.

    Empty if the user's secret can't be stored, which is logged.
    """
    path = _key_file()
    key = _read_key(path) or _make_key(path)
    if key is None:
        text = "%s can't be written: to resume this with settings that run code, use --trust"
        logger.warning(text, path)
        return ""
    return _digest(key, content)


def is_approved(content: Mapping[str, object], digest: str) -> bool:
    """Return whether this user wrote a content, by its ``approve`` digest, or trusts every file."""
    if os.environ.get(TRUST_VARIABLE) == "1":
        return True
    key = _read_key(_key_file())
    return key is not None and digest.isascii() and hmac.compare_digest(digest, _digest(key, content))


def _digest(key: bytes, content: Mapping[str, object]) -> str:
    return hmac.new(key, json.dumps(content, sort_keys=True, default=list).encode(), hashlib.sha256).hexdigest()


def _key_file() -> Path:
    state = os.environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state") / "embodrl" / "trust.key"


def _read_key(path: Path) -> bytes | None:
    with contextlib.suppress(OSError), open_regular_file(path, follow_links=True) as file:
        key = file.read(64)
        if os.fstat(file.fileno()).st_uid == os.getuid() and len(key) == 32:
            return key
    return None


def _make_key(path: Path) -> bytes | None:
    """Write a new secret, unless another process is faster; return the stored one."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.unlink(missing_ok=True)
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.write(descriptor, secrets.token_bytes(32))
            os.fsync(descriptor)
            with contextlib.suppress(FileExistsError):
                os.link(partial, path)
        finally:
            os.close(descriptor)
            partial.unlink()
    return _read_key(path)
