"""OpenVLA with its language model sharded over the tensor group; vision, projector and value head are whole."""

from __future__ import annotations

from typing import Any, NoReturn, cast

from torch import Tensor

from embodrl.config.schema import ModelConfig
from embodrl.errors import EmbodrlError
from embodrl.hybrid_engines.training.megatron.core import tensor_group
from embodrl.hybrid_engines.training.megatron.layout import parallelize
from embodrl.hybrid_engines.training.megatron.vocab import ActionDistribution, action_windows
from embodrl.models.common.llama import Llama
from embodrl.models.openvla.policy import OpenVLAPolicy
from embodrl.types import EvalOutput, SamplingParams

LLAMA = "model.language_model."


class ParallelOpenVLAPolicy(OpenVLAPolicy):
    """This process's part of an OpenVLA. It evaluates actions; it cannot act.

    Parts of ``policy`` are reused, so it must not be used afterwards.

    Raises:
        EmbodrlError: the dimensions cannot be divided evenly.
    """

    def __init__(self, policy: OpenVLAPolicy, config: ModelConfig) -> None:
        public = policy.model.language_model
        assert isinstance(public, Llama)
        llama = parallelize(public)
        policy.model.language_model = cast(Any, llama)
        super().__init__(policy.model, policy.processor, policy.stats, config, policy.value_head)
        dimensions = policy.model.config
        group = tensor_group()
        self.windows = action_windows(
            dimensions.first_action_id,
            dimensions.n_action_bins,
            dimensions.llama.vocab_size,
            group.rank(),
            group.size(),
        )
        self.train(policy.training)

    def evaluate_actions(
        self,
        forward_inputs: dict[str, Tensor],
        sampling: SamplingParams,
        compute_entropy: bool = True,
        compute_values: bool = True,
    ) -> EvalOutput:
        """Collective call: all processes of the tensor group pass the same arguments."""
        hidden, features = self.action_states(forward_inputs)
        tokens = forward_inputs["action_tokens"]
        index = self.bins.index(tokens.flatten(1))
        found = ActionDistribution(hidden, self.model.language_model.lm_head, self.windows, index, sampling)
        entropy = found.entropy().view(tokens.shape) if compute_entropy else None
        return EvalOutput(
            found.log_probs().view(tokens.shape), entropy, self.values_from(features) if compute_values else None
        )

    def predict_action_batch(self, *args: object, **kwargs: object) -> NoReturn:
        """Reject the call: a process holds only a part of the weights.

        Raises:
            EmbodrlError: always.
        """
        raise EmbodrlError(
            "a sharded policy can't act",
            "act with the policy of the rollout process",
            code="tensor-parallel-policy",
        )
