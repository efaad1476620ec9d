"""Supervised fine-tuning: an iteration takes optimizer steps on batches of demonstrated frames."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from embodrl.config.schema import AlgorithmConfig, Config, SftConfig
from embodrl.data.batch import Batch
from embodrl.data.demos import Demos
from embodrl.data.imitation import observation_of
from embodrl.hybrid_engines.base import TrainEngine
from embodrl.hybrid_engines.training.precision import Precision, autocast, resolve_precision
from embodrl.learners.base import Learner, LearnerState
from embodrl.learners.imitation_update import UPDATE, ImitationUpdate
from embodrl.learners.memory_phases import peak_memory
from embodrl.models.base import VLAPolicy
from embodrl.reporting.metrics_file import Row
from embodrl.storage.checkpoint import Checkpoint
from embodrl.types import Observation
from embodrl.workers.policy import num_threads


def learning_rate(settings: SftConfig, step: int) -> float:
    """Return the learning rate of a step: linear warm-up, then a cosine to 0."""
    if step < settings.lr_warmup_steps:
        return settings.lr * (step + 1) / settings.lr_warmup_steps
    part = (step - settings.lr_warmup_steps) / max(settings.max_steps - settings.lr_warmup_steps, 1)
    return settings.lr * 0.5 * (1 + math.cos(math.pi * min(part, 1.0)))


def engine_config(config: Config, device: torch.device) -> Config:
    """Return the configuration of the train engine: ``sft``'s rates and batch sizes, no reference.

    On a CPU ``device`` every core gets one micro-batch.
    """
    settings = config.sft
    cores = num_threads(config) if device.type == "cpu" and config.actor.training_backend == "native" else 1
    micro = settings.micro_batch_size or math.ceil(settings.batch_size / cores)
    optim = config.actor.optim.model_copy(update={"lr": settings.lr, "weight_decay": settings.weight_decay})
    actor = config.actor.model_copy(
        update={"optim": optim, "micro_batch_size": micro, "global_batch_size": settings.batch_size}
    )
    # An off-policy algorithm's settings would add critics, which imitation does not use.
    algorithm = AlgorithmConfig()
    on_policy = {"adv_type": algorithm.adv_type, "loss_type": algorithm.loss_type}
    kl = config.algorithm.kl.model_copy(update={"coef": 0.0})
    return config.model_copy(
        update={
            "actor": actor,
            "algorithm": config.algorithm.model_copy(update={"kl": kl, **on_policy}),
            "runner": config.runner.model_copy(update={"max_iterations": settings.max_steps, "max_staleness": 0}),
        }
    )


class Batches(Protocol):
    """Source of the batches of frames, e.g. ``FrameBatches``."""

    def next(self) -> tuple[Observation, Tensor, Tensor]:
        """Return observations, actions ``float32[N,H,A]`` and their mask ``bool[N,H]``."""
        ...

    def state(self) -> tuple[dict[str, Any], Tensor]:
        """Return the input of ``load_state``: JSON, and a tensor."""
        ...

    def load_state(self, rng: dict[str, Any], order: Tensor) -> None:
        """Continue from a result of ``state``."""
        ...


@dataclass(frozen=True)
class ImitationHooks:
    """Functions of a run that an imitation learner calls.

    Attributes:
        play: evaluates the policy; see ``Learner.evaluate``.
        on_step: called after every step with its number and metrics.
        should_stop: returns whether the run should stop.
        validate: measures the policy on held-out demonstrations; None without any.
    """

    play: Callable[[Path | None, bool], Row]
    on_step: Callable[[int, Mapping[str, float]], None]
    should_stop: Callable[[], bool]
    validate: Callable[[], Mapping[str, float]] | None = None


VAL_LOSS = "sft/val_loss"
VAL_BATCHES = 4


class HeldOut:
    """The loss on held-out demonstrations: on the same frames, with the same noise, every time."""

    def __init__(self, config: Config, policy: VLAPolicy, engine: TrainEngine, demos: Demos) -> None:
        self.settings = config.sft
        self.policy = policy
        self.engine = engine
        self.demos = demos
        self._seed = config.runner.seed
        self._precision: Precision = resolve_precision(config.actor.precision, policy.device)
        count = min(len(demos.actions), VAL_BATCHES * config.sft.batch_size)
        self.frames = np.linspace(0, len(demos.actions) - 1, count).round().astype(np.int64)
        """``int64[n]``, measured frames."""

    @torch.no_grad()
    def __call__(self) -> dict[str, float]:
        """Return ``sft/val_loss``, the mean over the actions of those frames; torch's random state is unchanged."""
        self.engine.fetch()
        size = self.settings.micro_batch_size or self.settings.batch_size
        before = torch.get_rng_state()
        torch.default_generator.manual_seed(self._seed)
        total = count = 0.0
        try:
            for start in range(0, len(self.frames), size):
                frames = self.frames[start : start + size]
                actions, inside = self.demos.action_chunks(frames, self.policy.action_horizon)
                seen = observation_of(self.demos, frames, self.demos.images[frames])
                mask = torch.from_numpy(inside).to(self.policy.device)
                inputs = self.policy.sft_inputs(seen, torch.from_numpy(actions)) | {"action_mask": mask}
                with autocast(self._precision, self.policy.device):
                    loss, _ = self.policy.sft_loss(inputs, self.settings.label_smoothing_bins)
                total += float(loss) * int(inside.sum())
                count += int(inside.sum())
        finally:
            torch.set_rng_state(before)
        return {VAL_LOSS: total / count}


