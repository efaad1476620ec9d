"""Hooks of the documentation site (mkdocs.yml): pages from outside docs/, and the page of the Python API.

- README.md, CONTRIBUTING.md, RELEASING.md, SECURITY.md and CHANGELOG.md become pages: each exists once.
- The references are made from the sources: each module of ``REFERENCES`` has a function ``page``.
- A file or folder outside docs/ that a page links to, such as ``../examples/new_env``, gets a page that shows it.
- docs/api.md gets one entry for each public name of ``embodrl``, in the order of ``SECTIONS``.
"""

from __future__ import annotations

import ast
import importlib
import posixpath
import re
import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
ROOT_PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "RELEASING.md": "releasing.md",
    "SECURITY.md": "vulnerabilities.md",
    "CHANGELOG.md": "changelog.md",
}
REFERENCES = {
    "configuration.md": "make_config_reference",
    "errors.md": "make_error_reference",
    "migration.md": "make_migration",
    "capabilities.md": "make_capabilities",
}
"""Pages that are not tracked -> the module beside this one that makes them."""
SOURCES = "source"
"""Folder of the site with the pages that show files of the repository."""

LINK = re.compile(r"(?<=\]\()(?P<path>[^)\s#:]+)(?P<anchor>#[^)\s]*)?(?=\))")
LANGUAGES = {".py": "python", ".yaml": "yaml", ".sh": "bash", ".toml": "toml", ".json": "json", ".txt": "text"}
NOT_SHOWN = {"__pycache__"}

API_MARK = "<!-- api -->"
SECTIONS = {
    "Running": (
        *("load_config", "train", "evaluate", "collect", "sft", "load_policy", "follow_weights", "serve", "Session"),
        *("TrainResult", "EvaluationResult", "EpisodeRecord", "CollectResult", "ReplayedEpisode", "SftResult"),
    ),
    "Configuration": ("LoadedConfig", "Config", "ModelConfig", "EnvConfig"),
    "Extension": (
        *("register_env", "register_model", "register_advantage", "register_loss", "register_pipeline"),
        *("ModelSpec", "SimulatorSpec"),
    ),
    "Environments": (
        *("Simulator", "SimStep", "Replayed", "SimulatorVectorEnv", "VectorEnv", "EpisodeRules"),
        *("EnvSpec", "CameraSpec", "Observation", "EnvStep"),
    ),
    "Models": (
        *("VLAPolicy", "PolicyOutput", "EvalOutput", "SamplingParams", "LoadReport", "ValueHead"),
        *("sampling", "checkpoint"),
    ),
    "Data": ("TrajectoryBatch", "to_verl", "from_verl", "to_areal", "from_areal", "to_areal_list", "from_areal_list"),
    "Algorithms": ("Advantages", "split_episodes", "episode_returns", "LossCounts", "LossOutput", "Episode"),
    "Pipelines": ("Pipeline", "PipelineContext"),
    "Workflows": (
        *("RolloutWorkflow", "EpisodeTask", "Trajectory", "EpisodeEngine", "Environment", "Tool", "ToolResult"),
        *("Completion", "ToolCall", "EpisodePlayer", "FinishedEpisode", "AsyncTaskRunner", "TaskResult"),
        "McpTools",
    ),
    "Errors": ("EmbodrlError", "ConfigError", "ConfigProblem"),
}
"""Headings of the API page; a public name that is in none of them comes under "Other"."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of ``ROOT_PAGES`` and ``REFERENCES``, and those of everything that pages link to outside docs/."""
    for source, page in ROOT_PAGES.items():
        if files.get_file_from_path(page) is None and (ROOT / source).is_file():
            files.append(File.generated(config, page, content=_root_page(source)))
    for page in REFERENCES:
        if (stale := files.get_file_from_path(page)) is not None:  # a copy from before, which git ignores
            files.remove(stale)
        files.append(File.generated(config, page, content=reference(page)))
    linked = {target for file in files.documentation_pages() for target in _linked_outside(file)}
    for target in sorted(linked):
        files.append(_source_file(config, target))
    return files


