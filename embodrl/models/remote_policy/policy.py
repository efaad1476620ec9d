"""A policy behind a server, which only acts: no weights, log-probs or gradients here.

Shapes: B batch, C actions run, A action dimensions.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Coroutine
from typing import Any, TypeVar

import torch

from embodrl.data.rng import RandomSource
from embodrl.errors import RemotePolicyError
from embodrl.models.common.acting import ActingPolicy
from embodrl.models.load_report import LoadReport
from embodrl.models.remote_policy.spec import RemoteConfig, client_of
from embodrl.serving.wire.clients import Client
from embodrl.types import ActMode, Observation, PolicyOutput, SamplingParams

_T = TypeVar("_T")


class ClientThread:
    """Runs a client in its own event loop, for callers in any thread; both end with this object."""

    def __init__(self, config: RemoteConfig) -> None:
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever, name="remote-policy", daemon=True)
        thread.start()
        self._loop = loop
        try:
            self.client: Client = self.run(_made(config))
        except BaseException:
            loop.call_soon_threadsafe(loop.stop)
            raise
        self.close = weakref.finalize(self, _end, loop, thread, self.client)
        try:
            self.run(self.client.connect())
        except BaseException:
            self.close()
            raise

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Wait for the result of a client coroutine."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


async def _made(config: RemoteConfig) -> Client:
    return client_of(config)


def _end(loop: asyncio.AbstractEventLoop, thread: threading.Thread, client: Client) -> None:
    asyncio.run_coroutine_threadsafe(client.close(), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


class RemotePolicy(ActingPolicy):
    """Evaluates action chunks of a policy server; without ``connection`` only the policy's shape is available."""

    def __init__(self, config: RemoteConfig, connection: ClientThread | None) -> None:
        super().__init__(config)
        self.connection = connection

    def only_acts(self) -> RemotePolicyError:
        return RemotePolicyError(
            "a policy behind a server only acts: its weights and gradients are not here",
            "use it with `embodrl eval`",
            code="remote-only-acts",
        )

    def misfit(self, message: str, setting: str) -> RemotePolicyError:
        hint = f"check {setting}, or serve a policy of this robot"
        return RemotePolicyError(message, hint, code="remote-does-not-fit")

    @torch.no_grad()
    def predict_action_batch(
        self,
        observation: Observation,
        mode: ActMode,
        sampling: SamplingParams,
        generator: RandomSource | None = None,
        compute_values: bool = True,
    ) -> PolicyOutput:
        """Query the server; ``mode`` must be ``eval``. Values are not computed, log-probs are 0.

        Raises:
            RemotePolicyError: ``train`` mode; the server refused or disconnected; or a short chunk, other action
                dimensions, or non-finite actions.
            WireError: the observation does not match the keys, or the answer is malformed.
        """
        if mode == "train" or self.connection is None:
            self.refuse()
        self.check_mode(mode)
        return self.output_of(self.connection.run(self.connection.client.act(observation)), observation.batch_size)


def build_remote(
    config: RemoteConfig, *, device: torch.device | str, dtype: torch.dtype, seed: int
) -> tuple[RemotePolicy, LoadReport]:
    """Connect to ``model.url``; ``dtype`` and ``seed`` are the server's own.

    Raises:
        MissingDependencyError: the extra ``serve`` is not installed.
        RemotePolicyError: the server is unreachable, or does not report its keys.
    """
    url = str(config.url)
    if str(device) == "meta":
        return RemotePolicy(config, None), LoadReport(url)
    connection = ClientThread(config)
    keys = connection.client.keys.describe()
    return RemotePolicy(config, connection), LoadReport(url, conventions={"observation": keys})
