"""moto's S3 server behind a door that can be shut: what it holds outlives an outage.

Needs s3fs, moto[s3], flask and flask-cors.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest


def _end(one: socket.socket) -> None:
    with suppress(OSError):  # the other side may have ended it
        one.shutdown(socket.SHUT_RDWR)


class S3Server:
    """A server, which clients find by the variables ``environment``."""

    def __init__(self, directory: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._behind = free.getsockname()
        self.log = (directory / "s3.log").open("w")
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self._behind[1])]
        self.process = subprocess.Popen(command, stdout=self.log, stderr=self.log)
        self._address = ("127.0.0.1", 0)
        self._open: list[socket.socket] = []
        self._lock = threading.Lock()
        self.open()
        self.environment = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._address[1]}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        while True:
            assert self.process.poll() is None, Path(self.log.name).read_text()
            try:
                socket.create_connection(self._behind, 1).close()
                break
            except OSError:
                time.sleep(0.1)

    def open(self) -> None:
        """Let clients in."""
        door = socket.create_server(self._address)
        self._address = door.getsockname()
        self._door = door
        threading.Thread(target=self._admit, args=(door,), daemon=True).start()

    def shut(self) -> None:
        """Refuse connections, and break those that exist, whatever they are in the midst of."""
        _end(self._door)
        self._door.close()
        with self._lock:
            for one in self._open:
                _end(one)
            self._open.clear()

    def _admit(self, door: socket.socket) -> None:
        while True:
            try:
                client, _ = door.accept()
            except OSError:
                return
            server = socket.create_connection(self._behind)
            with self._lock:
                self._open += [client, server]
            for pair in ((client, server), (server, client)):
                threading.Thread(target=self._copy, args=pair, daemon=True).start()

    def _copy(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
        for one in (source, target):
            _end(one)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.log.close()


@contextmanager
def s3_bucket(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """Run a server with the empty bucket ``s3://bucket``, and set the variables of its clients."""
    for name in ("moto.server", "s3fs", "flask"):
        pytest.importorskip(name)
    import boto3

    server = S3Server(directory)
    try:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        boto3.client("s3").create_bucket(Bucket="bucket")
        yield server
    finally:
        server.close()
