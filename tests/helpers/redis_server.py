"""Redis servers for tests: fakeredis's in this process, which other processes reach by TCP, and Redis's own."""

from __future__ import annotations

import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest


@contextmanager
def fake_redis() -> Iterator[str]:
    """Run a stand-in; yield ``redis://HOST:PORT/0``."""
    pytest.importorskip("fakeredis")
    from fakeredis import TcpFakeServer

    server = TcpFakeServer(("127.0.0.1", 0))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"redis://127.0.0.1:{server.server_address[1]}/0"
    finally:
        server.shutdown()
        server.server_close()


def free_ports(count: int) -> list[int]:
    """Return ports that nothing listens at, all different."""
    with ExitStack() as stack:
        taken = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in taken]


@contextmanager
def redis_server(directory: Path, *options: str, port: int | None = None) -> Iterator[str]:
    """Run Redis with these options, if it is installed; yield ``redis://HOST:PORT/0``."""
    pytest.importorskip("redis")
    command = shutil.which("redis-server")
    if command is None:
        pytest.skip("redis-server is not installed")
    port = port or free_ports(1)[0]
    own = ["--bind", "127.0.0.1", "--port", str(port), "--dir", str(directory), "--save", "", *options]
    with (directory / "redis.log").open("w") as log:
        process = subprocess.Popen([command, *own], stdout=log, stderr=log)
    try:
        while True:
            assert process.poll() is None, (directory / "redis.log").read_text()
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                time.sleep(0.05)
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        process.kill()
        process.wait()


@contextmanager
def redis_cluster(directory: Path, masters: int = 3) -> Iterator[str]:
    """Run a cluster; yield ``redis://HOST:PORT/0`` of its first node."""
    command = shutil.which("redis-cli")
    if command is None:
        pytest.skip("redis-cli is not installed")
    with ExitStack() as stack:
        nodes: list[str] = []
        for number in range(masters):
            place = directory / f"node-{number}"
            place.mkdir()
            port, bus = free_ports(2)  # the default of the second is 10000 above the first
            # On a busy machine a node may be silent for long, and is not down.
            settings = ("--cluster-enabled", "yes", "--cluster-port", str(bus), "--cluster-node-timeout", "120000")
            url = stack.enter_context(redis_server(place, *settings, port=port))
            nodes.append(url.removeprefix("redis://").removesuffix("/0"))
        subprocess.run([command, "--cluster", "create", *nodes, "--cluster-yes"], check=True, stdout=subprocess.DEVNULL)
        for node in nodes:
            state = [command, "-p", node.rpartition(":")[2], "cluster", "info"]
            while "cluster_state:ok" not in subprocess.run(state, check=True, capture_output=True, text=True).stdout:
                time.sleep(0.05)
        yield f"redis://{nodes[0]}/0"
