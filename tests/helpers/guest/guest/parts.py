"""The parts themselves, each as small as its kind allows."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from embodrl import Advantages, LoadReport, LossCounts, LossOutput
from embodrl.config.schema import ClusterConfig, Config, ModelConfig, SmallActorConfig, section_in
from embodrl.deployment import ProcessPlace
from embodrl.envs.toy.env import ToyVectorEnv
from embodrl.hybrid_engines.training.fsdp import FsdpTrainEngine
from embodrl.hybrid_engines.training.options import EngineOptions
from embodrl.models.gaussian.policy import build_gaussian
from embodrl.models.gaussian.spec import GaussianModelConfig
from embodrl.models.small_actors.on_frozen import OnFrozenPolicy, ResidualPolicy
from embodrl.processes.liveness import Limits
from embodrl.scheduler.launchers.base import Job
from embodrl.scheduler.launchers.process import ProcessLauncher
from guest.specs import ActorConfig, EngineConfig, LauncherConfig, PolicyConfig


class World(ToyVectorEnv):
    """The toy environment with rewards of another size."""

    def __init__(self, *args: Any, slope: float = 1.0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.slope = slope


def build_policy(config: PolicyConfig, *, device: torch.device, dtype: torch.dtype, seed: int) -> Any:
    """The Gaussian policy, of one width."""
    common = {name: getattr(config, name) for name in ModelConfig.model_fields}
    sizes = {"max_state_dim": 4, "hidden_sizes": (config.width,)}
    inner = GaussianModelConfig.model_validate(common | {"model_type": "gaussian", "gaussian": sizes})
    return build_gaussian(inner, device=device, dtype=dtype, seed=seed)


def returns(rewards: Tensor, valid: Tensor, scale: float, **_: Any) -> Advantages:
    """Rewards to go within a rollout, without a baseline."""
    per_chunk = (rewards * valid).sum(-1, keepdim=True)
    total = per_chunk.flip(0).cumsum(0).flip(0) * scale
    return Advantages(total, total, valid.any(-1, keepdim=True))


def loss(
    *, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, valid: Tensor, counts: LossCounts, tilt: float
) -> LossOutput:
    """The policy gradient, times ``tilt``."""
    ratio = (logprobs - old_logprobs).sum(2).exp() * valid
    total = -(ratio * advantages).sum() / counts.policy
    return LossOutput(tilt * total, {"approx_kl": torch.zeros(()), "tilt_max": torch.tensor(tilt)})


class Engine(FsdpTrainEngine):
    """FSDP with smaller gradients."""

    shrink = 1.0

    def _clip(self, leaves: Any) -> float:
        norm = super()._clip(leaves)
        for leaf in leaves.values():
            if leaf.grad is not None:
                leaf.grad.mul_(self.shrink)
        return norm * self.shrink


def make_engine(policy: Any, config: Config, mesh: Any) -> Engine:
    """Make the engine of a training process."""
    engine = Engine(policy, EngineOptions.of(config), mesh)
    engine.shrink = section_in(config.actor, "guest_engine", EngineConfig).shrink
    return engine


class Launcher(ProcessLauncher):
    """Processes of this machine, with a note for each."""

    note = ""

    @classmethod
    def for_run(
        cls,
        places: Sequence[ProcessPlace],
        simulators: Mapping[int, int] | None,
        cluster: ClusterConfig,
        limits: Limits,
    ) -> Launcher:
        launcher = cls(limits)
        launcher.note = section_in(cluster, "guest_launcher", LauncherConfig).note
        return launcher

    def start(self, job: Job, on_death: Any) -> Any:
        with Path(os.environ["GUEST_NOTES"]).open("a", encoding="utf-8") as file:
            file.write(f"{job.group} {self.note}\n")
        return super().start(job, on_death)


class Actor(ResidualPolicy):
    """A residual on frozen actions that are cut first."""

    @classmethod
    def build(
        cls,
        base: Any,
        config: ModelConfig,
        settings: SmallActorConfig,
        directory: Path | None,
        report: LoadReport,
        seed: int,
    ) -> OnFrozenPolicy:
        policy = super().build(base, config, settings, directory, report, seed)
        limit = section_in(config, "guest_actor", ActorConfig).limit
        predict = base.predict_action_batch

        def cut(*args: Any, **kwargs: Any) -> Any:
            output = predict(*args, **kwargs)
            output.actions[:] = output.actions.clip(-limit, limit)
            return output

        base.predict_action_batch = cut
        return policy
