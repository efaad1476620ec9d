"""Policy servers under load: clients at the same time against `embodrl serve`, and against one call per request.

    python benchmarks/serve_load.py env=toy model=openvla                  # 1, 8 and 32 clients, openpi's protocol
    python benchmarks/serve_load.py env=toy model=openvla --requests 50 --json load.json

The baseline answers each request by a forward pass of its own in the event loop, as openpi's own server does, with the
same model and decoder. Both are measured one after the other for every number of clients, which are in a process of
their own. An action is one row of a chunk; server_cpu_ms is processor time of the server per request, which other jobs
on the machine distort less than latencies.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from embodrl.serving.wire.codec import openpi_default, openpi_envelope, pack, unpack

if TYPE_CHECKING:  # the clients are processes of this file, too, and import no torch
    from embodrl.config.schema import Config

CLIENTS = (1, 8, 32)
PROMPT = "push the cube to the target"


async def ask(url: str, clients: int, requests: int, cameras: dict[str, list[int]]) -> dict[str, float]:
    """Run clients that ask one observation after the other; return latencies in ms and requests per second."""
    import aiohttp

    random = np.random.default_rng(0)
    contents = [
        {f"observation/{n}": random.integers(0, 255, s, np.uint8) for n, s in cameras.items()} for _ in range(8)
    ]
    frames = [pack(content | {"prompt": PROMPT}, openpi_default) for content in contents]
    latencies: list[float] = []
    connected, go = asyncio.Semaphore(0), asyncio.Event()

    async def client(session: aiohttp.ClientSession) -> None:
        async with session.ws_connect(url, max_msg_size=0) as socket:
            await socket.receive_bytes()
            connected.release()
            await go.wait()
            for number in range(requests):
                clock = time.perf_counter()
                await socket.send_bytes(frames[number % len(frames)])
                answer = await socket.receive()
                latencies.append(time.perf_counter() - clock)
                if not isinstance(answer.data, bytes) or "actions" not in unpack(answer.data, openpi_envelope):
                    raise RuntimeError(f"no actions: {answer.data[:300]!r}")

    async with aiohttp.ClientSession() as session:
        tasks = [asyncio.create_task(client(session)) for _ in range(clients)]
        for _ in tasks:
            await connected.acquire()
        clock = time.perf_counter()
        go.set()
        await asyncio.gather(*tasks)
    wall = time.perf_counter() - clock
    return {
        "p50_ms": 1000 * float(np.percentile(latencies, 50)),
        "p99_ms": 1000 * float(np.percentile(latencies, 99)),
        "requests_per_s": len(latencies) / wall,
    }


def load(*arguments: Any) -> dict[str, float]:
    """Run ``ask`` in a process of its own."""
    command = [sys.executable, __file__, "--as-clients", json.dumps(arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    found: dict[str, float] = json.loads(done.stdout)
    return found


def one_call_per_request() -> type:
    """Return a core without batches or a thread: the event loop computes."""
    from embodrl.serving.core import ModelCore, ServedChunk
    from embodrl.types import Observation

    class OneCallPerRequest(ModelCore):
        async def act(self, observation: Observation, client: object, protocol: str) -> ServedChunk:
            clock = time.perf_counter()
            output = self.engine.decide(observation, "greedy")
            return ServedChunk(output.actions[0], output.version, 1, 1000 * (time.perf_counter() - clock))

    return OneCallPerRequest


async def measure(config: Config, clients: list[int], requests: int) -> list[dict[str, Any]]:
    """Return a row for each number of clients and kind of server."""
    from embodrl.hybrid_engines.rollout.native import make_rollout_engine
    from embodrl.serving.core import ModelCore
    from embodrl.serving.server import PolicyServer
    from embodrl.workers.policy import build_policy, num_threads

    engine = make_rollout_engine(config, build_policy(config), num_threads(config))
    cameras = {camera.name: [camera.height, camera.width, 3] for camera in config.env.cameras}
    rows: list[dict[str, Any]] = []
    for number in clients:
        for kind, core in (("one call per request", one_call_per_request()), ("embodrl serve", ModelCore)):
            server = PolicyServer(engine, config, None, lambda line: None)
            server.core.__class__ = core
            ready: asyncio.Future[dict[str, str]] = asyncio.get_running_loop().create_future()
            task = asyncio.create_task(server.run(ready.set_result))
            url = (await ready)["openpi"]
            busy = time.process_time()
            figures = await asyncio.to_thread(load, url, number, requests, cameras)
            busy = time.process_time() - busy
            figures["actions_per_s"] = figures["requests_per_s"] * config.model.num_action_chunks
            figures["server_cpu_ms"] = 1000 * busy / (number * requests)
            figures["mean_batch"] = server.core.mean_batch() or 1.0
            rows.append({"clients": number, "server": kind} | figures)
            server.stop()
            await task
    return rows


def main() -> None:
    """Run the benchmark, or the clients of one measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="of the configuration, e.g. env=toy model=openvla")
    parser.add_argument("--clients", type=int, nargs="+", default=list(CLIENTS))
    parser.add_argument("--requests", type=int, default=30, help="of each client")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--as-clients", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.as_clients is not None:
        print(json.dumps(asyncio.run(ask(*json.loads(arguments.as_clients)))))
        return
    from embodrl.config.schema import ServeConfig
    from embodrl.errors import EmbodrlError
    from embodrl.pipelines.load import load_config
    from embodrl.workers.policy import configure_torch

    try:
        loaded = load_config(arguments.overrides, verb="serve")
    except EmbodrlError as error:
        raise SystemExit(str(error)) from error
    settings = loaded.config.serve.model_dump() | {"protocols": ("openpi",), "port": 0, "token": "none"}
    config = loaded.config.model_copy(update={"serve": ServeConfig.model_validate(settings)})
    configure_torch(config, loaded.deployment.of("rollout")[0])
    print(f"load average before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    rows = asyncio.run(measure(config, arguments.clients, arguments.requests))
    names = [name for name in rows[0] if name not in ("clients", "server")]
    print(f"{'clients':>7}  {'server':22}" + "".join(f"{name:>16}" for name in names))
    for row in rows:
        print(f"{row['clients']:>7}  {row['server']:22}" + "".join(f"{row[name]:>16.1f}" for name in names))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
