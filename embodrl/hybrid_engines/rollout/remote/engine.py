"""The rollout backend "remote": policy servers (`embodrl serve protocol=http`) act with the trained weights.

Each version of the weights is published in the run's directory, from which a server loads it before acting with it.
Every answer names its server and version; an answer with another version, or from a restarted server, is requested
again. If a server does not answer, the others take over its rows; without any server, the run waits. Ahead of training
(``runner.max_staleness``, or weights of a store) newer versions do as well, each batch goes to the server with the
fewest requests in progress, and stages ask concurrently: any idle server acts for any simulators.

Shapes: B batch, C actions in a chunk, A action dimensions.
"""

from __future__ import annotations

import http.client
import logging
import os
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import torch

from embodrl.config.schema import RolloutConfig, SamplingConfig, section_in
from embodrl.data.rng import RowGenerators
from embodrl.errors import RemotePolicyError
from embodrl.hybrid_engines.offload import Offload
from embodrl.hybrid_engines.rollout.base import ActRequest, RolloutParts
from embodrl.hybrid_engines.rollout.native import NativeRolloutEngine, concat_outputs
from embodrl.hybrid_engines.rollout.remote.spec import RemoteRolloutConfig
from embodrl.models.base import VLAPolicy
from embodrl.serving.wire import TOKEN_VARIABLE
from embodrl.serving.wire.codec import openpi_default, openpi_envelope, pack, unpack
from embodrl.types import PolicyOutput

logger = logging.getLogger(__name__)

_PAUSE_S = 0.5
_ATTEMPTS = 5
"""Attempts at making a server act with a version: it may restart in between."""
_FIRST_PAUSE_S = 0.02
"""Before the next attempt at a version, which doubles: ahead of training it is published as it begins to act."""
_LOOKS = 9


class ServerGone(Exception):
    """A server is unreachable or stopping."""


class RolloutServer:
    """One policy server; ``directory`` has the published weights, as seen by the server."""

    def __init__(self, url: str, directory: Path, timeout_s: float) -> None:
        self.url = url.rstrip("/")
        self._directory = directory
        self._timeout_s = timeout_s
        # No proxies: servers are given by their own addresses.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self._token = os.environ.get(TOKEN_VARIABLE)
        self._lock = threading.Lock()
        self._ready: tuple[object, int] | None = None
        self.is_gone = False

    def act(self, content: Mapping[str, object], version: int, or_newer: bool) -> Mapping[str, Any]:
        """Return the answer of POST /rollout, computed with weights of this version; ``or_newer``: or a newer one.

        Raises:
            ServerGone: the server is unreachable.
            RemotePolicyError: the server rejects the request or the weights.
        """
        for _ in range(_ATTEMPTS):
            with self._lock:
                if self._ready is None or not _is_wanted(self._ready[1], version, or_newer):
                    self._ready = self._take(version, or_newer)
                ready = self._ready
            answer = self._post("/rollout", content)
            if answer.get("instance") == ready[0] and _is_wanted(answer.get("policy_version"), version, or_newer):
                return answer
            with self._lock:  # the server was restarted, or another client gave it weights
                self._ready = None
        hint = "one run at a time may use a server"
        raise RemotePolicyError(f"{self.url} does not keep version {version}", hint, code="remote-version")

    def _take(self, version: int, or_newer: bool) -> tuple[object, int]:
        """Make the server load the newest published weights; return its instance name and the version."""
        problem = ""
        for look in range(_LOOKS):
            try:
                answer = self._post("/weights", {"directory": str(self._directory)})
            except RemotePolicyError as error:  # a resumed run has gone back: the next attempt starts there
                problem = error.message
            else:
                found = answer.get("policy_version")
                if _is_wanted(found, version, or_newer):
                    return answer.get("instance"), found
                problem = f"it took version {found}"
            time.sleep(min(_PAUSE_S, _FIRST_PAUSE_S * 2**look))
        hint = f"the server must serve the same model, and have access to {self._directory}"
        raise RemotePolicyError(
            f"{self.url} does not accept the weights of version {version}: {problem}", hint, code="remote-weights"
        )

    def _post(self, path: str, content: Mapping[str, object]) -> Mapping[str, Any]:
        headers = {"Content-Type": "application/msgpack"}
        headers |= {} if self._token is None else {"Authorization": f"Bearer {self._token}"}
        request = urllib.request.Request(self.url + path, pack(dict(content), openpi_default), headers)
        try:
            with self._opener.open(request, timeout=self._timeout_s) as answer:
                found = unpack(answer.read(), openpi_envelope)
        except urllib.error.HTTPError as error:
            if error.code == 503:
                raise ServerGone(f"{self.url}: it is stopping, or has too many clients") from error
            text = error.read().decode("utf-8", "replace")[-2000:]
            hint = f"the server must serve this model; {TOKEN_VARIABLE} is its token"
            raise RemotePolicyError(
                f"{self.url}{path} answered {error.code}: {text}", hint, code="remote-refused"
            ) from error
        except (OSError, http.client.HTTPException) as error:
            raise ServerGone(f"{self.url}: {error}") from error
        if not isinstance(found, Mapping):
            raise RemotePolicyError(f"{self.url}{path} returned an answer that is not a map", "", code="remote-refused")
        return found


