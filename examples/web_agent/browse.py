"""A web agent: a language model opens pages, searches them, and answers a question whose answer stands on one page.

PYTHONPATH=examples/web_agent embodrl train --config examples/web_agent/config.yaml

The browser reads HTML by HTTP, from this machine's own server here: the agent sees the text of a page, with links in
brackets. Facts differ between episodes, so that answers must be read; with two animals and two foods there are eight
different episodes, in training as in evaluations. No simulator takes part; that of ``env=toy`` stands idle.

From random weights (seed 0) 40 iterations of GRPO raise the success of 64 evaluation episodes from 53 to 100 % with the
most probable messages, and from 45 to 100 % with sampled ones; guessing earns half. It took five minutes on two CPU
cores, and was measured once, before the pages came by HTTP; other seeds have not been tried.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from functools import cache
from html import escape
from html.parser import HTMLParser
from http.client import HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import parse_qs, quote, urljoin, urlsplit
from urllib.request import ProxyHandler, Request, build_opener

import numpy as np

from embodrl import Environment, EpisodeEngine, EpisodeTask, RolloutWorkflow, Tool, Trajectory

ANIMALS = ("fox", "owl")
FOODS = ("fish", "nuts")
HOME = "home"
HOME_PAGE = "<html><head><title>Animals</title></head><body><p>{links}</p></body></html>"
ANIMAL_PAGE = """<html><head><title>{animal}</title></head>
<body><nav><a href="home">home</a></nav><p>The {animal} eats <b>{food}</b></p></body></html>"""
TURNS = 2  # messages of an episode: the last one answers, those before open or search
TIMEOUT_S = 10.0
MAX_BYTES = 2**20  # of a page; the rest is not read
OPENER = build_opener(ProxyHandler({}))  # the server is on this machine; elsewhere a proxy may be needed


class PageReader(HTMLParser):
    """Reads a page of HTML.

    Attributes:
        text: what a reader sees, with single spaces, and links in brackets.
        links: addresses, in the order of the page.
    """

    HIDDEN = ("head", "script", "style")

    def __init__(self, html: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self._parts: list[str] = []
        self._hidden = 0
        self.feed(html)
        self.close()
        self.text = " ".join("".join(self._parts).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """See HTMLParser."""
        self._hidden += tag in self.HIDDEN
        if tag == "a":
            self.links.append(dict(attrs).get("href") or "")
            self._parts.append(" [")

    def handle_endtag(self, tag: str) -> None:
        """See HTMLParser."""
        self._hidden -= tag in self.HIDDEN
        self._parts.append({"a": "] ", "p": " ", "nav": " "}.get(tag, ""))

    def handle_data(self, data: str) -> None:
        """See HTMLParser."""
        if not self._hidden:
            self._parts.append(data)


def make_question(seed: int) -> tuple[str, dict[str, str]]:
    """Return the animal that is asked for, and the food of each."""
    random = np.random.default_rng(seed)
    return str(random.choice(ANIMALS)), {animal: str(random.choice(FOODS)) for animal in ANIMALS}


def make_site(food_of: Mapping[str, str]) -> dict[str, str]:
    """Return the pages by address: a home page with links, and a page for each animal and its food."""
    pages = {animal: ANIMAL_PAGE.format(animal=animal, food=food) for animal, food in food_of.items()}
    return {HOME: HOME_PAGE.format(links=" ".join(map(make_link, pages))), **pages}


def make_link(address: str) -> str:
    """Return the HTML of a link."""
    return f'<a href="{address}">{address}</a>'


def search(site: Mapping[str, str], words: str) -> list[str]:
    """Return the addresses of pages with any of the words, those with most of them first, else in the site's order."""
    wanted = words_of(words)
    found = {address: len(wanted & words_of(PageReader(html).text)) for address, html in site.items()}
    return sorted((address for address in site if found[address]), key=lambda address: -found[address])


def words_of(text: str) -> set[str]:
    """Return the different words of a text, in small letters."""
    return set(re.findall(r"\w+", text.lower()))


