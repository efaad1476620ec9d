"""Files and modules that the pages, and docstrings' mentions of pages, name exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from embodrl import specs
from embodrl.registry import Registry

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = ("embodrl", "configs", "scripts", "tests", "docs", "benchmarks", "examples")
PAGES = [*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md"))]
SUFFIXES = r"\.(?:py|md|sh|yaml|yml|jsonl?|npz|txt|toml)"
PATH = re.compile(rf"`((?:(?:{'|'.join(FOLDERS)})/(?:[\w-]+/)*[\w-]+{SUFFIXES})|(?:[\w-]+/)+\w+\.py)(?:::\w+)?`")
PAGE = re.compile(r"\bdocs/[\w/]+\.md\b")
MODULE = re.compile(r"(?<![\w./])embodrl(?!\.(?:json|log)\b)(?:\.[A-Za-z_]\w*)+")
OF_OTHERS = {"src/openpi/models/model.py", "my_task/dock.py", "my_task/parts.py"}


def exists(path: str, files: set[str]) -> bool:
    """Tell whether a file has this path, or ends with it as in ``envs/toy/env.py``; a capital S stands for any seed."""
    pattern = re.compile("(?:^|/)" + re.sub(r"_S\\\.", r"_\\w+\\.", re.escape(path)) + "$")
    return any(pattern.search(file) for file in files)


def files_of(root: Path) -> set[str]:
    """Return the files in the folders of the repository."""
    found = (path for folder in FOLDERS for path in (root / folder).rglob("*"))
    return {str(path.relative_to(root)) for path in found if "__pycache__" not in path.parts and path.is_file()}


def is_module_or_name(dotted: str, root: Path) -> bool:
    """Tell whether a dotted name leads to a package, a module, or a name that stands in one."""
    place = root
    for part in dotted.split("."):
        if (place / part).is_dir():
            place /= part
            continue
        module = place / f"{part}.py"
        init = place / "__init__.py"
        return module.is_file() or (init.is_file() and part in init.read_text(encoding="utf-8"))
    return True


def unknown_paths(text: str, files: set[str]) -> list[str]:
    """Return the paths in backticks that no file has."""
    return sorted(path for path in set(PATH.findall(text)) - OF_OTHERS if not exists(path, files))


def _where(problems: Iterator[tuple[Path, str]]) -> list[str]:
    return [f"{path.relative_to(ROOT)}: {name}" for path, name in problems]


def test_paths_that_pages_name_exist() -> None:
    files = files_of(ROOT)
    assert not _where((page, name) for page in PAGES for name in unknown_paths(page.read_text("utf-8"), files))


def test_modules_that_pages_name_exist() -> None:
    groups = {"embodrl.launchers", *(kind.group for kind in vars(specs).values() if isinstance(kind, Registry))}
    assert not _where(
        (page, name)
        for page in PAGES
        for name in MODULE.findall(page.read_text("utf-8"))
        if name not in groups and not is_module_or_name(name, ROOT)
    )


def test_pages_that_code_names_exist() -> None:
    assert not _where(
        (path, name)
        for folder in ("embodrl", "scripts", "tests", "benchmarks", "examples")
        for path in (ROOT / folder).rglob("*.py")
        for name in PAGE.findall(path.read_text("utf-8"))
        if not (ROOT / name).is_file()
    )
