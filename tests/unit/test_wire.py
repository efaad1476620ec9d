"""Large messages in memory files."""

from __future__ import annotations

import errno
import os

import numpy as np
import pytest
import torch

from embodrl.errors import MessageError
from embodrl.scheduler import wire

VALUE = {"weights": torch.arange(5000.0), "empty": np.zeros(0, np.uint8), "rows": np.arange(35, dtype=np.int16)}


def exchange(value):
    ours, theirs = wire.socket_pair()
    with ours, theirs:
        wire.send(ours, wire.Kind.OK, 7, value)
        message = wire.receive(theirs)
    assert (message.kind, message.call) == (wire.Kind.OK, 7)
    return message.value


def assert_arrived(found):
    assert found.keys() == VALUE.keys()
    assert torch.equal(found["weights"], VALUE["weights"])
    for name in ("empty", "rows"):
        assert found[name].dtype == VALUE[name].dtype and np.array_equal(found[name], VALUE[name])


def test_tensors_and_arrays_arrive():
    assert_arrived(exchange(VALUE))


def test_what_the_system_takes_in_parts_arrives_whole(monkeypatch):
    pwrite, sizes = os.pwrite, []

    def a_part(memory, content, offset):
        sizes.append(len(content))
        return pwrite(memory, content[:999], offset)

    monkeypatch.setattr(os, "pwrite", a_part)
    assert_arrived(exchange(VALUE))
    assert 20000 in sizes and 20000 - 999 in sizes


def test_a_full_memory_is_told_and_keeps_no_file_open(monkeypatch):
    def full(*_args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    closed, close = [], os.close
    monkeypatch.setattr(os, "pwrite", full)
    monkeypatch.setattr(os, "close", lambda descriptor: (closed.append(descriptor), close(descriptor)))
    with pytest.raises(MessageError, match="no 0 MiB of memory for a message"):
        exchange(VALUE)
    assert len(closed) == 1
