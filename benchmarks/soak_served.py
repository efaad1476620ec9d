"""A soak of policy servers: clients of three protocols against two `embodrl serve`, which get faults at random.

    python benchmarks/soak_served.py --minutes 20 [--output DIR]

Both servers have the same policy, and clients know its answers. ``mortal`` is killed (SIGKILL) and started again, or
told to end (SIGTERM) and started again; ``spared`` lives all the time, so that its memory tells. Both are stopped for
seconds (SIGSTOP), slowed down, lose connections, and get clients that send garbage, leave before their answer, or never
read. Clients are those of ``model=remote``: a request that a fault has cut short is asked again. Every request has to
be answered, with the right actions, or to end with a named error where a server was stopped for too long.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import os
import random
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from fault_matrix import inflict
from hardware import describe_hardware
from soak_verdict import Check, growth

from embodrl.errors import RemotePolicyError
from embodrl.models.remote_policy.spec import RemoteConfig, client_of
from embodrl.serving.wire import TOKEN_VARIABLE
from embodrl.serving.wire.clients import Client
from embodrl.storage.json_file import write_json_file
from embodrl.types import Observation

HERE = Path(__file__).parent
PROTOCOLS = ("openpi", "http", "gr00t")
SCHEMES = {"openpi": "ws", "http": "http", "gr00t": "tcp"}
READY_S, END_S, RECONNECT_S = 900.0, 60.0, 900.0
STOPPED_S, SLOW_S, LONG_S = (2.0, 10.0), 10.0, 45.0
MIB, SAMPLE_S, WARM_UP, MAX_GROWTH = 1 << 20, 5.0, 0.25, 0.05
CLIENTS_PER_PROTOCOL, OBSERVATIONS, PAUSE_S = 2, 8, (0.1, 1.0)
TOLERANCE = 1e-4
"""Of actions: the same observation in batches of other sizes."""
FAULTS = {
    "mortal": ("kill", "term", "stop", "slow", "disconnect", "rude"),
    "spared": ("stop", "slow", "disconnect", "rude"),
}
_PIDFD_GETFD = 438


class Server:
    """`embodrl serve` with the smallest policy, at the same addresses in each of its lives.

    Args:
        name: of its log.
        output: directory for the log.
        token: that clients need.
        settings: further ones.
    """

    def __init__(self, name: str, output: Path, token: str, *settings: str) -> None:
        self.name, self.lives = name, 0
        self.port = free_ports(len(PROTOCOLS))
        settings = (
            *settings,
            *("env=toy", "env.cameras=[{height:16,width:16}]", f"protocol={','.join(PROTOCOLS)}"),
            *(f"serve.port={self.port}", f"serve.token={token}"),
        )
        config = str(HERE / "smallest_run.yaml")
        self._command = [sys.executable, "-m", "embodrl", "serve", "--config", config, *settings]
        self._log = output / f"{name}.log"
        self.process: subprocess.Popen[bytes] | None = None

    def url(self, protocol: str) -> str:
        """Return the address of a protocol."""
        return f"{SCHEMES[protocol]}://127.0.0.1:{self.port + PROTOCOLS.index(protocol)}"

    def start(self) -> None:
        """Begin a life; it is not ready yet."""
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                self._command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1"}
            )
        self.lives += 1

    async def ready(self) -> None:
        """Wait until all protocols listen.

        Raises:
            TimeoutError: they do not.
        """
        deadline = time.monotonic() + READY_S
        while self._log.read_text().splitlines().count("ready") < self.lives:
            if time.monotonic() > deadline or self.of.poll() is not None:
                raise TimeoutError(f"{self.name} is not ready: {self._log.read_text()[-2000:]}")
            await asyncio.sleep(0.2)

    @property
    def of(self) -> subprocess.Popen[bytes]:
        """Its process."""
        assert self.process is not None
        return self.process

    async def end(self, number: int) -> int | None:
        """Send a signal and wait for the end; return the exit code, None if it had to be killed."""
        self.of.send_signal(number)
        deadline = time.monotonic() + END_S
        while self.of.poll() is None and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        code = self.of.poll()
        if code is None:
            self.of.kill()
            self.of.wait()
        return code


def free_ports(number: int) -> int:
    """Return the first of so many ports in a row that nothing listens at."""
    while True:
        first = random.SystemRandom().randrange(20_000, 32_000)
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + number):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            return first


@dataclass
class Ledger:
    """What became of the requests.

    Attributes:
        asked: that clients made.
        answered: with the right actions.
        wrong: with others.
        errors: by code.
        longest_s: from the request to its answer or error.
    """

    asked: int = 0
    answered: int = 0
    wrong: int = 0
    errors: Counter[str] = field(default_factory=Counter[str])
    longest_s: float = 0.0


class Customer:
    """A client that asks one observation after the other; its answers are compared with the first ones of all.

    Args:
        server: that it asks.
        protocol: that it speaks.
        expected: answers by observation, which the first client fills.
        ledger: of all clients of the server.
    """

    def __init__(self, server: Server, protocol: str, expected: dict[int, Any], ledger: Ledger) -> None:
        self.expected, self.ledger = expected, ledger
        content = {"model_type": "remote", "warm_start": None, "url": server.url(protocol), "num_action_chunks": 3}
        self._config = RemoteConfig.model_validate(content | {"reconnect_timeout_s": RECONNECT_S})
        self._client: Client | None = None

    async def ask(self, number: int) -> None:
        """Ask about an observation and enter what came of it."""
        self.ledger.asked += 1
        start = time.monotonic()
        try:
            client = self._client = self._client or await self._connected()
            found = (await client.act(observation(number)))[0]
        except RemotePolicyError as error:
            self.ledger.errors[error.code or "none"] += 1
            await self.leave()
        else:
            wanted = self.expected.setdefault(number, found)
            is_right = found.shape == wanted.shape and np.allclose(found, wanted, rtol=0, atol=TOLERANCE)
            self.ledger.answered += is_right
            self.ledger.wrong += not is_right
        self.ledger.longest_s = max(self.ledger.longest_s, time.monotonic() - start)

    async def _connected(self) -> Client:
        """Return a client; only one that is connected waits for a server that is away."""
        deadline = time.monotonic() + RECONNECT_S
        while True:
            client = client_of(self._config)
            try:
                await client.connect()
            except RemotePolicyError:
                await client.close()
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(1)
            else:
                return client

    async def leave(self) -> None:
        """End the connection."""
        if self._client is not None:
            await self._client.close()
        self._client = None


def observation(number: int) -> Observation:
    """Return one of ``OBSERVATIONS`` observations ``[1]``."""
    images = np.random.default_rng(number).integers(0, 255, (1, 1, 16, 16, 3), np.uint8)
    return Observation(images, np.zeros((1, 0), np.float32), [f"push {number}"], np.zeros(1, np.int32))


async def rude(server: Server, dice: random.Random, abandoned: Counter[str]) -> str:
    """Be a client as none should be, for a moment; return which."""
    kind = dice.choice(("garbage", "leaves", "never reads"))
    with contextlib.suppress(OSError, asyncio.IncompleteReadError):
        _, writer = await asyncio.open_connection("127.0.0.1", server.port + dice.randrange(len(PROTOCOLS)))
        if kind == "garbage":
            writer.write(dice.randbytes(dice.randrange(1, 50_000)))
        else:
            body = b"x" * 1000
            token = os.environ[TOKEN_VARIABLE]
            head = (
                f"POST /act HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\nContent-Length: {len(body)}\r\n\r\n"
            )
            for _ in range(1 if kind == "leaves" else 200):
                writer.write(head.encode() + body)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(writer.drain(), 1)
        if kind == "never reads":
            await asyncio.sleep(3)
        writer.transport.abort()
    abandoned[kind] += 1
    return kind


def connections(server: Server) -> list[int]:
    """Return the descriptors of a server's connections."""
    found = psutil.Process(server.of.pid).net_connections("tcp")
    return [one.fd for one in found if one.status == psutil.CONN_ESTABLISHED]


