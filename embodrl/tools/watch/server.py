"""A local web page about runs, made from their files alone: a self-refreshing overview, and a page per run."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import html
import secrets
import signal
from collections.abc import Callable, Sequence
from http import HTTPStatus
from pathlib import Path
from urllib.parse import quote

from embodrl.errors import EmbodrlError, MissingDependencyError, OutputError, UsageError
from embodrl.reporting.page import page
from embodrl.reporting.report import report_page
from embodrl.reporting.run_files import own_files
from embodrl.serving import door
from embodrl.serving.door import ConnectionLimiter, bound_logs
from embodrl.tools.compare.comparison import (
    RunView,
    comparison_json,
    comparison_page,
    comparison_parts,
    find_runs,
    read_runs,
)

try:
    from aiohttp import web
except ImportError as error:
    raise MissingDependencyError("aiohttp is not installed", "pip install 'embodrl[serve]'") from error

MOST_RUNS = 12
"""Runs drawn by default: the newest."""
RENEW_S = 5
COOKIE = "embodrl_watch"
PATTERNS = ("videos/**/*.mp4", "logs/**/*.log", "metrics.jsonl", "config.yaml", "provenance.json")
"""Files of a run that its page links."""
POLICY = "default-src 'none'; style-src 'unsafe-inline'; media-src 'self' data:; connect-src 'self'; script-src {}"
STYLE = """<style>.runs { display: flex; flex-wrap: wrap; gap: .3rem 1.2rem; margin: .8rem 0 1.2rem; }
.runs label { color: var(--soft); } .runs .running { color: var(--good); } #stale { color: var(--bad); }</style>"""
SCRIPT = """
const form = document.querySelector('form'), main = document.querySelector('main');
const stale = document.querySelector('#stale');
form.addEventListener('change', () => form.submit());
setInterval(async () => {
  try {
    const answer = await fetch('part' + location.search);
    if (!answer.ok) throw new Error(answer.statusText);
    const text = await answer.text();
    if (text !== main.dataset.text) { main.innerHTML = text; main.dataset.text = text; }
    stale.textContent = '';
  } catch (error) { stale.textContent = 'not renewed: the server does not answer'; }
}, %d);
"""


