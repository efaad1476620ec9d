"""A critic that is a network of its own: it reads the observation, not the policy's features.

Shapes: B batch, V cameras, S state dimensions, K values per chunk (1 or C).
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from embodrl.config.schema import Config
from embodrl.errors import EmbodrlError
from embodrl.models.base import VLAPolicy
from embodrl.models.common import checkpoint
from embodrl.models.common.heads import VALUE_HEAD_FILE
from embodrl.models.common.observation_model import network_inputs
from embodrl.models.common.observation_net import ObservationNet, ObservationSpec
from embodrl.models.common.value_head import DrawnHead, ValueHead
from embodrl.models.load_report import LoadReport
from embodrl.types import EvalOutput, Observation, PolicyOutput

logger = logging.getLogger(__name__)

PREFIX = "critic_"
"""Prefix of the critic's inputs, which stand among the policy's."""


class OwnCritic(DrawnHead):
    """A small network on pictures, state and task, always in float32; ``num_values`` is K."""

    def __init__(self, spec: ObservationSpec, hidden_sizes: tuple[int, ...], num_values: int) -> None:
        super().__init__()
        self.encoder = ObservationNet(spec)
        self.head = ValueHead(self.encoder.num_features, hidden_sizes, num_values)

    def init_weights(self, generator: torch.Generator) -> None:
        self.encoder.init_weights(generator)
        self.head.init_weights(generator)

    def inputs(self, observation: Observation) -> dict[str, Tensor]:
        """Return its inputs by name, on its device; states are padded with zeros.

        Raises:
            EmbodrlError: the state has more numbers than it has room for (``state-size``).
        """
        spec = self.encoder.spec
        if observation.state.shape[1] > spec.state_dim > 0:
            raise EmbodrlError(
                f"the critic has room for {spec.state_dim} numbers of state, and there are"
                f" {observation.state.shape[1]}",
                f"set algorithm.critic.max_state_dim={observation.state.shape[1]}",
                code="state-size",
            )
        missing = max(0, spec.state_dim - observation.state.shape[1])
        state = np.pad(observation.state, ((0, 0), (0, missing)))
        tasks = torch.from_numpy(observation.task_id.astype(np.int64)).clamp(max=max(0, spec.num_tasks - 1))
        device = self.head.out.weight.device
        return {
            PREFIX + name: tensor.to(device)
            for name, tensor in network_inputs(spec, observation.images, state, tasks).items()
        }

    def forward(self, inputs: dict[str, Tensor] | Tensor) -> Tensor:
        """Map ``inputs``, among a policy's, to values ``float32[B,K]``.

        Raises:
            EmbodrlError: it is given features by the policy itself, which engines prevent (``critic-reads-pictures``).
        """
        if isinstance(inputs, Tensor):
            raise EmbodrlError(
                "the policy's critic is a network of its own, and reads observations in place of the policy's features",
                "take values from a rollout engine, or call predict_action_batch(..., compute_values=False)",
                code="critic-reads-pictures",
            )
        own = {name.removeprefix(PREFIX): tensor for name, tensor in inputs.items() if name.startswith(PREFIX)}
        with torch.autocast(self.head.out.weight.device.type, enabled=False):
            return self.head(self.encoder(own))

    def act(self, output: PolicyOutput, observation: Observation, compute_values: bool) -> PolicyOutput:
        """Return a policy's output with its values and its inputs, for updates."""
        inputs = self.inputs(observation)
        values = self(inputs) if compute_values else None
        return replace(output, values=values, forward_inputs=output.forward_inputs | inputs)

    def evaluate(self, output: EvalOutput, forward_inputs: dict[str, Tensor], compute_values: bool) -> EvalOutput:
        """Return a policy's output with its values."""
        return replace(output, values=self(forward_inputs)) if compute_values else output


def own_critic(policy: VLAPolicy) -> OwnCritic | None:
    """Return a policy's critic if it is a network of its own."""
    head = getattr(policy, "value_head", None)
    return head if isinstance(head, OwnCritic) else None


def add_critic(policy: VLAPolicy, config: Config, directory: Path | None, report: LoadReport) -> None:
    """Put a critic of its own (``algorithm.critic``) in the place of a policy's value head.

    It is trained, kept and sent as that is; in ``directory`` its weights are used if they fit.

    Raises:
        CheckpointError: the file is damaged.
    """
    settings, env = config.algorithm.critic, config.env
    cameras = len(env.cameras) if env.include_images else 0
    spec = ObservationSpec(cameras, settings.max_state_dim if env.include_state else 0, len(env.tasks))
    by_action = config.model.value_head.output == "action"
    critic = OwnCritic(spec, settings.hidden_sizes, policy.num_action_chunks if by_action else 1)
    critic.init_weights(torch.Generator().manual_seed(config.runner.seed))
    policy.value_head = critic.to(policy.device)
    path = None if directory is None else directory / VALUE_HEAD_FILE
    if path is None or not path.is_file():
        return
    wanted = {name: tuple(tensor.shape) for name, tensor in critic.state_dict().items()}
    if checkpoint.stored_shapes([path]) == wanted:
        report.ignored.pop(path.name, None)
        checkpoint.load_strict(critic, [path], report, device=policy.device, dtype=torch.float32)
        return
    report.ignored[path.name] = "it is of a critic of another kind or size"
    logger.warning("%s is not used: %s; initializing a new one", path, report.ignored[path.name])
