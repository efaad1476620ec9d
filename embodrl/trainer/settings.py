"""The settings of a run: ``config.yaml``, sealed with a checksum, and its copy in every checkpoint.

A run is resumed with its original settings, or not at all: a damaged file is replaced by the newest checkpoint's copy,
and edits must be confirmed on the command line. Missing settings never become defaults.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

from embodrl.config.compose import parse_arguments
from embodrl.config.load import LoadedConfig
from embodrl.config.nodes import parse_yaml
from embodrl.config.schema import Config
from embodrl.config.schema.readers import Verb, reads
from embodrl.config.trust import SEAL, approval, code_settings
from embodrl.config.yaml_text import flow, to_yaml
from embodrl.errors import CheckpointError, ConfigError, ConfigProblem
from embodrl.fields import Fields, read_regular_file
from embodrl.pipelines.load import load_run
from embodrl.storage.checkpoint import Checkpoint, CheckpointManager, newest_state
from embodrl.storage.json_file import write_text_file

logger = logging.getLogger(__name__)

CONFIG_FILE = "config.yaml"
STATE_KEY = "settings"
"""Checkpoint key of the settings."""
STATE_DIM = "state_dim"
"""Checkpoint key of the number of robot-state dimensions that the policy was trained on."""
MAX_BYTES = 4 * 2**20
ABSENT: object = object()
FIXED = {
    r"env\.env_type": "its simulator states belong to another simulator",
    r"env\.train\.total_num_envs": "it contains the state of each environment",
    r"env\.cameras(\.\d+\.(height|width))?": "its observations are images of that number and size",
    r"model\.model_type": "its weights belong to another model",
    r"store\.url": "it has counted the episodes of that store",
    r"cluster\.controllers": "it contains the simulators and random numbers of each controller",
    r"algorithm\.teacher": "it has learned from that teacher",
}
"""Patterns of settings that must match the checkpoint on resume, and the reasons."""


def is_run(directory: Path) -> bool:
    """Return whether a directory contains a run: its settings, or a checkpoint that has them."""
    return (directory / CONFIG_FILE).is_file() or bool(CheckpointManager(directory, 1).steps())


def not_a_run(directory: Path) -> CheckpointError:
    """Return the error for a directory without a run's configuration; names the run that contains it."""
    run = next((parent for parent in directory.absolute().parents[:2] if (parent / CONFIG_FILE).is_file()), None)
    hint = f"{run} is the run: embodrl resume {run}" if run is not None else "look in outputs/"
    what = f"{directory} is not a run: it has no {CONFIG_FILE}" if directory.exists() else f"{directory} does not exist"
    error = CheckpointError(what, hint, code="not-a-run")
    error.exit_code = 2  # as for any nonexistent argument
    return error


def approved(config_yaml: str, changes: Sequence[str] = ()) -> str:
    """Return a run's configuration with the approval of its settings that run code; ``changes`` become comments."""
    tree, _ = parse_yaml(config_yaml, CONFIG_FILE)
    return config_yaml + "".join(f"# {line}\n" for line in changes) + approval(code_settings(tree))


def write_settings(run_dir: Path, config_yaml: str, changes: list[str]) -> str:
    """Write ``config.yaml``, sealed, with the approval of the settings that run code; return the text.

    ``changes`` by earlier processes of the run, one line each, are kept as comments.

    Raises:
        OutputError: the directory is not writable.
    """
    text = approved(config_yaml, changes)
    text += f"{SEAL}{hashlib.sha256(text.encode()).hexdigest()}\n"
    write_text_file(run_dir / CONFIG_FILE, text, "set runner.output_dir to a writable directory")
    return text


@dataclass(frozen=True)
class SavedSettings:
    """The settings of a run; ``restored`` says why they come from the checkpoint, "" if they are the file's."""

    text: str
    restored: str = ""


