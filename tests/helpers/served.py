"""A policy server in this process, with a policy whose actions can be worked out by hand, and raw messages for it."""

from __future__ import annotations

import asyncio
import struct
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from toy_policy import ToyPolicy

from embodrl.config.schema import CameraConfig, Config, ServeConfig, section_class
from embodrl.config.schema.env import EnvConfig
from embodrl.errors import EmbodrlError
from embodrl.hybrid_engines.rollout.native import NativeRolloutEngine
from embodrl.models.base import VLAPolicy
from embodrl.serving.server import PolicyServer
from embodrl.types import ChunkPrefix, Observation, PolicyOutput

TOKEN = "a-token-of-the-tests"
CHUNK, DIM = 5, 7


class MeanPolicy(ToyPolicy):
    """Action a of step c is the mean pixel, plus c, plus a tenth of the number of characters, plus a weight."""

    decodings = ("greedy", "sampled", "mean")

    def __init__(self) -> None:
        super().__init__(CHUNK, DIM)
        self.offset = torch.nn.Parameter(torch.zeros(1))
        self.batches: list[int] = []
        self.mode = ""

    def predict_action_batch(self, observation: Observation, mode, sampling, generator=None, compute_values=True):
        assert mode in ("eval", "mean")
        if "fail" in observation.instruction:
            raise RuntimeError("a secret of the server")
        if "refuse" in observation.instruction:
            raise EmbodrlError("this instruction is refused", "say something else", code="test-refused")
        self.batches.append(observation.batch_size)
        self.mode = mode
        means = observation.images.mean(axis=(1, 2, 3, 4)) + [len(text) / 10 for text in observation.instruction]
        means = means + self.offset.item() + observation.state.sum(axis=1)
        actions = means[:, None, None] + np.arange(CHUNK)[None, :, None] + np.zeros((1, 1, DIM))
        return PolicyOutput(actions.astype(np.float32), torch.zeros(actions.shape), None, {})

    def continue_chunk(self, observation: Observation, prefix: ChunkPrefix, guidance: float) -> np.ndarray:
        """All actions are the first one that is left, plus the delay, ten times the length and 100 times guidance."""
        self.batches.append(observation.batch_size)
        rows = prefix.actions[:, :1] + (prefix.delay + 10 * prefix.length)[:, None, None] + 100 * guidance
        return np.repeat(rows, CHUNK, axis=1).astype(np.float32)


def wanted(pixel: float, text: str, offset: float = 0.0) -> np.ndarray:
    """Return ``float32[C,A]``, what MeanPolicy answers to a picture of one value."""
    steps = np.arange(CHUNK)[:, None] + np.zeros((1, DIM))
    return (pixel + len(text) / 10 + offset + steps).astype(np.float32)


def config_of(*protocols: str, cameras: tuple[str, ...] = ("base_camera",), **settings: Any) -> Config:
    chosen = {"protocols": protocols, "port": 0, "token": TOKEN, "max_wait_ms": 0.0} | settings
    serve = section_class("serve", chosen).model_validate(chosen)
    assert isinstance(serve, ServeConfig)
    env = EnvConfig(cameras=tuple(CameraConfig(name=name, height=4, width=4) for name in cameras))
    return Config(serve=serve, env=env)


def engine_of(policy: VLAPolicy) -> NativeRolloutEngine:
    config = Config()
    return NativeRolloutEngine(policy, config.rollout, config.algorithm.sampling, 0, 1)


class Served:
    """A running server: its parts, and the URL of each protocol."""

    def __init__(self, server: PolicyServer, policy: MeanPolicy, urls: dict[str, str], lines: list[str]) -> None:
        self.server, self.policy, self.urls, self.lines = server, policy, urls, lines
        self.core = server.core

    def port(self, name: str) -> int:
        return int(self.urls[name].rpartition(":")[2])


@asynccontextmanager
async def served(
    *protocols: str, weights_dir: Path | None = None, writer: VLAPolicy | None = None, **settings: Any
) -> AsyncIterator[Served]:
    """Serve a MeanPolicy, or a planner, until the block ends; the server must end by itself then."""
    policy, lines, config = MeanPolicy(), [], config_of(*protocols, **settings)
    if writer is not None:
        config = config.model_copy(update={"model": config.model.model_copy(update={"model_type": "planner"})})
    server = PolicyServer(engine_of(writer or policy), config, weights_dir, lines.append)
    ready: asyncio.Future[dict[str, str]] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(server.run(ready.set_result))
    await asyncio.wait({task, ready}, return_when=asyncio.FIRST_COMPLETED)
    if not ready.done():
        await task
    policy.batches.clear()  # the one that warmed it up
    try:
        yield Served(server, policy, ready.result(), lines)
    finally:
        server.stop()
        await asyncio.wait_for(task, 20)


@asynccontextmanager
async def websocket(url: str, token: str | None = TOKEN, scheme: str = "Api-Key") -> AsyncIterator[Any]:
    """A websocket client that is none of the product's."""
    import aiohttp

    headers = {} if token is None else {"Authorization": f"{scheme} {token}"}
    async with aiohttp.ClientSession() as session, session.ws_connect(url, headers=headers, max_msg_size=0) as socket:
        yield socket


def raw(value: Any) -> bytes:
    """Return msgpack, written by the specification and not by a library."""
    if value is None or isinstance(value, bool):
        return {None: b"\xc0", False: b"\xc2", True: b"\xc3"}[value]
    if isinstance(value, int):
        return bytes([value]) if 0 <= value < 128 else b"\xd3" + struct.pack(">q", value)
    if isinstance(value, float):
        return b"\xcb" + struct.pack(">d", value)
    if isinstance(value, str):
        return b"\xdb" + struct.pack(">I", len(value.encode())) + value.encode()
    if isinstance(value, bytes):
        return b"\xc6" + struct.pack(">I", len(value)) + value
    if isinstance(value, dict):
        return b"\xdf" + struct.pack(">I", len(value)) + b"".join(raw(k) + raw(v) for k, v in value.items())
    return b"\xdd" + struct.pack(">I", len(value)) + b"".join(map(raw, value))


def png(width: int, height: int) -> bytes:
    """Return a picture of 2 x 2 pixels with that size in its header."""

    def part(kind, data):
        return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")

    header = width.to_bytes(4, "big") + height.to_bytes(4, "big") + b"\x08\x02\x00\x00\x00"
    rows = b"".join(b"\x00" + bytes([row, 2, 3]) * 2 for row in range(2))
    return b"\x89PNG\r\n\x1a\n" + part(b"IHDR", header) + part(b"IDAT", zlib.compress(rows)) + part(b"IEND", b"")
