"""The lifecycle of a policy server: listen, announce it, and on a signal finish current requests and exit."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from embodrl.config.schema import Config, ServeConfig
from embodrl.errors import ServingError
from embodrl.hybrid_engines.rollout.base import RolloutEngine
from embodrl.hybrid_engines.weight_sync.follower import WeightFollower
from embodrl.processes.ending import SecondSignal, owns_process
from embodrl.processes.guard import keep_time, release_signals, watch_signals
from embodrl.serving.core import ModelCore
from embodrl.serving.listener import Listener, Service
from embodrl.specs import SERVE_PROTOCOLS

logger = logging.getLogger(__name__)

CLOSING_S = 5.0
"""Seconds that closing may take once requests are answered."""


class PolicyServer:
    """One policy behind all configured protocols.

    Args:
        weights_dir: directory where newer weights will appear; None if none are expected.

    Raises:
        MissingDependencyError: a protocol's library is not installed.
    """

    def __init__(
        self, engine: RolloutEngine, config: Config, weights_dir: Path | None, say: Callable[[str], None]
    ) -> None:
        self.config = config
        self.say = say
        self.core = ModelCore(engine, config.serve)
        self.service = Service(self.core, config, token_of(config.serve))
        self.listeners: list[Listener] = [SERVE_PROTOCOLS.get(name)(self.service) for name in config.serve.protocols]
        self._follower = None if weights_dir is None else WeightFollower(self.service.source, weights_dir)
        self._stop = asyncio.Event()
        self._second = SecondSignal()
        self.signal = 0

    async def run(self, on_ready: Callable[[dict[str, str]], None] | None = None) -> int:
        """Serve until a signal or ``stop``; return the exit code.

        The exit code is 1 if requests were left unanswered or the policy hung, which may also end the server; else 0.
        ``on_ready`` gets the URL of each protocol.

        Raises:
            ServingError: an address is not available.
        """
        self.core.warm_up(self.service.example())
        watching = asyncio.create_task(self.core.watch(self._give_up))
        with stopped_by_signals(self.stop, self.config.serve.drain_timeout_s + CLOSING_S):
            try:
                await self._begin(on_ready)
                await self._stop.wait()
                return await self._end()
            finally:
                watching.cancel()
                for listener in self.listeners:
                    await listener.close()
                if self._follower is not None and self._follower.is_alive():
                    await asyncio.to_thread(self._follower.stop)
                self.core.close()

    async def _begin(self, on_ready: Callable[[dict[str, str]], None] | None) -> None:
        urls = await self._listen()
        if self._follower is not None:
            self._follower.start()
        for name, url in urls.items():
            self.say(f"listening: {name} at {url}")
        if self.config.serve.token == "auto":
            self.say(f"token: {self.service.token}")
        for listener in self.listeners:
            self.say(f"{listener.name} takes {listener.takes()}")
        self.say("ready")
        if on_ready is not None:
            on_ready(urls)

    def stop(self, number: int = 0) -> None:
        """Begin to stop; a second signal, ``REPEAT_S`` or more after the first, does not wait for requests.

        Signal ``number`` 0 is a call without a signal, which abandons requests the second time.
        """
        is_second = self._second.is_now() if number else self._stop.is_set()
        if is_second:
            self.core.abandon()
        self.signal = self.signal or number
        self._stop.set()

    def _give_up(self) -> None:
        if not self._stop.is_set():
            logger.error(
                "%s; stopping the server, since the batch can't be cancelled within the process", self.core.stalled
            )
        self.stop()

    async def _listen(self) -> dict[str, str]:
        serve = self.config.serve
        urls = dict[str, str]()
        for number, listener in enumerate(self.listeners):
            port = serve.port + number if serve.port else 0
            try:
                found = await listener.start(serve.host, port)
            except OSError as error:
                raise ServingError(
                    f"{listener.name} can't listen at {serve.host}:{port}: {error.strerror or error}",
                    "choose another serve.port (0 takes a free one), or end the program that listens there",
                    code="server-address",
                ) from error
            host = f"[{serve.host}]" if ":" in serve.host else serve.host
            urls[listener.name] = f"{listener.scheme}://{host}:{found}"
        return urls

    async def _end(self) -> int:
        self.say("stopping: answering what is under way")
        for listener in self.listeners:
            await listener.stop_accepting()
        if await self.core.drain():
            return 1 if self.core.stalled else 0
        limit = self.config.serve.drain_timeout_s
        logger.error("requests were left unanswered after %g s (serve.drain_timeout_s)", limit)
        return 1


@contextlib.contextmanager
def stopped_by_signals(stop: Callable[[int], None], limit_s: float) -> Iterator[None]:
    """Make SIGTERM and SIGINT call ``stop`` in the running event loop; a no-op outside the main thread.

    If the process then hangs, e.g. in native code that holds the interpreter lock, the guard kills it ``limit_s`` after
    the signal.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    pipe = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    wakeup = signal.set_wakeup_fd(pipe[1], warn_on_full_buffer=False)
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGTERM, signal.SIGINT)}

    is_asked = False

    def read() -> None:
        nonlocal is_asked
        for number in os.read(pipe[0], 64):
            if number in before:
                is_asked = True
                if owns_process():
                    keep_time(limit_s)
                stop(number)

    loop.add_reader(pipe[0], read)
    if owns_process():
        watch_signals(pipe[0], limit_s)
    try:
        yield
    finally:
        if not (is_asked and owns_process()):  # the guard's timer runs until the process has ended
            release_signals()
        loop.remove_reader(pipe[0])
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, handler)
        for descriptor in pipe:
            os.close(descriptor)


def token_of(settings: ServeConfig) -> str | None:
    """Return the token that clients must send; None for none."""
    if settings.token == "none":
        return None
    return secrets.token_urlsafe(24) if settings.token == "auto" else settings.token
