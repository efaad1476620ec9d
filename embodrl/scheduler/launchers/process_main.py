"""Entry point of a worker process: ``python -m embodrl.scheduler.launchers.process_main SOCKET_FD``."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Mapping
from typing import Any

from embodrl.errors import MessageError
from embodrl.processes.ending import OUT_OF_MEMORY, leave, ran_out_of_memory
from embodrl.processes.frames import Connection, Frame, Kind, PeerGoneError
from embodrl.processes.serve import begin, describe_error
from embodrl.scheduler.channel import Channel, SharedChannel
from embodrl.scheduler.launchers.host import Host
from embodrl.scheduler.messages import CODEC


def main(socket_fd: int) -> None:
    """Serve calls until asked to close, or until the parent has ended."""
    try:
        connection, start = begin(socket_fd, CODEC)
        host = start_host(connection, start)
        if host is not None:
            serve(connection, host)
    except PeerGoneError:
        pass
    leave(0)


def start_host(connection: Connection, start: Mapping[str, Any]) -> Host | None:
    """Build the worker and report to the parent; None if that failed."""
    channels: dict[str, Channel] = {
        name: SharedChannel(name, capacity, descriptors) for name, (capacity, descriptors) in start["channels"].items()
    }
    try:
        host = Host(start["class_path"], start["context"], start["numa_node"], start["kwargs"], channels)
    except BaseException as error:  # noqa: BLE001 - process boundary: the parent raises it
        connection.send(Frame(Kind.RAISED, value=describe_error(error, "__init__")))
        return None
    # Number 0: the parent waits for the constructor under that number.
    connection.send(Frame(Kind.OK, value=(None, 0.0)))
    return host


def serve(connection: Connection, host: Host) -> None:
    """Answer calls, in order, until CLOSE."""
    while _serve_one(connection, host):
        pass


def _serve_one(connection: Connection, host: Host) -> bool:
    """Answer a call; return False after CLOSE. Arguments and result, which may be large, are gone afterwards."""
    frame = connection.receive()
    if frame.kind == Kind.CLOSE:
        host.worker.close()
        return False
    method, args, kwargs = frame.value
    try:
        answer = host.call(method, args, kwargs)
        try:
            connection.send(Frame(Kind.OK, frame.number, value=answer))
        except MessageError as error:
            raise MessageError(f"the result can't be sent: {error.message}", error.hint) from error
    except PeerGoneError:
        raise
    except BaseException as error:  # noqa: BLE001 - process boundary: the parent raises it
        if ran_out_of_memory(error):  # the worker can't release its resources; the parent may start a new process
            traceback.print_exc()
            os._exit(OUT_OF_MEMORY)
        connection.send(Frame(Kind.RAISED, frame.number, value=describe_error(error, method)))
    return True


if __name__ == "__main__":
    main(int(sys.argv[1]))