def reference(page: str) -> str:
    """Return a page of ``REFERENCES``, made from the package of this checkout, whether or not it is installed."""
    for folder in (ROOT / "scripts", ROOT):
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
    return importlib.import_module(REFERENCES[page]).page()


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links that leave docs/ to the pages made for them, and fill in the API page."""
    if page.file.src_uri.startswith(f"{SOURCES}/"):
        return markdown
    if API_MARK in markdown:
        markdown = markdown.replace(API_MARK, api_directives(ROOT / "embodrl" / "__init__.py"))
    return LINK.sub(lambda match: _rewrite(match, page.file.src_uri), markdown)


def api_directives(init: Path) -> str:
    """Return the mkdocstrings directives of the public names of a package, by section."""
    names = public_names(init)
    listed = {name for section in SECTIONS.values() for name in section}
    sections = {**SECTIONS, "Other": tuple(name for name in names if name not in listed)}
    lines: list[str] = []
    for title, members in sections.items():
        found = [name for name in members if name in names]
        if found:
            lines += [f"## {title}", "", *(_directive(name, names[name]) for name in found)]
    return "\n".join(lines)


def public_names(init: Path) -> dict[str, str]:
    """Return what a package offers, without importing it: names, and where their docstrings are.

    The names are those that ``if TYPE_CHECKING:`` binds: ``from x import y as y``, and ``name = CLASS.method``, also of
    an object.
    """
    tree = ast.parse(init.read_text(encoding="utf-8"))
    names: dict[str, str] = {}
    origins: dict[str, tuple[str, str]] = {}
    for node in tree.body:
        if not (isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"):
            continue
        for statement in node.body:
            if isinstance(statement, ast.ImportFrom) and statement.module:
                for alias in statement.names:
                    origins[alias.asname or alias.name] = (statement.module, alias.name)
                    if alias.asname:
                        names[alias.asname] = f"{init.parent.name}.{alias.asname}"
            elif isinstance(statement, ast.Assign) and isinstance(value := statement.value, ast.Attribute):
                (target,) = statement.targets
                if isinstance(target, ast.Name) and isinstance(value.value, ast.Name):
                    names[target.id] = f"{_class_of(*origins[value.value.id])}.{value.attr}"
    return names


def _class_of(module: str, name: str) -> str:
    """Return the path of a class, or of the class of an object that its module makes as ``NAME = Class(...)``."""
    path = ROOT / f"{module.replace('.', '/')}.py"
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        match node:
            case ast.Assign([ast.Name(target)], ast.Call(ast.Name(made_by))) if target == name:
                return f"{module}.{made_by}"
            case _:
                pass
    return f"{module}.{name}"


def _directive(name: str, path: str) -> str:
    """Return the directive of a name; the heading is the public name, wherever the docstring is."""
    options = "" if path.endswith(f".{name}") else f"    options:\n      heading: {name}\n      toc_label: {name}\n"
    return f"::: {path}\n{options}"


def _root_page(source: str) -> str:
    """Return a page of the repository's root with links as seen from docs/."""

    def move(match: re.Match[str]) -> str:
        path = match["path"]
        moved = path.removeprefix("docs/") if path.startswith("docs/") else f"../{path}"
        return moved + (match["anchor"] or "")

    return LINK.sub(move, (ROOT / source).read_text(encoding="utf-8"))


def _linked_outside(file: File) -> set[str]:
    """Return the paths below the root that a page of docs/ links to outside docs/, if they exist."""
    targets = {_outside(file.src_uri, match["path"]) for match in LINK.finditer(file.content_string)}
    return {target for target in targets if target and target not in ROOT_PAGES and (ROOT / target).exists()}


def _outside(page: str, path: str) -> str | None:
    """Return the path below the root of a link in a page of docs/, None where it stays within docs/."""
    target = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), path))
    return None if target == "docs" or target.startswith(("docs/", "../")) else target


def _rewrite(match: re.Match[str], page: str) -> str:
    """Return the link as the site has it; one that leads nowhere stays, and fails the build."""
    target = _outside(page, match["path"])
    if target is None or not (ROOT / target).exists():
        return match[0]
    shown = ROOT_PAGES.get(target) or _page_of(target)
    return posixpath.relpath(shown, posixpath.dirname(page) or ".") + (match["anchor"] or "")


def _page_of(target: str) -> str:
    """Return the path in the site of a file or folder of the repository."""
    return f"{SOURCES}/{target}" if target.endswith(".json") else f"{SOURCES}/{target}.md"


def _source_file(config: MkDocsConfig, target: str) -> File:
    """Return the page that shows a file, or the text files of a folder."""
    path = ROOT / target
    if target.endswith(".json"):
        return File.generated(config, _page_of(target), abs_src_path=str(path))
    lines = ["---", "search: {exclude: true}", "---", f"# {target}", ""]
    if path.is_file():
        lines += _code(path)
    else:
        children = sorted(child for child in path.iterdir() if child.name not in NOT_SHOWN)
        shown = [child for child in children if child.suffix in LANGUAGES and child.suffix != ".json"]
        for child in shown:
            lines += [f"## {child.name}", "", *_code(child)]
        others = [child.name for child in children if child not in shown and child.suffix != ".md"]
        lines += ([f"## {'Also here' if shown else 'Files'}", ""] if others else []) + [f"- `{n}`" for n in others]
    text = "\n".join(lines) + "\n"
    return File.generated(config, _page_of(target), content=text, inclusion=InclusionLevel.NOT_IN_NAV)


def _code(path: Path) -> list[str]:
    """Return a fenced block with a file; its fence is longer than any in the file."""
    text = path.read_text(encoding="utf-8").rstrip()
    fence = "`" * (max((len(run) for run in re.findall(r"`{3,}", text)), default=2) + 1)
    return [f"{fence}{LANGUAGES.get(path.suffix, 'text')}", text, fence, ""]
