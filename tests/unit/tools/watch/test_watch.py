"""The web page over runs."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

pytest.importorskip("aiohttp", reason="the extra serve is not installed")

from aiohttp.test_utils import TestClient, TestServer
from yarl import URL

from embodrl.serving import door
from embodrl.tools.watch.server import RunPages, serve

Client = TestClient  # type: ignore[type-arg]
TOKEN = "secret"


def write_run(path: Path, success: float = 0.5) -> Path:
    (path / "videos" / "iteration_4").mkdir(parents=True)
    rows = [{"iteration": i, "env_steps": 10 * i, "eval/success_rate": success} for i in (0, 4)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (path / "config.yaml").write_text("env: {tasks: ['<script>']}\nrunner: {max_iterations: 4}\n")
    (path / "videos" / "iteration_4" / "episode_0_success.mp4").write_bytes(b"film")
    return path


def visit(directory: Path, visitor: Callable[[Client], Awaitable[None]], token: str | None = None) -> None:
    async def all_of_it() -> None:
        async with TestClient(TestServer(RunPages([directory], token).app())) as client:
            await visitor(client)

    asyncio.run(all_of_it())


def test_runs_are_found_at_every_request_and_can_be_chosen(tmp_path: Path) -> None:
    async def visitor(client: Client) -> None:
        assert "No runs yet" in await (await client.get("/")).text()
        for name in ("a", "b<b>"):
            write_run(tmp_path / name, 0.25)
        page = await (await client.get("/")).text()
        assert "2 runs" in page and "b&lt;b&gt;" in page and "<b>" not in page.replace("<b>2", "")
        first, second = re.findall(r'value="([0-9a-f]{12})" checked', page)
        part = await (await client.get(f"/part?run={second}")).text()
        assert f"run/{second}/" in part and first not in part and "25.0 → 25.0" in part
        found = await (await client.get(f"/runs.json?run={first}")).json()
        assert [run["last"] for run in found["runs"]] == [0.25]
        saved = await (await client.get("/comparison.html")).text()
        assert saved.startswith("<!doctype html>") and "<script" not in saved

    visit(tmp_path, visitor)


def test_a_run_has_its_report_and_only_files_that_it_links(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a")
    (run / "policy").mkdir()
    (run / "policy" / "model.safetensors").write_bytes(b"weights")
    (run / "logs").mkdir()
    (run / "logs" / "outside.log").symlink_to("/etc/passwd")
    (run / "logs" / "embodrl.log").write_text("<script>")

    async def visitor(client: Client) -> None:
        (number,) = re.findall(r'value="([0-9a-f]{12})"', await (await client.get("/")).text())
        page = await client.get(f"/run/{number}/")
        text = await page.text()
        assert "Evaluation after iteration 4" in text and "&lt;script&gt;" in text
        assert await (await client.get(f"/run/{number}/videos/iteration_4/episode_0_success.mp4")).read() == b"film"
        log = await client.get(f"/run/{number}/logs/embodrl.log")
        assert log.content_type == "text/plain" and await log.text() == "<script>"
        for path in ("policy/model.safetensors", "logs/outside.log", "..%2fa/metrics.jsonl", ".lock", "nothing"):
            assert (await client.get(f"/run/{number}/{path}")).status == 404, path
        assert (await client.get("/run/000000000000/")).status == 404

    visit(tmp_path, visitor)


def test_nothing_is_shown_without_the_token(tmp_path: Path) -> None:
    write_run(tmp_path / "a")

    async def visitor(client: Client) -> None:
        for path in ("/", "/part", "/runs.json", "/?token=wrong", "/run/000000000000/"):
            assert (await client.get(path)).status == 401
        entered = await client.get(f"/?token={TOKEN}&run=0", allow_redirects=False)
        assert (entered.status, entered.headers["Location"]) == (303, "/?run=0")
        assert (await client.get("/")).status == 200  # the cookie

    visit(tmp_path, visitor, TOKEN)


@pytest.mark.parametrize("token", [None, TOKEN])
def test_addresses_with_zero_bytes_and_of_other_hosts_lead_nowhere(tmp_path: Path, token: str | None) -> None:
    async def visitor(client: Client) -> None:
        for path in ("/run/%00", "/run/%00/x", "/run/%00/%00"):
            url = URL(f"{path}?token={token or 'x'}", encoded=True)
            assert (await client.get(url)).status == 404
            assert token is None or (await client.get(URL(f"{path}?token=no", encoded=True))).status == 401
        away = await client.session.get(
            f"{client.make_url('/')}/else.where/?token={token or 'x'}", allow_redirects=False
        )
        assert not away.headers["Location"].startswith("//")

    visit(tmp_path, visitor, token)


def test_strangers_keep_nobody_out_and_are_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "MAX_STRANGERS", 4)

    async def run() -> None:
        ready = asyncio.Future[str]()
        serving = asyncio.create_task(serve(RunPages([tmp_path], TOKEN), "127.0.0.1", 0, ready.set_result))
        port = int((await ready).rpartition(":")[2].strip("/"))
        half_open = [await asyncio.open_connection("127.0.0.1", port) for _ in range(12)]
        for _, writer in half_open:
            writer.write(b"GET /he")
        assert [await reader.read() for reader, _ in half_open[:8]] == [b""] * 8
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"GET /?token={TOKEN} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        assert (await reader.readline()).split()[1] == b"303"
        half_open += [await asyncio.open_connection("127.0.0.1", port) for _ in range(4)]
        assert [await reader.read() for reader, _ in half_open[8:12]] == [b""] * 4
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")  # who was admitted stays; without its cookie it has to go
        assert b"401" in await reader.read()
        for _, each in [*half_open, (reader, writer)]:
            each.close()
        serving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await serving

    asyncio.run(asyncio.wait_for(run(), 30))


def test_a_connection_that_rests_is_closed_after_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "REST_S", 0.2)

    async def run() -> None:
        ready = asyncio.Future[str]()
        serving = asyncio.create_task(serve(RunPages([tmp_path], None), "127.0.0.1", 0, ready.set_result))
        port = int((await ready).rpartition(":")[2].strip("/"))
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /part HTTP/1.1\r\nHost: x\r\n\r\nGET /pa")
        assert (await reader.read()).startswith(b"HTTP/1.1 200")  # to the end
        writer.close()
        serving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await serving

    asyncio.run(asyncio.wait_for(run(), 30))


def test_pages_run_no_script_but_their_own(tmp_path: Path) -> None:
    write_run(tmp_path / "a")

    async def visitor(client: Client) -> None:
        answer = await client.get("/")
        policy, text = answer.headers["Content-Security-Policy"], await answer.text()
        (nonce,) = re.findall(r"script-src 'nonce-(.+)'", policy)
        assert f'<script nonce="{nonce}">' in text and text.count("<script") == 1
        assert "'none'" in (await client.get("/part")).headers["Content-Security-Policy"]

    visit(tmp_path, visitor)


@pytest.mark.long
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs the browser chromium")
def test_the_page_renews_itself_in_a_browser(tmp_path: Path) -> None:
    write_run(tmp_path / "a")
    command = [sys.executable, "-m", "embodrl", "watch", str(tmp_path), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = server.stdout.readline().split()[-1]
        browser = [
            "chromium",
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--virtual-time-budget=12000",
            "--dump-dom",
        ]
        seen = subprocess.check_output([*browser, url], text=True, timeout=120, stderr=subprocess.DEVNULL)
        server.terminate()
    assert 'data-text="' in seen and "50.0 → 50.0" in seen and '<span id="stale"></span>' in seen
    assert server.returncode == 143


@pytest.mark.parametrize(("arguments", "status"), [(["--port", "1"], 1), (["no-such-directory"], 2)])
def test_what_can_not_be_served_is_an_error(arguments: list[str], status: int, tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from embodrl.cli.main import app

    if arguments[0] == "--port" and os.geteuid() == 0:
        arguments = ["--host", "192.0.2.1"]
    result = CliRunner().invoke(app, ["watch", str(tmp_path), *arguments])
    assert result.exit_code == status
