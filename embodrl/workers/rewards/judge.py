"""Rewards by a model that sees pictures, behind a server with OpenAI's chat completions (vLLM, SGLang, a provider).

Shapes: t chunks, H x W image.
"""

from __future__ import annotations

import base64
import io
import json
import os
import re
from typing import Any

from torch import Tensor

from embodrl.algorithms.srpo import sample_frames
from embodrl.config.schema import JudgeConfig
from embodrl.errors import RewardError
from embodrl.serving.wire.codec import need
from embodrl.workers.episode import Episode

TOKEN_VARIABLE = "EMBODRL_JUDGE_TOKEN"
MAX_ANSWER = 1 << 20
"""Bytes of a response that are read."""
SHOWN = 200
_HINT = "ask for yes, no or a number from 0 to 1 in reward.judge.question"


class PictureJudge:
    """Asks a model about pictures of an episode; callable as a reward function.

    The answer is the reward: yes is 1, no is 0, a number from 0 to 1 itself. A sentence may follow yes or no.

    Raises:
        MissingDependencyError: the extra ``serve`` is not installed.
    """

    def __init__(self, settings: JudgeConfig) -> None:
        self.settings = settings
        self._aiohttp = need("aiohttp")
        self._image = need("PIL.Image")
        token = os.environ.get(TOKEN_VARIABLE)
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    async def __call__(self, episode: Episode) -> float:
        """Return the model's reward; raises RewardError for an answer that has none."""
        url = f"{str(self.settings.url).rstrip('/')}/chat/completions"
        async with (
            self._aiohttp.ClientSession(headers=self._headers) as session,
            session.post(url, json=self.request(episode), allow_redirects=False) as response,
        ):
            content = bytearray()
            async for piece in response.content.iter_any():
                content += piece
                if len(content) > MAX_ANSWER:
                    raise RewardError(f"{url} answered more than {MAX_ANSWER} bytes", _HINT)
        if response.status != 200:
            message = f"{url} answered {response.status}: {content[:SHOWN].decode(errors='replace')}"
            raise RewardError(message, f"check reward.judge, and the token in {TOKEN_VARIABLE}")
        return read_answer(bytes(content))

    def request(self, episode: Episode) -> dict[str, Any]:
        """Return the body of the request: ``num_frames`` pictures of the first camera, in order, and the question."""
        asked = self.settings.question.replace("{instruction}", episode.instruction or episode.task)
        pictures = [
            {"type": "image_url", "image_url": {"url": self._png(frame)}}
            for frame in sample_frames(episode.frames, self.settings.num_frames)
        ]
        message = {"role": "user", "content": [*pictures, {"type": "text", "text": asked}]}
        return {"model": self.settings.model, "messages": [message], "temperature": 0, "max_tokens": 16}

    def _png(self, frame: Tensor) -> str:
        """Return ``uint8[H,W,3]`` as a data URL."""
        written = io.BytesIO()
        self._image.fromarray(frame.numpy()).save(written, "PNG")
        return f"data:image/png;base64,{base64.b64encode(written.getvalue()).decode()}"


def read_answer(content: bytes) -> float:
    """Return the reward that a chat completion says; raises RewardError without one."""
    try:
        text = json.loads(content)["choices"][0]["message"]["content"]
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise RewardError(f"no chat completion: {content[:SHOWN].decode(errors='replace')}", _HINT) from error
    word = str(text).lstrip(" \n\t*").rstrip(" \n\t*.").lower()
    if said := re.fullmatch(r"(yes|no)(?:[*.]*[,.;:!].*)?", word, re.DOTALL):
        return float(said[1] == "yes")
    if re.fullmatch(r"\d*\.?\d+", word) and float(word) <= 1:
        return float(word)
    raise RewardError(f"the answer is {str(text)[:SHOWN]!r}", _HINT)
