"""Off-policy updates: critics, their targets, the temperature, and the actor, from a replay buffer.

Shapes: E critics, B transitions of a batch, F features, C actions in a chunk, A action dimensions.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn

from embodrl.algorithms.losses import LossOutput
from embodrl.algorithms.off_policy import (
    chunk_return,
    critic_loss,
    n_step_return,
    sac,
    soft_target,
    soft_update,
    temperature_loss,
)
from embodrl.config.schema import AlgorithmConfig, Config
from embodrl.data.batch import Batch
from embodrl.data.replay import ReplayBuffer, ReplayStores
from embodrl.data.shifts import shifted_inputs
from embodrl.hybrid_engines.base import TrainEngine
from embodrl.hybrid_engines.training.policy_engine import PolicyTrainEngine
from embodrl.hybrid_engines.training.schedule import LearningRates, learning_rates
from embodrl.learners.base import LearnerState
from embodrl.learners.records import ReplayUpdater
from embodrl.learners.update import Update
from embodrl.models.base import OffPolicyActor
from embodrl.models.common.q_head import QEnsemble
from embodrl.specs import SMALL_ACTORS
from embodrl.storage.checkpoint import Checkpoint

SECTION = "off_policy"
"""Section of the engine's state: critics, targets, temperature, and their optimizer's moments."""
UPDATE = f"{__name__}:OffPolicyUpdate"


class OffPolicyUpdate(Update):
    """Trains the policy as SAC's actor, alongside critics; everything runs in float32.

    Attributes:
        critic, target: ensembles on the policy's features, or on the whole state; the second follows the first.
        log_alpha: logarithm of the temperature, scalar.
        modules: critics, targets and temperature as held by the engine. The policy's encoder trains with critics that
            read it.
    """

    def __init__(
        self, engine: PolicyTrainEngine, config: Config, on_step: Callable[[int, int], None] | None = None
    ) -> None:
        super().__init__(engine, config, on_step)
        policy = engine.policy
        assert isinstance(policy, OffPolicyActor), "the configuration was checked"
        self.actor = policy
        self.settings = settings = config.algorithm.off_policy
        chunk = math.prod(policy.chunk_shape)
        self.reads_state = settings.critic_reads == "state"
        width = policy.state_dim if self.reads_state else policy.feature_dim
        shape = (width + chunk, settings.critic_hidden_sizes, settings.layer_norm)
        self.critic = QEnsemble(settings.num_q, *shape)
        self.critic.init_weights(torch.Generator().manual_seed(config.runner.seed))
        self.critic.to(engine.device)
        self.target = copy.deepcopy(self.critic).requires_grad_(False)
        # The logarithm trains, so that alpha stays positive.
        self.log_alpha = nn.Parameter(torch.tensor(math.log(settings.alpha), device=engine.device))
        per_chunk = settings.target_entropy_per_number * chunk
        self.target_entropy = per_chunk if settings.target_entropy is None else settings.target_entropy
        encoder = set[int]() if self.reads_state else {id(p) for p in policy.encoder_parameters()}
        trained = engine.state.policy_parameters
        self.encoder_parameters = [p for p in trained if id(p) in encoder]
        self.actor_parameters = [p for p in trained if id(p) not in encoder]
        self.modules = engine.add_modules(SECTION, self.side_modules(), {"encoder": self.encoder_parameters})
        self.critic_parameters = [*self.critic.parameters(), *self.encoder_parameters]

    def side_modules(self) -> dict[str, nn.Module | nn.Parameter]:
        """Return the modules that are saved and, if their parameters require gradients, trained, by name."""
        return {"critic": self.critic, "log_alpha": self.log_alpha, "target": self.target}

    def step(self, batch: Batch, rates: LearningRates, number: int, generator: torch.Generator) -> dict[str, float]:
        """Take a step of the critics and, when due, one of the actor; return metrics.

        Args:
            batch: see ``sample_transitions``.
            rates: learning rates of policy and critics.
            number: step number, from 1.
            generator: source of the noise, on the CPU.

        Raises:
            NonFiniteError: several consecutive steps were not finite.
        """
        self.engine.onload()
        self.set_rates(rates)
        if self.reads_state:
            metrics = self.update_critic(batch, generator)
            return metrics | (self.update_actor(batch, number, generator) if self._actor_is_due(number) else {})
        # Pictures are encoded once: the actor reads what the critics saw before their step, as in DrQ-v2.
        seen = torch.zeros(len(batch), self.actor.feature_dim, device=self.engine.device)
        metrics = self.update_critic(batch.replace(row=torch.arange(len(batch))), generator, seen)
        if self._actor_is_due(number):
            metrics |= self.update_actor(batch.replace(seen=seen), number, generator)
        return metrics

    def _actor_is_due(self, number: int) -> bool:
        return number > self.settings.critic_warm_up and number % self.settings.policy_delay == 0

    def alpha(self) -> float:
        """Return the temperature."""
        self.engine.onload()
        return float(self.log_alpha.detach().exp())

    def set_rates(self, rates: LearningRates) -> None:
        """Set the learning rates of the next steps."""
        self.engine.set_learning_rates(rates, train_policy=True)
        alpha_lr = self.settings.alpha_lr or 0.0
        self.modules.set_learning_rates({"critic": rates.value, "encoder": rates.value, "log_alpha": alpha_lr})

    def seen_by_critics(self, inputs: dict[str, Tensor]) -> Tensor:
        """Return ``float32[B,F]``, or the whole state ``float32[B,S]``."""
        return self.actor.whole_state(inputs) if self.reads_state else self.features(inputs)

    def features(self, inputs: dict[str, Tensor]) -> Tensor:
        """Return what the actor sees, ``float32[B,F]``."""
        [seen] = self.engine.run(lambda policy: (cast(OffPolicyActor, policy).features(inputs),))
        return cast(Tensor, seen)

    def seen_by_actor(self, part: Batch) -> Tensor:
        """Return features ``float32[B,F]``, without gradients if the critics train the encoder."""
        if self.reads_state:
            return self.features(part["inputs"])
        if "seen" in part:
            return part["seen"]
        with torch.no_grad():
            return self.features(part["inputs"])

    def sample(self, features: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return actions ``float32[B,C,A]`` and log-probs ``float32[B]`` of the actor."""
        outputs = self.engine.run(lambda policy: cast(OffPolicyActor, policy).sample_chunk(features, noise))
        return cast("tuple[Tensor, Tensor]", outputs)

    def update_critic(self, batch: Batch, generator: torch.Generator, seen: Tensor | None = None) -> dict[str, float]:
        """Step on the squared errors of the critics, and update the targets.

        ``seen``, ``float32[B,F]``, receives the features of this process's rows; ``batch`` then has their ``row``.
        """
        settings = self.settings
        device = self.engine.device
        chosen = torch.randperm(settings.num_q, generator=generator)[: settings.subset].to(device)
        alpha = float(self.log_alpha.detach().exp())
        total = len(batch)

        def loss_of(part: Batch) -> LossOutput:
            with torch.no_grad():
                target = self.backup(part, chosen, alpha)
            features = self.seen_by_critics(part["inputs"])
            if seen is not None:
                seen[part["row"]] = features.detach()
            q = self.critic(features, part["actions"])
            # Divided by the whole batch, so that the losses of the micro-batches add up.
            loss = critic_loss(q, target).sum() / total
            return LossOutput(loss, {"q_mean": q.detach().mean(0).sum() / total, "target_mean": target.sum() / total})

        loss, metrics = self.engine.forward_backward(
            self._with_noise(batch, generator), loss_of, self.critic_parameters
        )
        step = self.engine.modules_step(loss, self.critic_parameters)
        self.follow()
        demos = float(batch["is_demo"].float().mean())
        found = {name: float(value) for name, value in metrics.items()}
        return {"critic_loss": float(loss), "critic_grad_norm": step.grad_norm, "demo_share": demos, **found}

    def backup(self, part: Batch, chosen: Tensor, alpha: float) -> Tensor:
        """Return the targets of the critics, ``float32[B]``, by the critics ``chosen int64[E]`` and the temperature."""
        following = self.seen_by_critics(part["next_inputs"])
        read = self.features(part["next_inputs"]) if self.reads_state else following
        actions, logprobs = self.sample(read, part["noise"])
        next_q = self.target(following, actions, chosen)
        settings = self.settings
        entropy = (logprobs, alpha, settings.backup_entropy, settings.target_q == "min")
        return soft_target(part["returns"], part["discount"], next_q, *entropy)

    def follow(self) -> None:
        """Let the targets follow the critics."""
        soft_update(self.target.parameters(), self.critic.parameters(), self.settings.tau)

    def update_actor(self, batch: Batch, number: int, generator: torch.Generator) -> dict[str, float]:
        """Step on SAC's actor loss and on the temperature loss."""
        bc_coef = self.config.algorithm.bc_coef
        alpha = float(self.log_alpha.detach().exp())
        total = len(batch)
        labelled = float(batch["label_mask"].sum().clamp_min(1))

        def loss_of(part: Batch) -> LossOutput:
            seen = self.seen_by_actor(part)
            actions, logprobs = self.sample(seen, part["noise"])
            valued = self.seen_by_critics(part["inputs"]) if self.reads_state else seen
            loss = sac(logprobs, self.critic(valued, actions), alpha, self.settings.actor_q == "min").sum() / total
            metrics = {"entropy": -logprobs.detach().sum() / total}
            if bc_coef:
                greedy = self.sample(seen, torch.zeros_like(part["noise"]))[0]
                error = (greedy - part["labels"]).square().mean(-1)
                bc_loss = (error * part["label_mask"]).sum() / labelled
                loss = loss + bc_coef * bc_loss
                metrics["bc_loss"] = bc_loss.detach()
            return LossOutput(loss, metrics)

        loss, metrics = self.engine.forward_backward(self._with_noise(batch, generator), loss_of, self.actor_parameters)
        step = self.engine.optimizer_step(loss, self.actor_parameters)
        found = {name: float(value) for name, value in metrics.items()}
        if self.settings.alpha_lr is not None:
            # The temperature's loss is linear in the log-prob, so the mean over the batch suffices; it is the same in
            # every process. The gradients of the critics are cleared, so that only the temperature moves.
            mean_logprob = torch.tensor(-found["entropy"], device=self.engine.device)
            temperature_loss(self.log_alpha, mean_logprob, self.target_entropy).backward()
            self.modules.optimizer.step()
            self.engine.state.clear_gradients()
        return {"policy_loss": float(loss), "grad_norm": step.grad_norm, **found}

    def _with_noise(self, batch: Batch, generator: torch.Generator) -> Batch:
        """Add the actor's noise, drawn on the CPU for all rows, independently of micro-batches and device."""
        return batch.replace(noise=torch.randn(len(batch), *self.actor.chunk_shape, generator=generator))


