"""Frames between processes: inline and in memory files, with deadlines and prompt notice of a death."""

from __future__ import annotations

import array
import errno
import fcntl
import json
import os
import random
import resource
import signal
import socket
import struct
import time

import numpy as np
import pytest
import torch
from expect import open_descriptors, raises_code

from embodrl.errors import EmbodrlError, MessageError
from embodrl.processes.frames import (
    Connection,
    Frame,
    Kind,
    PeerGoneError,
    parse_frame,
    receive_now,
    socket_pair,
)
from embodrl.processes.memory_file import FIXED_SIZE, MemoryFile
from embodrl.scheduler.messages import CODEC, MAX_FILES

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


def test_a_memory_file_passes_on_without_being_read_and_closes_with_its_last_owner():
    before = open_descriptors()
    large = np.arange(1 << 16, dtype=np.uint8)
    file = MemoryFile.of([large[:3], large])
    first = exchange({"file": file, "small": torch.ones(2)})
    del file
    second = exchange([first["file"], first["file"]])
    del first
    assert second[1].num_bytes == 64 + large.nbytes and "memfd:embodrl-inputs" in str(open_descriptors())
    content = second[0].mapped()
    del second
    assert np.array_equal(np.frombuffer(content, np.uint8)[64:], large), "mapped memory needs no open file"
    del content
    assert not {name for _, name in open_descriptors() - before if "embodrl-inputs" in name}


def test_memory_files_pass_through_sockets_only_and_not_without_limit():
    file = MemoryFile.of([np.zeros(1, np.uint8)])
    assert CODEC.copied(file).num_bytes == 1
    with raises_code("message", MessageError):
        CODEC.encode(file)
    assert len(exchange([file] * MAX_FILES)) == MAX_FILES
    with raises_code("message", MessageError):
        exchange([file] * (MAX_FILES + 1))
    with raises_code("message", MessageError):
        CODEC.read_from(b'{"__file__": 0}', lambda *_: b"")


def test_frames_that_do_not_come_or_are_not_taken_time_out():
    ours, theirs = socket_pair()
    with ours, theirs:
        connection = Connection(ours)
        with pytest.raises(TimeoutError):
            connection.receive(time.monotonic() + 0.05)
        with pytest.raises(TimeoutError):
            while True:  # until the kernel's queue is full
                connection.send(Frame(Kind.STEP), time.monotonic() + 0.05)
        assert receive_now(theirs).kind == Kind.STEP  # frames are whole, whatever timed out


def test_a_death_is_noticed_though_a_grandchild_holds_the_socket_and_last_words_arrive():
    ours, theirs = socket_pair()
    end, alive = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(alive)
        if os.fork() == 0:  # inherits the socket, and lives until the test closes the pipe
            os.read(end, 1)
            os._exit(0)
        Connection(theirs).send(Frame(Kind.OK, value="last words"))
        os.kill(os.getpid(), signal.SIGKILL)
    theirs.close()
    pidfd = os.pidfd_open(child)
    connection = Connection(ours, peer_pidfd=pidfd)
    never = time.monotonic() + 250
    assert connection.receive(never).value == "last words"
    with pytest.raises(PeerGoneError):
        connection.receive(never)
    with pytest.raises(PeerGoneError):
        while True:
            connection.send(Frame(Kind.STEP), never)
    os.waitpid(child, 0)
    for descriptor in (pidfd, end, alive):
        os.close(descriptor)
    connection.close()


HEADER = struct.Struct("<BQQQQ")


def memory_file(content, size=None, seals=FIXED_SIZE):
    memory = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.pwrite(memory, content, 0)
    os.ftruncate(memory, len(content) if size is None else size)
    fcntl.fcntl(memory, fcntl.F_ADD_SEALS, seals)
    return memory


def captured(value):
    """The message and the content of the memory file that a value is sent as."""
    ours, theirs = socket_pair()
    with ours, theirs:
        Connection(ours).send(Frame(Kind.OK, 1, 4, value))
        data, ancillary, _, _ = theirs.recvmsg(1 << 16, socket.CMSG_SPACE(8))
    if not ancillary:
        return data, None
    descriptors = array.array("i", ancillary[0][2])
    content = os.pread(descriptors[0], 1 << 20, 0)
    os.close(descriptors[0])
    return data, content


def mutate(content, rng):
    """Overwrite, delete, repeat or insert some bytes."""
    changed = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 8))):
        at = rng.randrange(len(changed) + 1)
        kind = rng.randrange(5)
        if kind == 0:
            changed[at : at + 1] = rng.randbytes(1)
        elif kind == 1:
            changed[at : at + 8] = rng.choice((b"\xff" * 8, b"\0" * 8, b"[" * 8, b"9" * 8, b"-1e99999"))
        elif kind == 2:
            del changed[at : at + rng.randrange(1, 9)]
        elif kind == 3:
            changed[at:at] = changed[at : at + rng.randrange(1, 33)]
        else:
            changed[at:at] = rng.choice((b"]", b"}", b'"', b",", b"__ndarray__", b"null", b"NaN"))
    return bytes(changed)


