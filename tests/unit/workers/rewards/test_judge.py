"""A model behind OpenAI's chat completions that judges episodes by their pictures."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import embodrl, metrics

from embodrl.config.schema import JudgeConfig, RewardConfig
from embodrl.errors import RewardError
from embodrl.workers.episode import Episode
from embodrl.workers.reward import RewardCalls
from embodrl.workers.rewards.judge import PictureJudge, read_answer

web = pytest.importorskip("aiohttp.web", reason="needs embodrl[serve]")
Image = pytest.importorskip("PIL.Image")


class Server:
    """Answers chat completions with texts in turn, the last one again and again; keeps what it was asked."""

    def __init__(self) -> None:
        self.texts, self.status, self.asked, self.tokens = ["Yes."], 200, [], []
        self.loop = asyncio.new_event_loop()
        self.url = ""

    async def answer(self, request: Any) -> Any:
        self.asked.append(await request.json())
        self.tokens.append(request.headers.get("Authorization"))
        text = self.texts.pop(0) if len(self.texts) > 1 else self.texts[0]
        body = json.dumps({"choices": [{"message": {"content": text}}]}).encode()
        response = web.StreamResponse(status=self.status)  # in two pieces, as proxies may send it
        await response.prepare(request)
        for piece in (body[:20], body[20:]):
            await response.write(piece)
            await asyncio.sleep(0.05)
        await response.write_eof()
        return response

    async def start(self) -> None:
        app = web.Application(client_max_size=1 << 24)
        app.router.add_post("/v1/chat/completions", self.answer)
        self.runner = web.AppRunner(app)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}/v1"


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    thread = threading.Thread(target=made.loop.run_forever, daemon=True)
    thread.start()
    asyncio.run_coroutine_threadsafe(made.start(), made.loop).result(20)
    yield made
    asyncio.run_coroutine_threadsafe(made.runner.cleanup(), made.loop).result(20)
    made.loop.call_soon_threadsafe(made.loop.stop)
    thread.join(20)


def episode(count: int = 5) -> Episode:
    """Five chunks, whose pictures are filled with 0, 10, 20, 30, 40."""
    frames = torch.arange(count, dtype=torch.uint8).mul(10)[:, None, None, None].expand(-1, 4, 6, 3).contiguous()
    rewards, versions = torch.zeros(count), torch.zeros(count)
    return Episode(rewards, False, True, "reach-red", frames, versions, instruction="reach the red dot")


def outcome(server: Server, **settings: Any) -> tuple[object, int]:
    judge = JudgeConfig(url=server.url, model="seer", **settings)
    calls = RewardCalls(PictureJudge(judge), RewardConfig(judge=judge, retries=1, timeout_s=20))
    try:
        return calls.start(episode()).result(60)
    finally:
        calls.close()


def test_pictures_and_the_question_are_asked_and_yes_is_one(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMBODRL_JUDGE_TOKEN", "secret")
    assert outcome(server, num_frames=3, question="{instruction}?") == (torch.tensor(1.0), 0)
    assert server.tokens == ["Bearer secret"]
    (asked,) = server.asked
    *pictures, text = asked["messages"][0]["content"]
    assert (asked["model"], text) == ("seer", {"type": "text", "text": "reach the red dot?"})
    urls = [picture["image_url"]["url"].partition(",") for picture in pictures]
    assert {url[0] for url in urls} == {"data:image/png;base64"}
    shown = [Image.open(io.BytesIO(base64.b64decode(url[2]))) for url in urls]
    assert {image.size for image in shown} == {(6, 4)}
    assert [image.getpixel((0, 0)) for image in shown] == [(0, 0, 0), (20, 20, 20), (40, 40, 40)]


def test_an_answer_without_a_reward_is_asked_again_and_then_an_error(server: Server) -> None:
    server.texts = ["Perhaps.", "0.25"]
    assert outcome(server) == (torch.tensor(0.25), 1)
    server.texts = ["Perhaps."]
    found, failed = outcome(server)
    assert isinstance(found, RewardError) and "Perhaps" in found.message and failed == 2
    server.status = 401
    found, failed = outcome(server)
    assert isinstance(found, RewardError) and "401" in found.message and failed == 2


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("yes", 1.0),
        ("**No**, it is not.", 0.0),
        ("No.", 0.0),
        ("0.5", 0.5),
        ("1", 1.0),
        (" 1.0\n", 1.0),
        (".25.", 0.25),
    ],
)
def test_answers(text: str, reward: float) -> None:
    assert read_answer(json.dumps({"choices": [{"message": {"content": text}}]}).encode()) == reward


@pytest.mark.parametrize(
    "text",
    [
        "",
        "not yet",
        "yesterday",
        "10",
        "1.5",
        "-1",
        "nothing",
        "1/10",
        "1 out of 10",
        "1%",
        "0,8",
        "No-one",
        "yes or no?",
        None,
    ],
)
def test_other_answers_are_no_reward(text: str | None) -> None:
    with pytest.raises(RewardError):
        read_answer(json.dumps({"choices": [{"message": {"content": text}}]}).encode())
    with pytest.raises(RewardError):
        read_answer(b'{"choices": []}')


def test_a_run_is_paid_by_its_judge(server: Server, tmp_path: Path) -> None:
    server.texts = ["0.75"]
    sizes = ("runner=debug", "env.train.total_num_envs=4", "runner.max_iterations=1", "runner.eval_interval=0")
    judge = f"reward.judge={{url: '{server.url}', model: seer}}"
    done = embodrl("train", "env=toy", "model=cnn", *sizes, judge, f"runner.output_dir={tmp_path / 'run'}")
    assert done.code == 0, done.stderr
    row = metrics(tmp_path / "run")[-1]
    assert row["reward/mean"] == 0.75 and row["reward/errors"] == 0
    assert len(server.asked) >= row["rollout/episodes"] > 0
