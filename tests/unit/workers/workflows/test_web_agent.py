"""The example of a web agent: how it reads pages, what its search finds, and what an episode earns."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from embodrl.envs.environment import Environment, Tool
from embodrl.hybrid_engines.rollout.batched import Completion, EpisodeEngine
from embodrl.models.common.chat import ToolCall
from embodrl.types import PolicyOutput
from embodrl.workers.workflows.workflow import EpisodeTask

EXAMPLE = Path(__file__).parents[4] / "examples" / "web_agent"


@pytest.fixture
def browse(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of the example."""
    monkeypatch.syspath_prepend(EXAMPLE)
    monkeypatch.delitem(sys.modules, "browse", raising=False)
    import browse  # pyright: ignore[reportMissingImports]

    return browse


def test_a_page_has_a_text_and_links(browse: Any) -> None:
    """Heads, scripts and styles are not seen; entities are resolved, spaces single."""
    page = browse.PageReader(
        "<html><head><title>no</title></head><body><script>if (a) {}</script><style>p {}</style>"
        "<nav><a href='home'>go <i>home</i></a></nav><p>Fish &amp;\n  nuts</p><p>mice</p></body></html>"
    )
    assert page.text == "[go home] Fish & nuts mice"
    assert page.links == ["home"]


def test_a_search_counts_different_words(browse: Any) -> None:
    site = {
        "one": "<p>grass grass grass</p>",
        "two": "<p>The Fox eats grass.</p>",
        "three": "<p>nothing</p>",
        "four": "<p>a fox</p>",
    }
    assert browse.search(site, "fox, grass") == ["two", "one", "four"]
    assert browse.search(site, "GRASS") == ["one", "two"]
    assert browse.search(site, "title") == browse.search(site, "") == []


def test_tools_lead_to_pages(browse: Any) -> None:
    """``open`` offers the links of the page that is seen, also those that a search found."""
    seed = next(seed for seed in range(40) if browse.make_question(seed)[1] == {"fox": "fish", "owl": "nuts"})

    async def walk() -> None:
        browser = browse.Browser(f"{browse.start_server()}{seed}/home")
        assert await browser.open(browser.site) == "[fox] [owl]" and links(browser.tools()) == ["fox", "owl"]
        assert await browser.open("owl") == "[home] The owl eats nuts" and links(browser.tools()) == ["home"]
        found = await browser.search("eats fish")
        assert found == "[fox] [home] The fox eats fish [owl] [home] The owl eats nuts"
        assert links(browser.tools()) == ["fox", "home", "owl", "home"]
        assert await browser.open("home") == "[fox] [owl]", "of the page that was found"

    asyncio.run(walk())


def test_a_page_that_can_not_be_read_says_so(browse: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Addresses of files are none of the web's, a long page is cut, and proxies are not asked for this machine's."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")

    async def read(url: str) -> str:
        browser = browse.Browser(f"{browse.start_server()}0/home")
        assert await browser.open(browser.site)
        text = await browser.open(url)
        assert [tool.name for tool in browser.tools()] == ["search"]
        return text

    (tmp_path / "page.html").write_text("<p>secret</p>")
    assert "404" in asyncio.run(read(f"{browse.start_server()}0/absent"))
    for wrong in ("a b", "http://127.0.0.1:x/", f"http://127.0.0.1:{10**20}/", "http://[x", "http://a..b/", "\u00e9"):
        assert asyncio.run(read(wrong)), wrong
    assert "not of the web" in asyncio.run(read((tmp_path / "page.html").as_uri()))
    site = f"{browse.start_server()}0/home"
    with monkeypatch.context() as patched:
        patched.setattr(browse, "HOME_PAGE", "<![ 9 [ {links}")
        browser = browse.Browser(site)
        asyncio.run(browser.open(site))
        assert isinstance(browser.page.text, str)
    monkeypatch.setattr(browse, "MAX_BYTES", 40)
    assert asyncio.run(browse.Browser(site).open(site)) == ""


def links(tools: Sequence[Tool]) -> object:
    """Return what ``open`` offers."""
    schema = cast("dict[str, Any]", tools[0].parameters)
    assert tools[0].name == "open"
    return schema["properties"]["link"]["enum"]


class Scripted:
    """An engine that reads about an animal with a tool, and answers with the last word that it reads.

    Args:
        tool: ``open`` or ``search``.
        animal: what it reads about.
    """

    has_values = False

    def __init__(self, tool: str, animal: str) -> None:
        self.tool = tool
        self.animal = animal
        self.offered: list[list[str]] = []

    async def generate(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool], **_: Any) -> Completion:
        self.offered.append([tool.name for tool in tools])
        if len(messages) == 1:
            call = ToolCall(self.tool, {"link" if self.tool == "open" else "words": self.animal})
        else:
            call = ToolCall("answer", {"text": messages[-1]["content"].split()[-1]})
        output = PolicyOutput(np.zeros((1, 1, 0), np.float32), torch.zeros(1, 1, 1), None, {})
        return cast(Completion, SimpleNamespace(text=call.to_text(), tool_calls=(call,), output=output))


@pytest.mark.parametrize("tool", ["open", "search"])
def test_an_answer_from_the_right_page_earns_1(browse: Any, tool: str) -> None:
    """The first message reads, and the last one answers, with what stands on the page that was read."""
    seed = next(seed for seed in range(40) if len(set(browse.make_question(seed)[1].values())) == 2)
    asked = browse.make_question(seed)[0]
    for animal in browse.ANIMALS:
        engine = Scripted(tool, animal)
        task = EpisodeTask("reach-red", 0, seed, 2, 0)
        run = browse.BrowseWorkflow().run_episode(cast(EpisodeEngine, engine), cast(Environment, None), task)
        trajectory = asyncio.run(run)
        assert engine.offered == [["open", "search"], ["answer"]]
        right = animal == asked
        assert trajectory.done and trajectory.success == right
        assert [float(chunk.rewards) for chunk in trajectory.chunks] == [0.0, float(right)]


def test_facts_differ_between_episodes_and_not_within_a_group(browse: Any) -> None:
    """Answers must be read: over the seeds each food is right for the same question."""
    found: dict[str, set[str]] = {}
    for seed in range(40):
        (asked, food_of), again = browse.make_question(seed), browse.make_question(seed)
        assert (asked, food_of) == again
        found.setdefault(asked, set()).add(food_of[asked])
    assert found == {animal: set(browse.FOODS) for animal in browse.ANIMALS}