def read_settings(
    run_dir: Path, in_checkpoint: str | None, overrides: list[str], verb: Verb | None = None
) -> SavedSettings:
    """Return the settings of a run.

    Args:
        run_dir: run directory.
        in_checkpoint: settings in its newest checkpoint; None without one.
        overrides: command-line overrides; they may confirm edits of the file.
        verb: edits of settings that it does not read, and so cannot confirm, are ignored.

    Raises:
        CheckpointError: the settings are lost.
        ConfigError: the file was edited.
    """
    path = run_dir / CONFIG_FILE
    try:
        text = read_regular_file(path, MAX_BYTES).decode()
    except FileNotFoundError:
        text = ""
        problem = "is missing"
    except (OSError, UnicodeDecodeError) as error:
        text = ""
        problem = f"can't be read: {error}"
    else:
        problem = _seal_problem(text)
        if not problem:
            return SavedSettings(text)
    if in_checkpoint is None:
        return _without_copy(path, text, problem)
    values = _values(text)
    lost = _values(in_checkpoint)
    found = {} if values is None else dict(_differences(lost, values))
    missing = sorted(key for key, (_, new) in found.items() if new is ABSENT)
    if values is None or missing:
        why = f"lacks {', '.join(missing[:3])}{' and more' * (len(missing) > 3)}" if missing else problem
        return SavedSettings(in_checkpoint, f"{path} {why}")
    _refuse_edits(path, {key: pair for key, pair in found.items() if reads(verb, key)}, overrides)
    return SavedSettings(in_checkpoint)


def _seal_problem(text: str) -> str:
    """Return the problem with the checksum at the end of a run's configuration."""
    body, _, digest = text.rpartition(SEAL)
    if not text.strip():
        return "is empty"
    if not body:
        return "has no checksum"
    intact = hashlib.sha256(body.encode()).hexdigest() == digest.strip()
    return "" if intact else "differs from the run's original"


def _without_copy(path: Path, text: str, problem: str) -> SavedSettings:
    """Accept a complete file without checksum, as the user has chosen."""
    if problem == "is missing":
        raise not_a_run(path.parent)
    lacking = [name for name in Config.model_fields if name not in (_values(text) or {}) and name != "extensions"]
    if problem == "has no checksum" and not lacking:
        return SavedSettings(text)
    if lacking and _values(text):
        problem += f", and lacks the section {lacking[0]}"
    raise CheckpointError(
        f"{path} {problem}, and no checkpoint has a copy of these settings",
        f"restore the file; if you edited it, remove its last line, '{SEAL.strip()} ...', to use it as it is",
        code="settings-damaged",
    )


def _refuse_edits(path: Path, found: Mapping[str, tuple[object, object]], overrides: list[str]) -> None:
    """Raise ConfigError unless all edits are confirmed on the command line."""
    arguments, _ = parse_arguments(overrides)
    given = {argument.key for argument in arguments}
    edited = {key: pair for key, pair in found.items() if not any(key == k or key.startswith(f"{k}.") for k in given)}
    command = " ".join(
        [f"embodrl resume {path.parent}", *(f"'{key}={_shown(new)}'" for key, (_, new) in edited.items())]
    )
    problems = [
        ConfigProblem(
            key,
            f"was {_shown(old)} when the run wrote the file, and is {_shown(new)} now",
            str(path),
            hint=f"if you want the change: {command}; remove the file to go back to the run's own settings",
            code="settings-edited",
        )
        for key, (old, new) in edited.items()
    ]
    if problems:
        raise ConfigError(problems)


def load_saved(
    run_dir: Path,
    overrides: list[str],
    verb: Verb | None = None,
    checkpoint: Checkpoint | None = None,
    resuming: bool = False,
    trust: bool = False,
) -> tuple[LoadedConfig, SavedSettings]:
    """Load the configuration of a run; changes nothing on disk.

    Args:
        run_dir: run directory.
        overrides: command-line overrides.
        verb: purpose of loading; see ``load_config``.
        checkpoint: opened checkpoint in use, if any.
        resuming: the weights come from a checkpoint, so a warm start may be missing.
        trust: the settings may run code although another user started the run.

    Raises:
        CheckpointError: the settings are lost.
        ConfigError: the settings were edited, are invalid, or run code and belong to another user.
    """
    state = newest_state(run_dir) if checkpoint is None else checkpoint.state
    saved = read_settings(run_dir, None if state is None else state.text(STATE_KEY), overrides, verb)
    if saved.restored:
        logger.warning("%s: the settings are taken from the newest checkpoint", saved.restored)
    path = run_dir / CONFIG_FILE
    return load_run(path, overrides, verb, resuming, trust, saved.text), saved


def last_settings(run_dir: Path) -> str | None:
    """Return the settings text of this or the previous process.

    None if there is none yet; empty if unreadable, which is logged.
    """
    try:
        return read_regular_file(run_dir / CONFIG_FILE, MAX_BYTES).decode()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        logger.warning("%s can't be read (%s): it is written again", run_dir / CONFIG_FILE, error)
        return ""