def shut_down(server: Server, descriptor: int) -> bool:
    """Shut down a connection; return whether it was there."""
    pidfd = os.pidfd_open(server.of.pid)
    try:
        taken = ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_GETFD, pidfd, descriptor, 0)
    finally:
        os.close(pidfd)
    if taken < 0:
        return False
    with socket.socket(fileno=taken) as shared:
        shared.shutdown(socket.SHUT_RDWR)
    return True


class ServedSoak:
    """Two servers, their clients and their faults.

    Args:
        output: new directory.
        minutes: how long.
        fault_every_s: mean time between two faults of a server.
        seed: of the faults.
    """

    def __init__(self, output: Path, minutes: float, fault_every_s: float, seed: int) -> None:
        self.output, self.minutes, self.every = output, minutes, fault_every_s
        self.dice = random.Random(seed)
        os.environ[TOKEN_VARIABLE] = token = secrets.token_urlsafe(16)
        self.servers = {name: Server(name, output, token) for name in FAULTS}
        self.ledgers = {name: Ledger() for name in FAULTS}
        self.faults: list[tuple[float, str]] = []
        self.samples: list[dict[str, float]] = []
        self.rude: Counter[str] = Counter()
        self.bad_codes: list[str] = []
        self._start = time.monotonic()
        self._is_over = asyncio.Event()

    async def run(self) -> None:
        """Soak, until the time is over; all processes end."""
        try:
            for server in self.servers.values():
                server.start()
            for server in self.servers.values():
                await server.ready()
            expected: dict[int, Any] = {}
            first = Customer(self.servers["spared"], "http", expected, Ledger())
            for number in range(OBSERVATIONS):
                await first.ask(number)
            await first.leave()
            self._start = time.monotonic()
            visits = [
                asyncio.create_task(self._visit(Customer(server, protocol, expected, self.ledgers[name])))
                for name, server in self.servers.items()
                for protocol in PROTOCOLS * CLIENTS_PER_PROTOCOL
            ]
            trouble = [asyncio.create_task(self._trouble(name)) for name in self.servers]
            sampling = asyncio.create_task(self._sample())
            await asyncio.sleep(60 * self.minutes)
            self._is_over.set()
            await asyncio.gather(*trouble, sampling)
            await asyncio.gather(*visits)
            for name, server in self.servers.items():
                if (code := await server.end(signal.SIGTERM)) != 0:
                    self.bad_codes.append(f"{name} ended with {code}")
        finally:
            for server in self.servers.values():
                if server.process is not None and server.process.poll() is None:
                    server.process.kill()
                    server.process.wait()

    async def _visit(self, customer: Customer) -> None:
        while not self._is_over.is_set():
            await customer.ask(self.dice.randrange(OBSERVATIONS))
            await asyncio.sleep(self.dice.uniform(*PAUSE_S))
        await customer.leave()

    async def _trouble(self, name: str) -> None:
        while not await self._over_within(self.dice.uniform(0.5, 1.5) * self.every):
            fault = self.dice.choice(FAULTS[name])
            with contextlib.suppress(psutil.Error):
                if done := await self._fault(self.servers[name], fault):
                    self.faults.append((round(time.monotonic() - self._start, 1), f"{name}: {done}"))

    async def _over_within(self, seconds: float) -> bool:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._is_over.wait(), seconds)
        return self._is_over.is_set()

    async def _fault(self, server: Server, fault: str) -> str:
        process = psutil.Process(server.of.pid)
        if fault == "rude":
            return await rude(server, self.dice, self.rude)
        if fault == "disconnect":
            there = connections(server)
            return fault if there and shut_down(server, self.dice.choice(there)) else ""
        if fault == "slow":
            over = threading.Event()
            inflict("slow", process, False, over)
            await asyncio.sleep(SLOW_S)
            over.set()
            await asyncio.sleep(1)
            process.resume()
        elif fault == "stop":
            is_long = self.dice.random() < 0.2
            process.suspend()
            await asyncio.sleep(LONG_S if is_long else self.dice.uniform(*STOPPED_S))
            process.resume()
            return "stop, longer than clients wait" if is_long else fault
        else:
            code = await server.end(signal.SIGKILL if fault == "kill" else signal.SIGTERM)
            if code != (-signal.SIGKILL if fault == "kill" else 0):
                self.bad_codes.append(f"{server.name} ended with {code} after {fault}")
            await asyncio.sleep(self.dice.uniform(0, 5))
            server.start()
            await server.ready()
        return fault

    async def _sample(self) -> None:
        spared, own = psutil.Process(self.servers["spared"].of.pid), psutil.Process()
        while not await self._over_within(SAMPLE_S):
            self.samples.append(
                {
                    "time_s": round(time.monotonic() - self._start, 1),
                    "server_mib": round(spared.memory_full_info().uss / MIB, 2),
                    "server_fds": spared.num_fds(),
                    "server_threads": spared.num_threads(),
                    "clients_mib": round(own.memory_full_info().uss / MIB, 2),
                }
            )

    def judge(self) -> list[Check]:
        """Return all checks."""
        checks = [Check("servers end with 0 after SIGTERM", not self.bad_codes, "; ".join(self.bad_codes) or "all")]
        long = Counter(what.partition(":")[0] for _, what in self.faults if "longer" in what)
        for name, ledger in self.ledgers.items():
            errors = sum(ledger.errors.values())
            is_exact = ledger.asked == ledger.answered + errors and not ledger.wrong
            text = (
                f"{ledger.asked} asked, {ledger.answered} answered, {ledger.wrong} wrong, errors {dict(ledger.errors)}"
            )
            text += f"; the longest took {ledger.longest_s:.0f} s"
            # A server that is stopped for longer than clients wait costs each of them a request.
            most = long[name] * len(PROTOCOLS) * CLIENTS_PER_PROTOCOL
            is_named = set(ledger.errors) <= {"remote-unreachable"} and errors <= most
            checks.append(Check(f"requests to {name}", is_exact and is_named and ledger.answered > 0, text))
        after = [one for one in self.samples if one["time_s"] >= WARM_UP * self.samples[-1]["time_s"]]
        for key, text in (
            ("server_mib", "memory of the server that is spared"),
            ("clients_mib", "memory of the clients"),
        ):
            values = [one[key] for one in after]
            grown = growth(values) if len(values) >= 6 else float("inf")
            found = f"{values[0]:.1f} -> {values[-1]:.1f} MiB, {grown:+.1%}; at most {MAX_GROWTH:+.0%}"
            checks.append(Check(text, grown <= MAX_GROWTH, found))
        threads = [one["server_threads"] for one in after]
        most_fds = max(one["server_fds"] for one in after)
        checks.append(Check("threads of that server", threads[-1] <= threads[0], f"{threads[0]} -> {threads[-1]}"))
        checks.append(
            Check("its open files", after[-1]["server_fds"] <= after[0]["server_fds"] + 4, f"at most {most_fds}")
        )
        return checks


