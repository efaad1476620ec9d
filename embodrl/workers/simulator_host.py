"""Simulators on machines without rollouts: env servers that the launcher starts there (docs/placement.md)."""

from __future__ import annotations

import os
import secrets
import socket
import threading
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

from embodrl.config.schema import Config
from embodrl.deployment import Deployment, ProcessPlace
from embodrl.deployment.solver import SIMULATORS
from embodrl.envs.env_server.server import TcpEnvServer
from embodrl.scheduler.group import WorkerGroup
from embodrl.scheduler.launchers.base import Launcher
from embodrl.scheduler.worker import Worker, dispatch
from embodrl.serving.wire import TOKEN_VARIABLE
from embodrl.workers.env import gpu_variables

_ROOM = 3
"""Simulators per placed one: evaluations may have others, and a replaced one takes a while to end."""


def own_address(driver: str) -> str:
    """Return this machine's address on its route to ``driver``, ``tcp://HOST:PORT``; nothing is sent."""
    url = urlsplit(driver)
    family, kind, protocol, _, target = socket.getaddrinfo(url.hostname, url.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as sock:
        sock.connect(target)
        return sock.getsockname()[0]


class SimulatorHost(Worker):
    """Serves simulators at the address of its machine, to those who know the token in ``EMBODRL_TOKEN``."""

    def __init__(self, driver: str, max_processes: int, extensions: tuple[str, ...], log_dir: str) -> None:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        os.environ.update(gpu_variables(ProcessPlace(SIMULATORS, self.rank, 0, visible=visible)))
        directory = Path(log_dir) / f"{SIMULATORS}_{self.rank}"
        address = own_address(driver)
        self._server = TcpEnvServer(address, 0, os.environ[TOKEN_VARIABLE], max_processes, extensions, directory)
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
    variables = {TOKEN_VARIABLE: secrets.token_urlsafe(24)}
    placed = [(env.node, env.devices) for env in deployment.of("env")]
    group = WorkerGroup(
        SimulatorHost,
        SIMULATORS,
        independent=True,
        driver=launcher.address(),
        max_processes=_ROOM * max(Counter(placed).values()),
        extensions=tuple(config.extensions),
        log_dir=str(log_dir.resolve()),
    )
    closing.callback(group.close)
    group.launch(hosts, launcher, log_dir=log_dir, variables=variables)
    found: list[str] = group.address().result()
    at = {(host.node, host.devices): address for host, address in zip(hosts, found, strict=True)}
    env = config.env.model_copy(update={"remote": tuple(at[place] for place in placed)})
    return config.model_copy(update={"env": env}), variables