class OffPolicyUpdater(ReplayUpdater):
    """Draws transitions, and passes them to an ``OffPolicyUpdate`` in the engine's process.

    There are ``utd`` updates for each chunk stored since the last call, none before ``warm_up`` chunks.
    """

    def __init__(
        self,
        config: Config,
        engine: TrainEngine,
        stores: ReplayStores,
        on_step: Callable[[int, int], None] | None = None,
    ) -> None:
        super().__init__(on_step)
        self.config = config
        self.engine = engine
        self.stores = stores
        actor = config.model.small_actor.kind
        own = None if actor is None else SMALL_ACTORS.entry(actor).update
        self.update: OffPolicyUpdate = engine.attach(own or UPDATE, config)
        self.num_updates = 0

    def learn(self, generator: torch.Generator) -> dict[str, float | None]:
        config = self.config
        settings = config.algorithm.off_policy
        rates = learning_rates(config.actor.optim, self.engine.version, config.runner.max_iterations, 0)
        # Counted from the start of the run, so that a resumed run makes exactly the due updates.
        due = int(settings.utd * max(0, self.stores.online.stored - settings.warm_up)) - self.num_updates
        totals: dict[str, float] = defaultdict(float)
        counts: dict[str, int] = defaultdict(int)
        for _ in self.steps(due if len(self.stores.online) else 0):
            batch = sample_transitions(self.stores, config.actor.global_batch_size, config.algorithm, generator)
            self.num_updates += 1
            for name, value in self.update.step(batch, rates, self.num_updates, generator).items():
                totals[name] += value
                counts[name] += 1
        self.update.complete()
        result: dict[str, float | None] = {f"train/{name}": total / counts[name] for name, total in totals.items()}
        return result | {
            "train/alpha": self.update.alpha(),
            "train/num_updates": float(max(0, due)),
            "train/lr": rates.policy,
            "train/value_lr": rates.value,
        }

    def state(self) -> LearnerState:
        return LearnerState({"num_updates": self.num_updates})

    def load_state(self, checkpoint: Checkpoint) -> None:
        state = checkpoint.state
        # Older checkpoints keep it among the engine's counters.
        self.num_updates = (state if "num_updates" in state else state.fields("engine")).integer("num_updates")


