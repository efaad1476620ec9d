"""A stream of tokens says what the whole message says."""

from __future__ import annotations

import json

import pytest

from embodrl.models.common.chat import LiveToken, WrittenText
from embodrl.serving.wire.chat_api import ChatChoice, ChatRequest, ChatStream, completion_head

ASK = ({"role": "user", "content": "x"},)


def said(events: bytes) -> str:
    lines = [line.removeprefix("data: ") for line in events.decode().splitlines() if line.startswith("data: {")]
    deltas = [choice["delta"] for line in lines for choice in json.loads(line)["choices"]]
    return "".join(delta.get("content") or "" for delta in deltas)


@pytest.mark.parametrize(("stop", "expected"), [("\u2026", "ab "), ("more", "ab \u2026 "), ("none", "ab \u2026 more")])
def test_a_character_of_a_stop_sequence_may_begin_within_a_token(stop: str, expected: str) -> None:
    tokens = (b"ab \xe2\x80", b"\xa6", b" more")
    stream = ChatStream(completion_head("id", "m", 1, 0), ChatRequest("m", ASK, (), "auto", stops=(stop,), stream=True))
    events = b"".join(stream.add(LiveToken(place, data, -0.1)) for place, data in enumerate(tokens))
    events += stream.finish([ChatChoice(WrittenText(tokens, True, 3).before((stop,)))])
    assert said(events) == expected
