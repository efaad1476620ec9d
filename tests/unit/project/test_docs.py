"""The pages: links and anchors lead somewhere, every page is in the menu, examples are valid."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import tutorial

from embodrl.config import load_config

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "docs"
ROOT_PAGES = ("README.md", "CONTRIBUTING.md", "RELEASING.md", "SECURITY.md", "CHANGELOG.md")
PAGES = [ROOT / name for name in ROOT_PAGES] + sorted(DOCS.rglob("*.md"))
FENCE = re.compile(r"^ *(`{3,}|~{3,}).*?^ *\1 *$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?://|mailto:)(?P<path>[^)\s#]*)(?:#(?P<anchor>[^)\s]*))?\)")


def anchors(page: Path) -> set[str]:
    """Return the anchors of the headings of a page, as Python-Markdown makes them."""
    titles = re.findall(r"^#{1,6} (.+)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    plain = [re.sub(r"[`*_]|\[([^\]]*)\]\([^)]*\)", r"\1", title) for title in titles]
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in plain}


def load_hooks() -> Any:
    """Import scripts/docs_hooks.py."""
    spec = importlib.util.spec_from_file_location("docs_hooks", ROOT / "scripts" / "docs_hooks.py")
    assert spec is not None and spec.loader is not None
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    return hooks


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_anchors_lead_somewhere(page: Path) -> None:
    broken = []
    for match in LINK.finditer(FENCE.sub("", page.read_text(encoding="utf-8"))):
        target = page if not match["path"] else (page.parent / match["path"]).resolve()
        if not target.exists() or (match["anchor"] and match["anchor"] not in anchors(target)):
            broken.append(match[0])
    assert not broken


def test_every_page_is_in_the_menu() -> None:
    menu = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    listed = set(re.findall(r": ([\w/]+\.md)$", menu, re.MULTILINE))
    generated = {"index.md", "contributing.md", "releasing.md", "vulnerabilities.md", "changelog.md"}
    generated |= {"configuration.md", "errors.md", "migration.md", "capabilities.md"}
    assert listed == {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")} | generated


@pytest.mark.parametrize("page", [ROOT / "README.md", DOCS / "settings.md"], ids=lambda page: page.name)
def test_the_yaml_of_a_page_is_a_valid_configuration(page: Path, tmp_path: Path) -> None:
    blocks = re.findall(r"^```yaml\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert blocks
    for block in blocks:
        path = tmp_path / "page.yaml"
        path.write_text(block, encoding="utf-8")
        load_config([], path)


def test_the_tutorial_is_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tutorial.write_files(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    parts = ["reward.fn=parts:quick_success", "algorithm.loss_type=parts:unclipped", "env.motor_gain=1.5"]
    parts += ["algorithm.adv_type=parts:reward_to_go", "pipeline.fn=parts:shaped"]
    loaded = load_config(parts, tmp_path / "config.yaml")
    assert loaded.config.env.env_type == "dock" and not loaded.notes


@pytest.mark.parametrize(
    ("page", "link", "shown"),
    [
        ("models.md", "../examples/new_model", "source/examples/new_model.md"),
        ("dev/faults.md", "../../README.md#results", "../index.md#results"),
        ("dev/faults.md", "../../benchmarks/results/ratios.jsonl", "../source/benchmarks/results/ratios.jsonl.md"),
        ("dev/faults.md", "../models.md#memory", "../models.md#memory"),
        ("models.md", "dev/faults.md", "dev/faults.md"),
        ("models.md", "../nowhere.py", "../nowhere.py"),
    ],
)
def test_links_out_of_the_pages_lead_to_pages_of_the_site(page: str, link: str, shown: str) -> None:
    pytest.importorskip("mkdocs", reason="the extra docs is not installed")
    hooks = load_hooks()
    assert hooks.LINK.sub(lambda match: hooks._rewrite(match, page), f"[a]({link})") == f"[a]({shown})"


def test_the_api_page_has_a_section_for_every_public_name() -> None:
    pytest.importorskip("mkdocs", reason="the extra docs is not installed")
    import embodrl

    hooks = load_hooks()
    listed = {name for section in hooks.SECTIONS.values() for name in section}
    assert set(hooks.public_names(ROOT / "embodrl" / "__init__.py")) | {"__version__"} == set(embodrl.__all__)
    assert set(embodrl.__all__) - {"__version__"} <= listed
