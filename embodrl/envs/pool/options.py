"""Options of an EnvManager: time limits of its process, and the remote server it uses."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict


@dataclass(frozen=True)
class EnvTimeouts:
    """Time limits of a simulator process, in seconds.

    Attributes:
        start_s: from its start until it is ready.
        reset_s: a reset, a state transfer or a call.
        step_s: a chunk.
        heartbeat_s: without a heartbeat, while it is stopped or uses neither processor nor disk.
    """

    start_s: float = 180.0
    reset_s: float = 60.0
    step_s: float = 60.0
    heartbeat_s: float = 20.0

    def longer_by(self, seconds: float) -> EnvTimeouts:
        """Return the limits for waiting across a connection that may be cut for ``reconnect_s``."""
        # Not the heartbeat: the local relay sends it, not over the connection.
        return EnvTimeouts(self.start_s + seconds, self.reset_s + seconds, self.step_s + seconds, self.heartbeat_s)


@dataclass(frozen=True)
class RemoteEnv:
    """A simulator process behind an env server; see ``EnvServerSpec``.

    Attributes:
        reconnect_s: how long the connection may be cut before the simulator counts as lost.
        python: "auto" for the interpreter of `embodrl env install` on the server; None for the server's own.
        pin_cpus: the server binds the process to a core.
        timeouts: time limits applied by the server.
        session: simulator name; a restarted simulator replaces the one of the same name.
        others: addresses of servers that a starting simulator goes to where its own is gone or full.
    """

    address: str
    reconnect_s: float = 60.0
    python: str | None = None
    pin_cpus: bool = True
    timeouts: EnvTimeouts = EnvTimeouts()
    # Random, so that two runs on one server never take each other's simulators.
    session: str = field(default_factory=lambda: secrets.token_hex(16))
    others: list[str] = field(default_factory=list)

    @property
    def scheme(self) -> str:
        """Scheme of the address: the kind of server."""
        return self.address.partition("://")[0]


class ManagerOptions(TypedDict, total=False):
    """Keyword arguments shared by all ``EnvManager`` of a pool."""

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
    """``ManagerOptions`` plus the options that differ between managers; see ``EnvManager``."""

    cpu: int | None
    numa_node: int | None
    remote: RemoteEnv | None