class RunPages:
    """The pages about the runs in some directories, which are searched at every request.

    Attributes:
        limiter: connection limiter; None for no limit.
    """

    limiter: ConnectionLimiter | None = None

    def __init__(self, directories: Sequence[Path], token: str | None) -> None:
        self._directories = directories
        self._token = token

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._admit])
        app.add_routes(
            [
                web.get("/", self._overview),
                web.get("/part", self._part),
                web.get("/comparison.html", self._export),
                web.get("/runs.json", self._json),
                web.get("/run/{id}/", self._run),
                web.get("/run/{id}/{file:.+}", self._file),
            ]
        )
        return app

    @web.middleware
    async def _admit(self, request: web.Request, handler: Callable[[web.Request], object]) -> web.StreamResponse:
        given = request.query.get("token") or request.cookies.get(COOKIE) or ""
        if self._token is not None and not hmac.compare_digest(given.encode(), self._token.encode()):
            text = "This page needs the token: open the whole URL that `embodrl watch` has printed.\n"
            refused = web.Response(status=HTTPStatus.UNAUTHORIZED, text=text)
            refused.force_close()
            return refused
        if self.limiter is not None:
            self.limiter.admit(request.protocol)
        if "token" in request.query:  # keep the token out of the address bar, history and links
            others = "&".join(f"{quote(k)}={quote(v)}" for k, v in request.query.items() if k != "token")
            # As sent: a zero byte is not allowed in a header, and two slashes would lead to another host.
            path = f"/{request.rel_url.raw_path.lstrip('/')}"
            location = f"{path}?{others}" if others else path
            answer: web.StreamResponse = web.Response(status=HTTPStatus.SEE_OTHER, headers={"Location": location})
            answer.set_cookie(COOKIE, given, httponly=True, samesite="Strict")
            return answer
        try:
            answer = await handler(request)  # pyright: ignore
        except EmbodrlError as error:
            return web.Response(status=HTTPStatus.NOT_FOUND, text=f"{error}\n")
        if self.limiter is not None and self.limiter.is_crowded():
            answer.force_close()
        answer.headers["Cache-Control"] = "no-store"
        answer.headers["X-Content-Type-Options"] = "nosniff"
        return answer

    def _views(self) -> list[RunView]:
        try:
            paths = find_runs(self._directories)
        except UsageError:
            if not all(directory.is_dir() for directory in self._directories):
                raise
            return []  # no runs yet
        return sorted(read_runs(paths), key=lambda run: run.age_s)

    def _chosen(self, request: web.Request) -> tuple[list[RunView], list[RunView]]:
        """Return all runs, and the ones to draw, by name so that a run keeps its colour."""
        views = self._views()
        wanted = set(request.query.getall("run", []))
        chosen = [run for run in views if run_id(run) in wanted] if wanted else views[:MOST_RUNS]
        return views, sorted(chosen, key=lambda run: run.name)

    def _find(self, request: web.Request) -> RunView:
        found = next((run for run in self._views() if run_id(run) == request.match_info["id"]), None)
        if found is None:
            raise OutputError("there is no such run", "open the overview", code="no-run")
        return found

    async def _overview(self, request: web.Request) -> web.Response:
        views, chosen = await asyncio.to_thread(self._chosen, request)
        drawn = await asyncio.to_thread(_drawn, chosen)
        boxes = "".join(_box(run, run in chosen) for run in sorted(views, key=lambda run: run.name))
        nonce = secrets.token_urlsafe(16)
        script = f'<script nonce="{nonce}">{SCRIPT % (1000 * RENEW_S)}</script>'
        query = "?" + request.query_string if request.query_string else ""
        export = f'<a href="comparison.html{html.escape(query)}" download>Save as one page</a>'
        parts = [
            f'{STYLE}<h1>embodrl: {len(views)} runs</h1><p class="sub">{export} <span id="stale"></span></p>',
            f'<form class="runs">{boxes}</form><main>{drawn}</main>{script}',
        ]
        return _html(page("embodrl watch", parts), f"'nonce-{nonce}'")

    async def _part(self, request: web.Request) -> web.Response:
        _, chosen = await asyncio.to_thread(self._chosen, request)
        return _html(await asyncio.to_thread(_drawn, chosen), "'none'")

    async def _export(self, request: web.Request) -> web.Response:
        _, chosen = await asyncio.to_thread(self._chosen, request)
        return _html(await asyncio.to_thread(comparison_page, chosen), "'none'")

    async def _json(self, request: web.Request) -> web.Response:
        _, chosen = await asyncio.to_thread(self._chosen, request)
        return web.json_response(await asyncio.to_thread(comparison_json, chosen))

    async def _run(self, request: web.Request) -> web.Response:
        run = await asyncio.to_thread(self._find, request)
        return _html(await asyncio.to_thread(report_page, run.directory), "'unsafe-inline'")

    async def _file(self, request: web.Request) -> web.StreamResponse:
        run = await asyncio.to_thread(self._find, request)
        wanted = run.directory / request.match_info["file"]
        allowed, _ = await asyncio.to_thread(own_files, run.directory, *PATTERNS)
        if wanted not in allowed:
            raise OutputError("there is no such file", "open the page of the run", code="no-run")
        answer = web.FileResponse(wanted)
        if wanted.suffix != ".mp4":
            answer.content_type = "text/plain"
        return answer


def run_id(run: RunView) -> str:
    """Return the id of a run in URLs."""
    return hashlib.sha256(str(run.directory.resolve()).encode()).hexdigest()[:12]


def _box(run: RunView, checked: bool) -> str:
    mark = " checked" if checked else ""
    name = html.escape(run.name)
    return f'<label class="{run.status}"><input type="checkbox" name="run" value="{run_id(run)}"{mark}> {name}</label>'


def _drawn(runs: Sequence[RunView]) -> str:
    if not runs:
        return "<p>No runs yet: this page shows them when they begin.</p>"
    return "\n".join(comparison_parts(runs, lambda run: f"run/{run_id(run)}/"))


def _html(text: str, scripts: str) -> web.Response:
    return web.Response(
        text=text, content_type="text/html", headers={"Content-Security-Policy": POLICY.format(scripts)}
    )


async def serve(watch: RunPages, host: str, port: int, on_ready: Callable[[str], None]) -> int:
    """Serve the pages until SIGINT or SIGTERM; return 128 + the signal's number.

    ``port`` 0 picks a free one; ``on_ready`` gets the URL.

    Raises:
        OutputError: the address is not available.
    """
    runner = web.AppRunner(
        watch.app(), handle_signals=False, access_log=None, shutdown_timeout=1.0, keepalive_timeout=door.REST_S
    )
    bound_logs()
    await runner.setup()
    loop = asyncio.get_running_loop()
    stopped = asyncio.Future[int]()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, lambda n=number: stopped.done() or stopped.set_result(n))
    assert runner.server is not None
    watch.limiter = limiter = ConnectionLimiter(runner.server, None)
    try:
        try:
            bound = await limiter.open(host, port)
        except OSError as error:
            hint = "choose another --host or --port; --port 0 takes a free one"
            raise OutputError(f"can't listen at {host}:{port}: {error.strerror}", hint, code="watch-address") from error
        on_ready(f"http://{host}:{bound}/")
        return 128 + await stopped
    finally:
        await limiter.close()
        await runner.cleanup()
