"""Conversations with a policy server over plain HTTP, with arrays as json_numpy writes them."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

import numpy as np
from served import TOKEN, served


def picture(pixel: int) -> dict[str, Any]:
    """Return a picture of 2 x 2 pixels of one value."""
    return {"__numpy__": base64.b64encode(bytes([pixel]) * 12).decode(), "dtype": "|u1", "shape": [2, 2, 3]}


def array(content: dict[str, Any]) -> np.ndarray:
    """Return the array of a message."""
    assert content.keys() == {"__numpy__", "dtype", "shape"}
    return np.frombuffer(base64.b64decode(content["__numpy__"]), content["dtype"]).reshape(content["shape"])


def talk(protocol: str, test: Any, **settings: Any) -> None:
    """Run ``test(server, session, post)`` against a server of a protocol."""
    import aiohttp

    async def run():
        async with served(protocol, **settings) as server:
            headers = {"Authorization": f"Bearer {TOKEN}"}
            async with aiohttp.ClientSession(server.urls[protocol], headers=headers) as session:

                async def post(path, content, **more):
                    text = content if isinstance(content, (str, bytes)) else json.dumps(content)
                    async with session.post(path, data=text, **more) as answer:
                        body = await answer.read()
                        is_json = answer.content_type == "application/json"
                        return answer.status, json.loads(body) if is_json else body, answer.headers

                await asyncio.wait_for(test(server, session, post), 30)

    asyncio.run(run())
