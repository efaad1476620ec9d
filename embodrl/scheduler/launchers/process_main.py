"""Start of a worker process: ``python -m embodrl.scheduler.launchers.process_main SOCKET_FD``."""

from __future__ import annotations

import faulthandler
import signal
import socket
import sys
from typing import Any

from embodrl.envs.pool.worker_main import die_with_parent
from embodrl.errors import MessageError
from embodrl.scheduler.channel import Channel, SharedChannel
from embodrl.scheduler.launchers.host import Host, report
from embodrl.scheduler.wire import Kind, Message, PeerGone, receive, send, wait_for

_READABLE = 1  # select.POLLIN


def main(descriptor: int) -> None:
    """Serve calls until asked to close or until the parent has gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    sock = socket.socket(fileno=descriptor)
    try:
        start = next_message(sock)
        die_with_parent(sock, start.value["started_by_main_thread"])
        host = bring_up(sock, start.value)
        if host is not None:
            serve(sock, host)
    except PeerGone:
        sys.exit(0)


def next_message(sock: socket.socket) -> Message:
    """Return the next message.

    Raises:
        PeerGone: the parent has gone.
    """
    while True:
        message = receive(sock)
        if message is not None:
            return message
        wait_for({sock.fileno(): _READABLE}, None)


def bring_up(sock: socket.socket, start: dict[str, Any]) -> Host | None:
    """Make the worker and tell the parent; None if that failed."""
    sys.path[:0] = [path for path in start["sys_path"] if path not in sys.path]
    channels: dict[str, Channel] = {
        name: SharedChannel(name, capacity, descriptors) for name, (capacity, descriptors) in start["channels"].items()
    }
    try:
        host = Host(start["class_path"], start["context"], start["numa_node"], start["kwargs"], channels)
    except Exception as error:  # noqa: BLE001 - the parent raises it
        send(sock, Kind.RAISED, 0, report(error, "__init__"))
        return None
    send(sock, Kind.OK, 0, (None, 0.0))
    return host


def serve(sock: socket.socket, host: Host) -> None:
    """Answer calls, in order, until CLOSE."""
    while True:
        message = next_message(sock)
        if message.kind == Kind.CLOSE:
            host.worker.close()
            return
        method, args, kwargs = message.value
        try:
            answer = host.call(method, args, kwargs)
            try:
                send(sock, Kind.OK, message.call, answer)
            except MessageError as error:
                raise MessageError(f"the result can't be sent: {error.message}", error.hint) from error
        except PeerGone:
            raise
        except Exception as error:  # noqa: BLE001 - the parent raises it
            send(sock, Kind.RAISED, message.call, report(error, method))


if __name__ == "__main__":
    main(int(sys.argv[1]))
