"""`embodrl env serve`: simulators for runs on other machines."""

from __future__ import annotations

import secrets
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from embodrl.config.load import import_extension
from embodrl.config.rules.serve import LEAST_TOKEN
from embodrl.envs.env_server.server import SimulatorSettings, TcpEnvServer
from embodrl.errors import ConfigError, UsageError


def serve(
    host: str,
    port: int,
    token: str,
    max_processes: int,
    extensions: Sequence[str],
    log_dir: Path | None,
    say: Callable[[str], None],
) -> None:
    """Serve until SIGTERM or Ctrl-C; arguments as in ``TcpEnvServer``, with token "auto" (random) or "none".

    Raises EnvError if the address is not available, ConfigError if an extension can't be imported, and UsageError if
    the token is too weak, or "none" although others can reach the address.
    """
    problems = [problem for name in extensions if (problem := import_extension(name, "--extension")) is not None]
    if problems:
        raise ConfigError(problems)
    if token not in ("auto", "none") and (len(token) < LEAST_TOKEN or not token.isascii() or not token.isprintable()):
        message = f"the token must have {LEAST_TOKEN} or more characters, printable ASCII"
        raise UsageError(message, "omit --token to generate one", code="env-server-token")
    local = host in ("127.0.0.1", "::1", "localhost")
    if token == "none" and not local:
        message = f"anyone who can reach {host} could start simulators here without a token"
        raise UsageError(message, "omit --token, or serve on 127.0.0.1", code="env-server-token")
    known = secrets.token_urlsafe(24) if token == "auto" else None if token == "none" else token
    server = TcpEnvServer(host, port, known, max_processes, SimulatorSettings(extensions, log_dir))
    say(f"listening: simulators at {server.address}")
    if token == "auto":
        say(f"token: {known}")
    if not local:
        say("note: others can reach this address, and traffic is not encrypted")
    stop = threading.Event()
    before = {number: signal.signal(number, lambda *_: stop.set()) for number in (signal.SIGTERM, signal.SIGINT)}
    say("ready")
    try:
        server.run(stop.is_set)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
