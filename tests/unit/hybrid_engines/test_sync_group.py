"""Processes of a collective weight sync that meet, or learn that the group failed."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch
from expect import raises_code

from embodrl.errors import IncompleteSyncError, WorkerDied
from embodrl.hybrid_engines.weight_sync.collective import SyncGroup, cancel_rendezvous, open_rendezvous
from embodrl.scheduler.launchers.base import free_port

LONG_S = 300.0


@pytest.fixture(params=["tcp", "file"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"file://{tmp_path}/meeting" if request.param == "file" else f"tcp://127.0.0.1:{free_port('127.0.0.1')}"


def test_who_waits_is_notified_that_another_has_died(address: str) -> None:
    """Of two receivers one never comes: the sender gives up as soon as it knows, and the other with it."""
    connected = threading.Event()

    def check() -> None:
        if connected.is_set():
            raise WorkerDied("rollout[1] was killed")

    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(SyncGroup, address, 1, 3, connect_s=LONG_S, check=connected.set)
        with pytest.raises(WorkerDied):
            SyncGroup(address, 0, 3, connect_s=LONG_S, check=check)
        with raises_code("incomplete-sync", IncompleteSyncError):
            waiting.result(LONG_S / 10)


def test_a_meeting_that_was_called_off_before_it_began(address: str) -> None:
    rendezvous = open_rendezvous(address, 2)
    cancel_rendezvous(rendezvous)
    with raises_code("incomplete-sync", IncompleteSyncError):
        SyncGroup(address, 1, 2, connect_s=LONG_S)


def test_no_process_at_the_address() -> None:
    with raises_code("incomplete-sync", IncompleteSyncError):
        SyncGroup(f"tcp://127.0.0.1:{free_port('127.0.0.1')}", 1, 2, connect_s=LONG_S, find_s=1.0)


def test_leaving_wakes_those_who_wait_within_a_sync(address: str) -> None:
    """One that has given up a sync says so by leaving, though its process lives on."""
    with ThreadPoolExecutor(2) as threads:
        groups = [threads.submit(SyncGroup, address, rank, 2, timeout_s=LONG_S) for rank in range(2)]
        sender, receiver = (group.result(LONG_S) for group in groups)
        assert threads.submit(receiver.all_agree, True) and sender.all_agree(True)
        waiting = threads.submit(receiver.broadcast, torch.empty(4, dtype=torch.uint8))
        sender.close()
        with raises_code("incomplete-sync", IncompleteSyncError):
            waiting.result(LONG_S / 10)
    assert receiver.broken
    with raises_code("incomplete-sync", IncompleteSyncError):
        receiver.describe()


def test_the_sender_listens_at_its_address_alone() -> None:
    port = free_port("127.0.0.1")
    rendezvous = open_rendezvous(f"tcp://127.0.0.1:{port}", 2)
    listening = [c.laddr.ip for c in psutil.Process().net_connections("tcp") if c.laddr.port == port and not c.raddr]
    assert listening == ["127.0.0.1"]
    with raises_code("incomplete-sync", IncompleteSyncError):
        open_rendezvous(f"tcp://127.0.0.1:{port}", 2)
    del rendezvous
