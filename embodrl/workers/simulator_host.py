"""Simulators on machines without rollouts: env servers that the launcher starts there (docs/placement.md)."""

from __future__ import annotations

import os
import secrets
import socket
import threading
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

from embodrl.config.schema import Config
from embodrl.deployment import Deployment, ProcessPlace
from embodrl.deployment.solver import SIMULATORS
from embodrl.envs.env_server.server import SimulatorSettings, TcpEnvServer
from embodrl.scheduler.group import WorkerGroup
from embodrl.scheduler.launchers.base import Launcher
from embodrl.scheduler.worker import Worker, dispatch
from embodrl.serving.wire import HOSTS_TOKEN_VARIABLE
from embodrl.workers.env import gpu_variables

_ROOM = 6
"""Simulators per placed one: evaluations may have others, and lost ones stay until their run can't come back."""


def own_address(driver: str) -> str:
    """Return this machine's address on its route to ``driver``, ``tcp://HOST:PORT``; nothing is sent."""
    host, _, port = driver.removeprefix("tcp://").rpartition(":")
    family, kind, protocol, _, target = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as sock:
        sock.connect(target)
        return sock.getsockname()[0]


class SimulatorHost(Worker):
    """Serves simulators at the address of its machine, to those who know the token in ``EMBODRL_HOSTS_TOKEN``.

    Args:
        driver: the driver's address, ``tcp://HOST:PORT``.
        max_processes: simulators at a time.
        extensions: modules that they import first.
        log_dir: directory for their output.
        cores: CPU and NUMA node of the simulators of each host, as placed.
    """

    def __init__(
        self,
        driver: str,
        max_processes: int,
        extensions: tuple[str, ...],
        log_dir: str,
        cores: tuple[tuple[tuple[int | None, int | None], ...], ...],
    ) -> None:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        os.environ.update(gpu_variables(ProcessPlace(SIMULATORS, self.rank, 0, visible=visible)))
        directory = Path(log_dir) / f"{SIMULATORS}_{self.rank}"
        address = own_address(driver)
        token = os.environ[HOSTS_TOKEN_VARIABLE]
        mine = cores[self.rank]
        known = os.sched_getaffinity(0)  # another machine than the driver's may have others
        places = mine if all(cpu in known for cpu, _ in mine) else None
        settings = SimulatorSettings(extensions, directory, places, runs_code=True)
        self._server = TcpEnvServer(address, 0, token, max_processes, settings)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._server.run, args=(self._stop.is_set,), name="env-server")
        self._thread.start()

    @dispatch()
    def address(self) -> str:
        """Return the server's address."""
        return self._server.address

    def close(self) -> None:
        """End the simulators."""
        self._stop.set()
        self._thread.join()


def host_simulators(
    config: Config, deployment: Deployment, launcher: Launcher, log_dir: Path, closing: ExitStack
) -> tuple[Config, dict[str, str]]:
    """Start the servers of simulators away from their rollout processes.

    Returns:
        The configuration with their addresses, one for each simulator, and the variables with the token, which is drawn
        for this run and never written.

    Raises:
        WorkerError: a server could not be started.
    """
    hosts = deployment.simulator_hosts
    variables = {HOSTS_TOKEN_VARIABLE: secrets.token_urlsafe(24)}
    envs = deployment.of("env")
    placed = [(env.node, env.devices) for env in envs]
    cores = [
        tuple(
            (next(iter(env.cpus), None), env.numa_node)
            for env in envs
            if (env.node, env.devices) == (host.node, host.devices)
        )
        for host in hosts
    ]
    group = WorkerGroup(
        SimulatorHost,
        SIMULATORS,
        independent=True,
        driver=launcher.address(),
        max_processes=_ROOM * max(Counter(placed).values()),
        extensions=tuple(config.extensions),
        log_dir=str(log_dir.resolve()),
        cores=tuple(cores),
    )
    closing.callback(group.close)
    group.launch(hosts, launcher, log_dir=log_dir, variables=variables)
    found: list[str] = group.address().result()
    at = {(host.node, host.devices): address for host, address in zip(hosts, found, strict=True)}
    env = config.env.model_copy(update={"remote": tuple(at[place] for place in placed)})
    return config.model_copy(update={"env": env}), variables
