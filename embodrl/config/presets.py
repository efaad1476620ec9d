"""Preset files by group and name: shipped ones, and ones in the user's directories."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from embodrl.config.nodes import Node, Origin, lookup, merge, read_yaml
from embodrl.config.trust import is_trusted
from embodrl.errors import ConfigProblem
from embodrl.names import nearest
from embodrl.specs import ENVS

DIRS = "presets.dirs"
"""Setting that names the user's preset directories, in a file, a mapping or on the command line."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_OVERRIDE = "override /"
_GLOBAL = re.compile(r"^#\s*@package\s+_global_", re.MULTILINE)


def _find_configs() -> Path:
    """Return the preset directory: in the installed package, else at the top of the checkout."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"


CONFIGS = _find_configs()


def own_directories(given: Iterable[str | Path] = (), base: Path | None = None) -> tuple[Path, ...]:
    """Return the user's preset directories, absolute: ``$XDG_CONFIG_HOME/embodrl`` if it exists, then ``given``.

    Args:
        given: paths of directories.
        base: base of relative paths; None is the working directory.
    """
    root = os.environ.get("XDG_CONFIG_HOME")
    home = (Path(root) if root else Path.home() / ".config") / "embodrl"
    named = [((base or Path()) / Path(path).expanduser()).absolute() for path in given]
    return tuple(dict.fromkeys([*([home.absolute()] if home.is_dir() else []), *named]))


def groups() -> list[str]:
    """Return the preset groups: env, model, ..."""
    return sorted(path.name for path in CONFIGS.iterdir() if path.is_dir())


def presets(group: str, own: Sequence[Path] = ()) -> list[str]:
    """Return the names of the presets of a group."""
    return sorted({path.stem for directory in (CONFIGS, *own) for path in (directory / group).glob("*.yaml")})


def of_algorithm(pipeline: str) -> tuple[str, str] | None:
    """Return a replacement and a hint for a pipeline that is named like an algorithm, or None."""
    if pipeline not in presets("algorithm"):
        return None
    return f"algorithm={pipeline}", f"write algorithm={pipeline}, and remove the pipeline, which follows from the loss"


def of_task(name: str) -> tuple[str, str] | None:
    """Return the simulator preset and a hint for a task's name used as a preset; None if no simulator has that task."""
    for spec in ENVS.all():
        task = next((known for known in spec.instructions() if known.lower() == name.lower()), None)
        if task is None or spec.name not in presets("env"):
            continue
        for preset in presets("env"):
            tree, _ = load(preset_file("env", preset))
            tasks = lookup(tree, "env.tasks") or lookup(tree, "tasks")
            if tasks is not None and tasks.plain() == [task]:
                return preset, f"{task} is a task: write env={preset}, or env={spec.name} env.tasks=[{task}]"
        return spec.name, f"{task} is a task: write env={spec.name} env.tasks=[{task}]"
    return None


def preset_file(group: str, name: str, own: Sequence[Path] = ()) -> Path:
    """Return the file of a preset; the first directory that has it wins, since names are unique."""
    paths = [directory / group / f"{name}.yaml" for directory in (CONFIGS, *own)]
    return next((path for path in paths if path.is_file()), paths[0])


def is_shipped(path: Path) -> bool:
    """Return whether a preset file ships with embodrl."""
    return path.is_relative_to(CONFIGS)


def describe(group: str, name: str, own: Sequence[Path] = ()) -> str:
    """Return the first comment of a preset, its description."""
    lines = preset_file(group, name, own).read_text(encoding="utf-8", errors="replace").splitlines()
    comments = [line.lstrip("# ") for line in lines if line.startswith("#") and "@package" not in line]
    return comments[0] if comments else ""


def directory_problems(own: Sequence[Path]) -> list[ConfigProblem]:
    """Return the problems of the user's directories: files that would never be found, and duplicate names."""

    def problem(path: Path, message: str, hint: str, code: str = "preset-directory", near: str = "") -> None:
        problems.append(ConfigProblem(DIRS, message, str(path), ", ".join(groups()) if near else "", near, hint, code))

    problems: list[ConfigProblem] = []
    known = groups()
    taken: dict[str, Path] = {f"{group}={name}": CONFIGS / group for group in known for name in presets(group)}
    for directory in own:
        if not directory.is_dir():
            problem(directory, "is no directory", "name a directory with presets as GROUP/NAME.yaml")
            continue
        for path in sorted([*directory.glob("*.yaml"), *directory.glob("*/*.yaml")]):
            group = path.parent.name
            if path.parent == directory:
                problem(path, "is not in a group's directory", f"move it to {directory}/GROUP/{path.name}")
            elif group not in known:
                near = nearest(group, known)
                problem(path, f"no preset group '{group}'", "rename its directory", near=near)
            elif not _NAME.fullmatch(path.stem):
                problem(path, f"'{path.stem}' is not a valid preset name", "use letters, digits and _ . - only")
            elif (choice := f"{group}={path.stem}") in taken:
                hint = "rename one of them; preset names are unique"
                problem(path, f"{choice} is in {taken[choice]}, too", hint, "preset-clash")
            else:
                taken[choice] = path.parent
    return problems


