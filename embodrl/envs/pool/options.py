"""Options of an EnvManager: the time limits of its process, and the server that it is behind."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict


@dataclass(frozen=True)
class EnvTimeouts:
    """How long a simulator process may take, in seconds.

    Attributes:
        start_s: time from its start until it is ready.
        reset_s: a reset, a state transfer or a call.
        step_s: a chunk.
        heartbeat_s: time without a heartbeat, while it is stopped or uses neither processor nor disk.
    """

    start_s: float = 180.0
    reset_s: float = 60.0
    step_s: float = 60.0
    heartbeat_s: float = 20.0

    def longer_by(self, seconds: float) -> EnvTimeouts:
        """Return the limits of who waits for these on a connection that may be away for so long."""
        # Not the heartbeat, which is that of the relay on this machine and goes over no connection.
        return EnvTimeouts(self.start_s + seconds, self.reset_s + seconds, self.step_s + seconds, self.heartbeat_s)


@dataclass(frozen=True)
class RemoteEnv:
    """A simulator process behind an env server; see ``EnvServerSpec``.

    Attributes:
        address: address of the server, ``tcp://HOST:PORT``.
        reconnect_s: how long the connection may be away before the simulator counts as lost.
        python: "auto" for the interpreter of `embodrl env install` there; None for the server's own.
        pin_cpus: the server binds the process to a core.
        timeouts: time limits that the server applies.
        session: names the simulator; a restarted one takes the place of the one of the same name.
    """

    address: str
    reconnect_s: float = 60.0
    python: str | None = None
    pin_cpus: bool = True
    timeouts: EnvTimeouts = EnvTimeouts()
    # Random, so that two runs on one server never take each other's simulators.
    session: str = field(default_factory=lambda: secrets.token_hex(16))

    @property
    def scheme(self) -> str:
        """Of the address: which kind of server it is."""
        return self.address.partition("://")[0]


class ManagerOptions(TypedDict, total=False):
    """Keyword arguments of every ``EnvManager`` of a pool."""

    python: str | None
    timeouts: EnvTimeouts | None
    log_dir: Path | None
    max_chunk: int | None
    extensions: Sequence[str]
    axis: str | None
    real_time: Mapping[str, object] | None
    environ: Mapping[str, str] | None
    debug: bool


class ProcessOptions(ManagerOptions, total=False):
    """Those, and what differs from manager to manager; see ``EnvManager``."""

    cpu: int | None
    numa_node: int | None
    remote: RemoteEnv | None
