"""Starting of simulator processes."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from embodrl.errors import EnvTimeout
from embodrl.processes import bootstrap
from embodrl.processes.child import ChildProcess
from embodrl.processes.frames import Frame
from embodrl.processes.liveness import Limits
from embodrl.specs import ENV_SERVERS, ENVS

if TYPE_CHECKING:
    from typing import Unpack  # not in Python 3.10, which simulators may use

    from embodrl.envs.pool.options import ProcessOptions

_OOM_SCORE_ADJ = 300
"""When memory runs out, the kernel kills a simulator, which can be restarted, before the driver."""
# Each simulator process is bound to one core: thread pools would only compete for it.
SINGLE_THREADED = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "LP_NUM_THREADS": "1",
    "SAPIEN_DISABLE_RAY_TRACING": "1",
}


class FrameSender(Protocol):
    """Sends frames to a child."""

    def send(self, frame: Frame, deadline: float | None = None) -> None: ...


class Child(Protocol):
    """Answers a manager's frames; same methods as ``ChildProcess``."""

    log_path: Path | None

    @property
    def pid(self) -> int: ...
    @property
    def connection(self) -> FrameSender: ...
    def receive(self, deadline: float | None = None) -> Frame: ...
    def exit_reason(self) -> str: ...
    def log_tail(self) -> str: ...
    def dump_stack(self) -> None: ...
    def wait_ended(self, grace_s: float) -> bool: ...
    def end_group(self) -> int: ...
    def kill(self) -> None: ...


class Launch(Protocol):
    """Starts a child that builds its environments and then answers frames."""

    @property
    def interpreter(self) -> str: ...

    def __call__(self, memory_fd: int, heartbeat_s: float) -> Child:
        """Start a child on this shared memory."""
        ...


@dataclass(frozen=True)
class ProcessLaunch:
    """Starts a simulator in its own process.

    Attributes:
        name: name in the process list.
        main: module to run.
        config: fields of its START frame.
        environ: extra environment variables.
        log_path: file for its output; None for an unnamed one.
    """

    name: str
    interpreter: str
    main: str
    config: Mapping[str, object]
    environ: Mapping[str, str]
    log_path: Path | None

    @staticmethod
    def of(name: str, env_type: str, kwargs: Mapping[str, object], **options: Unpack[ProcessOptions]) -> ProcessLaunch:
        """Return the launch of the simulator ``env_type``; arguments as in ``EnvManager``."""
        # Resolved here, so that the simulator's interpreter does not need the imports of specs (pydantic).
        target = ENVS.entry(env_type).target if env_type in ENVS else env_type
        config: dict[str, object] = {
            "env_type": target if isinstance(target, str) else env_type,
            "kwargs": dict(kwargs),
            **{key: options.get(key) for key in ("cpu", "numa_node", "max_chunk", "axis")},
            "extensions": list(options.get("extensions", ())),
            "real_time": dict(options.get("real_time") or {}),
        }
        main = "embodrl.envs.pool.worker_main"
        if (remote := options.get("remote")) is not None:
            # The relay replaces the simulator on this machine: same frames, same memory.
            main = ENV_SERVERS.entry(remote.scheme).relay
            config |= {"env_type": env_type, "remote": asdict(remote)}
        log_dir = options.get("log_dir")
        log_path = None if log_dir is None else log_dir / f"{name.replace('/', '_')}.log"
        interpreter = options.get("python") or sys.executable
        return ProcessLaunch(name, interpreter, main, config, options.get("environ") or {}, log_path)

    def __call__(self, memory_fd: int, heartbeat_s: float) -> ChildProcess:
        return ChildProcess(
            [self.interpreter, bootstrap.__file__, self.main],
            {**self.config, "memory_fd": memory_fd},
            # The caller's variables override these defaults.
            environ={**SINGLE_THREADED, **self.environ},
            log_path=self.log_path,
            pass_fds=[memory_fd],
            stuck_error=EnvTimeout,
            name=self.name,
            limits=Limits(heartbeat_s),
            oom_score_adj=_OOM_SCORE_ADJ,
        )
