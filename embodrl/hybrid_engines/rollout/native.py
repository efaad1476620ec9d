"""The rollout backend "native": the policy's own modules, in the same process."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodrl.config.schema import Config
from embodrl.data.rng import RandomSource
from embodrl.hybrid_engines.offload import Offload
from embodrl.hybrid_engines.rollout.base import ActRequest, RolloutEngine, RolloutParts
from embodrl.hybrid_engines.training.parallel import on_threads
from embodrl.hybrid_engines.training.precision import autocast
from embodrl.models.base import VLAPolicy
from embodrl.models.common.live import LiveWriter
from embodrl.models.common.own_critic import own_critic
from embodrl.names import import_object
from embodrl.specs import ENGINES
from embodrl.types import Observation, PolicyOutput


class NativeRolloutEngine(RolloutEngine):
    """Computes actions with the policy's own modules.

    On a CPU a batch is split into ``num_threads`` parts, each with its own random generator.
    """

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        with self._lock:
            self.onload()
            self._copy_weights(weights)
            self.version = version

    def offload(self) -> None:
        with self._lock:
            if self._memory is not None:
                self.offload_report = self._memory.offload() or self.offload_report

    def onload(self) -> None:
        with self._lock:
            if self._memory is not None:
                self._memory.onload()

    def values(self, observation: Observation) -> Tensor:
        self.onload()
        return super().values(observation)

    def _predict(self, request: ActRequest) -> PolicyOutput:
        def compute(part: Observation, generator: RandomSource, first: int) -> PolicyOutput:
            with torch.no_grad(), autocast(self.precision, self.device):
                critic = own_critic(self.policy)
                by_policy = request.compute_values and critic is None
                sampling = request.sampling or self.sampling
                if (on_token := request.on_token) is not None and isinstance(self.policy, LiveWriter):
                    return self.policy.write_live(
                        part, request.mode, sampling, generator, lambda row, token: on_token(first + row, token)
                    )
                output = self.policy.predict_action_batch(part, request.mode, sampling, generator, by_policy)
                return output if critic is None else critic.act(output, part, request.compute_values)

        # A batch with fewer rows than threads has fewer parts than there are generators.
        parts = self._parts(request.observation)
        firsts = itertools.accumulate((part.batch_size for part in parts), initial=0)
        tasks = [functools.partial(compute, *each) for each in zip(parts, request.generators, firsts, strict=False)]
        with self._lock:
            self.onload()
            outputs = on_threads(tasks, self.num_threads)
            # Read under the lock: weights may change as soon as it is released.
            version = self.version
        return replace(outputs[0] if len(outputs) == 1 else concat_outputs(outputs), version=version)


def policy_memory(policy: VLAPolicy) -> Offload:
    """Return the weights and buffers of a policy as offloadable memory."""
    return Offload(lambda: [*policy.parameters(), *policy.buffers()])


def make_rollout_engine(
    config: Config,
    policy: VLAPolicy,
    num_threads: int,
    part: tuple[int, int] = (0, 1),
    memory: Offload | None = None,
    weights_dir: Path | None = None,
) -> RolloutEngine:
    """Return the engine of ``rollout.backend``; arguments are the attributes of ``RolloutParts``.

    Raises:
        EmbodrlError: a requirement of the backend is missing.
    """
    maker = ENGINES.entry(config.rollout.backend).rollout
    assert maker is not None, "the configuration was checked"
    make: Any = import_object(maker) if isinstance(maker, str) else maker
    return make(RolloutParts(config, policy, num_threads, part, memory, weights_dir))


def make_native(parts: RolloutParts) -> NativeRolloutEngine:
    """Return the engine that acts with the policy's own modules."""
    return NativeRolloutEngine(*parts.common, parts.memory)


def max_batch_rows(config: Config) -> int:
    """Return the largest batch of environments in training or evaluation."""
    return max(config.env.train.total_num_envs // config.rollout.pipeline_stages, config.env.eval.total_num_envs)


def concat_outputs(parts: list[PolicyOutput]) -> PolicyOutput:
    """Concatenate the rows of all parts."""
    values = [part.values for part in parts if part.values is not None]
    inputs = parts[0].forward_inputs
    return PolicyOutput(
        np.concatenate([part.actions for part in parts]),
        torch.cat([part.logprobs for part in parts]),
        torch.cat(values) if values else None,
        {name: torch.cat([part.forward_inputs[name] for part in parts]) for name in inputs},
    )
