"""Training processes that tell what is inside them."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import cuda_names
import torch
import torch.distributed as dist
from torch import Tensor

from embodrl.algorithms.losses import LossOutput
from embodrl.config.schema import Config
from embodrl.data.trajectory import TrajectoryBatch
from embodrl.hybrid_engines.megatron.checkpoint import load_sharded, save_sharded
from embodrl.hybrid_engines.megatron.engine import MegatronTrainEngine
from embodrl.hybrid_engines.megatron.layout import publish
from embodrl.hybrid_engines.megatron.policy import ParallelOpenVLAPolicy
from embodrl.hybrid_engines.megatron.vocab import action_logits
from embodrl.hybrid_engines.sharding import whole
from embodrl.scheduler.worker import dispatch
from embodrl.types import SamplingParams
from embodrl.workers import actor
from embodrl.workers.actor import ActorWorker


def toy_loss(output: Any) -> Tensor:
    """Return a loss that depends on every output, unevenly."""
    weights = torch.linspace(-1.0, 2.0, output.logprobs.numel()).view(output.logprobs.shape)
    return (output.logprobs * weights).sum() + 0.1 * (output.entropy * weights).sum() + output.values.square().sum()


class Probe(ActorWorker):
    """An actor of the backend megatron."""

    @property
    def megatron(self) -> tuple[MegatronTrainEngine, ParallelOpenVLAPolicy]:
        engine = self.engine
        assert isinstance(engine, MegatronTrainEngine)
        assert isinstance(engine.policy, ParallelOpenVLAPolicy)
        return engine, engine.policy

    @dispatch("one_to_all")
    @torch.no_grad()
    def evaluate(self, inputs: dict[str, Tensor], temperature: float, top_k: int) -> dict[str, Tensor]:
        """Return log-probs, entropy, values, and this process's window of the logits."""
        _, policy = self.megatron
        output = policy.evaluate_actions(inputs, SamplingParams(temperature, top_k))
        hidden, _ = policy.action_states(inputs)
        window = action_logits(hidden, policy.model.language_model.lm_head, policy.windows)
        assert output.entropy is not None
        assert output.values is not None
        found = {"logprobs": output.logprobs, "entropy": output.entropy, "values": output.values}
        return found | {"window": window, "places": policy.windows.places}

    @dispatch("one_to_all")
    def gradients(self, batch: TrajectoryBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the toy loss and its gradients, in public names."""
        engine, policy = self.megatron

        def compute(micro: TrajectoryBatch) -> LossOutput:
            output = policy.evaluate_actions(micro.forward_inputs, SamplingParams(0.7, 0))
            return LossOutput(toy_loss(output), {})

        loss, _ = engine.forward_backward(batch, compute)
        engine._clip_gradients()  # sums over the data group; nothing is clipped at this setting
        found = {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}
        result = {name: whole(t).clone() for name, t in publish(found, engine.pieces, engine.tensor_mesh)}
        engine._clear_gradients()
        return loss, result

    @dispatch("one_to_all")
    def copies_differ(self) -> list[str]:
        """Return the parameters that should be the same in all processes of the tensor group and are not."""
        engine, policy = self.megatron
        group = engine.tensor_mesh.get_group()
        differ = []
        for name, parameter in policy.named_parameters():
            if engine.pieces[name][0].dim is None:
                parts = [torch.empty_like(parameter) for _ in range(group.size())]
                dist.all_gather(parts, parameter.detach(), group=group)
                differ += [name] if any(not torch.equal(part, parts[0]) for part in parts) else []
        return differ

    @dispatch("one_to_all")
    def shapes(self) -> dict[str, list[int]]:
        """Return what this process holds, by its own names."""
        return {name: list(p.shape) for name, p in self.megatron[1].named_parameters()}

    @dispatch("one_to_all")
    def save(self, directory: str) -> None:
        """Write a checkpoint of parts."""
        save_sharded(self.megatron[0], Path(directory))

    @dispatch("one_to_all")
    def load(self, directory: str) -> None:
        """Read a checkpoint of parts."""
        load_sharded(self.megatron[0], Path(directory))


class ShimmedProbe(Probe):
    """With megatron-core's distributed optimizer, on the CPU."""

    def __init__(self, config: Config) -> None:
        cuda_names.install()
        real = actor.MegatronTrainEngine
        actor.MegatronTrainEngine = functools.partial(real, distributed_optimizer=True)
        try:
            super().__init__(config)
        finally:
            actor.MegatronTrainEngine = real


class ShimmedPlainProbe(Probe):
    """With torch's AdamW, and the names that saving needs."""

    def __init__(self, config: Config) -> None:
        cuda_names.install()
        super().__init__(config)