class ImitationLearner(Learner):
    """Imitates frames. An iteration lasts until the next optimizer step that is logged or evaluated.

    It ends after multiples of ``pauses``; zeros are ignored. The policy has the engine's weights after
    ``engine.fetch``.
    """

    def __init__(
        self,
        config: Config,
        policy: VLAPolicy,
        engine: TrainEngine,
        batches: Batches,
        pauses: tuple[int, ...],
        hooks: ImitationHooks,
    ) -> None:
        super().__init__(policy, engine)
        self.config = config
        self.batches = batches
        self._pauses = [pause for pause in pauses if pause]
        self.hooks = hooks
        self._update: ImitationUpdate = engine.attach(UPDATE, config)
        self._start = time.monotonic()

    def step(self, iteration: int) -> Row:
        began = time.monotonic()
        if not self.await_batch(iteration):
            raise InterruptedError
        self.is_updating = True  # between two steps, too: the iteration is not complete
        while True:
            row = self._take_step(iteration)
            iteration += 1
            if self.hooks.validate is not None and self._is_pause(iteration):
                row |= self.hooks.validate()
            self.hooks.on_step(iteration, row)
            if self.hooks.should_stop() or self._is_pause(iteration) or not self.await_batch(iteration):
                break
        now = time.monotonic()
        times = {"time_s": now - self._start, "time/total_s": now - began}
        self.is_updating = False
        return {"iteration": iteration, "step": iteration, **row, **peak_memory(self.engine), **times}

    def await_batch(self, iteration: int) -> bool:
        """Wait until there is data for the next step; return False if the run is stopping."""
        return True

    def _is_pause(self, iteration: int) -> bool:
        return iteration == self.config.sft.max_steps or any(iteration % pause == 0 for pause in self._pauses)

    def _take_step(self, iteration: int) -> dict[str, float]:
        settings = self.config.sft
        self.engine.check()
        observation, actions, inside = self.batches.next()
        self.policy.seen_state_dim = observation.state.shape[1]
        # Inputs are prepared here, not by the engine: noise and times of flow policies come from one stream.
        inputs = self.policy.sft_inputs(observation, actions) | {"action_mask": inside}
        batch = Batch({name: tensor.cpu() for name, tensor in inputs.items()})
        rate = learning_rate(settings, iteration)
        metrics = self._update.step(batch, rate, settings.label_smoothing_bins)
        self._update.complete()
        return metrics | {"lr": rate}

    def evaluate(self, video_dir: Path | None, every_decoding: bool) -> Row:
        self.engine.fetch()
        if self.config.actor.enable_offload:
            self.engine.offload()
        return self.hooks.play(video_dir, every_decoding)

    def state(self) -> LearnerState:
        data_rng, order = self.batches.state()
        return LearnerState({"kind": "sft", "data_rng": data_rng}, {"data": {"order": order}})

    def load_state(self, checkpoint: Checkpoint) -> None:
        order = checkpoint.tensors("data")["order"]
        self.batches.load_state(dict(checkpoint.state.fields("data_rng").content), order)