class Pages(BaseHTTPRequestHandler):
    """Serves the site of each seed, ``/SEED/home`` and ``/SEED/ANIMAL``, and ``/SEED/search?words=WORDS``."""

    def do_GET(self) -> None:
        """See BaseHTTPRequestHandler."""
        url = urlsplit(self.path)
        seed, _, address = url.path.strip("/").partition("/")
        site = make_site(make_question(int(seed))[1]) if seed.isdecimal() else {}
        if site and address == "search":
            found = search(site, " ".join(parse_qs(url.query).get("words", [])))
            html: str | None = " ".join(f"{make_link(address)} {site[address]}" for address in found)
        else:
            html = site.get(address)
        body = ("<p>not found</p>" if html is None else html).encode()
        self.send_response(404 if html is None else 200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


class Server(ThreadingHTTPServer):
    """Has many episodes wait for their pages at once."""

    request_queue_size = 128


@cache
def start_server() -> str:
    """Serve ``Pages`` to this machine, until the process ends; return their address."""
    server = Server(("127.0.0.1", 0), Pages)
    Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}/"


def fetch(url: str) -> str:
    """Return the HTML at an address of the web.

    Raises:
        OSError, HTTPException: there is none.
        ValueError, LookupError, ArithmeticError: the address, or the encoding of the page, is wrong.
    """
    if urlsplit(url).scheme not in ("http", "https"):
        raise OSError(f"{url} is not of the web")
    with OPENER.open(Request(url, headers={"Accept": "text/html"}), timeout=TIMEOUT_S) as answer:
        return answer.read(MAX_BYTES).decode(answer.headers.get_content_charset() or "utf-8", "replace")


class Browser:
    """The page of a site that is open; ``open`` opens the first.

    Args:
        site: address of the home page, beside which there is ``search?words=WORDS``.
    """

    def __init__(self, site: str) -> None:
        self.site = self.url = site
        self.page = PageReader("")

    def tools(self) -> list[Tool]:
        """Return what leads to other pages: the links of this one, if it has any, and the search."""
        links = [make_tool("open", "link", self.page.links)] if self.page.links else []
        return [*links, make_tool("search", "words", ANIMALS)]

    async def open(self, link: str) -> str:
        """Follow a link of this page, or of the site; return the text of its page, or what is wrong with it."""
        try:
            url = urljoin(self.url, link)
            page = PageReader(await asyncio.to_thread(fetch, url))
        except (OSError, HTTPException, ValueError, LookupError, ArithmeticError, AssertionError) as error:
            url, page = self.url, PageReader(f"<p>{escape(str(error))}</p>")
        self.url, self.page = url, page
        return self.page.text

    async def search(self, words: str) -> str:
        """Go to a page of what is found, links with their texts; return its text."""
        return await self.open(urljoin(self.site, f"search?words={quote(words)}"))


def make_tool(name: str, argument: str, values: Sequence[str]) -> Tool:
    """Return a tool with one argument, which has one of the values."""
    properties = {argument: {"enum": list(values)}}
    return Tool(name, "", {"type": "object", "properties": properties, "required": [argument]})


class BrowseWorkflow(RolloutWorkflow):
    """The agent reads the question and the home page, opens pages or searches, and answers: right earns 1."""

    async def run_episode(self, engine: EpisodeEngine, env: Environment, task: EpisodeTask) -> Trajectory | None:
        """Play one episode of at most ``TURNS`` messages."""
        asked, food_of = make_question(task.seed)
        browser, trajectory = Browser(urljoin(start_server(), f"{task.seed}/{HOME}")), Trajectory(task)
        question = f"{await browser.open(browser.site)} What is eaten by the {asked}"
        messages: list[dict[str, object]] = [{"role": "user", "content": question}]
        answer = make_tool("answer", "text", FOODS)
        for turn in range(TURNS):
            tools = [answer] if turn + 1 == TURNS else browser.tools()
            completion = await engine.generate(messages, tools, tool_choice="required")
            call = completion.tool_calls[0]
            (argument,) = map(str, call.arguments.values())
            if call.name == answer.name:
                right = argument == food_of[asked]
                trajectory.add_message(completion, float(right), terminated=True, success=right)
                break
            trajectory.add_message(completion)
            said = await (browser.open if call.name == "open" else browser.search)(argument)
            messages.append({"role": "assistant", "content": completion.text})
            messages.append({"role": "tool", "content": said})
        return trajectory
