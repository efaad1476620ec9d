"""vla-evaluation-harness's websocket protocol: hello, episodes, and one action per observation.

Source: github.com/allenai/vla-evaluation-harness, src/vla_eval/protocol and model_servers/serve.py.
"""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embodrl.config.schema import section_in
from embodrl.errors import WireError
from embodrl.serving.core import explain
from embodrl.serving.listener import HttpListener, Service
from embodrl.serving.protocols.spec import VlaEvalKeysConfig
from embodrl.serving.session import ChunkSession
from embodrl.serving.wire.codec import HINT, Map, array_of, need, pack, unpack
from embodrl.version import __version__

PROTOCOL_VERSION = 1
MAX_PIXELS = 1 << 24
FIELDS = ("type", "payload", "seq", "timestamp")


class VlaEvalListener(HttpListener):
    """Answers hello, and each observation with the next action of the connection's chunk, under the same ``seq``."""

    name = "vla_eval"
    scheme = "ws"

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        settings = section_in(service.settings, "vla_eval", VlaEvalKeysConfig)
        self.keys = service.wire_map(settings, "images.{}", "states", "task_description")
        self.observation_params = dict(settings.observation_params)

    async def converse(self, socket: Any, client: object) -> None:
        session = ChunkSession(self.core, client, self.name, self.service.horizon)
        async for frame in socket:
            if frame.type not in (self.web.WSMsgType.BINARY, self.web.WSMsgType.TEXT):
                break
            sequence = 0
            try:
                message = await asyncio.to_thread(_message, frame.data)  # image decompression takes time
                sequence = message["seq"]
                reply = await self._answer(message, session)
            except Exception as error:  # noqa: BLE001 - reported to the client; the connection stays open
                self.core.metrics.count("errors_total", self.name)
                reply = ("error", {"error": explain(error)})
            if reply is not None:
                kind, payload = reply
                content = {"type": kind, "payload": payload, "seq": sequence, "timestamp": time.time()}
                await socket.send_bytes(pack(content, vla_eval_default))

    async def _answer(self, message: Mapping[str, Any], session: ChunkSession) -> tuple[str, dict[str, Any]] | None:
        kind = message["type"]
        if kind == "hello":
            return "hello", self._hello()
        if kind == "observation":
            action, version = await session.next_action(self.keys.observation(message["payload"]))
            return "action", {"actions": action, "policy_version": version}
        if kind in ("episode_start", "episode_end"):
            session.reset()
        return None  # the client does not expect an answer

    def _hello(self) -> dict[str, Any]:
        content: dict[str, Any] = {
            "harness_version": f"embodrl {__version__}",
            "protocol_version": PROTOCOL_VERSION,
            "model_server": f"embodrl/{self.service.config.model.model_type}",
            "policy_version": self.core.version,
            "capabilities": {},
        }
        if self.observation_params:
            content["observation_params"] = self.observation_params
        return content


def _message(data: bytes | str) -> Mapping[str, Any]:
    """Return a message with its four fields; raises WireError if it is malformed."""
    hint = "see docs/serving.md for what a message holds"
    if isinstance(data, str):
        raise WireError("received a text frame, expected a message in msgpack", hint, code="wire-message")
    message = unpack(data, vla_eval_envelope)
    missing = [name for name in FIELDS if not isinstance(message, dict) or name not in message]
    if missing:
        raise WireError(f"a message lacks {', '.join(missing)}", hint, code="wire-message")
    if type(message["seq"]) is not int or message["type"] not in (
        *("hello", "observation", "action", "episode_start", "episode_end", "error"),
    ):
        raise WireError(f"a message has the type {str(message['type'])[:40]!r}", hint, code="wire-message")
    found: Mapping[str, Any] = message
    return found


def vla_eval_envelope(content: Map) -> object:
    """Decode ``{"__ndarray__": True, ...}`` and images ``{"__image__": True, "format", "data", "shape"}``."""
    if "__image__" in content:
        if content["format"] == "raw":
            return array_of(content["dtype"], content["shape"], content["data"])
        return picture(content["data"], content["format"])
    if "__ndarray__" in content:
        return array_of(content["dtype"], content["shape"], content["data"])
    return content


def vla_eval_default(value: object) -> object:
    """Encode arrays as vla-evaluation-harness does (not as images)."""
    if isinstance(value, np.ndarray):
        return {
            "__ndarray__": True,
            "data": value.tobytes(),
            "dtype": value.dtype.str,
            "shape": list(value.shape),
        }
    raise TypeError(f"{type(value).__name__} can't be sent in a message")


def picture(data: object, file_format: object) -> NDArray[np.uint8]:
    """Return a PNG or JPEG file as ``uint8[H,W,3]``.

    Raises:
        WireError: the file is damaged, larger than MAX_PIXELS, or in another format.
    """
    if file_format not in ("png", "jpeg") or not isinstance(data, bytes):
        raise _refused(f"an image has the format {str(file_format)[:20]!r}; allowed: png, jpeg, raw")
    image = need("PIL.Image")
    try:
        with image.open(io.BytesIO(data), formats=[str(file_format).upper()]) as opened:
            if opened.width * opened.height > MAX_PIXELS:
                raise _refused(f"a picture has {opened.width} x {opened.height} pixels")
            return np.array(opened.convert("RGB"))
    # Pillow also raises SyntaxError, EOFError and zlib errors, depending on where a file is damaged.
    except Exception as error:
        if isinstance(error, WireError):
            raise
        raise _refused(f"an image can't be read: {str(error)[:200]}") from error


def _refused(message: str) -> WireError:
    return WireError(message, HINT, code="wire-picture")