def sample_transitions(
    stores: ReplayStores, count: int, algorithm: AlgorithmConfig, generator: torch.Generator
) -> Batch:
    """Return ``count`` transitions, ``demo_fraction`` of them from the demonstrations.

    Returns:
        ``inputs`` and ``next_inputs``, current and next policy inputs by name, ``[B,...]``; ``actions float32[B,C,A]``
        as executed; ``returns`` and ``discount float32[B]``, see ``n_step_return``; ``is_demo bool[B]``; ``labels
        float32[B,C,A]`` and ``label_mask bool[B,C]``, the expert's actions where it was queried.
    """
    from_demos = round(count * algorithm.off_policy.demo_fraction) if stores.demos is not None else 0
    online = transitions(stores.online, count - from_demos, algorithm, generator, is_demo=False)
    if stores.demos is None or not from_demos:
        return online
    return Batch.concat([online, transitions(stores.demos, from_demos, algorithm, generator, is_demo=True)])


def transitions(
    buffer: ReplayBuffer, count: int, algorithm: AlgorithmConfig, generator: torch.Generator, *, is_demo: bool
) -> Batch:
    """Return ``count`` transitions of a buffer; see ``sample_transitions``."""
    places = buffer.draw(count, generator)
    seen = buffer.window(places, algorithm.off_policy.n_step)
    per_action = algorithm.reward_type == "action_level"
    rewards, lengths = chunk_return(seen.rewards, seen.valid, algorithm.gamma, per_action)
    found = n_step_return(rewards, lengths, seen.terminated, seen.acted, algorithm.gamma)
    seen_inputs = [buffer.inputs(places), buffer.inputs(places + found.offset)]
    if most := algorithm.off_policy.shift_pixels:
        seen_inputs = [shifted_inputs(inputs, most, generator) for inputs in seen_inputs]
    return Batch(
        {
            "inputs": seen_inputs[0],
            "next_inputs": seen_inputs[1],
            "actions": buffer.column("actions", places),
            "returns": found.returns,
            "discount": found.discount,
            "is_demo": torch.full((count,), is_demo),
            # Rows of the run itself are masked, and need any tensor of this shape.
            "labels": buffer.column("labels" if is_demo else "actions", places),
            "label_mask": seen.valid[:, 0] & is_demo,
        }
    )
