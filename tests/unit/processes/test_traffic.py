"""Bytes between processes, and which component a process belongs to."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import numpy as np
import pytest

from embodrl.processes.frames import Connection, Frame, Kind, socket_pair
from embodrl.processes.guard import VARIABLE
from embodrl.processes.traffic import Traffic, kind_of, totals
from embodrl.processes.tree import ProcessTree, component_of

HEADER_BYTES = 1 + 4 * 8


def test_bytes_of_frames_are_counted_for_their_link_at_both_ends() -> None:
    ours, theirs = socket_pair()
    with ours, theirs:
        sender, receiver = Connection(ours, link="sender"), Connection(theirs, link="receiver")
        sender.send(Frame(Kind.CLOSE))
        sender.send(Frame(Kind.CLOSE))
        receiver.receive(time.monotonic() + 5)
        found = totals()
        assert found["sender"] == Traffic(2 * HEADER_BYTES, 0)
        assert found["receiver"] == Traffic(0, HEADER_BYTES)
        receiver.receive(time.monotonic() + 5)
        sender.send(Frame(Kind.OK, value=np.zeros(1 << 20, np.uint8)))  # in a memory file
        receiver.receive(time.monotonic() + 5)
    sent = totals()["sender"].sent - 2 * HEADER_BYTES
    assert (1 << 20) + HEADER_BYTES < sent < (1 << 20) + 2048
    assert totals()["receiver"].received == totals()["sender"].sent
    assert "" not in totals()


@pytest.mark.parametrize(
    ("name", "component"),
    [
        ("env_3", "env"),
        ("actor[0]", "actor"),
        ("rollout[1]", "rollout"),
        ("rollout[1]/env_0", "env"),
        ("rollout[1]/lerobot", "rollout"),
        ("lerobot", "main"),
        ("evaluation[0]/env_0", "eval"),
        ("python", "main"),
    ],
)
def test_a_process_belongs_to_the_component_of_its_place_in_the_family(name: str, component: str) -> None:
    assert component_of(name) == component


def test_kinds_are_the_letters_of_names() -> None:
    assert [kind_of(name) for name in ("env/12", "rollout[0]", "lerobot", "")] == ["env", "rollout", "lerobot", ""]


def test_the_tree_finds_processes_that_start_and_end() -> None:
    tree = ProcessTree(search_s=0.0)
    assert set(tree.look()) == {"main"}
    environ = os.environ | {VARIABLE: "1-ab/env_0.7"}
    script = "import time\nwhile time.process_time() < 0.2: pass\nprint(flush=True)\ninput()"
    command = [sys.executable, "-S", "-c", script]
    child = subprocess.Popen(command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        child.stdout.readline()
        found = tree.look()
        assert set(found) == {"main", "env"}
        assert found["env"].cpu_s >= 0.15 and found["env"].resident_bytes > 1 << 20
        assert 0 <= tree.look()["env"].cpu_s < 0.15  # since the look before
    finally:
        child.communicate("\n")
    assert set(tree.look()) == {"main"}
