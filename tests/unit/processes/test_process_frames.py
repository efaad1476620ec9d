"""Frames between processes: inline and in memory files, with deadlines and prompt notice of a death."""

from __future__ import annotations

import errno
import os
import signal
import time

import numpy as np
import pytest
import torch
from expect import raises_code

from embodrl.errors import MessageError
from embodrl.processes.frames import Connection, Frame, Kind, PeerGoneError, receive_now, socket_pair
from embodrl.scheduler.messages import CODEC

VALUE = {"weights": torch.arange(5000.0), "empty": np.zeros(0, np.uint8), "rows": np.arange(35, dtype=np.int16)}


def exchange(value):
    ours, theirs = socket_pair()
    with ours, theirs:
        Connection(ours, CODEC).send(Frame(Kind.OK, 7, 3, value))
        frame = Connection(theirs, CODEC).receive(time.monotonic() + 5)
    assert (frame.kind, frame.number, frame.argument) == (Kind.OK, 7, 3)
    return frame.value


def assert_arrived(found):
    assert found.keys() == VALUE.keys()
    assert torch.equal(found["weights"], VALUE["weights"])
    for name in ("empty", "rows"):
        assert found[name].dtype == VALUE[name].dtype and np.array_equal(found[name], VALUE[name])


def test_tensors_and_arrays_arrive():
    assert_arrived(exchange(VALUE))


@pytest.mark.parametrize("value", [None, 0, "", "x" * 1015, "x" * 1024, "x" * 100_000, [], {}])
def test_values_of_any_size_arrive(value):
    assert exchange(value) == value


def test_what_the_system_takes_in_parts_arrives_whole(monkeypatch):
    pwrite, sizes = os.pwrite, []

    def a_part(memory, content, offset):
        sizes.append(len(content))
        return pwrite(memory, content[:999], offset)

    monkeypatch.setattr(os, "pwrite", a_part)
    assert_arrived(exchange(VALUE))
    assert 20000 in sizes and 20000 - 999 in sizes


def test_a_full_memory_is_an_error_and_keeps_no_file_open(monkeypatch):
    def full(*_args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    closed, close = [], os.close
    monkeypatch.setattr(os, "pwrite", full)
    monkeypatch.setattr(os, "close", lambda descriptor: (closed.append(descriptor), close(descriptor)))
    with raises_code("message", MessageError):
        exchange(VALUE)
    assert len(closed) == 1


def test_frames_that_do_not_come_or_are_not_taken_time_out():
    ours, theirs = socket_pair()
    with ours, theirs:
        connection = Connection(ours)
        start = time.monotonic()
        with pytest.raises(TimeoutError):
            connection.receive(start + 0.05)
        with pytest.raises(TimeoutError):
            while True:  # until the kernel's queue is full
                connection.send(Frame(Kind.STEP), time.monotonic() + 0.05)
        assert time.monotonic() - start < 2
        assert receive_now(theirs).kind == Kind.STEP  # frames are whole, whatever timed out


def test_a_death_is_noticed_though_a_grandchild_holds_the_socket_and_last_words_arrive():
    ours, theirs = socket_pair()
    child = os.fork()
    if child == 0:
        if os.fork() == 0:  # inherits the socket, and outlives the child
            time.sleep(5)
            os._exit(0)
        Connection(theirs).send(Frame(Kind.OK, value="last words"))
        os.kill(os.getpid(), signal.SIGKILL)
    theirs.close()
    pidfd = os.pidfd_open(child)
    connection = Connection(ours, peer_pidfd=pidfd)
    start = time.monotonic()
    assert connection.receive(start + 4).value == "last words"
    with pytest.raises(PeerGoneError):
        connection.receive(start + 4)
    with pytest.raises(PeerGoneError):
        while True:
            connection.send(Frame(Kind.STEP), start + 4)
    assert time.monotonic() - start < 2
    os.waitpid(child, 0)
    os.close(pidfd)
    connection.close()
