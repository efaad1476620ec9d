"""Process groups: on which address they listen, how long they wait, and who is blamed."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import Future, wait
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import psutil
import pytest
from expect import raises_code
from waiting_worker import WaitingWorker

from embodrl.errors import WorkerDied, WorkerError, WorkerRaised
from embodrl.hybrid_engines.process_groups import cause_of, loopback_only
from embodrl.scheduler.group import WorkerGroup
from embodrl.scheduler.launchers.inline import InlineLauncher
from embodrl.scheduler.launchers.process import ProcessLauncher

CALL_S = 240.0

LISTENING = """
    import socket, tempfile, threading, sys
    from pathlib import Path
    socket.sethostname(sys.argv[1])  # resolves to itself, as a host name of the local network does
    assert socket.gethostbyname(socket.gethostname()) == sys.argv[1]
    from embodrl.hybrid_engines.weight_sync.collective import SyncGroup
    groups = {}
    where = "file://" + tempfile.mkdtemp() + "/rendezvous"
    def join(rank):
        groups[rank] = SyncGroup(where, rank, 2)
    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    inodes = {str(found.readlink()) for found in Path("/proc/self/fd").iterdir() if found.is_symlink()}
    for line in open("/proc/net/tcp").read().splitlines()[1:]:
        field = line.split()
        if field[3] == "0A" and f"socket:[{field[9]}]" in inodes:  # listening
            print(socket.inet_ntoa(bytes.fromhex(field[1][:8])[::-1]))
"""


def test_groups_of_one_machine_listen_on_loopback_alone() -> None:
    """gloo takes the address that the host name resolves to: here, that of the network card."""
    cards = [a.address for found in psutil.net_if_addrs().values() for a in found if a.family == socket.AF_INET]
    address = next((address for address in cards if not address.startswith("127.")), None)
    own_name = ["unshare", "--user", "--map-root-user", "--uts"]
    if address is None or subprocess.run([*own_name, "true"], capture_output=True).returncode:
        pytest.skip("needs a network card, and unshare for a host name of its own")
    script = [sys.executable, "-c", textwrap.dedent(LISTENING), address]
    environ = {name: value for name, value in os.environ.items() if name != "GLOO_SOCKET_IFNAME"}
    done = subprocess.run([*own_name, *script], capture_output=True, text=True, env=environ, timeout=CALL_S)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() and set(done.stdout.split()) == {"127.0.0.1"}


def test_the_interface_is_chosen_for_the_groups_of_one_machine_only(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "GLOO_SOCKET_IFNAME"
    monkeypatch.delenv(name, raising=False)
    with loopback_only(True):
        assert os.environ[name] == "lo"
    assert name not in os.environ
    with loopback_only(False):
        assert name not in os.environ
    monkeypatch.setenv(name, "eth7")
    with loopback_only(True):
        assert os.environ[name] == "eth7"


@pytest.mark.long  # ten seconds of waiting
def test_a_process_that_does_not_take_part_is_blamed_and_not_the_one_that_waits(tmp_path: Path) -> None:
    launcher = ProcessLauncher()
    channels = {"go_on": launcher.channel("go_on", 2)}
    group = WorkerGroup(WaitingWorker, "actor", timeout_s=3.0)
    try:
        group.launch(2, launcher, channels, timeout_s=CALL_S)
        assert group.add(False).result(CALL_S) == [2.0, 2.0]
        call = group.add(True)
        with raises_code("worker-raised", WorkerRaised, "actor[0]", "Timed out") as caught:
            call.result(CALL_S)  # far below the default of gloo, 1800 s
        cause = cause_of(call, caught.value)
        assert (cause.rank, cause.code) == (1, "collective-timeout") and "rank 1 did not take part" in cause.message
    finally:
        group.kill()
        launcher.close()


@pytest.mark.parametrize("launcher_class", [InlineLauncher, ProcessLauncher])
def test_workers_find_each_other_after_the_temporary_directory_was_cleaned(
    launcher_class: type[InlineLauncher | ProcessLauncher], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    launcher = launcher_class()
    (cleaned,) = tmp_path.iterdir()
    cleaned.rmdir()
    file = Path(launcher.rendezvous("actor-1").removeprefix("file://"))
    assert (file.name, file.parent, cleaned.stat().st_mode & 0o777) == ("actor-1", cleaned, 0o700)
    launcher.close()
    assert not cleaned.exists()


def call_of(*answers: object) -> SimpleNamespace:
    """A call with these answers or errors by rank; None has not answered."""
    futures: dict[int, Future[object]] = {rank: Future() for rank in range(len(answers))}
    for future, answer in zip(futures.values(), answers, strict=True):
        if isinstance(answer, Exception):
            future.set_exception(answer)
        elif answer is not None:
            future.set_result(answer)
    return SimpleNamespace(futures=futures)


def test_the_cause_of_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = WorkerRaised("actor[0] raised RuntimeError in update: Connection closed by peer [127.0.0.1]", "", 0)
    own: WorkerError = WorkerRaised("actor[0] raised ValueError in update: no rows", "", 0)
    died = WorkerDied("actor[1] was killed", "", 1)
    assert cause_of(call_of(None, died), died) is died
    assert cause_of(call_of(lost, "done"), lost) is lost
    assert cause_of(call_of(own, None), own) is own, "the other one waits for it"
    monkeypatch.setattr("embodrl.hybrid_engines.process_groups._DEATH_S", 0.0)
    assert cause_of(call_of(lost, "done", None), lost).rank == 2


def test_a_death_that_is_known_after_the_connections_have_broken_is_the_cause() -> None:
    lost = WorkerRaised("actor[0] raised RuntimeError in update: Connection closed by peer [127.0.0.1]", "", 0)
    died = WorkerDied("actor[1] was killed", "", 1)
    call = call_of(lost, None)
    killed = threading.Thread(target=call.futures[1].set_exception, args=(died,))
    with mock.patch("embodrl.hybrid_engines.process_groups.wait", lambda *args: (killed.start(), wait(*args))[1]):
        assert cause_of(call, lost) is died
    killed.join()