def _is_wanted(found: object, version: int, or_newer: bool) -> TypeGuard[int]:
    return isinstance(found, int) and (found == version or (or_newer and found > version))


@dataclass(frozen=True)
class ServedWeights:
    """Where a run publishes its weights, and whether newer ones than an update's may act."""

    directory: Path
    may_be_newer: bool = False


class RemoteRolloutEngine(NativeRolloutEngine):
    """Gets actions from servers; values of final observations and policy inputs come from the local policy.

    Every row has its own seed, drawn here: for policies with ``draws_by_row`` the samples do not depend on the server
    that computes them. ``weights`` are those of the run; for the other arguments see RolloutEngine.
    """

    def __init__(
        self,
        policy: VLAPolicy,
        config: RolloutConfig,
        sampling: SamplingConfig,
        seed: int,
        num_threads: int = 1,
        part: tuple[int, int] = (0, 1),
        memory: Offload | None = None,
        *,
        weights: ServedWeights,
    ) -> None:
        super().__init__(policy, config, sampling, seed, num_threads, part, memory)
        self._settings = section_in(config, "remote", RemoteRolloutConfig)
        seen = Path(self._settings.weights_dir or weights.directory)
        self._servers = [RolloutServer(url, seen, self._settings.request_timeout_s) for url in self._settings.urls]
        self._threads = ThreadPoolExecutor(len(self._servers), "rollout-server")
        self._is_ahead = weights.may_be_newer
        self._under_way = [0] * len(self._servers)
        self._choosing = threading.Lock()

    def _predict(self, request: ActRequest) -> PolicyOutput:
        if request.mode == "mean":  # servers on vLLM cannot, and the local policy has the same weights
            return super()._predict(request)
        seeds = self._seeds(request)
        if self._is_ahead:
            return self._ask_one(request, seeds)
        rows = np.arange(request.observation.batch_size)
        present = [number for number, server in enumerate(self._servers) if not server.is_gone]
        shares = np.array_split(rows, min(len(present) or 1, len(rows)))
        given_up = threading.Event()
        with self._lock:
            asked = [
                self._threads.submit(self._ask, number, _message(request, share, seeds), given_up)
                for number, share in zip(present or [0], shares, strict=False)
            ]
            try:
                outputs = [_output(each.result()) for each in asked]
            except BaseException:  # also after a signal, which is re-raised: the threads must stop waiting
                given_up.set()
                raise
            return replace(outputs[0] if len(outputs) == 1 else concat_outputs(outputs), version=self.version)

    def _ask_one(self, request: ActRequest, seeds: list[int]) -> PolicyOutput:
        """Ask the server with the fewest requests; the output has the version of its answer."""
        message = _message(request, np.arange(request.observation.batch_size), seeds)
        with self._choosing:
            present = [number for number, server in enumerate(self._servers) if not server.is_gone]
            number = min(present or [0], key=lambda one: self._under_way[one])
            self._under_way[number] += 1
        try:
            answer = self._ask(number, message, threading.Event())
        finally:
            with self._choosing:
                self._under_way[number] -= 1
        return replace(_output(answer), version=int(answer["policy_version"]))

    def _seeds(self, request: ActRequest) -> list[int]:
        if request.mode != "train":  # nothing is sampled, and an evaluation keeps the random state unchanged
            return [0] * request.observation.batch_size
        found: list[int] = []
        for part, generator in zip(self._parts(request.observation), request.generators, strict=False):
            count = part.batch_size
            each = generator.rows if isinstance(generator, RowGenerators) else (generator,) * count
            found += [int(torch.randint(2**62, (1,), generator=one)) for one in each]
        return found

    def _ask(self, first: int, content: Mapping[str, object], given_up: threading.Event) -> Mapping[str, Any]:
        """Ask one server after another until one answers."""
        deadline = time.monotonic() + self._settings.timeout_s
        turn = first
        while not given_up.is_set():
            server = self._servers[turn % len(self._servers)]
            try:
                answer = server.act(content, self.version, self._is_ahead)
            except ServerGone as error:
                if not server.is_gone:
                    logger.warning("a rollout server does not answer; the others take over (%s)", error)
                server.is_gone = True
                turn += 1
                if (turn - first) % len(self._servers) == 0:  # no server is left
                    if time.monotonic() > deadline:
                        limit = f"{self._settings.timeout_s:g} s (rollout.remote.timeout_s)"
                        hint = "start the servers again, and resume the run"
                        message = f"no rollout server answered within {limit}: {error}"
                        raise RemotePolicyError(message, hint, code="remote-unreachable") from error
                    given_up.wait(_PAUSE_S)
                continue
            if server.is_gone:
                logger.warning("%s answers again", server.url)
                server.is_gone = False
            return answer
        raise InterruptedError

    def update_weights(self, weights: Any, version: int) -> None:
        super().update_weights(weights, version)
        for server in self._servers:  # every version gives unreachable servers another chance
            server.is_gone = False