def main() -> int:
    """Soak, judge, write ``soak.json``; return 0 if everything was as it should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=120.0, help="how long")
    parser.add_argument("--fault-every-s", type=float, default=20.0, help="mean time between two faults of a server")
    parser.add_argument("--seed", type=int, default=0, help="of the faults")
    parser.add_argument("--output", type=Path, help="new directory; by default outputs/soak-served-<date and time>")
    given = parser.parse_args()
    output: Path = given.output or Path("outputs") / time.strftime("soak-served-%Y%m%d-%H%M%S")
    output.mkdir(parents=True)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # leaves nothing behind
    soak = ServedSoak(output, given.minutes, given.fault_every_s, given.seed)
    asyncio.run(soak.run())
    checks = soak.judge()
    counted = Counter(what for _, what in soak.faults)
    content = {
        "passed": all(check.passed for check in checks),
        "minutes": given.minutes,
        "faults": dict(sorted(counted.items())),
        "lives": {name: server.lives for name, server in soak.servers.items()},
        "checks": [asdict(check) for check in checks],
        "hardware": describe_hardware(),
        "samples": soak.samples,
        "faults_at_s": soak.faults,
    }
    write_json_file(output / "soak.json", content)
    print(f"{given.minutes:g} minutes, {len(soak.faults)} faults: {dict(sorted(counted.items()))}")
    for check in checks:
        print(f"{'ok    ' if check.passed else 'FAILED'} {check.name}: {check.found}")
    return 0 if content["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
