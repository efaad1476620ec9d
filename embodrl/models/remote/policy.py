"""A policy behind a server, as a policy that acts: no weights, no log-probs, no gradients here.

Shapes: B batch, C actions run, A action dimensions.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Coroutine
from typing import Any, Literal, NoReturn, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from embodrl.data.rng import RandomSource
from embodrl.errors import RemotePolicyError
from embodrl.models.base import LoadReport, VLAPolicy
from embodrl.models.common.gripper import to_environment
from embodrl.models.remote.clients import CLIENTS, Client
from embodrl.models.remote.spec import RemoteConfig
from embodrl.types import Observation, PolicyOutput, SamplingParams

_T = TypeVar("_T")


class Connection:
    """A client in an event loop of its own, for callers in any thread; both end with this object.

    Args:
        config: section ``model``.

    Raises:
        RemotePolicyError: see ``Client.connect``.
    """

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
        """Wait for what a coroutine of the client returns."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


async def _made(config: RemoteConfig) -> Client:
    assert config.url is not None  # see remote_policy_has_a_url
    return CLIENTS[config.url.partition("://")[0]](config)


def _end(loop: asyncio.AbstractEventLoop, thread: threading.Thread, client: Client) -> None:
    asyncio.run_coroutine_threadsafe(client.close(), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


class RemotePolicy(VLAPolicy):
    """Chunks of actions of a policy server, for evaluation.

    Args:
        config: section ``model``.
        connection: to the server; None where only the shape of the policy is asked for.
    """

    def __init__(self, config: RemoteConfig, connection: Connection | None) -> None:
        super().__init__()
        self.config, self.connection = config, connection
        self.num_action_chunks, self.action_dim = config.num_action_chunks, config.action_dim

    @property
    def device(self) -> torch.device:
        """Of what is returned; the policy itself is elsewhere."""
        return torch.device("cpu")

    def preprocess(self, observation: Observation) -> dict[str, Tensor]:
        """Return ``images uint8[B,V,H,W,3]`` and ``state float32[B,S]``."""
        return {"images": torch.tensor(observation.images), "state": torch.tensor(observation.state)}

    @torch.no_grad()
    def predict_action_batch(
        self,
        observation: Observation,
        mode: Literal["train", "eval"],
        sampling: SamplingParams,
        generator: RandomSource | None = None,
        compute_values: bool = True,
    ) -> PolicyOutput:
        """Ask the server; ``mode`` is ``eval``, and values are not computed. Log-probs are 0.

        Raises:
            RemotePolicyError: in ``train`` mode; the server refused, or is gone; too short a chunk, other action
                dimensions, or actions that are not finite.
            WireError: the observation does not fit the keys, or the answer is malformed.
        """
        if mode == "train" or self.connection is None:
            self._refuse()
        found = self.connection.run(self.connection.client.act(observation))
        wanted = (observation.batch_size, self.num_action_chunks, self.action_dim)
        if (len(found), found.shape[2]) != (wanted[0], wanted[2]) or found.shape[1] < wanted[1]:
            raise _unfit(f"the server answered with actions of shape {list(found.shape)}, {list(wanted)} are run")
        if found.dtype.kind != "f" or not np.isfinite(found).all():
            raise _unfit("the server answered with actions that are not finite numbers")
        actions = to_environment(found[:, : wanted[1]].astype(np.float64), self.config.gripper)
        return PolicyOutput(actions.astype(np.float32), torch.zeros(wanted), None, {})

    def parts(self) -> dict[str, nn.Module]:
        """There are none."""
        return {}

    def head_parameters(self) -> list[nn.Parameter]:
        return []

    unused_parameters = head_parameters

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RemotePolicyError(
            "a policy behind a server only acts: its weights and gradients are not here",
            "use it with `embodrl eval`",
            code="remote-only-acts",
        )

    predict_values = evaluate_actions = sft_inputs = sft_loss = _refuse
    enable_gradient_checkpointing = save_pretrained = _refuse


def _unfit(message: str) -> RemotePolicyError:
    hint = "check model.num_action_chunks and model.action_dim, or serve a policy of this robot"
    return RemotePolicyError(message, hint, code="remote-does-not-fit")


def build_remote(
    config: RemoteConfig, *, device: torch.device | str, dtype: torch.dtype, seed: int
) -> tuple[RemotePolicy, LoadReport]:
    """Connect to ``model.url``; ``dtype`` and ``seed`` are the server's own.

    Raises:
        MissingDependencyError: the extra ``serve`` is not installed.
        RemotePolicyError: the server can't be reached, or does not tell its keys.
    """
    url = str(config.url)
    if str(device) == "meta":
        return RemotePolicy(config, None), LoadReport(url)
    connection = Connection(config)
    keys = connection.client.keys.describe()
    return RemotePolicy(config, connection), LoadReport(url, conventions={"observation": keys})