def test_mutated_frames_are_read_or_refused_and_nothing_else():
    rng = random.Random(7)
    values = [
        None,
        {"text": "ü", "numbers": [1, 2.5, None, True], 3: (1, 2)},
        {"state": np.arange(12.0).reshape(3, 4), "raw": b"abc", "words": np.array(["a", "bcd"])},
        {"objects": np.array([[1, "x"]], dtype=object), "scalar": np.float32(2), "deep": [[[[[(1,)]]]]]},
    ]
    frames = [captured(value) for value in values]
    refused = 0
    for _ in range(4000):
        data, content = rng.choice(frames)
        in_memory = content is not None and rng.random() < 0.7
        descriptors = []
        if content is not None:
            descriptors.append(memory_file(mutate(content, rng) if in_memory else content))
        if in_memory and rng.random() < 0.9:  # a header that agrees with the changed size
            kind, number, argument, length, _ = HEADER.unpack(data)
            data = HEADER.pack(kind, number, argument, length, os.fstat(descriptors[0]).st_size)
        try:
            frame = parse_frame(data if in_memory else mutate(data, rng), descriptors)
            assert isinstance(frame.kind, Kind)
        except MessageError:
            refused += 1
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
    assert 1000 < refused < 4000


DEEP = b"[" * 200_000 + b"]" * 200_000
HUGE = json.dumps({"__ndarray__": ["<f8", [2**40], 0]}).encode()
WRAPS = json.dumps({"__ndarray__": ["<f8", [2**31, 2**33, 2**70], 0]}).encode()


@pytest.mark.parametrize(
    ("description", "words"),
    [
        (DEEP, "RecursionError"),
        (HUGE, "8796093022208 bytes at 0 announced"),
        (WRAPS, "announced"),
        (b'{"__ndarray__": ["<f8", [-1], 0]}', "negative size"),
        (b'{"__ndarray__": ["O", [1], 0]}', "refused"),
        (b'{"__bytes__": [-4, 4]}', "4 bytes at -4"),
        (b'{"__unknown__": 1}', "__unknown__"),
        (b"{", "JSON"),
    ],
)
def test_descriptions_that_announce_what_is_not_there_are_refused(description, words):
    memory = memory_file(description)
    try:
        header = HEADER.pack(Kind.OK, 0, 0, len(description), len(description))
        with raises_code("message", MessageError) as raised:
            parse_frame(header, [memory])
        assert words in raised.value.message
    finally:
        os.close(memory)


def test_memory_files_that_could_be_a_bus_error_are_refused():
    content = b"1".ljust(5000)
    header = HEADER.pack(Kind.OK, 0, 0, 1, 5000)
    cases = {
        "not sealed": memory_file(content, seals=0),
        "has 4096 bytes": memory_file(content, 4096),
        "of them written": memory_file(b"1", 5000),
        "not a memory file": os.open(os.devnull, os.O_RDONLY),
    }
    for words, memory in cases.items():
        with raises_code("message", MessageError) as raised:
            parse_frame(header, [memory])
        assert words in raised.value.message
        os.close(memory)
    whole = memory_file(content)
    assert parse_frame(header, [whole]).value == 1
    for descriptors in ([], [whole, whole]):
        with raises_code("message", MessageError):
            parse_frame(header, descriptors)
    os.close(whole)


@pytest.mark.parametrize(
    "message", [b"", b"\x10", HEADER.pack(99, 0, 0, 0, 0), HEADER.pack(16, 0, 0, 9, 0), b"x" * 9000]
)
def test_a_message_that_is_no_frame_is_refused_and_leaves_no_descriptor_open(message):
    ours, theirs = socket_pair()
    with ours, theirs:
        before = open_descriptors()
        memory = memory_file(b"1")
        ours.sendmsg([message], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [memory] * 3))])
        os.close(memory)
        with raises_code("message", MessageError):
            receive_now(theirs)
        ours.sendmsg([message])
        with raises_code("message", MessageError):
            receive_now(theirs)
        assert open_descriptors() <= before
        ours.close()
        with pytest.raises(PeerGoneError):
            receive_now(theirs)


def test_a_receiver_without_descriptors_does_not_blame_the_sender():
    ours, theirs = socket_pair()
    with ours, theirs:
        Connection(ours, CODEC).send(Frame(Kind.OK, value=VALUE))
        before, free = resource.getrlimit(resource.RLIMIT_NOFILE), os.dup(0)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, before[1]))
        try:
            with raises_code("open-files", EmbodrlError):
                receive_now(theirs, CODEC)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
