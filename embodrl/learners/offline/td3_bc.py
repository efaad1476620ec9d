"""TD3+BC: a deterministic actor between its critics and the actions of a dataset.

Fujimoto and Gu 2021, "A Minimalist Approach to Offline Reinforcement Learning", arXiv 2106.06860; its critics are those
of TD3 (Fujimoto et al. 2018, arXiv 1802.09477).

Shapes: E critics, B transitions of a batch, F features, C actions in a chunk, A action dimensions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor, nn

from embodrl.algorithms.losses import LossOutput
from embodrl.algorithms.off_policy import soft_target, soft_update
from embodrl.algorithms.offline import td3_bc
from embodrl.config.schema import Config
from embodrl.data.batch import Batch
from embodrl.data.replay import ReplayBuffer
from embodrl.hybrid_engines.base import TrainEngine
from embodrl.hybrid_engines.copies import whole_copy
from embodrl.hybrid_engines.training.policy_engine import PolicyTrainEngine
from embodrl.hybrid_engines.training.schedule import LearningRates, learning_rates
from embodrl.hybrid_engines.training.sharding import whole
from embodrl.learners.base import LearnerState
from embodrl.learners.off_policy import OffPolicyUpdate, transitions
from embodrl.learners.offline.settings import offline_settings
from embodrl.learners.records import ReplayUpdater
from embodrl.models.base import OffPolicyActor
from embodrl.storage.checkpoint import Checkpoint

UPDATE = f"{__name__}:Td3BcUpdate"


class Td3BcUpdate(OffPolicyUpdate):
    """Critics and actor of TD3+BC; the actor is the policy's greedy action.

    Attributes:
        target_actor: follows the policy, whole in every process; only what is behind the features of both acts.
    """

    def __init__(
        self, engine: PolicyTrainEngine, config: Config, on_step: Callable[[int, int], None] | None = None
    ) -> None:
        self.target_actor = whole_copy(engine.policy)
        super().__init__(engine, config, on_step)
        encoder = {name for name, p in engine.policy.named_parameters() if p in {*self.encoder_parameters}}
        theirs = dict(self.target_actor.named_parameters())
        mine = {id(p): name for name, p in engine.policy.named_parameters() if name not in encoder}
        self._followers = [theirs[mine[id(p)]] for p in self.actor_parameters]

    def side_modules(self) -> dict[str, nn.Module | nn.Parameter]:
        return {"critic": self.critic, "target": self.target, "target_actor": self.target_actor}

    def set_rates(self, rates: LearningRates) -> None:
        self.engine.set_learning_rates(rates, train_policy=True)
        self.modules.set_learning_rates({"critic": rates.value, "encoder": rates.value})

    def backup(self, part: Batch, chosen: Tensor, alpha: float) -> Tensor:
        """Return the critics' targets ``float32[B]``, at the target actor's action with clipped noise (TD3, eq. 14)."""
        settings = offline_settings(self.config.algorithm)
        assert isinstance(self.target_actor, OffPolicyActor)
        following = self.features(part["next_inputs"])
        actions, _ = self.target_actor.sample_chunk(following, torch.zeros_like(part["noise"]))
        noise = (part["noise"] * settings.policy_noise).clamp(-settings.noise_clip, settings.noise_clip)
        next_q = self.target(following, (actions + noise).clamp(-1, 1), chosen)
        return soft_target(part["returns"], part["discount"], next_q, torch.zeros_like(part["returns"]), 0.0, False)

    def follow(self) -> None:
        """Targets follow when the actor has been updated."""

    def update_actor(self, batch: Batch, number: int, generator: torch.Generator) -> dict[str, float]:
        """Step on the objective of TD3+BC, and let both targets follow."""
        alpha = offline_settings(self.config.algorithm).alpha
        total = len(batch)
        labelled = float(batch["label_mask"].sum().clamp_min(1))
        batch = batch.replace(noise=torch.zeros(total, *self.actor.chunk_shape))
        scale = self._scale(batch)

        def loss_of(part: Batch) -> LossOutput:
            seen = self.seen_by_actor(part)
            actions, _ = self.sample(seen, part["noise"])
            error = (actions - part["actions"]).square().mean(-1)
            bc_loss = (error * part["label_mask"]).sum() / labelled
            value = td3_bc(self.critic(seen, actions)[0], scale, alpha).sum() / total
            return LossOutput(value + bc_loss, {"bc_loss": bc_loss.detach()})

        loss, metrics = self.engine.forward_backward(batch, loss_of, self.actor_parameters)
        step = self.engine.optimizer_step(loss, self.actor_parameters)
        self.engine.state.clear_gradients()
        super().follow()
        soft_update(self._followers, map(whole, self.actor_parameters), self.settings.tau)
        return {"policy_loss": float(loss), "grad_norm": step.grad_norm, "bc_loss": float(metrics["bc_loss"])}

    def _scale(self, batch: Batch) -> Tensor:
        """Return the mean of ``|Q(s, pi(s))|`` over the batch, each process having valued its share of the rows."""

        def value(rows: Tensor) -> Tensor:
            part = batch[rows].to(self.engine.device)
            with torch.no_grad():  # here, since it applies to one thread
                seen = self.seen_by_actor(part)
                return self.critic(seen, self.sample(seen, part["noise"])[0])[0]

        values = torch.zeros(len(batch), device=self.engine.device)
        self.engine.evaluate_rows(value, torch.arange(len(batch)), values)
        return values.abs().mean()


class Td3BcUpdater(ReplayUpdater):
    """Draws transitions of a dataset, ``algorithm.offline.updates`` batches in an iteration.

    Args:
        data: the dataset as transitions.
        on_step: called with the finished and the total number of optimizer steps of an update.
    """

    def __init__(
        self,
        config: Config,
        engine: TrainEngine,
        data: ReplayBuffer,
        on_step: Callable[[int, int], None] | None = None,
    ) -> None:
        super().__init__(on_step)
        self.config = config
        self.engine = engine
        self.data = data
        self.update: Td3BcUpdate = engine.attach(UPDATE, config)
        self.num_updates = 0

    def learn(self, generator: torch.Generator) -> dict[str, float | None]:
        config = self.config
        rates = learning_rates(config.actor.optim, self.engine.version, config.runner.max_iterations, 0)
        totals: dict[str, float] = defaultdict(float)
        counts: dict[str, int] = defaultdict(int)
        due = offline_settings(config.algorithm).updates
        for _ in self.steps(due):
            batch = transitions(self.data, config.actor.global_batch_size, config.algorithm, generator, is_demo=True)
            self.num_updates += 1
            for name, value in self.update.step(batch, rates, self.num_updates, generator).items():
                totals[name] += value
                counts[name] += 1
        self.update.complete()
        result: dict[str, float | None] = {f"train/{name}": total / counts[name] for name, total in totals.items()}
        return result | {"train/num_updates": float(due), "train/lr": rates.policy, "train/value_lr": rates.value}

    def state(self) -> LearnerState:
        return LearnerState({"num_updates": self.num_updates})

    def load_state(self, checkpoint: Checkpoint) -> None:
        self.num_updates = checkpoint.state.integer("num_updates")