def _message(request: ActRequest, rows: np.ndarray[Any, Any], seeds: list[int]) -> dict[str, object]:
    observation = request.observation.select(rows)
    return {
        "images": np.ascontiguousarray(observation.images),
        "state": np.ascontiguousarray(observation.state),
        "instructions": list(observation.instruction),
        "seeds": [seeds[row] for row in rows],
        "mode": request.mode,
        "compute_values": request.compute_values,
    }


def _output(answer: Mapping[str, Any]) -> PolicyOutput:
    actions, logprobs, values = (answer.get(name) for name in ("actions", "logprobs", "values"))
    inputs = answer.get("forward_inputs")
    tensors = {"logprobs": logprobs, **inputs} if isinstance(inputs, Mapping) else {"logprobs": None}
    is_whole = all(isinstance(each, np.ndarray) for each in (actions, *tensors.values()))
    if not is_whole or not isinstance(values, np.ndarray | None):
        raise RemotePolicyError("a server's answer lacks actions, log-probs or inputs", "", code="remote-refused")
    found = {str(name): torch.from_numpy(np.array(array)) for name, array in tensors.items()}
    worth = None if values is None else torch.from_numpy(np.array(values))
    return PolicyOutput(np.asarray(actions), found.pop("logprobs"), worth, found)


def make_remote(parts: RolloutParts) -> RemoteRolloutEngine:
    """Return the engine that queries the servers of ``rollout.remote``."""
    assert parts.weights_dir is not None, "a rule restricts it to training"
    is_ahead = parts.config.runner.max_staleness > 0 or parts.config.store_url is not None
    return RemoteRolloutEngine(*parts.common, parts.memory, weights=ServedWeights(parts.weights_dir, is_ahead))
