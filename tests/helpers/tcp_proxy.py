"""A TCP connection that tests can delay, limit, cut and freeze."""

import contextlib
import socket
import threading
import time


class TcpProxy:
    """Passes on what comes, in both directions.

    Args:
        target: port on this machine.
        delay_s: added to each piece, one way.
        bytes_per_s: in each direction; 0 for no limit.
        cut_every: bytes after which a connection is reset, in either direction; 0 for never.

    Attributes:
        port: to connect to.
        num_bytes: passed on so far.
        num_connections: accepted so far.
        open: cleared, nothing is passed on or accepted, and no connection is closed: the network is gone.
    """

    def __init__(self, target: int, delay_s: float = 0.0, bytes_per_s: float = 0.0, cut_every: int = 0) -> None:
        self._target, self._delay_s, self._rate, self._cut_every = target, delay_s, bytes_per_s, cut_every
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.num_bytes = self.num_connections = 0
        self.open = threading.Event()
        self.open.set()
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Close all connections; new ones are accepted."""
        for sock in list(self._sockets):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close all connections, and accept no more."""
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()
        self.open.set()
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.num_connections += 1
            self.open.wait()
            server = socket.create_connection(("127.0.0.1", self._target))
            self._sockets += [client, server]
            left = [self._cut_every]
            for pair in ((client, server), (server, client)):
                pair[0].setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=self._pass_on, args=(*pair, left), daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket, left: list[int]) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                self.open.wait()
                time.sleep(self._delay_s + (len(data) / self._rate if self._rate else 0.0))
                if self._cut_every:
                    data = data[: left[0]]
                    left[0] -= len(data)
                target.sendall(data)
                self.num_bytes += len(data)
                if self._cut_every and left[0] <= 0:
                    break
        for sock in (source, target):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