def parts_of(tree: Node, group: str) -> list[tuple[str, object, Origin]]:
    """Return (group, name, origin) of the presets in ``defaults``, of the own group or ``override /GROUP``."""
    defaults = tree.children.get("defaults")
    found: list[tuple[str, object, Origin]] = []
    for item in defaults.items if defaults is not None else []:
        if isinstance(item.value, str) and item.value != "_self_":
            found.append((group, item.value, item.origin))
        for key, node in item.children.items():
            found.append((key.removeprefix(_OVERRIDE), node.plain(), node.origin))
    return found


def load(path: Path) -> tuple[Node, list[ConfigProblem]]:
    """Return the tree of a preset file, and its problems."""
    if is_shipped(path):
        return read_yaml(path, f"configs/{path.relative_to(CONFIGS)}", "preset")
    return read_yaml(path, str(path))


def defaults_problems(path: Path, tree: Node) -> list[ConfigProblem]:
    """Return the problems in the form of a user's preset: its ``defaults``, and Hydra's first line."""
    defaults = tree.children.get("defaults")
    items = defaults.items if defaults is not None else []
    known = [_OVERRIDE + group for group in groups() if group != path.parent.name]
    wrong = [item for item in items if not isinstance(item.value, str) and not _is_override(item, known)]
    if wrong or (defaults is not None and not items):
        hint = (
            "list presets of the same group by name, and others as 'override /GROUP: NAME'; _self_ is the file itself"
        )
        origin = str((wrong[0] if wrong else tree).origin)
        return [ConfigProblem("defaults", "is not a list of presets", origin, hint=hint, code="preset-defaults")]
    of_all = path.parent.name == "experiment" or any(item.children for item in items)
    if of_all and not _GLOBAL.search(path.read_text(encoding="utf-8")):
        message = "has settings of all sections, but no package line"
        hint = "begin the file with the line: # @package _global_"
        return [ConfigProblem(path.parent.name, message, str(path), hint=hint, code="preset-package")]
    return []


def _is_override(item: Node, known: list[str]) -> bool:
    return len(item.children) == 1 and next(iter(item.children)) in known


def preset_order(
    choices: dict[str, str | None], own: Sequence[Path] = ()
) -> tuple[list[tuple[Path, str]], list[ConfigProblem]]:
    """Return the preset files that Hydra would load for these choices, in order, each with the section it fills.

    Hydra's errors about the ``defaults`` of a user's file are returned as problems.
    """
    from hydra.errors import HydraException

    stamps = tuple((str(path), path.stat().st_mtime_ns) for each in own for path in sorted(each.glob("*/*.yaml")))
    try:
        return _order(tuple(choices.items()), tuple(own), stamps), []
    except HydraException as error:
        if not own:
            raise
        hint = "put 'override /GROUP: NAME' after all others, each group once"
        message = f"a preset's defaults can't be composed: {str(error).strip().splitlines()[0]}"
        return _order((), (), ()), [ConfigProblem("defaults", message, hint=hint, code="preset-defaults")]


@lru_cache(maxsize=64)
def _order(
    choices: tuple[tuple[str, str | None], ...], own: tuple[Path, ...], stamps: tuple[tuple[str, int], ...]
) -> list[tuple[Path, str]]:
    """Cached ``preset_order``; ``stamps`` of the user's files invalidate the cache when they change."""
    del stamps
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.types import RunMode

    overrides = [f"{group}={name}" for group, name in choices if name is not None]  # null is the default where allowed
    if own:
        quoted = ",".join("'file://{}'".format(str(path).replace("'", "\\'")) for path in own)
        overrides.append(f"hydra.searchpath=[{quoted}]")
    with initialize_config_dir(config_dir=str(CONFIGS), version_base="1.3"):
        hydra = GlobalHydra.instance()
        loader = hydra.config_loader()
        defaults = loader.compute_defaults_list("train", overrides, RunMode.RUN).defaults
    order: list[tuple[Path, str]] = []
    for default in defaults:
        path: Any = default.config_path
        if path is None or path == "_dummy_empty_config_" or path.startswith("hydra"):
            continue
        group, _, name = path.rpartition("/")
        order.append((preset_file(group, name, own) if group else CONFIGS / f"{path}.yaml", default.package or ""))
    return order


def load_presets(
    choices: dict[str, str | None], own: Sequence[Path] = ()
) -> tuple[Node, list[ConfigProblem], tuple[str, ...]]:
    """Return the merged presets, their problems, and the files whose settings must not run code.

    The choices must be valid. Settings under ``last`` in a preset may be of any section and are merged after all
    presets, e.g. the cameras that a model needs.
    """
    tree = Node({}, Origin("preset", "configs"))
    order, problems = preset_order(choices, own)
    untrusted: list[str] = []
    last: list[Node] = []
    for path, package in order:
        preset, wrong = load(path)
        problems += wrong
        preset.children.pop("defaults", None)
        late = preset.children.pop("last", Node({}, preset.origin))
        placed = Node({package: preset}, preset.origin) if package else preset
        merge(tree, placed)
        last.append(late)
        if not is_shipped(path) and not (is_trusted(path, placed) and is_trusted(path, late)):
            untrusted.append(str(path))
    for late in last:
        merge(tree, late)
    return tree, problems, tuple(untrusted)