def refuse_impossible(
    config: Config,
    in_checkpoint: str,
    rollout: Fields | None = None,
    num_generators: Sequence[int] = (),
    done: int = 0,
) -> None:
    """Reject, before anything starts, settings that are incompatible with a checkpoint.

    Args:
        config: configuration of the resumed run.
        in_checkpoint: settings that the checkpoint was made with.
        rollout: state of the rollouts in the checkpoint.
        num_generators: current number of random generators per rollout process; empty if unknown.
        done: number of complete iterations.

    Raises:
        ConfigError: names each setting, with the checkpoint's value.
    """
    problems = [] if rollout is None else list(_other_counts(config, rollout, num_generators))
    for key, (was, now) in changed_settings(in_checkpoint, to_yaml(config, None)).items():
        why = next((reason for pattern, reason in FIXED.items() if re.fullmatch(pattern, key)), None)
        if why is not None:
            problems.append(_fixed(key, now, was, why))
    if done > config.runner.max_iterations:
        message = f"is {config.runner.max_iterations}, and the run has done {done}"
        problems.append(
            ConfigProblem("runner.max_iterations", message, hint="raise it", code="iterations-already-done")
        )
    if problems:
        raise ConfigError(problems)


def _other_counts(config: Config, rollout: Fields, num_generators: Sequence[int]) -> Iterator[ConfigProblem]:
    """Yield conflicts that follow from the states themselves: ``auto`` and null depend on the machine.

    The state of an asynchronous run has neither simulators nor random numbers.
    """
    state = rollout.fields("state")
    states = state.objects("processes") if "processes" in state else [state]
    simulators = len([name for name in rollout.texts("blobs") if re.fullmatch(r"(rollout_\d+_)?env_\d+", name)])
    if not any("lost" in one for one in states) and simulators not in (0, config.env.num_processes):
        yield _fixed(
            "env.num_processes", config.env.num_processes, simulators, "it contains the state of each simulator"
        )
    found = [len(one.items("random")) for one in states if "random" in one]
    if len(found) != len(num_generators):
        return  # another number of rollout processes, whose error names cluster.component_placement
    if found != list(num_generators):
        why = "it contains the random state of each thread"
        yield _fixed("cluster.num_threads", sum(num_generators), sum(found), why)


def _fixed(key: str, now: object, was: object, why: str) -> ConfigProblem:
    message = f"is {_shown(now)}, and the checkpoint was made with {_shown(was)}: {why}"
    hint = f"resume with {key}={_shown(was)}, or start a new run with model.warm_start=RUN/policy"
    return ConfigProblem(key, message, hint=hint, code="settings-fixed")


def changed_settings(old_yaml: str, new_yaml: str) -> dict[str, tuple[object, object]]:
    """Return dotted key -> (old, new) of the values in which two full configurations differ.

    Keys of only one side are settings added or removed by another version, not changes by the user.
    """
    found = _differences(_values(old_yaml) or {}, _values(new_yaml) or {})
    return {key: (old, new) for key, (old, new) in found if old is not ABSENT and new is not ABSENT}


def _differences(old: object, new: object, key: str = "") -> Iterator[tuple[str, tuple[object, object]]]:
    """Yield dotted key and both values where they differ; ABSENT for a missing key."""
    if _is_section(old) and _is_section(new):
        for name in {**old, **new}:
            yield from _differences(old.get(name, ABSENT), new.get(name, ABSENT), f"{key}.{name}" if key else name)
    elif _is_list(old) and _is_list(new) and len(old) == len(new) and any(map(_is_section, old)):
        for index, (one, other) in enumerate(zip(old, new, strict=True)):
            yield from _differences(one, other, f"{key}.{index}")
    elif old is ABSENT or new is ABSENT or old != new:
        yield key, (old, new)


def _is_section(value: object) -> TypeGuard[dict[str, object]]:
    return isinstance(value, dict)


def _is_list(value: object) -> TypeGuard[list[object]]:
    return isinstance(value, list)


def _values(text: str) -> dict[str, object] | None:
    tree, problems = parse_yaml(text, CONFIG_FILE)
    values = tree.plain()
    return values if _is_section(values) and values and not problems else None


def _shown(value: object) -> str:
    return "nothing" if value is ABSENT else flow(value)
